//! An R*-tree in disaggregated memory: rectangles of `D` dimensions with payloads, found by where they are.
//!
//! Beckmann et al. (SIGMOD 1990) say where entries go; Kornacker and Banks (VLDB 1995) how a search goes by pages that are
//! being split. Written once over [`Access`]: one-sided it is Catfish's client that traverses the tree by READs (ICDCS 2019),
//! except that its reads overlap over all levels, and that clients also write.
//!
//! # A page
//! has a *box* of its own, in which all of its entries lie; the entry that leads to it says the same box, always: both are
//! changed together. So whoever adds an entry that fits the box of a leaf changes the leaf and nothing else. An entry that
//! does not fit enlarges all boxes on the way in the same change that adds it.
//!
//! It also has a *stamp*, its node sequence number, and the entry that leads to it says that stamp. Kornacker and Banks count;
//! here stamps are drawn at random, and say who has drawn them, since all that is ever asked is whether two are equal: nobody has
//! to share a counter, and a page that was freed and is used again has a stamp that nobody expects. Were two equal, a search would
//! miss entries.
//!
//! # What a search promises
//! **It returns every entry that was there all the time, once, and none that never was.** An entry that is added or removed
//! meanwhile is returned or not. One that is moved by [`RTree::update`] meanwhile is returned where it was, where it is, at both
//! places or at neither: it counts as two entries, as does one that is taken away and put back, and so do two equal ones.
//!
//! Why: all that changes which page an entry is in is *one* all-or-nothing change of a page and of its children that are
//! involved (`shape`). Say a search has read a page *P*, and an entry is below P's child *C* then.
//!
//! 1. C's box in P holds the entry, whatever comes later: the search goes to C.
//! 2. If C was split before the search gets there, C has another stamp than P says. The one that P says is now that of the last
//!    page to which C's right links lead by way of the split; these pages together hold what C held, and
//!    the search looks at each (*right-link rule*).
//! 3. If entries have moved from C to its siblings, by a reinsertion or as C was condensed, C and the siblings that took them have
//!    new stamps and no right links, or C is gone. P's stamps lead nowhere: the search drops all that it has found below P
//!    and reads P again. So an entry that it has met in C already it does not return from the sibling, too.
//! 4. Boxes and stamps of P's children are changed with the children: nothing is ever outside a box that leads to it.
//!    Moves stay below one parent, whose own box is that of all its children's entries: above it nothing has to be enlarged
//!    first, nor shrunk last.
//!
//! In none of this P has to be as it was when the search goes on from it to C: C's stamp proves what P has said. So a search goes by
//! copies of pages, and need not begin anew because others change the root.
//!
//! A copy of P from a cache may be old, and its box of C too small: nothing shows that, so a search validates what it went by
//! before it answers ([`Access::validate`]).
//!
//! # Where it differs from R*
//! Forced reinsertion takes the 30% of a leaf's entries that are farthest out, as in R*, but inserts them among the siblings of the
//! page and not from the root: so it is one change, and costs one round trip to read siblings. If fewer than a tenth of the leaf's
//! entries would go, it is split. Pages above level 0 are split at once.

mod bulk;
mod change;
mod check;
mod choose;
mod cursor;
mod node;
pub mod ops;
mod rect;
mod search;
mod shape;
mod visits;

use farlink_runtime::{
    access::{Access, Link, Operations, Overlap, PagesMut, Plugin, Region as _, Slot, Structure, Words},
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    page::SizeClass,
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    worker::Handle,
};

pub use self::{
    cursor::{Cursor, Join},
    rect::{BadRect, Entry, Query, Rect, Scope},
};
use self::{
    node::{Head, Node},
    ops::{Count, Delete, Insert, Update},
};

/// What makes an [`RTree`] one: the plug-in. There are trees of 1 to 8 dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tree<const D: usize = 2>;

