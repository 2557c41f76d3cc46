//! The files of a cluster directory, which are their user's alone: see [`private`] and [`require_own`].

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, ErrorKind, Write as _},
    path::{Path, PathBuf},
};

use crate::{
    error::Error,
    ptr::{SERVERS_MAX, ServerId},
    region::Region,
    sync::Ordering,
};

/// Tries to hold a cluster that others remove meanwhile.
const HOLD_TRIES_MAX: u32 = 100;

/// How files of a cluster are opened: made, they are their user's alone, so that nobody else can lock one and pass for a
/// process that runs; and never through a symbolic link, which could lead to a file of another purpose.
pub(super) fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt as _;
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
    }
    options
}

/// Makes a directory, and what leads to it, for its user alone, if it is not there.
pub(super) fn make_dir(dir: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt as _;
        builder.mode(0o700);
    }
    builder.create(dir)
}

/// Whether nobody but this user (and root) can put files into a directory.
///
/// # Errors
/// If somebody can, with what to do; if there is no such directory.
pub(super) fn require_own(dir: &Path) -> Result<(), Error> {
    let what = fs::metadata(dir).map_err(Error::io(format!("looking at {}", dir.display())))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        // SAFETY: it has no preconditions and touches no memory.
        let user = unsafe { libc::geteuid() };
        let why = if what.uid() != user && what.uid() != 0 {
            format!(
                "it belongs to user {}, and this process runs as user {user}; name a directory of your own",
                what.uid()
            )
        } else if what.mode() & 0o022 != 0 {
            format!(
                "others may write to it (its mode is {:o}); `chmod go-w` it, or name another one",
                what.mode() & 0o7777
            )
        } else {
            return Ok(());
        };
        let cause = io::Error::new(ErrorKind::PermissionDenied, why);
        Err(Error::Io { what: format!("using {} for a cluster", dir.display()), cause })
    }
    #[cfg(not(unix))]
    Ok(drop(what))
}

/// Behind the name of a file that is not complete.
fn draft_number() -> String {
    format!("{:016x}", rand::random::<u64>())
}

/// Whether a draft's name ends so.
pub(super) fn is_draft_number(end: &str) -> bool {
    end.len() == 16 && end.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Writes a file so that whoever reads it finds the old text or the new one.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", draft_number()));
    let draft = PathBuf::from(name);
    let written = private()
        .create_new(true)
        .open(&draft)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        let _ = fs::remove_file(&draft);
    }
    written
}

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
        let text = fs::read(&path).map_err(|error| {
            let start = format!("start its memory servers with `farlink serve --dir {}`", dir.display());
            no_cluster(format!("{}: {error}; {start}", path.display()))
        })?;
        require_own(dir)?;
        let other = || format!("{} is not a cluster file; remove the folder, or name another one", path.display());
        Self::parse(&text).ok_or_else(|| no_cluster(other()))
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
                make_dir(&dir.join("owners")).map_err(Error::io(failed()))?;
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
        make_dir(&dir.join("owners")).map_err(Error::io(failed()))?;
        require_own(dir)?;
        require_own(&dir.join("owners"))?;
        let path = dir.join("cluster");
        if !path.exists() {
            let draft = dir.join(format!("cluster.{}", draft_number()));
            let text = format!("farlink cluster\nid {:#x}\nservers {servers}\n", rand::random::<u64>());
            let made = private().create_new(true).open(&draft).and_then(|mut file| file.write_all(text.as_bytes()));
            let linked = made.and_then(|()| fs::hard_link(&draft, &path));
            let _ = fs::remove_file(&draft);
            match linked {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(Error::io(failed())(error)),
                _ => {}
            }
        }
        let found = Self::read(dir)?;
        if found.servers != servers {
            let (dir, s, found) = (dir.display(), if found.servers == 1 { "" } else { "s" }, found.servers);
            let why = format!(
                "the cluster in {dir} has {found} memory server{s}, not {servers}; start it with `--servers {found}`, or name another folder"
            );
            return Err(Error::BadOption { option: "servers", why });
        }
        Ok(found)
    }
}

