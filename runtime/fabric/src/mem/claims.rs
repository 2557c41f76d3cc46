//! Who is alive: a compute server holds the lock of a file named after its incarnation; the system releases it when the
//! process is gone, and not before. After that nothing of that process can still write to the mapped memory, so *dead*
//! is a fact. In one process, a set takes the files' place.

use std::{
    fs::{self, File, TryLockError},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use hashbrown::HashSet;

use super::{
    files::{self, is_locked},
    served::has_regions,
};
use crate::{
    error::Error,
    fabric::{Liveness, OwnerClaim},
    lock::OwnerId,
    ptr::ServerId,
    sync::{Arc, Mutex, lock},
};

type Owners = Arc<Mutex<HashSet<OwnerId>>>;

#[derive(Debug)]
pub(super) enum Claims {
    InProcess(Owners),
    Files(PathBuf),
}

impl Claims {
    pub(super) fn in_process() -> Self {
        Self::InProcess(Arc::new(Mutex::new(HashSet::new())))
    }

    pub(super) fn files(cluster: &Path) -> Self {
        Self::Files(cluster.join("owners"))
    }

    pub(super) fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error> {
        match self {
            Self::InProcess(owners) => {
                if !lock(owners).insert(owner) {
                    return Err(given_out_twice(owner));
                }
                Ok(Box::new(InProcessClaim { owner, owners: Arc::clone(owners) }))
            }
            Self::Files(dir) => {
                let path = file_of(dir, owner);
                let failed = || format!("claiming {}", path.display());
                let file = files::private().create(true).truncate(false).open(&path).map_err(Error::io(failed()))?;
                match file.try_lock() {
                    Ok(()) => {}
                    Err(TryLockError::WouldBlock) => return Err(given_out_twice(owner)),
                    Err(TryLockError::Error(error)) => return Err(Error::io(failed())(error)),
                }
                Ok(Box::new(FileClaim { path, locked: file }))
            }
        }
    }

    /// Whether their cluster has ended.
    pub(super) fn are_over(&self) -> bool {
        matches!(self, Self::Files(dir) if is_over(dir))
    }

    pub(super) fn liveness(&self, owner: OwnerId) -> Liveness {
        match self {
            Self::InProcess(owners) if lock(owners).contains(&owner) => Liveness::Alive,
            Self::InProcess(_) => Liveness::Dead,
            Self::Files(dir) => match files::private().open(file_of(dir, owner)) {
                Ok(file) if is_locked(&file) => Liveness::Alive,
                Ok(_) => Liveness::Dead,
                // A claim is made before its incarnation is first used, and its file goes only with a clean exit, or with its cluster.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && !self.are_over() => Liveness::Dead,
                Err(_) => Liveness::Alive,
            },
        }
    }
}

/// Only a superblock whose counter went back leads here. To wait would be to wait for the other one's end.
fn given_out_twice(owner: OwnerId) -> Error {
    let server = ServerId::new(0).expect("0 is a server id");
    Error::BadRegion { server, why: format!("it gave out the incarnation of {owner}, which still runs") }
}

/// Whether the cluster of these claims has ended, with its last region: its claims are removed then, and nobody is dead.
fn is_over(dir: &Path) -> bool {
    dir.parent().is_some_and(|cluster| !has_regions(cluster))
}

fn file_of(dir: &Path, owner: OwnerId) -> PathBuf {
    dir.join(owner.incarnation().to_string())
}

#[derive(Debug)]
struct InProcessClaim {
    owner: OwnerId,
    owners: Owners,
}

impl OwnerClaim for InProcessClaim {
    fn holds(&self) -> bool {
        lock(&self.owners).contains(&self.owner)
    }
}

impl Drop for InProcessClaim {
    fn drop(&mut self) {
        lock(&self.owners).remove(&self.owner);
    }
}

#[derive(Debug)]
struct FileClaim {
    path: PathBuf,
    locked: File,
}

impl OwnerClaim for FileClaim {
    /// Nobody but the system ends it, unless somebody deletes its file: then others count it as dead.
    fn holds(&self) -> bool {
        self.locked.metadata().is_ok_and(|found| found.nlink() > 0) || self.path.parent().is_some_and(is_over)
    }
}

impl Drop for FileClaim {
    fn drop(&mut self) {
        // Else its cluster has ended, and this is a claim of the next one.
        if files::is_still_at(&self.locked, &self.path).unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;

    /// Claims in this directory, which is remade.
    fn anew(cluster: &Path) -> Claims {
        let _ = fs::remove_dir_all(cluster);
        files::make_dir(&cluster.join("owners")).unwrap();
        fs::write(cluster.join("server-0.mem"), []).unwrap();
        Claims::files(cluster)
    }

    #[test]
    fn who_ends_late_leaves_the_next_cluster_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let (dir, owner) = (scratch.path().join("cluster"), OwnerId::new(5).unwrap());
        let first = anew(&dir).claim(owner).unwrap();
        let claims = anew(&dir);
        let second = claims.claim(owner).unwrap();
        // Whoever can lock it can have the dead count as alive.
        #[cfg(unix)]
        assert_eq!(files::mode_of(&dir.join("owners/5")), 0o600);
        drop(first);
        assert_eq!(claims.liveness(owner), Liveness::Alive);
        assert!(second.holds());
        drop(second);
        assert_eq!(claims.liveness(owner), Liveness::Dead);
        assert!(!dir.join("owners/5").exists());
    }

    #[test]
    fn nobody_is_dead_where_there_is_no_cluster_any_more() {
        let scratch = tempfile::tempdir().unwrap();
        let (dir, owner) = (scratch.path().join("cluster"), OwnerId::new(5).unwrap());
        let claims = anew(&dir);
        let claim = claims.claim(owner).unwrap();
        fs::remove_file(dir.join("server-0.mem")).unwrap();
        fs::remove_dir_all(dir.join("owners")).unwrap();
        assert!(claim.holds());
        // A memory server that is about to begin another one makes it again.
        files::make_dir(&dir.join("owners")).unwrap();
        assert!(claim.holds());
        assert_eq!(claims.liveness(owner), Liveness::Alive);
        // Here others find that it is not among those that live.
        let claims = anew(&dir);
        assert!(!claim.holds());
        assert_eq!(claims.liveness(owner), Liveness::Dead);
    }
}
