//! What a structure's code says of itself: a plug-in, its operations, their parts and answers.

use std::fmt;

use farlink_messaging::Pieces;

use super::{Access, Interrupt, Link, Overlap, Pages, PagesMut, Region, RemotePtr, Slot, Start, Structure, Words};
use crate::{
    error::Error,
    report::Report,
    sync::AtomicU64,
    wire::{DecodeError, Wire},
};

/// Makes one answer of those of several parts of a structure.
pub trait Merge: Sized {
    /// Adds what another part has answered.
    fn merge(&mut self, other: Self);
}

impl Merge for () {
    fn merge(&mut self, (): Self) {}
}

/// A sum.
impl Merge for u64 {
    fn merge(&mut self, other: Self) {
        *self = self.wrapping_add(other);
    }
}

/// Whether any part says so.
impl Merge for bool {
    fn merge(&mut self, other: Self) {
        *self |= other;
    }
}

/// What the first part has that has something.
impl<T> Merge for Option<T> {
    fn merge(&mut self, other: Self) {
        if self.is_none() {
            *self = other;
        }
    }
}

/// One after the other.
impl<T> Merge for Vec<T> {
    fn merge(&mut self, other: Self) {
        self.extend(other);
    }
}

impl<A: Merge, B: Merge> Merge for (A, B) {
    fn merge(&mut self, other: Self) {
        self.0.merge(other.0);
        self.1.merge(other.1);
    }
}

/// The part of a structure that an operation is about.
pub type RegionOf<O> = <<O as Operation>::Plugin as Plugin>::Region;

/// A request to a structure, as a value: it runs here, or is sent and runs there.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Operation: Wire + Clone + 'static {
    /// What it answers.
    type Output: Wire + Merge + 'static;
    /// The structure's plug-in: over the access of another one it does not compile.
    type Plugin: Plugin;
    /// Its name among the plug-in's operations. It is sent as a number made of both names.
    const NAME: &'static str;
    /// Whether it changes nothing. Then it can be done again if a memory server is lost with it, and nobody need know.
    const READS_ONLY: bool = false;

    /// What of the structure it is about, where it begins: whoever routes it asks this, and nothing else.
    fn scope(&self) -> RegionOf<Self>;

    /// What of it is about a region of which its scope has something; itself, if it need not say so: whoever has that region must not
    /// be asked for what is beyond.
    #[must_use]
    fn within(&self, _region: &RegionOf<Self>) -> Self {
        self.clone()
    }

    /// Takes back what it asks for beyond the size of one message. Called where it comes from afar.
    fn limit(&mut self) {}

    /// The answer, if all pages that it takes are cached and nothing is to be changed. Tried before [`Operation::run`], for it
    /// spares what suspending takes: a future's variables are places in memory.
    ///
    /// # Errors
    /// If something has to be waited for: where [`Operation::run`] begins, which may be where this has stopped.
    fn try_sync<A: Access<Plugin = Self::Plugin>>(&self, _access: &A) -> Result<Self::Output, Start> {
        Err(Start::Root)
    }

    /// One attempt. The first visible effect is also the last thing that can be interrupted.
    ///
    /// # Errors
    /// [`Interrupt`] says whether to begin anew, to ship, or to give up.
    async fn run<A: Access<Plugin = Self::Plugin>>(&self, access: &A, from: Start) -> Result<Self::Output, Interrupt>;

    /// Runs it over a structure in parts. If not said otherwise, all parts that it is about are asked at the same time, and
    /// their answers merged.
    ///
    /// # Errors
    /// What it failed with.
    async fn route<D: Shards<Plugin = Self::Plugin>>(&self, parts: &D) -> Result<Self::Output, Error> {
        route_to_all(self, parts).await
    }
}

/// Asks all parts that an operation is about, at the same time, and merges their answers: what [`Operation::route`] does if not
/// said otherwise.
///
/// # Errors
/// What the first of those that failed failed with.
pub async fn route_to_all<O: Operation, D: Shards<Plugin = O::Plugin>>(
    operation: &O,
    parts: &D,
) -> Result<O::Output, Error> {
    let about = parts.about(&operation.scope());
    if let &[part] = &*about {
        return parts.on(part, operation).await;
    }
    let answers = futures_util::future::join_all(about.iter().map(|&part| parts.on(part, operation))).await;
    let mut answers = answers.into_iter();
    let mut first = answers.next().ok_or(Error::Malformed("an operation is about no part of its structure"))??;
    for answer in answers {
        first.merge(answer?);
    }
    Ok(first)
}

/// Pages of an access that lie in this process's memory: that of a memory server's threads.
pub trait InPlace {
    /// The words of a page, where they lie; none if it is on another memory server. Others may read them, and change those of a
    /// page that is changed at all: so this is for pages of which no word is changed once something leads to them. The caller has
    /// a link to it, read since the operation began, or keeps off what it finds: it checks that the words are those that the link
    /// promised. Nobody has compared them with the page's checksum, so damage shows only if the caller does.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if the page was freed or belongs to another structure by now; [`Interrupt::Failed`] if the link
    /// leads nowhere.
    fn in_place(&self, link: Link) -> Result<Option<&[AtomicU64]>, Interrupt>;
}

