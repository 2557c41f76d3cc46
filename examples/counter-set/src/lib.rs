//! Named counters in hashed buckets: a structure for farlink that is no ordered map, in a crate of its own.
//!
//! The root leads to a page for each bucket. A bucket that is full becomes a page of twice the size:
//!
//! ```text
//! root      a link for each bucket
//! bucket    word 4: its number   word 5: how many counters   then for each: its name in two words, its value
//! ```

mod measured;

use std::{collections::HashSet, rc::Rc};

use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, OneSidedPages, Proof},
    operation::retry,
    page::{HEADER_WORDS, SizeClass, avalanche},
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::wire,
    worker::Handle,
};

/// How many buckets there are.
pub const BUCKETS: usize = 16;
const ROOT_BYTES: usize = 256;
const BUCKET_BYTES: usize = 128;
const NUMBER: usize = HEADER_WORDS;
const COUNT: usize = HEADER_WORDS + 1;
const COUNTERS: usize = HEADER_WORDS + 2;
const WORDS_EACH: usize = 3;

/// A name of up to 16 bytes.
pub type Name = [u64; 2];

/// The name that a text is, if it is short enough.
pub fn name(text: &str) -> Option<Name> {
    let mut bytes = [0; 16];
    bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
    let [low, high] = [0, 8].map(|from| std::array::from_fn(|index| bytes[from + index]));
    Some([u64::from_le_bytes(low), u64::from_le_bytes(high)])
}

/// Named counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CounterSet;

/// Adds to a counter, which is 0 if it is not there; its value then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Add {
    /// Its name.
    pub name: Name,
    /// What to add.
    pub amount: u64,
}

/// The value of a counter, if it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Get {
    /// Its name.
    pub name: Name,
}

/// Removes a counter; its value, if it was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// Its name.
    pub name: Name,
}

/// The sum of all counters; of each bucket at some moment of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Total {}

wire! {
    struct Add { name, amount }
    struct Get { name }
    struct Take { name }
    struct Total {}
}

fn bucket_of(name: Name) -> usize {
    (avalanche(name[0] ^ avalanche(name[1])) % BUCKETS as u64) as usize
}

/// The counters of a bucket, whatever words it has; `None` if it is another one.
fn counters(page: &(impl Words + ?Sized), bucket: usize) -> Option<Vec<(Name, u64)>> {
    let room = page.count().checked_sub(COUNTERS)? / WORDS_EACH;
    let count = usize::try_from(page.word(COUNT)).ok().filter(|&count| count <= room)?;
    let counter = |at: usize| ([page.word(at), page.word(at + 1)], page.word(at + 2));
    (page.word(NUMBER) == bucket as u64)
        .then(|| (0..count).map(|index| counter(COUNTERS + index * WORDS_EACH)).collect())
}

fn set_counters(pages: &mut impl PagesMut, slot: Slot, counters: &[(Name, u64)]) {
    pages.set(slot, COUNT, counters.len() as u64);
    for (index, ([low, high], value)) in counters.iter().enumerate() {
        pages.fill(slot, COUNTERS + index * WORDS_EACH, &[*low, *high, *value]);
    }
}

fn read<P: PageRef>(page: &P, bucket: usize) -> Result<Vec<(Name, u64)>, Interrupt> {
    let read = if page.level() == 0 { page.read(|words| counters(words, bucket))? } else { None };
    read.ok_or(Interrupt::stale(page.at(), "it is another bucket"))
}

/// `None` if the page has no room for such a link: it is no root, whatever its level.
fn link(root: &(impl Words + ?Sized), bucket: usize) -> Option<Link> {
    let index = HEADER_WORDS + bucket;
    (index < root.count()).then(|| Link::from_word(root.word(index)))
}

fn links(root: &(impl Words + ?Sized)) -> Option<Vec<Link>> {
    (0..BUCKETS).map(|bucket| link(root, bucket)).collect()
}

