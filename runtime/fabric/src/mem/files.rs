//! The files of a cluster directory.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use super::claims::is_locked;
use crate::{
    error::Error,
    ptr::{SERVERS_MAX, ServerId},
    region::Region,
};

/// Tries to hold a cluster that others remove meanwhile.
const HOLD_TRIES_MAX: u32 = 100;

/// What the file `cluster` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClusterFile {
    pub(crate) cluster: u64,
    pub(crate) servers: usize,
}

impl ClusterFile {
    pub(crate) fn read(dir: &Path) -> Result<Self, Error> {
        let no_cluster = |why: String| Error::NoCluster { path: dir.to_path_buf(), why };
        let path = dir.join("cluster");
        let text = fs::read(&path).map_err(|error| no_cluster(format!("{}: {error}", path.display())))?;
        Self::parse(&text).ok_or_else(|| no_cluster(format!("{} is not a cluster file", path.display())))
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(text).ok()?.lines();
        if lines.next()? != "farlink cluster" {
            return None;
        }
        let cluster = u64::from_str_radix(lines.next()?.strip_prefix("id 0x")?, 16).ok()?;
        let servers = lines.next()?.strip_prefix("servers ")?.parse().ok()?;
        (1..=SERVERS_MAX).contains(&servers).then_some(Self { cluster, servers })
    }

    /// As [`ClusterFile::create_or_read`]; while the file that is returned is open, the cluster is not removed.
    pub(crate) fn hold(dir: &Path, servers: usize) -> Result<(Self, File), Error> {
        let path = dir.join("cluster");
        let failed = || format!("holding {}", path.display());
        // A cluster that is just being removed takes its directory with it: then again.
        for _ in 0..HOLD_TRIES_MAX {
            let found = match Self::create_or_read(dir, servers) {
                Err(_) if !path.exists() => continue,
                found => found?,
            };
            let Ok(file) = File::open(&path) else { continue };
            file.lock_shared().map_err(Error::io(failed()))?;
            if is_still_at(&file, &path).map_err(Error::io(failed()))? {
                // Whoever removed an earlier cluster here may have taken it away again.
                fs::create_dir_all(dir.join("owners")).map_err(Error::io(failed()))?;
                return Ok((found, file));
            }
        }
        let found = Self::create_or_read(dir, servers)?;
        let file = File::open(&path).map_err(Error::io(failed()))?;
        Ok((found, file))
    }

    /// Makes the file if there is none, and reads the one there is: of several servers that start at once, one decides.
    pub(crate) fn create_or_read(dir: &Path, servers: usize) -> Result<Self, Error> {
        let failed = || format!("creating the cluster in {}", dir.display());
        fs::create_dir_all(dir.join("owners")).map_err(Error::io(failed()))?;
        let path = dir.join("cluster");
        if !path.exists() {
            let draft = dir.join(format!("cluster.{:016x}", rand::random::<u64>()));
            let text = format!("farlink cluster\nid {:#x}\nservers {servers}\n", rand::random::<u64>());
            fs::write(&draft, text).map_err(Error::io(failed()))?;
            let linked = fs::hard_link(&draft, &path);
            let _ = fs::remove_file(&draft);
            match linked {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(Error::io(failed())(error)),
                _ => {}
            }
        }
        let found = Self::read(dir)?;
        if found.servers != servers {
            let why = format!("the cluster in {} has {} memory servers, not {servers}", dir.display(), found.servers);
            return Err(Error::BadOption { option: "servers", why });
        }
        Ok(found)
    }
}

/// Whether this open file is the one at `path`, or that one was removed or replaced.
#[cfg(unix)]
pub(crate) fn is_still_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok((there.dev(), there.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(not(unix))]
pub(crate) fn is_still_at(_file: &File, _path: &Path) -> io::Result<bool> {
    Ok(true)
}

pub(crate) fn server_id(index: usize) -> Result<ServerId, Error> {
    u16::try_from(index).ok().and_then(ServerId::new).ok_or_else(|| Error::BadOption {
        option: "server",
        why: format!("{index} is above the highest server id, {}", SERVERS_MAX - 1),
    })
}

pub(crate) fn region_path(dir: &Path, server: ServerId) -> PathBuf {
    dir.join(format!("server-{server}.mem"))
}

/// Maps the region of a memory server, one of `servers`, that is running.
pub(super) fn open_served(dir: &Path, server: ServerId, servers: usize) -> Result<Region, Error> {
    let path = region_path(dir, server);
    let start =
        || format!("start it with `farlink serve --dir {} --server {server} --servers {servers}`", dir.display());
    let file = match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let why = format!("{} does not exist; {}", path.display(), start());
            return Err(Error::ServerMissing { server, why });
        }
        Err(error) => return Err(Error::io(format!("opening {}", path.display()))(error)),
    };
    if !is_locked(&file) {
        let why = format!("no process serves {}; {}", path.display(), start());
        return Err(Error::ServerMissing { server, why });
    }
    map(&file, &path, server)
}

/// Maps an existing region file, whatever it holds.
pub(crate) fn map(file: &File, path: &Path, server: ServerId) -> Result<Region, Error> {
    let bytes = file.metadata().map_err(Error::io(format!("reading the size of {}", path.display())))?.len();
    if bytes < 4096 || !bytes.is_multiple_of(8) {
        let why = format!("{} has {bytes} bytes, too few for a superblock", path.display());
        return Err(Error::BadRegion { server, why });
    }
    Region::of_file(file, path)
}

/// Gives the file `bytes` of zeroed, reserved blocks: a region never meets a full disk later, as a fault in mid-write.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let length = libc::off_t::try_from(bytes).map_err(|_| io::Error::from(ErrorKind::FileTooLarge))?;
        // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }
    #[cfg(not(target_os = "linux"))]
    file.set_len(bytes)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_cluster_file_wins_and_wrong_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(ClusterFile::read(dir.path()), Err(Error::NoCluster { .. })));
        let first = ClusterFile::create_or_read(dir.path(), 2).unwrap();
        assert_eq!(ClusterFile::create_or_read(dir.path(), 2).unwrap(), first);
        assert!(matches!(ClusterFile::create_or_read(dir.path(), 3), Err(Error::BadOption { .. })));
        fs::write(dir.path().join("cluster"), "farlink cluster\nid 0x1\nservers 0\n").unwrap();
        assert!(matches!(ClusterFile::read(dir.path()), Err(Error::NoCluster { .. })));
    }

    proptest! {
        #[test]
        fn random_cluster_files_do_not_panic(text: Vec<u8>) {
            let _ = ClusterFile::parse(&text);
        }
    }
}