impl<const D: usize> Plugin for Tree<D> {
    const NAME: &'static str = match D {
        1 => "rtree-1d",
        2 => "rtree",
        3 => "rtree-3d",
        4 => "rtree-4d",
        5 => "rtree-5d",
        6 => "rtree-6d",
        7 => "rtree-7d",
        8 => "rtree-8d",
        _ => panic!("an R-tree has 1 to 8 dimensions"),
    };
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 1024..=16384;
    // Owned as a whole: pages do not end where regions do.
    type Region = Scope<D>;
    type Local = ();

    fn links(page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        let node = Node::<_, D>::of(page);
        (0..node.count).map(move |index| node.word_position(index))
    }

    fn below(page: &(impl Words + ?Sized), link: usize) -> Option<Scope<D>> {
        let node = Node::<_, D>::of(page);
        let index = link.checked_sub(node.word_position(0)).filter(|&index| index < node.count)?;
        Some(node.rect(index).into())
    }

    fn overlap(page: &(impl Words + ?Sized), region: &Scope<D>) -> Overlap {
        // A forged page may have no room for its box.
        if page.count() < node::words_min::<D>() {
            return Overlap::Partly;
        }
        Scope::from(Node::<_, D>::of(page).bounds()).overlap(region)
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        let head = Head { level: 0, stamp: 1, right: Link::NULL, bounds: Rect::<D>::EVERYTHING };
        node::write(pages, root, &head, &[]);
    }

    fn operations(to: &mut impl Operations<Self>) {
        ops::operations(to);
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        check::check(access).await
    }
}

/// How a tree is made and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RTreeOptions {
    /// Bytes of a page: a power of two from 1024 to 16384. Fixed when the tree is created.
    pub page_bytes: usize,
    /// How readers prove their copies whole. Each reader's own choice.
    pub proof: Proof,
    /// On which memory servers its pages are. Fixed when the tree is created.
    pub placement: StructurePlacement,
}

impl Default for RTreeOptions {
    fn default() -> Self {
        Self { page_bytes: 1024, proof: Proof::Checksum, placement: StructurePlacement::default() }
    }
}

/// An R*-tree. A handle belongs to one worker; any number of handles can be open on one tree.
///
/// ```
/// use std::sync::Arc;
/// use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::mem::MemOptions, server};
/// use farlink_structures::rtree::{RTree, RTreeOptions, Query, Rect};
///
/// let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
/// let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
/// let worker = compute.worker()?;
/// worker.block_on(async {
///     let tree = RTree::create(&worker, "places", RTreeOptions::default()).await?;
///     let house = Rect::new([1.0, 1.0], [2.0, 3.0])?;
///     tree.insert(house, 7).await?;
///     assert_eq!(tree.search(Query::Contains(Rect::point([1.5, 2.0])?)).all().await?, [(house, 7)]);
///     assert_eq!(tree.search(Query::Nearest([9.0, 9.0])).next().await?, Some((house, 7)));
///     assert!(tree.delete(house, 7).await?);
///     assert!(tree.check().await?.is_clean());
///     Ok::<_, farlink_runtime::error::Error>(())
/// })?;
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RTree<A, const D: usize = 2> {
    access: A,
}

impl<const D: usize> RTree<OneSided<Tree<D>>, D> {
    /// Makes an empty tree and enters it into the cluster's catalog.
    ///
    /// # Errors
    /// If the name is taken, empty or longer than 64 bytes, the page size is not possible, there is no such memory server, or
    /// memory or the catalog is full.
    pub async fn create(worker: &Handle, name: &str, options: RTreeOptions) -> Result<Self, Error> {
        let RTreeOptions { page_bytes, proof, placement } = options;
        let bad = || Error::BadOption { option: "page-bytes", why: format!("{page_bytes}; it is a power of two") };
        let class = SizeClass::of_bytes(page_bytes).ok_or_else(bad)?;
        let options = CreateOptions { class, placement, options: [0; OPTIONS] };
        Ok(Self::over(catalog::create(worker, name, &options, proof).await?))
    }

    /// Opens a tree by its name.
    ///
    /// # Errors
    /// If there is none of that name, or it is another kind of structure.
    pub async fn open(worker: &Handle, name: &str, proof: Proof) -> Result<Self, Error> {
        Ok(Self::over(OneSided::new(worker, catalog::open::<Tree<D>>(worker, name).await?, proof)))
    }

    /// The same; reading asks for no right, and beside an owner answers what that one has written back:
    /// [`OneSided::beside_owners`].
    pub fn beside_owners(self) -> Self {
        Self::over(self.access.beside_owners())
    }
}

