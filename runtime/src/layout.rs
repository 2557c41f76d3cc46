//! What stands where in a memory server's region.
//!
//! ```text
//! 0          banner: text for whoever looks at the file
//! 64         superblock, fixed part: magic, format version, cluster id, server, sizes, and a check word
//! 128..4088  superblock, words that change, each in a cache line of its own
//! 4088       a word of the `mem` fabric: which start of the memory server the region is of
//! 4 KiB      catalog: 64 pages of 128 B (used on server 0)
//! 12 KiB     compute-server slots: 256 x [incarnation, announced epoch] (used on server 0)
//! 16 KiB     table of rings: a compute-server slot x [link to the first ring on this memory server] (see `redo`)
//! 18 KiB     fences: a compute-server slot x [incarnation fenced off, operations under way here] (see `fencing`)
//! 22 KiB     chunk directory: a chunk x [state, pages free in its bitmap]
//! ...        free-page bitmaps: a chunk x 128 B, one bit a page, set = free and held by nobody
//! ...        chunks of 64 KiB, aligned to their size
//! ```
//!
//! The first chunks, one in 256, are for [rings](crate::redo) alone, and all free from the start: who joins where all other memory is in
//! use can record changes, and so free pages. At most one ring for each slot is kept.
//!
//! Everything that changes is changed by compute servers with one-sided operations, so a memory server needs no processor
//! for it and every fabric can do it.

use std::{fmt, str::FromStr};

use crate::{
    error::Error,
    page::{SizeClass, mix},
    ptr::{REGION_BYTES_MAX, RemotePtr, SERVERS_MAX, ServerId},
    sync::{AtomicU64, Ordering},
};

const MAGIC: u64 = u64::from_le_bytes(*b"FARLINK\0");
/// The version of everything in this module and in [`crate::page`].
pub const FORMAT_VERSION: u64 = 7;
const BANNER: &[u8; 64] = b"farlink: the memory of a memory server. Do not edit.           \n";

/// Bytes of a chunk, the unit that a compute server leases; all its pages have one size class for ever.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// How many compute servers can be attached at a time.
pub const SLOTS: usize = 256;
/// How many structures a cluster can hold.
pub const CATALOG_PAGES: usize = 64;
/// The size class of catalog pages.
pub const CATALOG_CLASS: SizeClass = match SizeClass::of_bytes(128) {
    Some(class) => class,
    None => panic!("128 B is a size class"),
};

/// The size class of [rings](crate::redo).
pub const RING_CLASS: SizeClass = match SizeClass::of_bytes(16 << 10) {
    Some(class) => class,
    None => panic!("16 KiB is a size class"),
};
/// Rings that fit into a chunk.
const RINGS_PER_CHUNK: u64 = CHUNK_BYTES / RING_CLASS.bytes() as u64;
/// One chunk in so many is for rings alone.
const RING_CHUNKS_SHARE: u64 = 256;

/// The words of a catalog page.
pub(crate) type CatalogPage = [u64; CATALOG_CLASS.words()];

const SUPERBLOCK_OFFSET: u64 = 64;
pub(crate) const SUPERBLOCK_WORDS: usize = 8;
const CATALOG_OFFSET: u64 = 4 << 10;
const SLOTS_OFFSET: u64 = CATALOG_OFFSET + CATALOG_PAGES as u64 * 128;
/// Words of one slot: the incarnation (0: free) and the epoch it announces.
pub(crate) const SLOT_WORDS: usize = 2;
const RINGS_OFFSET: u64 = SLOTS_OFFSET + (SLOTS * SLOT_WORDS * 8) as u64;
const FENCES_OFFSET: u64 = RINGS_OFFSET + (SLOTS * 8) as u64;
/// Words of one slot's fence.
pub(crate) const FENCE_WORDS: usize = 2;
const DIRECTORY_OFFSET: u64 = FENCES_OFFSET + (SLOTS * FENCE_WORDS * 8) as u64;
/// Words of one directory entry: the state (0: never leased) and the count of pages free in the bitmap.
pub(crate) const DIRECTORY_WORDS: usize = 2;
/// Words of one chunk's bitmap: enough for the smallest class.
pub(crate) const BITMAP_WORDS: usize = (CHUNK_BYTES / 64 / 64) as usize;
const METADATA_PER_CHUNK: u64 = ((DIRECTORY_WORDS + BITMAP_WORDS) * 8) as u64;