/// Whether somebody holds the exclusive lock of this file. Errors count as held: they prove nothing.
pub(super) fn is_locked(file: &File) -> bool {
    match file.try_lock_shared() {
        Ok(()) => {
            let _ = file.unlock();
            false
        }
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => true,
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

/// What a memory server noted when it was last started: which region it serves. It stays when the region's file is gone, so
/// that nobody takes an empty one for it; and a file of another time does not have its stamp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Started {
    path: PathBuf,
    /// The region has one of them: two only while a memory server starts.
    stamps: Vec<u64>,
}

impl Started {
    /// Where the stamp of a region stands: its fabric's word.
    const WORD: usize = 511;

    pub(super) fn path(dir: &Path, server: ServerId) -> PathBuf {
        dir.join(format!("started-{server}"))
    }

    /// None if the memory server was never started.
    pub(super) fn read(dir: &Path, server: ServerId) -> Result<Option<Self>, Error> {
        let path = Self::path(dir, server);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(format!("reading {}", path.display()))(error)),
        };
        let bad =
            || Error::BadRegion { server, why: format!("{} does not say which region it serves", path.display()) };
        let stamps = Self::parse(&text).ok_or_else(bad)?;
        Ok(Some(Self { path, stamps }))
    }

    fn parse(text: &[u8]) -> Option<Vec<u64>> {
        let stamps = std::str::from_utf8(text).ok()?.strip_prefix("farlink region")?.split_whitespace();
        let stamps = stamps.map(|stamp| u64::from_str_radix(stamp.strip_prefix("0x")?, 16).ok());
        stamps.collect::<Option<Vec<_>>>().filter(|stamps| !stamps.is_empty())
    }

    /// Whether a region is the one that was served.
    pub(super) fn is_of(&self, region: &Region) -> bool {
        self.stamps.contains(&region.words()[Self::WORD].load(Ordering::Acquire))
    }

    /// Gives a region a new stamp.
    pub(super) fn stamp(dir: &Path, server: ServerId, region: &Region) -> Result<(), Error> {
        let path = Self::path(dir, server);
        let note = |stamps: &[u64]| {
            let stamps: String = stamps.iter().map(|stamp| format!(" {stamp:#x}")).collect();
            replace(&path, &format!("farlink region{stamps}\n"))
                .map_err(Error::io(format!("writing {}", path.display())))
        };
        let (word, new) = (&region.words()[Self::WORD], rand::random::<u64>() | 1);
        // Killed between any two steps, the region has a stamp that the note names.
        note(&[new, word.load(Ordering::Acquire)])?;
        word.store(new, Ordering::Release);
        note(&[new])
    }
}

/// A region's file as this process has it open: to find out what has become of it.
#[derive(Debug)]
pub(super) struct RegionFile {
    dir: PathBuf,
    path: PathBuf,
    server: ServerId,
    bytes: u64,
    file: File,
}