/// The page of a bucket, and the root if the operation began there. All that is left lies below.
async fn descend<'a, A: Access<Plugin = CounterSet>>(
    access: &'a A,
    from: Start,
    bucket: usize,
) -> Result<(Option<A::Page<'a>>, A::Page<'a>), Interrupt> {
    let page = access.open(from).await?;
    if page.level() == 0 {
        return Ok((None, page));
    }
    let link = page.read(|root| link(root, bucket))?.ok_or(Interrupt::stale(page.at(), "it is no root"))?;
    let below = access.descend(&page, link, Hint::DOWN).await?;
    Ok((Some(page), below))
}

/// Sets a counter of a page, by what it is, or takes it away; its value before. `None` if there is no room for it.
async fn alter<'a, A: Access<Plugin = CounterSet>>(
    access: &'a A,
    page: A::Page<'a>,
    name: Name,
    to: impl FnOnce(Option<u64>) -> Option<u64>,
) -> Result<Option<Option<u64>>, Interrupt> {
    let (at, slot) = (page.at(), Slot::ONLY);
    let set = |pages: &mut A::PagesMut<'a>| {
        let words = pages.page(slot);
        let room = (words.count() - COUNTERS) / WORDS_EACH;
        let mut all = counters(&words, bucket_of(name))?;
        drop(words);
        let at = all.iter().position(|(other, _)| *other == name);
        let before = at.map(|at| all.swap_remove(at).1);
        all.extend(to(before).map(|value| (name, value)));
        if all.len() > room {
            return Some(None);
        }
        set_counters(pages, slot, &all);
        Some(Some(before))
    };
    access.change(Pages::current(page), set).await?.0.ok_or(Interrupt::stale(at, "it is another bucket"))
}

/// Replaces a full bucket by one of twice the size.
async fn grow<'a, A: Access<Plugin = CounterSet>>(
    access: &'a A,
    root: A::Page<'a>,
    full: A::Page<'a>,
    bucket: usize,
) -> Result<(), Interrupt> {
    let all = read(&full, bucket)?;
    let bytes = full.link().remote().map_or(0, |(_, class)| 2 * class.bytes());
    let class = SizeClass::of_bytes(bytes).ok_or_else(|| CounterSet::error("a bucket cannot grow any more"))?;
    let new = access.allocate(class, access.context().structure.placement(0, root.at())).await?;
    let (link, mut pages) = (new.link(), Pages::new());
    let (root, full, new) = (pages.add(root), pages.add(full), pages.add_new(new));
    let replace = |pages: &mut A::PagesMut<'a>| {
        pages.describe(new, 0, 0);
        pages.set(new, NUMBER, bucket as u64);
        set_counters(pages, new, &all);
        pages.set(root, HEADER_WORDS + bucket, link.word());
        pages.free(full);
    };
    access.change(pages, replace).await.map(drop)
}

impl Operation for Add {
    type Output = u64;
    type Plugin = CounterSet;
    const NAME: &'static str = "add";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = CounterSet>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let bucket = bucket_of(self.name);
        let (root, page) = descend(access, from, bucket).await?;
        let link = page.link();
        let add = |before: Option<u64>| Some(before.unwrap_or(0).wrapping_add(self.amount));
        if let Some(before) = alter(access, page, self.name, add).await? {
            return Ok(before.unwrap_or(0).wrapping_add(self.amount));
        }
        let root = root.ok_or(Interrupt::above())?;
        let full = access.follow(&root, link, Hint::DOWN).await?;
        grow(access, root, full, bucket).await?;
        Err(Interrupt::again())
    }
}

impl Operation for Get {
    type Output = Option<u64>;
    type Plugin = CounterSet;
    const NAME: &'static str = "get";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = CounterSet>>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        let bucket = bucket_of(self.name);
        let (_, page) = descend(access, from, bucket).await?;
        Ok(read(&page, bucket)?.into_iter().find(|(name, _)| *name == self.name).map(|(_, value)| value))
    }
}

impl Operation for Take {
    type Output = Option<u64>;
    type Plugin = CounterSet;
    const NAME: &'static str = "take";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = CounterSet>>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        let (_, page) = descend(access, from, bucket_of(self.name)).await?;
        Ok(alter(access, page, self.name, |_| None).await?.flatten())
    }
}