const _: () = assert!(SLOTS_OFFSET == 12 << 10 && RINGS_OFFSET == 16 << 10);
const _: () = assert!(FENCES_OFFSET == 18 << 10 && DIRECTORY_OFFSET == 22 << 10);

/// The words of the superblock that change, by their byte offset.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Dynamic {
    /// The cluster's epoch (server 0).
    Epoch,
    /// The next incarnation to give out (server 0).
    NextIncarnation,
    /// The next chunk never leased.
    NextChunk,
    /// How often pages of a class were returned to bitmaps.
    Returns(SizeClass),
}

impl Dynamic {
    pub(crate) fn offset(self) -> u64 {
        let line = match self {
            Self::Epoch => 2,
            Self::NextIncarnation => 3,
            Self::NextChunk => 4,
            Self::Returns(class) => 5 + class.index() as u64,
        };
        line * 64
    }
}

/// Which changes of pages compute servers [record](crate::redo) before they make them. It is the same in a whole cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Records {
    /// All: whatever a compute server dies of, others finish or undo its changes.
    #[default]
    All,
    /// Those of several pages, which would leave half a change. A change of several words of one page costs no WRITE more, but if its
    /// compute server dies while it is written, that page stays damaged.
    SeveralPages,
}

impl Records {
    /// Both.
    pub const CHOICES: [Self; 2] = [Self::All, Self::SeveralPages];

    /// As it is called on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::SeveralPages => "several-pages",
        }
    }

    /// What it means, in a line.
    pub fn summary(self) -> &'static str {
        match self {
            Self::All => "all changes: whoever dies of one, others finish or undo it",
            Self::SeveralPages => {
                "those of several pages: who dies of writing several words of one page alone may leave it damaged"
            }
        }
    }
}

impl fmt::Display for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Records {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::CHOICES.into_iter().find(|records| records.name() == name);
        found.ok_or_else(|| format!("{name:?} is neither all nor several-pages"))
    }
}

/// The fixed part of a superblock: a region's place in the cluster, and its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// The memory server.
    pub server: ServerId,
    /// How many memory servers the cluster has.
    pub servers: usize,
    /// The cluster's id.
    pub cluster: u64,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// How many chunks fit.
    pub chunks: u64,
    /// What is recorded.
    pub records: Records,
}

impl Geometry {
    /// Plans a new region.
    ///
    /// # Errors
    /// If the region is too small for one chunk, or a number is out of range.
    pub fn plan(server: usize, servers: usize, region_bytes: u64, cluster: u64) -> Result<Self, Error> {
        let bad = |option, why: String| Err(Error::BadOption { option, why });
        if servers == 0 || servers > SERVERS_MAX {
            return bad("servers", format!("{servers} memory servers; there must be 1 to {SERVERS_MAX}"));
        }
        let id = u16::try_from(server).ok().and_then(ServerId::new).filter(|_| server < servers);
        let Some(id) = id else {
            return bad("server", format!("{server} is not below the number of servers, {servers}"));
        };
        let chunks = if region_bytes <= REGION_BYTES_MAX { chunks_in(region_bytes) } else { 0 };
        if chunks <= ring_chunks(chunks) || !region_bytes.is_multiple_of(4096) {
            let least = chunks_offset(2) + 2 * CHUNK_BYTES;
            return bad(
                "bytes",
                format!("{region_bytes}; a region has {least} to {REGION_BYTES_MAX} bytes, in multiples of 4096"),
            );
        }
        Ok(Self { server: id, servers, cluster, region_bytes, chunks, records: Records::All })
    }

    /// The same, where this is recorded.
    #[must_use]
    pub fn with_records(self, records: Records) -> Self {
        Self { records, ..self }
    }

    fn superblock(&self) -> [u64; SUPERBLOCK_WORDS] {
        let records = self.records as u64;
        let servers = (self.server.number() as u64) << 32 | records << 16 | self.servers as u64;
        let mut words = [MAGIC, FORMAT_VERSION, self.cluster, servers, self.region_bytes, CHUNK_BYTES, self.chunks, 0];
        words[SUPERBLOCK_WORDS - 1] = superblock_check(&words);
        words
    }