/// An operation that only reads, and whose answer a memory server can send in pieces of its pages, which are not copied.
///
/// Such an answer is put together again by the client. What the pieces are is up to the operation: the entries that the answer
/// consists of; or whole pages, for the client to make the answer of. Until they are sent, no page that they are of is reused. It
/// may be *freed*, though, and then its lock word says so.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait InPieces: Operation {
    /// One attempt, inside a memory server: appends what the answer is made of. A piece is of a page that is never changed, and
    /// was read with [`InPlace::in_place`].
    ///
    /// # Errors
    /// As [`Operation::run`].
    async fn collect<A: Access<Plugin = Self::Plugin> + InPlace>(
        &self,
        access: &A,
        to: &mut Pieces,
    ) -> Result<(), Interrupt>;

    /// The answer that those words hold, on the client: all that [`InPieces::collect`] has appended.
    ///
    /// # Errors
    /// If it is none.
    fn assemble(&self, words: &[u64]) -> Result<Self::Output, DecodeError>;
}

/// A structure in several parts, each a structure of its own.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Shards {
    /// Their plug-in.
    type Plugin: Plugin;

    /// The numbers of the parts that have something of a region.
    fn about(&self, region: &<Self::Plugin as Plugin>::Region) -> Vec<usize>;

    /// The region of a part; `None` if parts are cut by hash.
    fn region(&self, part: usize) -> Option<&<Self::Plugin as Plugin>::Region>;

    /// Runs an operation on one of them.
    ///
    /// # Errors
    /// What it failed with.
    async fn on<O: Operation<Plugin = Self::Plugin>>(&self, part: usize, operation: &O) -> Result<O::Output, Error>;
}

/// What a [`Plugin`] names its operations to: memory servers can carry out those.
pub trait Operations<P: Plugin> {
    /// Adds one.
    ///
    /// # Panics
    /// If the plug-in has another one of the same name.
    fn add<O: Operation<Plugin = P>>(&mut self) -> &mut Self;

    /// Adds one whose answer can be sent in pieces, too. Provided for who does not send any.
    ///
    /// # Panics
    /// As [`Operations::add`].
    fn add_in_pieces<O: InPieces<Plugin = P>>(&mut self) -> &mut Self {
        self.add::<O>()
    }
}

/// A structure: all that the rest of farlink wants of it. Its functions cope with any words: a page may be looked at while it
/// changes.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Plugin: Copy + Default + fmt::Debug + Send + Sync + 'static {
    /// What it is called, in the catalog too: no two plug-ins of a cluster have the same name. 1 to 64 bytes.
    const NAME: &'static str;
    /// The sizes that its root can have, in bytes: powers of two.
    const ROOT_BYTES: std::ops::RangeInclusive<usize>;
    /// A part of it that somebody can own: a key range, a box, a set of hashes, all.
    type Region: Region;
    /// What a handle keeps between operations: hints, a cached directory.
    type Local: Default + fmt::Debug;

    /// That the structure cannot do what it was asked for.
    fn error(why: impl Into<String>) -> Error {
        Error::Structure { structure: Self::NAME, why: why.into() }
    }

    /// The position of each link of a page above level 0 to a page of a lower level, the next lower one as a rule, and the only link to it that
    /// is named. Links to siblings are not among them, nor words that are no links. A cache may swizzle these words, and no others: what
    /// may be set to one is said at [`PagesMut::set`].
    fn links(page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize>;

    /// The part of the structure that is below one of those links. `None` if the page does not tell: operations are never
    /// shipped from there.
    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<Self::Region> {
        None
    }

    /// Whether what belongs to the page (its fences, its bounding box) lies in a region. Provided for what is owned as a whole or
    /// not at all.
    fn overlap(_page: &(impl Words + ?Sized), region: &Self::Region) -> Overlap {
        if Self::can_own(region) { Overlap::Inside } else { Overlap::Partly }
    }

    /// Whether one compute server can own such a region by itself. Provided for what is owned as a whole or not at all.
    fn can_own(region: &Self::Region) -> bool {
        Self::Region::everything().overlap(region) == Overlap::Inside
    }

    /// Sets the words of an empty structure's root.
    fn create(pages: &mut impl PagesMut, root: Slot, structure: &Structure);

    /// Names its operations.
    fn operations(to: &mut impl Operations<Self>);

    /// The pages of a chain that [installs](Access::install) make, of all that readers can come to now: what is
    /// [sought](super::Swap::found_by) is the chain in which a page is that such a swap has made or unlinked, if it is in any. Asked when
    /// the answer to a swap is lost. None: there is no telling, and pages may be lost with the answer.
    ///
    /// # Errors
    /// As [`Operation::run`].
    async fn reachable<A: Access<Plugin = Self>>(
        _access: &A,
        _found_by: [u64; 2],
    ) -> Result<Option<Vec<RemotePtr>>, Interrupt> {
        Ok(None)
    }

    /// Whether nothing leads to a page of the structure, which no operation that still runs has made. Others may change the structure meanwhile.
    /// What leads there and is itself nobody's, such as an entry of a table, is given up first. Asked for each page by
    /// `leaks::free`; needed only where [installs](Access::install) make pages. Provided: no page is.
    ///
    /// # Errors
    /// As [`Operation::run`].
    async fn is_leaked<A: Access<Plugin = Self>>(_access: &A, _page: Link) -> Result<bool, Interrupt> {
        Ok(false)
    }

    /// Looks at every page. Nobody may change the structure meanwhile.
    ///
    /// # Errors
    /// If the root cannot be read, or the fabric fails. What is wrong with the structure is in the report.
    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error>;
}

/// Frees a page that is unlinked already: of a structure whose pages are unlinked one by one, or one that never was linked.
///
/// # Errors
/// [`Interrupt::Restart`] if the page is changed or freed meanwhile.
pub async fn free<A: Access>(access: &A, page: Link) -> Result<(), Interrupt> {
    let mut pages = Pages::new();
    let page = pages.add(access.open(Start::Page(page)).await?);
    access.change(pages, |pages| pages.free(page)).await.map(drop)
}
