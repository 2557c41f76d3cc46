//! A B+-tree in disaggregated memory.
//!
//! Written once over [`Access`]: over [`OneSided`] with round-robin placement it is the fine-grained tree of Ziegler et al.
//! (SIGMOD 2019, section 4), with what theirs leaves out: merging deletes, page reuse, reads that are proven whole.
//!
//! How it works, by module:
//!
//! - `node`: a page. Low and high fences, a link to the right sibling (the B-link tree of Lehman and Yao), sorted keys.
//! - `descend`: root to leaf, one READ a level. A reader whose copy of the parent is old lands too far left at worst, and
//!   moves right; so no parent needs to be validated again.
//! - `ops`: get, put and remove as [`Operation`](farlink_runtime::operation::Operation) values. A put locks one page, and
//!   only while it writes the changed words.
//! - `split`, `shrink`: structure modification operations. Each locks the pages it changes together (parent and children),
//!   all or none, so a tree is never seen half-split, and a crash leaves no orphan.
//! - `scan`: leaves fetched ahead of need through their parents' links.
//! - `bulk`: load from sorted input. `check`: every invariant, and leaked pages.
//!
//! Keys and values are u64; every key is legal. Operations from any number of workers on any number of compute servers are
//! linearizable for each key; what scans promise is said in `scan`.

mod bulk;
mod check;
mod descend;
mod layout;
mod node;
mod ops;
mod scan;
mod shrink;
mod split;

use std::{
    collections::VecDeque,
    ops::{Bound, RangeBounds},
};

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    catalog,
    error::Error,
    one_sided::{OneSided, Proof},
    operation::{execute, retry},
    page::SizeClass,
    pages::{self, Placement},
    structure::Structure,
    worker::Handle,
};

use self::node::{Fences, Node, NodeMut, PAGE_BYTES_MIN};
pub use self::{
    check::{Problem, Report},
    layout::{BTreeLayout, KeyRange},
    ops::{Get, Put, PutMode, Remove},
    scan::{Count, Scan, ScanPart},
};

/// The catalog's number for B+-trees.
pub const KIND: u32 = 1;

/// Entries that a [`Range`] and [`BTree::len`] ask for at a time.
const PART_ENTRIES: u64 = 1024;

/// How a tree is made and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BTreeOptions {
    /// Bytes of a page: a power of two from 256 to 4096. Fixed when the tree is created.
    pub page_bytes: usize,
    /// How readers prove their copies whole. Each reader's own choice.
    pub proof: Proof,
}

impl Default for BTreeOptions {
    fn default() -> Self {
        Self { page_bytes: 1024, proof: Proof::Checksum }
    }
}

/// A B+-tree of u64 keys and values. A handle belongs to one worker; any number of handles can be open on one tree.
///
/// ```
/// use std::sync::Arc;
/// use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::mem::{MemFabric, MemOptions}};
/// use farlink_structures::btree::{BTree, BTreeOptions};
///
/// let cluster = MemFabric::in_process(2, 16 << 20, MemOptions::default())?;
/// let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
/// let worker = compute.worker()?;
/// worker.block_on(async {
///     let tree = BTree::create(&worker, "ages", BTreeOptions::default()).await?;
///     assert!(tree.insert(7, 70).await?);
///     assert!(!tree.insert(7, 71).await?);
///     assert_eq!(tree.get(7).await?, Some(70));
///     assert_eq!(tree.scan(0, 10).await?, [(7, 70)]);
///     assert!(tree.check().await?.is_clean());
///     Ok::<_, farlink_runtime::error::Error>(())
/// })?;
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BTree<A> {
    access: A,
}

