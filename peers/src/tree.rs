//! The tree that all of farlink's systems read: built once in an in-process cluster, and for who reads it by hand copied into local memory.
//!
//! The copy is one anonymous mapping advised for huge pages, so that every page is reached by an addition, and most of the
//! translations are in the processor's buffers. Pages keep their offsets: a remote pointer to server 0 is an offset here.

use std::sync::{Arc, atomic::Ordering};

use anyhow::Context as _;
use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer, Maintenance},
    fabric::mem::{MemFabric, MemOptions},
    page::SizeClass,
    ptr::{RemotePtr, ServerId},
    server::in_process,
    structure::Structure,
    sync::AtomicU64,
};
use farlink_structures::btree::{BTree, BTreeOptions};
use memmap2::{MmapMut, MmapRaw};

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 1024;
/// The share of each page that the load uses.
const FILL: f64 = 0.9;
/// Entries of a full page; see the layout in `farlink_structures::btree`.
const ENTRIES_MAX: usize = (PAGE_BYTES / 8 - 8) / 2;
/// Room for the superblock, the catalog and the chunks that are begun and not full.
const SLACK_BYTES: u64 = 16 << 20;
/// Copied together, or left untouched if all zero.
const COPY_WORDS: usize = 8 << 10;

/// Pages in local memory. Whoever changes one follows the rules of a page that is shared: lock word, relaxed words.
pub(crate) struct LocalPages {
    map: MmapRaw,
}

impl std::fmt::Debug for LocalPages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalPages({} bytes)", self.map.len())
    }
}

impl LocalPages {
    /// A copy of a region, at the same offsets.
    ///
    /// # Errors
    /// If the memory cannot be had.
    pub(crate) fn copy_of(region: &[AtomicU64]) -> anyhow::Result<Self> {
        let bytes = size_of_val(region);
        let map = MmapMut::map_anon(bytes).with_context(|| format!("mapping {bytes} bytes"))?;
        #[cfg(target_os = "linux")]
        if let Err(refused) = map.advise(memmap2::Advice::HugePage) {
            eprintln!("farlink-peers: no huge pages ({refused}); lookups will miss in the TLB more often");
        }
        let pages = Self { map: MmapRaw::from(map) };
        for (to, from) in pages.words().chunks(COPY_WORDS).zip(region.chunks(COPY_WORDS)) {
            if from.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
                continue;
            }
            for (to, from) in to.iter().zip(from) {
                to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        Ok(pages)
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is aligned to a memory page, covers `len` bytes, is readable and writable, and lives as long
        // as `self`. Nothing but these atomics ever refers to it.
        unsafe { std::slice::from_raw_parts(self.map.as_mut_ptr().cast::<AtomicU64>(), self.map.len() / 8) }
    }

    /// The words of the page of `class` at `at`; `None` if no page can stand there.
    #[inline]
    pub(crate) fn page(&self, at: RemotePtr, class: SizeClass) -> Option<&[AtomicU64]> {
        // A pointer to server 0 is its offset; to any other, it is beyond every mapping.
        let offset = usize::try_from(at.raw()).ok()?;
        if offset & (class.bytes() - 1) != 0 {
            return None;
        }
        self.words().get(offset / 8..offset / 8 + class.words())
    }
}

/// The tree, in local memory, and the compute server that makes workers for it.
#[derive(Debug)]
pub(crate) struct LocalTree {
    fabric: Arc<MemFabric>,
    /// The tree as the catalog has it.
    pub(crate) structure: Structure,
    /// Makes the workers of the threads that read the tree.
    pub(crate) compute: ComputeServer,
}

impl LocalTree {
    /// Loads `count` entries, in ascending key order.
    ///
    /// # Errors
    /// If the memory cannot be had, or the entries are not in order.
    pub(crate) fn build(entries: impl IntoIterator<Item = (u64, u64)>, count: usize) -> anyhow::Result<Self> {
        let leaves = count as f64 / (ENTRIES_MAX as f64 * FILL).floor();
        let bytes = (leaves * 1.05 * PAGE_BYTES as f64) as u64 + SLACK_BYTES;
        let fabric = Arc::new(in_process(1, bytes.next_multiple_of(2 << 20), MemOptions::default())?);
        // Nobody frees a page here, so no maintenance is needed, nor its thread.
        let options = ComputeOptions { maintenance: Maintenance::Manual, ..ComputeOptions::default() };
        let compute = ComputeServer::join(Arc::clone(&fabric) as _, options)?;
        let worker = compute.worker()?;
        let structure = worker.block_on(async {
            let options = BTreeOptions { page_bytes: PAGE_BYTES, ..BTreeOptions::default() };
            let tree = BTree::create(&worker, "peers", options).await?;
            tree.bulk_load(entries, FILL).await?;
            Ok::<_, farlink_runtime::error::Error>(tree.structure().clone())
        })?;
        drop(worker);
        Ok(Self { fabric, structure, compute })
    }

    /// A copy of its pages.
    ///
    /// # Errors
    /// If the memory cannot be had.
    pub(crate) fn pages(&self) -> anyhow::Result<LocalPages> {
        LocalPages::copy_of(self.fabric.raw_words(ServerId::new(0).expect("0 is a server number")))
    }
}
