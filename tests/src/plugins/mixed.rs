//! Counters in pages of four sizes: a root of 256 B over one page each of 64 B, 256 B, 4 KiB and 16 KiB. No ordered map.

use std::rc::Rc;

use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, Proof},
    operation::{Run, retry},
    page::{HEADER_WORDS, SizeClass},
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::wire,
    worker::Handle,
};

/// The sizes of the pages below the root, in bytes.
pub const BYTES: [usize; 4] = [64, 256, 4096, 16384];
const KIND: u8 = 0x3d;
const FIRST_LINK: usize = HEADER_WORDS;

/// Counters, by number: each is in the page that its remainder says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mixed;

/// Adds to a counter; its value before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Add {
    /// The number of the counter.
    pub counter: u64,
    /// What to add.
    pub amount: u64,
}

/// Adds all counters up. Below a page that is no root: those of that page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Whether the pages below the root are summed up where they are.
    pub forks: bool,
}

wire! {
    struct Add { counter, amount }
    struct Sum { forks }
}

/// The page of a counter, and its position there: counters that are far apart can share one.
pub fn place(counter: u64) -> (usize, usize) {
    let page = (counter % 4) as usize;
    (page, HEADER_WORDS + (counter / 4) as usize % (BYTES[page] / 8 - HEADER_WORDS))
}

fn sum_of(page: &(impl Words + ?Sized)) -> u64 {
    (HEADER_WORDS..page.count()).fold(0u64, |sum, index| sum.wrapping_add(page.word(index)))
}

fn is_leaf(page: &impl PageRef) -> Result<(), Interrupt> {
    match (page.level(), page.kind()) {
        (0, KIND) => Ok(()),
        _ => Err(Interrupt::stale(page.at(), "it holds no counters")),
    }
}

impl Operation for Add {
    type Output = u64;
    type Plugin = Mixed;
    const NAME: &'static str = "add";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Mixed>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let (child, index) = place(self.counter);
        let mut page = access.open(from).await?;
        if page.level() == 1 {
            let link = page.read(|words| Link::from_word(words.word(FIRST_LINK + child)))?;
            page = access.descend(&page, link, Hint::DOWN).await?;
        }
        is_leaf(&page)?;
        let add = |pages: &mut A::PagesMut<'_>| {
            let words = pages.page(Slot::ONLY);
            let before = (index < words.count()).then(|| words.word(index))?;
            drop(words);
            pages.set(Slot::ONLY, index, before.wrapping_add(self.amount));
            Some(before)
        };
        let (before, after) = access.change(Pages::current(page), add).await?;
        let Some(before) = before else { return Err(Interrupt::conflict()) };
        // The page as it was left can be read on.
        let mut after = after;
        let left = after.take(Slot::ONLY).map(|page| page.read(|words| words.word(index)));
        if let Some(Ok(left)) = left {
            assert_eq!(left, before.wrapping_add(self.amount), "a page after a change is not what the change left");
        }
        Ok(before)
    }
}

impl Operation for Sum {
    type Output = u64;
    type Plugin = Mixed;
    const NAME: &'static str = "sum";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Mixed>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let page = access.open(from).await?;
        if page.level() == 0 {
            is_leaf(&page)?;
            return page.read(sum_of);
        }
        let links = page.read(|words| [0, 1, 2, 3].map(|child| Link::from_word(words.word(FIRST_LINK + child))))?;
        let (root, mut sum) = (Rc::new(page), 0u64);
        if self.forks {
            for forked in access.fork(&root, &links, self).await {
                sum = sum.wrapping_add(match forked? {
                    Forked::Page(page) => page.read(sum_of)?,
                    Forked::Done(sum) => sum,
                });
            }
            return Ok(sum);
        }
        let mut pages = access.follow_each(links.map(|link| (Rc::clone(&root), link)));
        let mut held = Vec::new();
        while let Some((_, page)) = pages.next().await {
            held.push(page?);
        }
        access.validate(&held.iter().collect::<Vec<_>>()).await?;
        for page in &held {
            is_leaf(page)?;
            sum = sum.wrapping_add(page.read(sum_of)?);
        }
        Ok(sum)
    }
}

impl Plugin for Mixed {
    const NAME: &'static str = "mixed";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 256..=256;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        FIRST_LINK..FIRST_LINK + 4
    }

    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<()> {
        Some(())
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 1, KIND);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Add>().add::<Sum>();
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        let Context { worker, structure, .. } = access.context();
        let mut report = Report::default();
        let root = Rc::new(retry(worker, async || access.open(Start::Root).await).await?);
        let mut reached = std::collections::HashSet::from([root.at()]);
        let links = root.read(|words| [0, 1, 2, 3].map(|child| Link::from_word(words.word(FIRST_LINK + child))));
        let Ok(links) = links else { return Ok(report) };
        for (link, bytes) in links.into_iter().zip(BYTES) {
            match link.remote() {
                Some((at, class)) if class.bytes() == bytes => reached.insert(at),
                _ => {
                    return Ok({
                        report.add(root.at(), format!("leads to {link:?}, not {bytes} bytes"));
                        report
                    });
                }
            };
        }
        for page in access.follow_each(links.map(|link| (Rc::clone(&root), link))).all().await {
            match page {
                Ok(page) if is_leaf(&page).is_ok() => report.entries += 1,
                Ok(page) => report.add(page.at(), "it holds no counters"),
                Err(interrupt) => report.add_unreadable(root.at(), &interrupt),
            }
        }
        report.pages_by_level = vec![4, 1];
        report.bytes = (256 + BYTES.iter().sum::<usize>()) as u64;
        report.audit(worker, structure, &reached).await?;
        Ok(report)
    }
}

/// Makes counters, all zero.
///
/// # Errors
/// As [`catalog::create_with`].
pub async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<OneSided<Mixed>, Error> {
    let class = SizeClass::of_bytes(256).expect("256 B is a size class");
    let options = CreateOptions { class, placement, options: [0; OPTIONS] };
    catalog::create_with(worker, name, &options, Proof::Checksum, async |access: &OneSided<Mixed>| {
        let mut pages = Pages::new();
        let root = pages.add(access.open(Start::Root).await.map_err(|_| Error::NotEmpty)?);
        let mut links = Vec::new();
        for bytes in BYTES {
            let class = SizeClass::of_bytes(bytes).expect("a size class");
            let structure = &access.context().structure;
            let page = access.allocate(class, structure.placement(0, structure.root)).await?;
            links.push((page.link(), pages.add_new(page)));
        }
        let fill = |pages: &mut farlink_runtime::one_sided::OneSidedPages| {
            for (index, &(link, slot)) in links.iter().enumerate() {
                pages.describe(slot, 0, KIND);
                pages.set(root, FIRST_LINK + index, link.word());
            }
        };
        match access.change(pages, fill).await {
            Ok(_) => Ok(()),
            Err(Interrupt::Failed(error)) => Err(*error),
            Err(_) => Err(Error::Malformed("nobody else knows the root")),
        }
    })
    .await
}

/// [`Add`] by whoever runs operations.
///
/// # Errors
/// What it failed with.
pub async fn add(to: &impl Run<Plugin = Mixed>, counter: u64, amount: u64) -> Result<u64, Error> {
    to.execute(&Add { counter, amount }).await
}