impl BTree<OneSided> {
    /// Makes an empty tree and enters it into the cluster's catalog.
    ///
    /// # Errors
    /// If the name is taken, empty or longer than 64 bytes, the page size is not possible, or memory or the catalog is
    /// full.
    pub async fn create(worker: &Handle, name: &str, options: BTreeOptions) -> Result<Self, Error> {
        let class = SizeClass::of_bytes(options.page_bytes).filter(|class| class.bytes() >= PAGE_BYTES_MIN);
        let Some(class) = class else {
            let why = format!("{}; a page has a power of two from {PAGE_BYTES_MIN} to 4096 bytes", options.page_bytes);
            return Err(Error::BadOption { option: "page-bytes", why });
        };
        let id = catalog::next_id(worker).await?;
        let root = pages::allocate(worker, class, Placement::RoundRobin).await?;
        let structure = Structure { id, name: name.into(), kind: KIND, class, root: root.at() };
        let access = OneSided::new(worker, structure, options.proof);
        let empty = |views: &mut <OneSided as Access>::Views<'_>| {
            NodeMut::new(views, 0).rewrite(0, Fences::ALL, None, &[]);
        };
        // A task, so that the root is not left behind between the two steps.
        let make = async move {
            access.change(vec![], vec![root], empty).await.map_err(unexpected)?;
            let (worker, structure) = (access.worker(), access.structure());
            if let Err(error) = catalog::register(worker, structure).await {
                retry(worker, async || access.retire(structure.root, class).await).await?;
                return Err(error);
            }
            Ok(access)
        };
        Ok(Self { access: worker.spawn_to_end(make).await? })
    }

    /// Opens a tree by its name.
    ///
    /// # Errors
    /// If there is none of that name, or it is another kind of structure.
    pub async fn open(worker: &Handle, name: &str, proof: Proof) -> Result<Self, Error> {
        let structure = catalog::open(worker, name, KIND).await?;
        if structure.class.bytes() < PAGE_BYTES_MIN {
            return Err(Error::Inconsistent { page: structure.root, why: "no B+-tree has pages of that size" });
        }
        Ok(Self { access: OneSided::new(worker, structure, proof) })
    }

    /// Checks every invariant of the tree, and looks for leaked pages. Reads the whole tree, and the header of every page
    /// of the cluster. Nobody may change the tree meanwhile.
    ///
    /// # Errors
    /// If the root cannot be read, or the fabric fails. What is wrong with the tree is in the report.
    pub async fn check(&self) -> Result<Report, Error> {
        check::check(&self.access).await
    }
}

fn unexpected(interrupt: Interrupt) -> Error {
    match interrupt {
        Interrupt::Failed(error) => *error,
        _ => Error::Malformed("an unconditional change was refused"),
    }
}

impl<A: Access> BTree<A> {
    /// The tree that `access` leads to.
    pub fn over(access: A) -> Self {
        Self { access }
    }

    /// The tree as the catalog knows it: to open it through another access.
    pub fn structure(&self) -> &Structure {
        self.access.structure()
    }

    /// How its pages are reached.
    pub fn access(&self) -> &A {
        &self.access
    }

    /// The least key that belongs to the leaf where `key` does: a place to cut the tree into ranges of keys.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn leaf_low(&self, key: u64) -> Result<u64, Error> {
        retry(self.access.worker(), async || {
            let leaf = descend::descend(&self.access, Start::Anew, key, 0).await?.page;
            leaf.read(|words| Node(words).low())
        })
        .await
    }

    /// The value of a key.
    ///
    /// # Errors
    /// If a page on the way is damaged or corrupt, or the fabric fails. So for all operations.
    pub async fn get(&self, key: u64) -> Result<Option<u64>, Error> {
        execute(&self.access, &Get { key }).await
    }

    /// Stores a value under a key that is absent. False if the key is there, and nothing is changed.
    ///
    /// # Errors
    /// As [`BTree::get`]; and if remote memory is full.
    pub async fn insert(&self, key: u64, value: u64) -> Result<bool, Error> {
        Ok(execute(&self.access, &Put { key, value, mode: PutMode::Insert }).await?.is_none())
    }

    /// Stores a value under a key, whether or not it is there; returns the value before.
    ///
    /// # Errors
    /// As [`BTree::insert`].
    pub async fn upsert(&self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        execute(&self.access, &Put { key, value, mode: PutMode::Upsert }).await
    }

    /// Stores a value under a key that is there; returns the value before, or `None` if the key is absent and nothing is
    /// changed.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn update(&self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        execute(&self.access, &Put { key, value, mode: PutMode::Update }).await
    }

    /// Removes a key; returns its value.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn remove(&self, key: u64) -> Result<Option<u64>, Error> {
        execute(&self.access, &Remove { key }).await
    }

    /// The first `limit` entries from `from` on, in ascending order.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn scan(&self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, Error> {
        self.range(from..).take(limit).await
    }

    /// The entries whose keys are in `bounds`, in ascending order; [`Range::descending`] turns it round.
    pub fn range(&self, bounds: impl RangeBounds<u64>) -> Range<'_, A> {
        let low = match bounds.start_bound() {
            Bound::Included(&key) => Some(key),
            Bound::Excluded(&key) => key.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let high = match bounds.end_bound() {
            Bound::Included(&key) => Some(key),
            Bound::Excluded(&key) => key.checked_sub(1),
            Bound::Unbounded => Some(u64::MAX),
        };
        let rest = low.zip(high).filter(|(low, high)| low <= high);
        Range { tree: self, rest, descending: false, fetched: VecDeque::new() }
    }

    /// Counts the entries: reads every leaf. Entries that come or go meanwhile may be counted or not.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn len(&self) -> Result<u64, Error> {
        let (mut total, mut next) = (0, Some(0));
        while let Some(low) = next {
            let (count, rest) = execute(&self.access, &Count { low, limit: PART_ENTRIES }).await?;
            total += count;
            next = rest;
        }
        Ok(total)
    }

    /// Whether there is no entry.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn is_empty(&self) -> Result<bool, Error> {
        Ok(self.scan(0, 1).await?.is_empty())
    }
}