    /// Reads the fixed part of a superblock, as found at its place in the region of `server`, which maps `mapped_bytes`.
    ///
    /// # Errors
    /// If it is none, is damaged, or does not fit the region.
    pub fn read(words: &[u64; SUPERBLOCK_WORDS], server: ServerId, mapped_bytes: u64) -> Result<Self, Error> {
        let bad = |why: String| Err(Error::BadSuperblock { server, why });
        if words[0] != MAGIC {
            return bad(format!("the magic number is {:#018x}, not {MAGIC:#018x}", words[0]));
        }
        if words[1] != FORMAT_VERSION {
            return Err(Error::WrongVersion { server, found: words[1], expected: FORMAT_VERSION });
        }
        if words[SUPERBLOCK_WORDS - 1] != superblock_check(words) {
            return bad("the superblock's check word does not fit".into());
        }
        let (stated, servers) = (words[3] >> 32, words[3] as u16 as usize);
        let found = (words[3] >> 16) as u16;
        let Some(records) = Records::CHOICES.into_iter().find(|&records| records as u16 == found) else {
            return bad("it does not say what is recorded".into());
        };
        if stated != u64::from(server.number()) {
            return bad(format!("it says it is memory server {stated}; the files were renamed or mixed"));
        }
        if words[4] != mapped_bytes {
            return Err(Error::WrongSize { server, found: mapped_bytes, expected: words[4] });
        }
        let geometry = Self::plan(server.index(), servers, words[4], words[2])?.with_records(records);
        if (words[5], words[6]) != (CHUNK_BYTES, geometry.chunks) {
            return bad(format!("{} chunks of {} bytes do not fit its size", words[6], words[5]));
        }
        Ok(geometry)
    }

    /// Where the fixed part of a superblock stands.
    pub(crate) fn superblock_at(server: ServerId) -> RemotePtr {
        pointer(server, SUPERBLOCK_OFFSET)
    }

    pub(crate) fn dynamic_at(&self, word: Dynamic) -> RemotePtr {
        pointer(self.server, word.offset())
    }

    /// How many of the first chunks are for rings alone.
    pub fn ring_chunks(&self) -> u64 {
        ring_chunks(self.chunks)
    }

    /// Whether a page lies in one of them.
    pub(crate) fn is_for_rings(&self, page: RemotePtr) -> bool {
        page.offset()
            .checked_sub(chunks_offset(self.chunks))
            .is_some_and(|inside| inside / CHUNK_BYTES < self.ring_chunks())
    }

    pub(crate) fn directory_at(&self, chunk: u64) -> RemotePtr {
        pointer(self.server, DIRECTORY_OFFSET + chunk * (DIRECTORY_WORDS * 8) as u64)
    }

    pub(crate) fn bitmap_at(&self, chunk: u64) -> RemotePtr {
        let bitmaps = DIRECTORY_OFFSET + self.chunks * (DIRECTORY_WORDS * 8) as u64;
        pointer(self.server, bitmaps + chunk * (BITMAP_WORDS * 8) as u64)
    }

    pub(crate) fn chunk_at(&self, chunk: u64) -> RemotePtr {
        pointer(self.server, chunks_offset(self.chunks) + chunk * CHUNK_BYTES)
    }

    /// The chunk and the index in it of the page at `page`, if a page of this class can be there.
    pub(crate) fn locate(&self, page: RemotePtr, class: SizeClass) -> Option<(u64, usize)> {
        let inside = page.offset().checked_sub(chunks_offset(self.chunks))?;
        let (chunk, within) = (inside / CHUNK_BYTES, (inside % CHUNK_BYTES) as usize);
        let aligned = within & (class.bytes() - 1) == 0;
        (aligned && chunk < self.chunks).then(|| (chunk, within >> class.bytes().trailing_zeros()))
    }

    /// Whether a page of this class may stand at `page`: in a chunk, or in the catalog.
    pub(crate) fn holds_page(&self, page: RemotePtr, class: SizeClass) -> bool {
        let in_catalog = page
            .offset()
            .checked_sub(CATALOG_OFFSET)
            .is_some_and(|inside| inside.is_multiple_of(128) && inside < SLOTS_OFFSET - CATALOG_OFFSET);
        self.locate(page, class).is_some() || (in_catalog && class == CATALOG_CLASS)
    }
}

