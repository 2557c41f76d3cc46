//! Latch-free: sets of values in chains of immutable pages, whose heads are words that are swapped. A set is read along its
//! chain; a value is added by a page of its own, and the swap of the head; a set is emptied by a swap, and its pages retired.

use std::collections::HashSet;

use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, Proof},
    operation::retry,
    page::{HEADER_WORDS, IDENTITY, Identity, SizeClass},
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::{DecodeError, Wire, wire},
    worker::Handle,
};

/// How many sets there are.
pub const SETS: u64 = 8;
const NODE: SizeClass = SizeClass::SMALLEST;
const HEADS: u8 = 1;
const LINK_OF_CHAIN: u8 = 2;
const VALUE: usize = HEADER_WORDS;
const NEXT: usize = HEADER_WORDS + 1;

/// Sets of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chains;

/// Adds a value to a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Push {
    /// The set.
    pub set: u64,
    /// The value. Of two that are equal both are kept.
    pub value: u64,
}

/// The values of a set, the newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Values {
    /// The set.
    pub set: u64,
}

/// The values of a set, the newest first, sent in pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentValues {
    /// The set.
    pub set: u64,
    /// Pages as they are, for the client to make the answer of; else the values alone.
    pub pages: bool,
}

/// Empties a set; its values, the newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Take {
    /// The set.
    pub set: u64,
}

wire! {
    struct Push { set, value }
    struct Values { set }
    struct SentValues { set, pages }
    struct Take { set }
}

/// The word that leads to a set's newest value. It is unique as long as it leads somewhere: its page is new. An empty set's
/// counts up, so that it is not mistaken for an earlier one: bit 62 tells it from a link to any page here.
fn head(root: &impl PageRef, set: u64) -> WordPtr {
    WordPtr { page: root.link(), index: HEADER_WORDS + (set % SETS) as usize }
}

const EMPTY: u64 = 1 << 62;

/// The pages of a chain, as long as it is whole.
async fn chain<'a, A: Access<Plugin = Chains>>(
    access: &'a A,
    root: &A::Page<'a>,
    first: u64,
) -> Result<(Vec<A::Page<'a>>, Vec<u64>), Interrupt> {
    let (mut pages, mut values, mut next) = (Vec::new(), Vec::new(), Link::from_word(first));
    // A damaged chain may be a ring.
    let mut met = HashSet::new();
    while !next.is_null() && next.word() & EMPTY == 0 {
        let page = access.follow(pages.last().unwrap_or(root), next, Hint::DOWN).await?;
        if page.kind() != LINK_OF_CHAIN || !met.insert(page.at()) {
            return Err(Interrupt::stale(page.at(), "it is no part of a chain"));
        }
        let (value, after) = page.read(|words| (words.word(VALUE), Link::from_word(words.word(NEXT))))?;
        values.push(value);
        pages.push(page);
        next = after;
    }
    Ok((pages, values))
}

impl Operation for Push {
    type Output = ();
    type Plugin = Chains;
    const NAME: &'static str = "push";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Chains>>(&self, access: &A, from: Start) -> Result<(), Interrupt> {
        let root = access.open(from).await?;
        let word = head(&root, self.set);
        let old = access.load(&[word]).await?[0];
        let structure = &access.context().structure;
        let page = access.allocate(NODE, structure.placement(0, root.at())).await?;
        let to = page.link().word();
        let fill = |pages: &mut A::PagesMut<'_>| {
            let slot = Slot::new_page(0);
            pages.describe(slot, 0, LINK_OF_CHAIN);
            pages.set(slot, VALUE, self.value);
            pages.set(slot, NEXT, if old & EMPTY == 0 { old } else { 0 });
        };
        match access.install(vec![page], fill, Swap { word, old, to, found_by: Some([self.set, 0]) }, vec![]).await? {
            Ok(()) => Ok(()),
            Err(_) => Err(Interrupt::conflict()),
        }
    }
}

impl Operation for Values {
    type Output = Vec<u64>;
    type Plugin = Chains;
    const NAME: &'static str = "values";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Chains>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        let root = access.open(from).await?;
        let first = access.load(&[head(&root, self.set)]).await?[0];
        Ok(chain(access, &root, first).await?.1)
    }
}

impl Operation for SentValues {
    type Output = Vec<u64>;
    type Plugin = Chains;
    const NAME: &'static str = "sent-values";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Chains>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        Values { set: self.set }.run(access, from).await
    }
}

