//! A folder for a run, and the promise that it does not stay behind.
//!
//! It lies in `/dev/shm` where that exists (memory, not a disk), else in the system's folder for temporary files. It is
//! removed when the run ends. Against SIGKILL nothing helps at once; so every folder holds a lock file that its run keeps
//! locked, and the next run of the same user removes the folders whose lock is free. A lock, unlike a process id in a name, means the same thing
//! in every container that shares `/dev/shm`. The lock file goes last, so that a removal that was cut off is gone on with; a folder
//! that has none, because its run was killed before it had made one, is removed once it is a minute old.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

const PREFIX: &str = "farlink-run-";
const LOCK_NAME: &str = "run.lock";
/// What it is called until it is locked.
const NEW_LOCK_NAME: &str = "new.lock";
/// A run makes its folder and locks it in less time.
const UNLOCKED_MAX: Duration = Duration::from_secs(60);

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
            let unnamed = folder.path().join(NEW_LOCK_NAME);
            let lock = OpenOptions::new().create_new(true).write(true).open(&unnamed)?;
            lock.try_lock()?;
            fs::rename(&unnamed, folder.path().join(LOCK_NAME))?;
            Ok(Self { folder, _lock: lock })
        };
        make().with_context(|| format!("cannot make a temporary folder in {}", parent.display()))
    }

    /// Removes a folder of this kind, as far as that is possible.
    pub fn remove(folder: &Path) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| !path.ends_with(LOCK_NAME)) {
            let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
        if fs::read_dir(folder).is_ok_and(|left| left.count() <= 1) {
            let _ = fs::remove_dir_all(folder);
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        Self::remove(self.folder.path());
    }
}

/// Whether nobody holds the lock of a folder. One whose lock is not named yet, or is none, is somebody's who makes it, unless it is old.
fn is_abandoned(folder: &Path) -> bool {
    let is_free = |name| match OpenOptions::new().write(true).open(folder.join(name)) {
        Ok(lock) => Some(lock.try_lock().is_ok()),
        Err(error) => (error.kind() != io::ErrorKind::NotFound).then_some(false),
    };
    is_free(LOCK_NAME).unwrap_or_else(|| {
        let made = fs::metadata(folder).and_then(|folder| folder.modified());
        let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > UNLOCKED_MAX));
        is_old && is_free(NEW_LOCK_NAME).unwrap_or(true)
    })
}

/// Removes folders whose run is gone. Errors do not matter: what cannot be removed now may be removed next time.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    // SAFETY: it has no preconditions and touches no memory.
    let user = unsafe { libc::geteuid() };
    for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX)) {
        // Anybody can put names there. The metadata are a symbolic link's own: what it leads to is nobody's to remove, and what is in another
        // user's folder may be anything.
        let is_ours = entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user);
        let path = entry.path();
        if is_ours && is_abandoned(&path) {
            Scratch::remove(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

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
    fn what_never_had_a_lock_is_swept_once_it_is_old() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str, age: Duration| {
            let folder = parent.path().join(format!("{PREFIX}{name}"));
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("memory-0"), b"x").unwrap();
            File::open(&folder).unwrap().set_modified(SystemTime::now() - age).unwrap();
            folder
        };
        let (old, new) = (make("old", UNLOCKED_MAX * 2), make("new", Duration::ZERO));
        // Another run is about to give it its name.
        let locked = make("locked", Duration::ZERO);
        let lock = File::create(locked.join(NEW_LOCK_NAME)).unwrap();
        lock.try_lock().unwrap();
        File::open(&locked).unwrap().set_modified(SystemTime::now() - UNLOCKED_MAX * 2).unwrap();
        // Another one is about to lock it.
        let unlocked = make("unlocked", Duration::ZERO);
        File::create(unlocked.join(NEW_LOCK_NAME)).unwrap();
        let _scratch = Scratch::inside(parent.path()).unwrap();
        let all = [old, new, locked, unlocked].map(|folder| folder.exists());
        assert_eq!(all, [false, true, true, true]);
    }

    #[test]
    fn what_is_no_folder_of_this_user_stays() {
        let parent = tempfile::tempdir().unwrap();
        let target = tempfile::tempdir().unwrap();
        fs::write(target.path().join("precious"), b"x").unwrap();
        File::open(target.path()).unwrap().set_modified(SystemTime::now() - UNLOCKED_MAX * 2).unwrap();
        std::os::unix::fs::symlink(target.path(), parent.path().join(format!("{PREFIX}link"))).unwrap();
        let foreign = parent.path().join(format!("{PREFIX}foreign"));
        fs::create_dir(&foreign).unwrap();
        fs::write(foreign.join(LOCK_NAME), b"").unwrap();
        // Only root can give a folder away.
        let is_given = std::os::unix::fs::chown(&foreign, Some(12_345), None).is_ok();
        let _scratch = Scratch::inside(parent.path()).unwrap();
        assert!(target.path().join("precious").exists());
        assert_eq!(foreign.exists(), is_given);
    }

    #[test]
    fn the_lock_file_goes_last() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join(format!("{PREFIX}dead"));
        fs::create_dir_all(folder.join("owners")).unwrap();
        for file in ["memory-0", LOCK_NAME, "owners/1"] {
            fs::write(folder.join(file), b"x").unwrap();
        }
        Scratch::remove(&folder);
        assert!(!folder.exists());
        Scratch::remove(&folder);
    }

    #[test]
    fn a_parent_that_is_not_there_is_named() {
        let error = Scratch::inside(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at/all"));
    }
}
