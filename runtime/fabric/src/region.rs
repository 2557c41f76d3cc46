//! The memory of one memory server, as words that several threads and processes share.

use std::{fs::File, path::Path};

use memmap2::{MmapOptions, MmapRaw};

use crate::{
    error::Error,
    sync::{AtomicU64, Mutex},
};

enum Memory {
    Mapped(MmapRaw),
    Heap(Box<[AtomicU64]>),
}

/// Shared words: a mapped file, anonymous memory, or (under Miri and loom, which cannot map) the heap.
pub struct Region {
    memory: Memory,
    /// In memory of this process alone: orders atomics among each other that are not those of the processor.
    atomics: Option<Mutex<()>>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({} bytes)", self.bytes())
    }
}

impl Region {
    /// Zeroed memory of this process alone. `bytes` is a multiple of 8.
    ///
    /// # Errors
    /// If the memory cannot be had.
    pub fn anonymous(bytes: usize) -> Result<Self, Error> {
        if cfg!(any(miri, loom)) {
            let words = (0..bytes / 8).map(|_| AtomicU64::new(0)).collect();
            return Ok(Self { memory: Memory::Heap(words), atomics: Some(Mutex::new(())) });
        }
        let map = MmapOptions::new().len(bytes).map_anon().map_err(Error::io(format!("mapping {bytes} bytes")))?;
        Ok(Self { memory: Memory::Mapped(MmapRaw::from(map)), atomics: Some(Mutex::new(())) })
    }

    /// Asks the system to use large pages, of which a network card needs to know fewer. It may not have any.
    #[cfg(feature = "verbs")]
    pub(crate) fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if let Memory::Mapped(map) = &self.memory
            && let Err(error) = map.advise(memmap2::Advice::HugePage)
        {
            tracing::debug!(%error, "no huge pages");
        }
    }

    /// The whole of `file`, shared with every process that maps it. Its length is a multiple of 8.
    pub(crate) fn of_file(file: &File, path: &Path) -> Result<Self, Error> {
        let map = MmapOptions::new().map_raw(file).map_err(Error::io(format!("mapping {}", path.display())))?;
        Ok(Self { memory: Memory::Mapped(map), atomics: None })
    }

    pub(crate) fn atomics(&self) -> Option<&Mutex<()>> {
        self.atomics.as_ref()
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.words().len() as u64 * 8
    }

    /// The memory. Others read and write it at the same time.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        match &self.memory {
            // SAFETY: the mapping is page-aligned, covers `len` bytes, is readable and writable, and lives as long as
            // `self`. Every access from this process goes through these atomics; other processes write through theirs,
            // which the hardware makes atomic per word. A memory server reserves its file's blocks and nobody shortens
            // the file while it is served, so the pages exist.
            Memory::Mapped(map) => unsafe {
                std::slice::from_raw_parts(map.as_mut_ptr().cast::<AtomicU64>(), map.len() / size_of::<u64>())
            },
            Memory::Heap(words) => words,
        }
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<AtomicU64>() == 8 && align_of::<AtomicU64>() == 8);