impl InPieces for SentValues {
    async fn collect<A: Access<Plugin = Chains> + InPlace>(
        &self,
        access: &A,
        to: &mut Pieces,
    ) -> Result<(), Interrupt> {
        let root = access.open(Start::Root).await?;
        let mut next = Link::from_word(access.load(&[head(&root, self.set)]).await?[0]);
        let mut met = HashSet::new();
        to.own(|to| self.pages.encode(to));
        while !next.is_null() && next.word() & EMPTY == 0 {
            let (page, at) = (access.in_place(next)?, next.remote().map(|(at, _)| at));
            let (Some(page), Some(at)) = (page, at) else { return Err(Interrupt::stale(root.at(), "it is not here")) };
            let identity = Identity::from_word(page.word(IDENTITY));
            if identity.is_none_or(|it| it.kind != LINK_OF_CHAIN) || !met.insert(at) {
                return Err(Interrupt::stale(at, "it is no part of a chain"));
            }
            match self.pages {
                true => to.push(at, NODE.words()),
                false => to.push(at.word(VALUE), 1),
            }
            next = Link::from_word(page.word(NEXT));
        }
        Ok(())
    }

    fn assemble(&self, words: &[u64]) -> Result<Vec<u64>, DecodeError> {
        match words.split_first() {
            Some((1, pages)) if pages.len() % NODE.words() == 0 => {
                Ok(pages.chunks(NODE.words()).map(|page| page[VALUE]).collect())
            }
            Some((0, values)) => Ok(values.to_vec()),
            _ => Err(DecodeError("it is no list of values")),
        }
    }
}

impl Operation for Take {
    type Output = Vec<u64>;
    type Plugin = Chains;
    const NAME: &'static str = "take";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Chains>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        let root = access.open(from).await?;
        let word = head(&root, self.set);
        let first = access.load(&[word]).await?[0];
        if first & EMPTY != 0 || first == 0 {
            return Ok(Vec::new());
        }
        let (pages, values) = chain(access, &root, first).await?;
        let unlinked = pages.iter().map(|page| page.read(Unlinked::of)).collect::<Result<Vec<_>, _>>()?;
        let unlinked = unlinked.into_iter().flatten().collect();
        let to = EMPTY | access.context().worker.random(rand::RngExt::random::<u64>) >> 2;
        let swap = Swap { word, old: first, to, found_by: Some([self.set, 0]) };
        match access.install(vec![], |_| (), swap, unlinked).await? {
            Ok(()) => Ok(values),
            Err(_) => Err(Interrupt::conflict()),
        }
    }
}

impl Plugin for Chains {
    const NAME: &'static str = "chains";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 256..=256;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe_words(root, 1, HEADS);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Push>().add::<Values>().add_in_pieces::<SentValues>().add::<Take>();
    }

    async fn reachable<A: Access<Plugin = Self>>(
        access: &A,
        [set, _]: [u64; 2],
    ) -> Result<Option<Vec<RemotePtr>>, Interrupt> {
        let root = access.open(Start::Root).await?;
        let first = access.load(&[head(&root, set)]).await?[0];
        Ok(Some(chain(access, &root, first).await?.0.iter().map(PageRef::at).collect()))
    }

    async fn is_leaked<A: Access<Plugin = Self>>(access: &A, page: Link) -> Result<bool, Interrupt> {
        let root = access.open(Start::Root).await?;
        for set in 0..SETS {
            let first = access.load(&[head(&root, set)]).await?[0];
            if chain(access, &root, first).await?.0.iter().any(|it| it.link() == page) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        let Context { worker, structure, .. } = access.context();
        let mut report = Report::default();
        let root = retry(worker, async || access.open(Start::Root).await).await?;
        let mut reached = HashSet::from([root.at()]);
        for set in 0..SETS {
            let read = async {
                let first = access.load(&[head(&root, set)]).await?[0];
                chain(access, &root, first).await
            };
            match read.await {
                Ok((pages, _)) => {
                    report.entries += pages.len() as u64;
                    reached.extend(pages.iter().map(PageRef::at));
                }
                Err(interrupt) => report.add_unreadable(root.at(), &interrupt),
            }
        }
        report.pages_by_level = vec![report.entries, 1];
        report.bytes = report.entries * NODE.bytes() as u64 + 256;
        report.audit(worker, structure, &reached).await?;
        Ok(report)
    }
}

/// Makes empty sets.
///
/// # Errors
/// As [`catalog::create`].
pub async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<OneSided<Chains>, Error> {
    let class = SizeClass::of_bytes(256).expect("256 B is a size class");
    catalog::create(worker, name, &CreateOptions { class, placement, options: [0; OPTIONS] }, Proof::Checksum).await
}