impl RegionFile {
    pub(super) fn new(dir: &Path, server: ServerId, bytes: u64, file: File) -> Self {
        Self { dir: dir.to_owned(), path: region_path(dir, server), server, bytes, file }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a process serves it.
    pub(super) fn is_served(&self) -> bool {
        is_locked(&self.file)
    }

    /// Whether the file at its place is still this one.
    pub(super) fn is_in_place(&self) -> bool {
        is_still_at(&self.file, &self.path).unwrap_or(true)
    }

    /// What is wrong with the file. A few system calls; answers that the system does not give prove nothing.
    pub(super) fn damage(&self, region: &Region) -> Option<String> {
        if !self.is_in_place() {
            return Some("its file was deleted or replaced".to_owned());
        }
        match self.file.metadata() {
            Ok(now) if now.len() != self.bytes => {
                return Some(format!("its file was cut or stretched from {} to {} bytes", self.bytes, now.len()));
            }
            _ => {}
        }
        let note = || Started::read(&self.dir, self.server).ok().flatten();
        is_other(region, note).then(|| "its file was overwritten by one of another time".to_owned())
    }
}

/// Whether a region has none of the stamps that its note, as it is read, names. A memory server that starts changes both, so this
/// counts only if the note is the same afterwards: no start has come in between then.
fn is_other(region: &Region, mut note: impl FnMut() -> Option<Started>) -> bool {
    let mut unmatched = || note().filter(|started| !started.is_of(region));
    let found = unmatched();
    found.is_some() && unmatched() == found
}

/// Maps the region of a memory server, one of `servers`, that is running.
pub(super) fn open_served(dir: &Path, server: ServerId, servers: usize) -> Result<(Region, RegionFile), Error> {
    let path = region_path(dir, server);
    let start =
        || format!("start it with `farlink serve --dir {} --server {server} --servers {servers}`", dir.display());
    let file = match private().open(&path) {
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
    let region = map(&file, &path, server)?;
    let file = RegionFile::new(dir, server, region.bytes(), file);
    Ok((region, file))
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
        loop {
            // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
            match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
                0 => return Ok(()),
                // By any signal, on some kernels: who is stopped and goes on has got one.
                libc::EINTR => {}
                code => return Err(io::Error::from_raw_os_error(code)),
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    file.set_len(bytes)
}

/// The same for a file that is there, and keeps what it holds: a copy may have holes where a page was never written.
pub(super) fn fill_holes(file: &File) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::{fd::AsRawFd as _, unix::fs::MetadataExt as _};
        let found = file.metadata()?;
        // Not where nothing is missing: it takes a while for much memory, and those who use it wait.
        if found.blocks() * 512 < found.len() {
            let length = libc::off_t::try_from(found.len()).map_err(|_| io::Error::from(ErrorKind::FileTooLarge))?;
            // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
            while unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) } != 0 {
                let error = io::Error::last_os_error();
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The C library would write to each page instead, also to those that others write to.
                    Some(libc::EOPNOTSUPP) => break,
                    _ => return Err(error),
                }
            }
        }
    }
    Ok(())
}

/// What a file's user, its group, and others may do with it.
#[cfg(all(test, unix, not(loom)))]
pub(super) fn mode_of(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt as _;
    fs::metadata(path).unwrap().permissions().mode() & 0o777
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

    #[cfg(unix)]
    #[test]
    fn files_are_their_users_alone() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("cluster");
        ClusterFile::create_or_read(&dir, 1).unwrap();
        let modes = ["", "owners", "cluster"].map(|name| mode_of(&dir.join(name)));
        assert_eq!(modes, [0o700, 0o700, 0o600]);
        let (target, link) = (folder.path().join("target"), dir.join("link"));
        symlink(&target, &link).unwrap();
        private().create(true).truncate(false).open(&link).unwrap_err();
        assert!(!target.exists());
        for path in [&dir, &dir.join("owners")] {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
            let error = ClusterFile::create_or_read(&dir, 1).unwrap_err().to_string();
            assert!(error.contains("others may write to it") && error.contains("777"), "{error}");
            fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
        }
        ClusterFile::read(&dir).unwrap();
        // Only root can give a directory away.
        if std::os::unix::fs::chown(&dir, Some(12_345), None).is_ok() {
            let error = ClusterFile::create_or_read(&dir, 1).unwrap_err().to_string();
            assert!(error.contains("it belongs to user 12345"), "{error}");
        }
    }

    #[test]
    fn a_start_is_not_taken_for_a_file_of_another_time() {
        let dir = tempfile::tempdir().unwrap();
        let server = server_id(0).unwrap();
        let region = Region::anonymous(1 << 16).unwrap();
        let read = || Started::read(dir.path(), server).unwrap();
        assert!(!is_other(&region, read), "it was never started");
        Started::stamp(dir.path(), server, &region).unwrap();
        assert!(!is_other(&region, read));
        let mut starts = 0..1;
        let overtaken = || {
            let found = read();
            starts.by_ref().for_each(|_| Started::stamp(dir.path(), server, &region).unwrap());
            found
        };
        assert!(!is_other(&region, overtaken), "it was started again just after the note was read");
        region.words()[Started::WORD].store(77, Ordering::Release);
        assert!(is_other(&region, read), "it was overwritten");
    }

    proptest! {
        #[test]
        fn random_files_do_not_panic(text: Vec<u8>) {
            let _ = ClusterFile::parse(&text);
            let _ = Started::parse(&text);
            let _ = Started::parse(&[b"farlink region", &text[..]].concat());
        }
    }
}
