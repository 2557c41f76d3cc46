//! A folder for a run, and the promise that it does not stay behind.
//!
//! It lies in `/dev/shm` where that exists (memory, not a disk), else in the system's folder for temporary files. It is
//! removed when the run ends. Against SIGKILL nothing helps at once; so every folder holds a lock file that its run keeps
//! locked, and the next run removes the folders whose lock is free. A lock, unlike a process id in a name, means the same thing
//! in every container that shares `/dev/shm`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

const PREFIX: &str = "farlink-run-";
const LOCK_NAME: &str = "run.lock";

/// A folder that is removed when this value is dropped.
#[derive(Debug)]
pub struct Scratch {
    folder: tempfile::TempDir,
    /// Held locked for as long as the run lives.
    _lock: File,
}

impl Scratch {
    /// Makes a folder, after removing what killed runs left.
    ///
    /// # Errors
    /// If no folder can be made there; the error says where.
    pub fn new() -> anyhow::Result<Self> {
        let shm = Path::new("/dev/shm");
        Self::inside(&if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() })
    }

    /// The same inside this folder.
    ///
    /// # Errors
    /// As [`Scratch::new`].
    pub fn inside(parent: &Path) -> anyhow::Result<Self> {
        remove_abandoned(parent);
        let make = || -> io::Result<Self> {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            // Locked first and named after, so that no other run ever sees the name without the lock.
            let unnamed = folder.path().join("new.lock");
            let lock = OpenOptions::new().create_new(true).write(true).open(&unnamed)?;
            lock.try_lock()?;
            fs::rename(&unnamed, folder.path().join(LOCK_NAME))?;
            Ok(Self { folder, _lock: lock })
        };
        make().with_context(|| format!("cannot make a temporary folder in {}", parent.display()))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Removes folders whose run is gone. Errors do not matter: what cannot be removed now may be removed next time.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let ours =
        |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX));
    for path in entries.flatten().map(|entry| entry.path()).filter(ours) {
        let Ok(lock) = OpenOptions::new().write(true).open(path.join(LOCK_NAME)) else { continue };
        if lock.try_lock().is_ok() {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_its_run() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::inside(parent.path()).unwrap();
        fs::write(scratch.path().join("memory-0"), b"x").unwrap();
        drop(scratch);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn abandoned_folders_are_swept_and_live_ones_stay() {
        let parent = tempfile::tempdir().unwrap();
        let live = Scratch::inside(parent.path()).unwrap();
        let abandoned = parent.path().join(format!("{PREFIX}dead"));
        fs::create_dir(&abandoned).unwrap();
        fs::write(abandoned.join(LOCK_NAME), b"").unwrap();
        let foreign = parent.path().join("something-else");
        fs::create_dir(&foreign).unwrap();
        fs::write(foreign.join(LOCK_NAME), b"").unwrap();
        let second = Scratch::inside(parent.path()).unwrap();
        assert!(live.path().exists() && second.path().exists() && foreign.exists());
        assert!(!abandoned.exists());
    }

    #[test]
    fn a_parent_that_is_not_there_is_named() {
        let error = Scratch::inside(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at/all"));
    }
}
