//! The memory of one memory server, as words that several threads and processes share.

use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use memmap2::{MmapOptions, MmapRaw};

use crate::{
    error::Error,
    mapped::Watch,
    ptr::ServerId,
    sync::{AtomicBool, AtomicU64, Mutex, Ordering},
};

enum Memory {
    Mapped(MmapRaw),
    Heap(Box<[AtomicU64]>),
}

/// Where a region comes from that others can take away.
struct Origin {
    path: PathBuf,
    watch: Watch,
    /// Whether somebody has found it gone, and why.
    is_lost: AtomicBool,
    why: OnceLock<String>,
}

/// Shared words: a mapped file, anonymous memory, or (under Miri and loom, which cannot map) the heap.
pub struct Region {
    /// Of a mapped file. Before the memory: it is no longer looked after when it is unmapped.
    origin: Option<Origin>,
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
            return Ok(Self { origin: None, memory: Memory::Heap(words), atomics: Some(Mutex::new(())) });
        }
        let map = MmapOptions::new().len(bytes).map_anon().map_err(Error::io(format!("mapping {bytes} bytes")))?;
        Ok(Self { origin: None, memory: Memory::Mapped(MmapRaw::from(map)), atomics: Some(Mutex::new(())) })
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
        let failed = || format!("mapping {}", path.display());
        let map = MmapOptions::new().map_raw(file).map_err(Error::io(failed()))?;
        let watch = Watch::new(map.as_ptr(), map.len()).map_err(Error::io(failed()))?;
        let origin = Origin { path: path.to_owned(), watch, is_lost: AtomicBool::new(false), why: OnceLock::new() };
        Ok(Self { origin: Some(origin), memory: Memory::Mapped(map), atomics: None })
    }

    /// Whether its file is known to be gone, shortened, or without a memory server: to be asked after an access, which means
    /// nothing then.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.origin.as_ref().is_some_and(|origin| origin.watch.is_cut_off() || origin.is_lost.load(Ordering::Relaxed))
    }

    /// It is lost from now on.
    pub(crate) fn lose(&self, why: String) {
        if let Some(origin) = &self.origin {
            let _ = origin.why.set(why);
            origin.is_lost.store(true, Ordering::Release);
        }
    }

    /// What whoever has used it is told once it is lost.
    #[cold]
    pub(crate) fn lost(&self, server: ServerId) -> Error {
        let why = |origin: &Origin| match origin.why.get() {
            Some(why) => why.clone(),
            None => "its file was truncated while it was mapped".to_owned(),
        };
        let address = self.origin.as_ref().map_or_else(String::new, |origin| origin.path.display().to_string());
        Error::ServerLost { server, address, why: self.origin.as_ref().map_or_else(String::new, why) }
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
            // which the hardware makes atomic per word. A memory server reserves its file's blocks; if somebody shortens the
            // file nevertheless, other memory takes its place (`mapped.rs`).
            Memory::Mapped(map) => unsafe {
                std::slice::from_raw_parts(map.as_mut_ptr().cast::<AtomicU64>(), map.len() / size_of::<u64>())
            },
            Memory::Heap(words) => words,
        }
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<AtomicU64>() == 8 && align_of::<AtomicU64>() == 8);

#[cfg(all(test, target_os = "linux", not(any(loom, miri))))]
mod tests {
    use std::{fs::OpenOptions, process::Command};

    use super::*;

    /// A mapped file with a word in each page.
    fn mapped(path: &Path) -> (Region, File) {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
        file.set_len(64 << 10).unwrap();
        let region = Region::of_file(&file, path).unwrap();
        region.words().iter().step_by(512).for_each(|word| word.store(7, Ordering::Relaxed));
        (region, file)
    }

    #[test]
    fn a_file_that_is_cut_while_it_is_mapped_ends_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let server = ServerId::new(1).unwrap();
        // Again and again: entries of mappings that are gone are used again.
        for round in 0..3 {
            let (cut, file) = mapped(&folder.path().join("cut"));
            let (whole, _file) = mapped(&folder.path().join("whole"));
            file.set_len(4096).unwrap();
            assert!(!cut.is_lost(), "round {round}: nobody has touched it");
            assert_eq!(cut.words()[512].load(Ordering::Relaxed), 0);
            assert!(cut.is_lost());
            assert!(cut.lost(server).to_string().contains("was truncated"));
            // Not even what is still there: some of it may be of before, some of after.
            assert_eq!(cut.words()[0].load(Ordering::Relaxed), 0);
            cut.words()[512].store(1, Ordering::Relaxed);
            assert!(whole.words().iter().step_by(512).all(|word| word.load(Ordering::Relaxed) == 7));
            assert!(!whole.is_lost());
        }
    }

    /// The other side of [`a_foreign_fault_ends_the_process`].
    #[test]
    #[ignore = "ends the process"]
    fn a_foreign_fault() {
        let folder = tempfile::tempdir().unwrap();
        let (_ours, _file) = mapped(&folder.path().join("ours"));
        let path = folder.path().join("foreign");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        file.set_len(8192).unwrap();
        let foreign = MmapOptions::new().map_raw(&file).unwrap();
        file.set_len(0).unwrap();
        // SAFETY: it is mapped; its file has no page for it, so the system ends the process.
        unsafe { foreign.as_ptr().read_volatile() };
    }

    #[test]
    fn a_foreign_fault_ends_the_process() {
        use std::os::unix::process::ExitStatusExt as _;
        let mut command = Command::new(std::env::current_exe().unwrap());
        let status = command.args(["--ignored", "--exact", "region::tests::a_foreign_fault"]).output().unwrap().status;
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}