pub(crate) fn catalog_page_at(index: usize) -> RemotePtr {
    pointer(ServerId::new(0).expect("0 is a server id"), CATALOG_OFFSET + index as u64 * 128)
}

pub(crate) fn slot_at(index: usize) -> RemotePtr {
    pointer(ServerId::new(0).expect("0 is a server id"), SLOTS_OFFSET + (index * SLOT_WORDS * 8) as u64)
}

/// The word of a slot in a memory server's table of rings.
pub(crate) fn rings_at(server: ServerId, slot: usize) -> RemotePtr {
    pointer(server, RINGS_OFFSET + (slot * 8) as u64)
}

/// The words of a slot's fence on a memory server.
pub(crate) fn fence_at(server: ServerId, slot: usize) -> RemotePtr {
    pointer(server, FENCES_OFFSET + (slot * FENCE_WORDS * 8) as u64)
}

fn pointer(server: ServerId, offset: u64) -> RemotePtr {
    RemotePtr::new(server, offset).expect("offsets inside a region are not null and fit into 48 bits")
}

fn superblock_check(words: &[u64; SUPERBLOCK_WORDS]) -> u64 {
    words[..SUPERBLOCK_WORDS - 1].iter().enumerate().fold(1, |sum: u64, (i, &word)| sum.wrapping_add(mix(i, word)))
}

fn chunks_offset(chunks: u64) -> u64 {
    (DIRECTORY_OFFSET + chunks * METADATA_PER_CHUNK).next_multiple_of(CHUNK_BYTES)
}

const fn ring_chunks(chunks: u64) -> u64 {
    let (share, most) = (chunks.div_ceil(RING_CHUNKS_SHARE), SLOTS as u64 / RINGS_PER_CHUNK);
    if share < most { share } else { most }
}

fn chunks_in(region_bytes: u64) -> u64 {
    let mut chunks = region_bytes.saturating_sub(DIRECTORY_OFFSET) / (CHUNK_BYTES + METADATA_PER_CHUNK);
    while chunks > 0 && chunks_offset(chunks) + chunks * CHUNK_BYTES > region_bytes {
        chunks -= 1;
    }
    chunks
}

/// Writes the superblock, the pages of the empty catalog and the entries of chunks for rings, with this state, into a zeroed region, the
/// magic number last.
pub(crate) fn format(
    words: &[AtomicU64],
    geometry: &Geometry,
    catalog_page: impl Fn(usize) -> CatalogPage,
    ring_chunk: u64,
) {
    for (word, text) in words.iter().zip(BANNER.chunks_exact(8)) {
        word.store(u64::from_le_bytes(text.try_into().expect("eight bytes")), Ordering::Relaxed);
    }
    let set = |offset: u64, value: u64| words[(offset / 8) as usize].store(value, Ordering::Relaxed);
    set(Dynamic::Epoch.offset(), 1);
    set(Dynamic::NextIncarnation.offset(), 1);
    for index in 0..CATALOG_PAGES {
        let page = catalog_page(index);
        for (position, &word) in page.iter().enumerate() {
            set(catalog_page_at(index).offset() + position as u64 * 8, word);
        }
    }
    set(Dynamic::NextChunk.offset(), geometry.ring_chunks());
    for chunk in 0..geometry.ring_chunks() {
        let entry = geometry.directory_at(chunk).offset();
        set(entry, ring_chunk);
        set(entry + 8, RINGS_PER_CHUNK);
        set(geometry.bitmap_at(chunk).offset(), (1 << RINGS_PER_CHUNK) - 1);
    }
    for (index, &word) in geometry.superblock().iter().enumerate().rev() {
        let first = (SUPERBLOCK_OFFSET / 8) as usize;
        words[first + index].store(word, Ordering::Release);
    }
}

/// Whether a region has no magic number and nobody can have used it: whoever formatted it, if anybody, did not get to the end.
pub(crate) fn is_unfinished(words: &[AtomicU64]) -> bool {
    let word = |offset: u64| words.get((offset / 8) as usize).map(|word| word.load(Ordering::Acquire));
    word(SUPERBLOCK_OFFSET) == Some(0)
        && word(Dynamic::NextIncarnation.offset()).is_some_and(|next| next <= 1)
        && word(Dynamic::NextChunk.offset()).is_some_and(|next| next <= ring_chunks(chunks_in(words.len() as u64 * 8)))
}