impl<A: Access + Clone + 'static> BTree<A> {
    /// Loads entries in strictly ascending key order into an empty tree, using the share `fill` (0.1 to 1.0) of each page;
    /// returns their number. Others see the tree empty until it is done; if it fails or is dropped, the tree stays empty and
    /// its pages are taken back, by a task of the worker: a future that outlives the worker leaves them behind.
    ///
    /// # Errors
    /// If the tree is not empty, the input is not in order, `fill` is out of range, or remote memory is full.
    pub async fn bulk_load(&self, entries: impl IntoIterator<Item = (u64, u64)>, fill: f64) -> Result<u64, Error> {
        bulk::load(&self.access, entries, fill).await
    }
}

/// Entries in key order, fetched in parts. Each part holds what [`Scan`] promises; changes between two parts may show or
/// not.
#[derive(Debug)]
#[must_use = "a range fetches nothing until it is asked for entries"]
pub struct Range<'a, A: Access> {
    tree: &'a BTree<A>,
    /// The keys not fetched yet, both ends included.
    rest: Option<(u64, u64)>,
    descending: bool,
    fetched: VecDeque<(u64, u64)>,
}

impl<A: Access> Range<'_, A> {
    /// From the greatest key to the least. To be called before the first entry is asked for.
    pub fn descending(mut self) -> Self {
        self.descending = true;
        self
    }

    /// The next entry, or `None` at the end. Suspends when the entries fetched so far are used up.
    ///
    /// # Errors
    /// As [`BTree::get`]. The range can be asked again: nothing is lost.
    pub async fn next(&mut self) -> Result<Option<(u64, u64)>, Error> {
        while self.fetched.is_empty() && self.rest.is_some() {
            self.fetch(PART_ENTRIES).await?;
        }
        Ok(self.fetched.pop_front())
    }

    /// The next `limit` entries, or all there are if they are fewer.
    ///
    /// # Errors
    /// As [`BTree::get`].
    pub async fn take(mut self, limit: usize) -> Result<Vec<(u64, u64)>, Error> {
        while self.fetched.len() < limit && self.rest.is_some() {
            self.fetch((limit - self.fetched.len()) as u64).await?;
        }
        self.fetched.truncate(limit);
        Ok(self.fetched.into())
    }

    async fn fetch(&mut self, limit: u64) -> Result<(), Error> {
        let Some((low, high)) = self.rest else { return Ok(()) };
        let scan = Scan { low, high, limit, descending: self.descending };
        let (entries, next) = execute(&self.tree.access, &scan).await?;
        self.fetched.extend(entries);
        self.rest = next.map(|next| if self.descending { (low, next) } else { (next, high) });
        Ok(())
    }
}
