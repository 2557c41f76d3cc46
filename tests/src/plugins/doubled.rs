//! Values in pages beside buckets: each bucket leads to one of its own level. The root can lead to each bucket twice, as a directory
//! does that was doubled. No ordered map.

use std::rc::Rc;

use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, OneSidedPages, Proof},
    page::{HEADER_WORDS, SizeClass},
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::wire,
    worker::Handle,
};

/// How many buckets there are.
pub const BUCKETS: u64 = 4;
const ROOT_BYTES: usize = 256;
const BUCKET_BYTES: usize = 64;
const LINKS: usize = HEADER_WORDS;
/// The same pages once more, for a cache no links.
const SECOND_LINKS: usize = LINKS + BUCKETS as usize;
const NUMBER: usize = HEADER_WORDS;
/// Of a bucket.
const BESIDE: usize = NUMBER + 1;
/// Of the page beside it.
const VALUE: usize = NUMBER + 1;
const BUCKET: u8 = 0;
const VALUES: u8 = 1;

/// A value for each bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Doubled;

/// The value of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Get {
    /// Its number.
    pub bucket: u64,
    /// Whether the root's second link leads the way.
    pub second: bool,
}

/// Sets the value of a bucket; the value before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Set {
    /// Its number.
    pub bucket: u64,
    /// The value.
    pub value: u64,
    /// The link to the page of the value, if somebody has kept it.
    pub kept: Option<u64>,
}

/// The link to the page of a bucket's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Find {
    /// The number of the bucket.
    pub bucket: u64,
}

/// Has the root lead to each bucket a second time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Double {
    /// With the words of the first links, which is wrong.
    pub copies: bool,
}

wire! {
    struct Get { bucket, second }
    struct Set { bucket, value, kept }
    struct Find { bucket }
    struct Double { copies }
}

/// The word of a page that is this one: of that kind, of a bucket of that number.
fn word_of(page: &impl PageRef, kind: u8, bucket: u64, index: usize) -> Result<u64, Interrupt> {
    let word = page.read(|words| (words.word(NUMBER) == bucket).then(|| words.word(index)))?;
    let is_it = page.level() == 0 && page.kind() == kind;
    word.filter(|_| is_it).ok_or(Interrupt::stale(page.at(), "it is another bucket, or none"))
}

async fn descend<'a, A: Access<Plugin = Doubled>>(
    access: &'a A,
    from: Start,
    bucket: u64,
    links: usize,
) -> Result<A::Page<'a>, Interrupt> {
    let page = access.open(from).await?;
    if page.level() == 0 {
        return Ok(page);
    }
    let link = page.read(|root| Link::from_word(root.word(links + (bucket % BUCKETS) as usize)))?;
    access.descend(&page, link, Hint::DOWN).await
}

/// The page of a bucket's value.
async fn values<'a, A: Access<Plugin = Doubled>>(
    access: &'a A,
    from: Start,
    bucket: u64,
    links: usize,
) -> Result<A::Page<'a>, Interrupt> {
    let page = descend(access, from, bucket, links).await?;
    let beside = Link::from_word(word_of(&page, BUCKET, bucket, BESIDE)?);
    let (_, page) = access.follow_each([(Rc::new(page), beside)]).next().await.expect("one link");
    page
}

impl Operation for Get {
    type Output = u64;
    type Plugin = Doubled;
    const NAME: &'static str = "get";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Doubled>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let page = values(access, from, self.bucket, if self.second { SECOND_LINKS } else { LINKS }).await?;
        word_of(&page, VALUES, self.bucket, VALUE)
    }
}

impl Operation for Set {
    type Output = u64;
    type Plugin = Doubled;
    const NAME: &'static str = "set";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Doubled>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let page = match self.kept {
            Some(word) => access.open(Start::Page(Link::from_word(word))).await?,
            None => values(access, from, self.bucket, LINKS).await?,
        };
        word_of(&page, VALUES, self.bucket, VALUE)?;
        let mut pages = Pages::new();
        let slot = pages.add(page);
        let set = |pages: &mut A::PagesMut<'_>| {
            let before = pages.page(slot).word(VALUE);
            pages.set(slot, VALUE, self.value);
            before
        };
        access.change(pages, set).await.map(|(before, _)| before)
    }
}

impl Operation for Find {
    type Output = u64;
    type Plugin = Doubled;
    const NAME: &'static str = "find";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Doubled>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let page = descend(access, from, self.bucket, LINKS).await?;
        word_of(&page, BUCKET, self.bucket, BESIDE)
    }
}

impl Operation for Double {
    type Output = ();
    type Plugin = Doubled;
    const NAME: &'static str = "double";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Doubled>>(&self, access: &A, from: Start) -> Result<(), Interrupt> {
        let root = access.open(from).await?;
        if root.level() == 0 {
            return Err(Interrupt::above());
        }
        let mut second = Vec::new();
        for bucket in 0..BUCKETS as usize {
            let link = root.read(|words| Link::from_word(words.word(LINKS + bucket)))?;
            second.push(access.follow(&root, link, Hint::DOWN).await?.link().word());
        }
        let double = |pages: &mut A::PagesMut<'_>| {
            for (bucket, &link) in second.iter().enumerate() {
                let first = pages.page(Slot::ONLY).word(LINKS + bucket);
                pages.set(Slot::ONLY, SECOND_LINKS + bucket, if self.copies { first } else { link });
            }
        };
        access.change(Pages::current(root), double).await.map(drop)
    }
}

impl Plugin for Doubled {
    const NAME: &'static str = "doubled";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = ROOT_BYTES..=ROOT_BYTES;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        LINKS..SECOND_LINKS
    }

    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<()> {
        Some(())
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 1, 0);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Get>().add::<Set>().add::<Find>().add::<Double>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

/// Makes it, with all values zero.
///
/// # Errors
/// As [`catalog::create_with`].
pub async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<OneSided<Doubled>, Error> {
    let class = |bytes| SizeClass::of_bytes(bytes).expect("a size class");
    let options = CreateOptions { class: class(ROOT_BYTES), placement, options: [0; OPTIONS] };
    catalog::create_with(worker, name, &options, Proof::Checksum, async move |access: &OneSided<Doubled>| {
        let structure = &access.context().structure;
        let mut pages = Pages::new();
        let root = pages.add(access.open(Start::Root).await.map_err(|_| Error::NotEmpty)?);
        let mut below = Vec::new();
        for _ in 0..BUCKETS {
            let mut new = Vec::new();
            for _ in 0..2 {
                let page = access.allocate(class(BUCKET_BYTES), structure.placement(0, structure.root)).await?;
                new.push((page.link(), pages.add_new(page)));
            }
            below.push((new[0], new[1]));
        }
        let fill = |pages: &mut OneSidedPages| {
            for (number, &((bucket, bucket_slot), (values, values_slot))) in below.iter().enumerate() {
                pages.describe(bucket_slot, 0, BUCKET);
                pages.describe(values_slot, 0, VALUES);
                pages.set(bucket_slot, NUMBER, number as u64);
                pages.set(values_slot, NUMBER, number as u64);
                pages.set(bucket_slot, BESIDE, values.word());
                pages.set(root, LINKS + number, bucket.word());
            }
        };
        access.change(pages, fill).await.map(drop).map_err(|_| Error::NotEmpty)
    })
    .await
}