impl Operation for Total {
    type Output = u64;
    type Plugin = CounterSet;
    const NAME: &'static str = "total";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = CounterSet>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let sum = |counters: Vec<(Name, u64)>| counters.iter().fold(0u64, |sum, (_, value)| sum.wrapping_add(*value));
        let page = access.open(from).await?;
        if page.level() == 0 {
            let bucket = page.read(|words| words.word(NUMBER))? as usize;
            return Ok(sum(read(&page, bucket)?));
        }
        let links = page.read(links)?.ok_or(Interrupt::stale(page.at(), "it is no root"))?;
        let mut total = 0u64;
        for (bucket, part) in access.fork(&Rc::new(page), &links, self).await.into_iter().enumerate() {
            total = total.wrapping_add(match part? {
                Forked::Page(page) => sum(read(&page, bucket)?),
                Forked::Done(sum) => sum,
            });
        }
        Ok(total)
    }
}

// Glue: what farlink wants to know.
impl Plugin for CounterSet {
    const NAME: &'static str = "counter-set";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = ROOT_BYTES..=ROOT_BYTES;
    type Region = ();
    type Local = ();
    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        HEADER_WORDS..HEADER_WORDS + BUCKETS
    }
    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<()> {
        Some(())
    }
    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 1, 0);
    }
    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Add>().add::<Get>().add::<Take>().add::<Total>();
    }
    // End of the glue.

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        let Context { worker, structure, .. } = access.context();
        let (mut report, root) = (Report::default(), retry(worker, async || access.open(Start::Root).await).await?);
        let (mut reached, root) = (HashSet::from([root.at()]), Rc::new(root));
        let Ok(Some(links)) = root.read(links) else { return Ok(report) };
        (report.pages_by_level, report.bytes) = (vec![links.len() as u64, 1], ROOT_BYTES as u64);
        let pages = access.follow_each(links.iter().map(|&link| (Rc::clone(&root), link))).all().await;
        for (bucket, page) in pages.into_iter().enumerate() {
            match page.and_then(|page| Ok((page.link(), read(&page, bucket)?))) {
                Ok((link, counters)) => {
                    let names: HashSet<Name> = counters.iter().map(|(name, _)| *name).collect();
                    if names.len() < counters.len() || names.iter().any(|name| bucket_of(*name) != bucket) {
                        report.add(root.at(), format!("bucket {bucket} has counters of others, or twice"));
                    }
                    report.entries += counters.len() as u64;
                    reached.extend(link.remote().map(|(at, _)| at));
                    report.bytes += link.remote().map_or(0, |(_, class)| class.bytes() as u64);
                }
                Err(interrupt) => report.add_unreadable(root.at(), &interrupt),
            }
        }
        report.audit(worker, structure, &reached).await?;
        Ok(report)
    }
}

/// Makes an empty set of counters.
///
/// # Errors
/// As [`catalog::create_with`].
pub async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<OneSided<CounterSet>, Error> {
    let class = |bytes| SizeClass::of_bytes(bytes).expect("a size class");
    let options = CreateOptions { class: class(ROOT_BYTES), placement, options: [0; OPTIONS] };
    catalog::create_with(worker, name, &options, Proof::Checksum, async move |access: &OneSided<CounterSet>| {
        let Context { worker, structure, .. } = access.context();
        let build = async || {
            let (mut pages, mut below) = (Pages::new(), Vec::new());
            let root = pages.add(access.open(Start::Root).await?);
            for _ in 0..BUCKETS {
                let page = access.allocate(class(BUCKET_BYTES), structure.placement(0, structure.root)).await?;
                below.push((page.link(), pages.add_new(page)));
            }
            let fill = |pages: &mut OneSidedPages| {
                for (bucket, &(link, slot)) in below.iter().enumerate() {
                    pages.describe(slot, 0, 0);
                    pages.set(slot, NUMBER, bucket as u64);
                    pages.set(root, HEADER_WORDS + bucket, link.word());
                }
            };
            access.change(pages, fill).await.map(drop)
        };
        retry(worker, build).await
    })
    .await
}