impl<A: Access<Plugin = Tree<D>> + Clone + 'static, const D: usize> RTree<A, D> {
    /// Loads entries into an empty tree by sort-tile-recursive packing (Leutenegger et al., ICDE 1997), using about the share
    /// `fill` (0.1 to 1.0) of each page; returns their number. Others see the tree empty until it is done. Goes on to its end if
    /// the future is dropped; if it fails, the tree stays empty.
    ///
    /// # Errors
    /// If the tree is not empty, a rectangle is not finite, `fill` is out of range, or remote memory is full. A tree whose last entries
    /// have gone by deletes that were dropped midway may still have pages, and counts as not empty until something is inserted and
    /// deleted again.
    /// [`Error::NotRecorded`] if the log of an owner is not written: all may be loaded then, and be recorded later.
    pub async fn bulk_load(&self, entries: impl IntoIterator<Item = Entry<D>>, fill: f64) -> Result<u64, Error> {
        bulk::load(&self.access, entries.into_iter().collect(), fill).await
    }
}

impl<A: Access<Plugin = Tree<D>>, const D: usize> RTree<A, D> {
    /// Checks every invariant of the tree, and looks for leaked pages. Nobody may change the tree meanwhile.
    ///
    /// # Errors
    /// If the root cannot be read, or the fabric fails. What is wrong with the tree is in the report.
    pub async fn check(&self) -> Result<Report, Error> {
        check::check(&self.access).await
    }
}

impl<A: Run<Plugin = Tree<D>>, const D: usize> RTree<A, D> {
    /// The tree that `access` leads to.
    pub fn over(access: A) -> Self {
        Self { access }
    }

    /// How its pages are reached, or who runs its operations.
    pub fn access(&self) -> &A {
        &self.access
    }

    /// Adds an entry, whether or not there is an equal one.
    ///
    /// # Errors
    /// If the rectangle is not finite; if a page on the way is damaged or corrupt, the fabric fails, or remote memory is full.
    pub async fn insert(&self, rect: Rect<D>, payload: u64) -> Result<(), Error> {
        rect.require_finite()?;
        self.access.execute(&Insert { rect, payload }).await
    }

    /// Removes an entry; whether it was there. Of several equal ones it removes one. If others add
    /// an equal one while it looks, and remove the one that was there, it may find neither.
    ///
    /// # Errors
    /// If a page on the way is damaged or corrupt, or the fabric fails. So for all that follow.
    pub async fn delete(&self, rect: Rect<D>, payload: u64) -> Result<bool, Error> {
        self.access.execute(&Delete { rect, payload }).await
    }

    /// Moves an entry to another rectangle, all or nothing; whether it was there.
    ///
    /// # Errors
    /// As [`RTree::insert`].
    pub async fn update(&self, rect: Rect<D>, payload: u64, to: Rect<D>) -> Result<bool, Error> {
        to.require_finite()?;
        self.access.execute(&Update { rect, payload, to }).await
    }

    /// The entries that are asked for, to be had one after the other or all at once. Each part that is fetched is a search with
    /// the promise of the [module](self).
    pub fn search(&self, query: Query<D>) -> Cursor<'_, A, D> {
        Cursor::new(&self.access, query)
    }

    /// How many entries are asked for: one search, whatever their number.
    ///
    /// # Errors
    /// As [`RTree::delete`].
    pub async fn count(&self, query: Query<D>) -> Result<u64, Error> {
        self.access.execute(&Count { query, stamp: 0 }).await
    }

    /// How many entries there are: reads the whole tree.
    ///
    /// # Errors
    /// As [`RTree::delete`].
    pub async fn len(&self) -> Result<u64, Error> {
        self.count(Query::Intersects(Rect::EVERYTHING)).await
    }

    /// Whether there is no entry.
    ///
    /// # Errors
    /// As [`RTree::delete`].
    pub async fn is_empty(&self) -> Result<bool, Error> {
        Ok(self.search(Query::Intersects(Rect::EVERYTHING)).take(1).await?.is_empty())
    }

    /// All pairs of an entry of this tree and one of another that intersect. Reads each tree once, from low to high coordinates
    /// of the first dimension.
    pub fn join<'a, B: Run<Plugin = Tree<D>>>(&'a self, other: &'a RTree<B, D>) -> Join<'a, A, B, D> {
        Join::new(self, other)
    }
}
