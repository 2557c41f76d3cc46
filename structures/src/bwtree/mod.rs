//! A Bw-tree in disaggregated memory (Levandoski et al., ICDE 2013; Wang et al., SIGMOD 2018), without locks.
//!
//! A page is a number. A word for each number, in a mapping table in remote memory, leads to the newest of the page's records;
//! that leads to the next older one, down to a base page. Records are never changed: a write is a new record, a *delta*, and a
//! compare-and-swap of the word, with one doorbell. No worker waits for another one.
//!
//! - `record`: what records say, and how words lead to them; `chain`: what a chain of records comes to.
//! - `table`: the mapping table, and numbers for new pages.
//! - `page`: reading a page, and the way down to one. Pages have right links (Lehman and Yao), so a search whose page above is
//!   older lands too far left at worst, and moves right.
//! - `split`, `merge`: several swaps each, between any two of which the tree is whole. Whoever goes before a change finishes what
//!   it meets half-done.
//! - `write`: a put or removal is one delta; where the chain is as long as it may be, it is a new base, and the old chain is free.
//! - `scan`, `bulk`, `check`, `leaks`; `sent`: scans that memory servers send without copying them.
//!
//! Keys and values are u64; every key is legal. Operations from any number of workers on any number of compute servers are
//! linearizable for each key; what scans promise is said in `scan`.

mod bulk;
pub mod chain;
mod check;
mod leaks;
mod merge;
mod page;
pub mod record;
mod scan;
mod sent;
mod split;
mod table;
mod write;

pub use sent::{Sent, SentScan};

use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, Proof},
    page::SizeClass,
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    worker::Handle,
};

use crate::map::{
    KeyRange, Map, OrderedMap, ScanPart,
    ops::{self as map_ops, Put, Scan},
};

/// Under this name the tree [counts](Handle::count) base pages that it has made in place of chains.
pub const CONSOLIDATIONS: &str = "consolidations";

/// The length of a chain, if the options do not say.
const CHAIN: u8 = 4;
/// The longest chain that can be asked for.
const CHAIN_MAX: u8 = 32;

/// How a tree is made. All is fixed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BwTreeOptions {
    /// Bytes of a base page: a power of two from 256 to 16384. The structure's root page, which is its directory of the mapping
    /// table, has the same size: it names 27 pages of the table with 256 bytes, 123 with 1 KiB, 2043 with 16 KiB. About half of those
    /// have 64 KiB at least, which is numbers for 8188 pages of the tree. So a tree has 110,000 pages, 500,000, or 8 million, or up to
    /// twice as many on few memory servers; what needs one more fails with [`Error::MappingTableFull`].
    pub page_bytes: usize,
    /// Deltas on a base page, 1 to 32, before the next write makes a new one. Splits and merges add some.
    pub chain: u8,
    /// Where its pages are.
    pub placement: StructurePlacement,
}

impl Default for BwTreeOptions {
    fn default() -> Self {
        Self { page_bytes: 1024, chain: CHAIN, placement: StructurePlacement::default() }
    }
}

/// A Bw-tree of u64 keys and values. A handle belongs to one worker; any number of handles can be open on one tree.
///
/// ```
/// use std::sync::Arc;
/// use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::mem::MemOptions, server};
/// use farlink_structures::bwtree::{BwTree, BwTreeOptions};
///
/// let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
/// let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
/// let worker = compute.worker()?;
/// worker.block_on(async {
///     let tree = BwTree::create(&worker, "ages", BwTreeOptions::default()).await?;
///     assert!(tree.insert(7, 70).await?);
///     assert!(!tree.insert(7, 71).await?);
///     assert_eq!(tree.get(7).await?, Some(70));
///     assert_eq!(tree.scan(0, 10).await?, [(7, 70)]);
///     assert!(tree.check().await?.is_clean());
///     Ok::<_, farlink_runtime::error::Error>(())
/// })?;
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
pub type BwTree<A> = Map<Bw, A>;

/// What makes a [`Map`] a Bw-tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bw;

impl Bw {
    /// How many deltas a chain of a structure has.
    fn chain_max(structure: &Structure) -> u8 {
        match u8::try_from(structure.options[0]).unwrap_or(CHAIN_MAX) {
            0 => CHAIN,
            chain => chain.min(CHAIN_MAX),
        }
    }
}

impl Plugin for Bw {
    const NAME: &'static str = "bwtree";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 256..=16384;
    type Region = KeyRange;
    type Local = table::Known;

    /// None: its pages are found over the mapping table.
    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe_words(root, 0, table::DIRECTORY_KIND);
    }

    fn operations(to: &mut impl Operations<Self>) {
        map_ops::operations(to);
        to.add_in_pieces::<SentScan>();
    }

    async fn reachable<A: Access<Plugin = Self>>(
        access: &A,
        found_by: [u64; 2],
    ) -> Result<Option<Vec<RemotePtr>>, Interrupt> {
        split::reachable(access, found_by).await
    }

    async fn is_leaked<A: Access<Plugin = Self>>(access: &A, page: Link) -> Result<bool, Interrupt> {
        leaks::is_leaked(access, page).await
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        check::check(access).await
    }
}

/// Every operation begins at the root: where a memory server may have it go on says nothing here, but whether it may trust what
/// is remembered.
impl OrderedMap for Bw {
    async fn get<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        write::get(access, from, key).await
    }

    async fn put<A: Access<Plugin = Self>>(access: &A, from: Start, put: &Put<Self>) -> Result<Option<u64>, Interrupt> {
        write::put(access, from, put).await
    }

    async fn remove<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        write::remove(access, from, key).await
    }

    async fn scan<A: Access<Plugin = Self>>(
        access: &A,
        _from: Start,
        scan: &Scan<Self>,
    ) -> Result<ScanPart, Interrupt> {
        scan::scan(access, scan).await
    }
}

impl BwTree<OneSided<Bw>> {
    /// Makes an empty tree and enters it into the cluster's catalog.
    ///
    /// # Errors
    /// As [`Map::make`]; and if chains cannot be so long.
    pub async fn create(worker: &Handle, name: &str, options: BwTreeOptions) -> Result<Self, Error> {
        let BwTreeOptions { page_bytes, chain, placement } = options;
        let bad = |option, why| Error::BadOption { option, why };
        let class = SizeClass::of_bytes(page_bytes)
            .ok_or(bad("page-bytes", format!("{page_bytes}; it is a power of two from 256 to 16384")))?;
        if !(1..=CHAIN_MAX).contains(&chain) {
            return Err(bad("chain", format!("{chain}; a chain has 1 to {CHAIN_MAX} deltas")));
        }
        let mut all = [0; OPTIONS];
        all[0] = u64::from(chain);
        let options = CreateOptions { class, placement, options: all };
        Ok(Self::over(catalog::create(worker, name, &options, Proof::Checksum).await?))
    }
}

impl<A: Access<Plugin = Bw>> BwTree<A> {
    /// Loads entries in strictly ascending key order into an empty tree, using the share `fill` (0.1 to 1.0) of each page;
    /// returns their number. Holds them in memory. Others see the tree empty until it is done; if it fails, the tree stays
    /// empty, unless the answer to the last swap is lost. Dropped, it goes on.
    ///
    /// # Errors
    /// If the tree is not empty, the input is not in order, `fill` is out of range, remote memory or the mapping table is full;
    /// [`Error::InstallUnknown`]: the tree is empty, or holds all entries.
    pub async fn bulk_load(&self, entries: impl IntoIterator<Item = (u64, u64)>, fill: f64) -> Result<u64, Error> {
        bulk::load(self.access(), entries, fill).await
    }
}