/// The fixed part of the superblock in mapped memory.
pub(crate) fn superblock_words(words: &[AtomicU64]) -> Option<[u64; SUPERBLOCK_WORDS]> {
    let first = (SUPERBLOCK_OFFSET / 8) as usize;
    let found = words.get(first..first + SUPERBLOCK_WORDS)?;
    Some(std::array::from_fn(|index| found[index].load(Ordering::Acquire)))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_plan_fills_its_region_and_reads_back() {
        for mib in [1, 2, 3, 7, 64, 1024, 1 << 20] {
            let geometry = Geometry::plan(1, 3, mib << 20, 42).unwrap();
            let end = geometry.chunk_at(geometry.chunks - 1).offset() + CHUNK_BYTES;
            assert!(end <= mib << 20 && end + CHUNK_BYTES + (1 << 20) > mib << 20, "{mib} MiB");
            let bitmaps_end = geometry.bitmap_at(geometry.chunks - 1).offset() + (BITMAP_WORDS * 8) as u64;
            assert!(bitmaps_end <= geometry.chunk_at(0).offset());
            for geometry in [geometry, geometry.with_records(Records::SeveralPages)] {
                assert_eq!(Geometry::read(&geometry.superblock(), geometry.server, mib << 20).unwrap(), geometry);
            }
        }
        assert!(Geometry::plan(0, 1, 4096, 1).is_err());
        assert!(Geometry::plan(2, 2, 1 << 20, 1).is_err());
        assert!(Geometry::plan(0, 1, u64::MAX, 1).is_err());
    }

    #[test]
    fn a_region_is_unfinished_until_it_has_its_magic_number_or_is_used() {
        let geometry = Geometry::plan(1, 2, 64 << 20, 42).unwrap();
        assert_eq!(geometry.ring_chunks(), 4);
        let words: Vec<AtomicU64> = (0..geometry.region_bytes / 8).map(|_| AtomicU64::new(0)).collect();
        assert!(is_unfinished(&words));
        format(&words, &geometry, |_| [0; CATALOG_CLASS.words()], 1);
        assert!(!is_unfinished(&words));
        words[(SUPERBLOCK_OFFSET / 8) as usize].store(0, Ordering::Relaxed);
        assert!(is_unfinished(&words), "whoever formatted it did not get to the end");
        words[(Dynamic::NextChunk.offset() / 8) as usize].fetch_add(1, Ordering::Relaxed);
        assert!(!is_unfinished(&words), "somebody has leased a chunk");
    }

    #[test]
    fn every_wrong_field_has_its_error() {
        let geometry = Geometry::plan(0, 1, 1 << 20, 42).unwrap();
        let read = |change: &dyn Fn(&mut [u64; SUPERBLOCK_WORDS]), mapped| {
            let mut words = geometry.superblock();
            change(&mut words);
            Geometry::read(&words, geometry.server, mapped)
        };
        assert!(matches!(read(&|w| w[0] = 0, 1 << 20), Err(Error::BadSuperblock { .. })));
        assert!(matches!(read(&|w| w[1] = 9, 1 << 20), Err(Error::WrongVersion { found: 9, .. })));
        assert!(matches!(read(&|w| w[2] = 9, 1 << 20), Err(Error::BadSuperblock { .. })));
        assert!(matches!(read(&|_| (), 2 << 20), Err(Error::WrongSize { .. })));
        let other = ServerId::new(1).unwrap();
        assert!(matches!(Geometry::read(&geometry.superblock(), other, 1 << 20), Err(Error::BadSuperblock { .. })));
    }

    proptest! {
        #[test]
        fn random_superblocks_are_refused(mut words: [u64; SUPERBLOCK_WORDS], magic: bool, sealed: bool, bytes: u64) {
            if magic {
                (words[0], words[1]) = (MAGIC, FORMAT_VERSION);
            }
            if sealed {
                words[SUPERBLOCK_WORDS - 1] = superblock_check(&words);
            }
            prop_assert!(Geometry::read(&words, ServerId::new(0).unwrap(), bytes).is_err());
        }
    }
}
