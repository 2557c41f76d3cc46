//! Files that a run loads from: read whole and checked whole before anything is stored.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use farlink_children::Scratch;
use serde::{Deserialize, Serialize};

use crate::signals;
use crate::units::plural;

/// Problems that an error tells in full.
const PROBLEMS_TOLD: usize = 3;

/// A file with what is to be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputFile {
    /// Where every process of the run can read it.
    pub path: PathBuf,
    /// What the user calls it.
    pub name: String,
}

impl InputFile {
    /// The file at `path`, `-` being standard input; `what` names its kind in errors. What is no regular file can be
    /// read once only, so all processes get a copy, which lasts as long as the scratch folder.
    pub(crate) fn take(path: &Path, what: &str) -> anyhow::Result<(Self, Option<Scratch>)> {
        let is_input = path == Path::new("-");
        let name = if is_input { "standard input".to_owned() } else { path.display().to_string() };
        let cannot_read = || format!("cannot read the {what} file {name}");
        if !is_input {
            let given = fs::metadata(path).with_context(cannot_read)?;
            // `/dev/stdin` is another file in another process.
            let resolved = fs::canonicalize(path).ok().filter(|path| {
                fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (given.dev(), given.ino()))
            });
            if let Some(path) = resolved.filter(|_| given.is_file()) {
                return Ok((Self { path, name }, None));
            }
        }
        let scratch = signals::scratch()?;
        let copy = scratch.path().join(what);
        let mut to = File::create(&copy).with_context(|| format!("cannot make a copy of the {what}"))?;
        match is_input {
            true => io::copy(&mut io::stdin().lock(), &mut to),
            false => io::copy(&mut File::open(path).with_context(cannot_read)?, &mut to),
        }
        .with_context(|| format!("cannot copy the {what} file {name} to {}", copy.display()))?;
        Ok((Self { path: copy, name }, Some(scratch)))
    }
}

/// The lines of a text, counted from 1, without blanks around them. Blank lines and those that begin with `#` are left
/// out.
pub(crate) fn lines(content: &[u8]) -> impl Iterator<Item = anyhow::Result<(u64, &str)>> {
    (1u64..).zip(content.split(|byte| *byte == b'\n')).filter_map(|(number, line)| match str::from_utf8(line) {
        Ok(line) => {
            Some(line.trim()).filter(|line| !line.is_empty() && !line.starts_with('#')).map(|it| Ok((number, it)))
        }
        Err(_) => Some(Err(anyhow!("line {number}: not UTF-8 text"))),
    })
}

/// All of what was parsed, or an error with the first problems and how many more there are.
pub(crate) fn all_sound<T>(parsed: impl Iterator<Item = anyhow::Result<T>>) -> anyhow::Result<Vec<T>> {
    let (mut sound, mut told, mut untold) = (Vec::new(), Vec::new(), 0);
    for one in parsed {
        match one {
            Ok(one) if told.is_empty() => sound.push(one),
            Ok(_) => {}
            Err(problem) if told.len() < PROBLEMS_TOLD => told.push(format!("{problem:#}")),
            Err(_) => untold += 1,
        }
    }
    if untold > 0 {
        told.push(format!("and {}", plural(untold, "more problem")));
    }
    if told.is_empty() { Ok(sound) } else { bail!(told.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_their_numbers() {
        let found: Vec<_> = lines(b"a\r\n\n # no\n  b  \n\xFF").map(|line| line.map_err(|e| e.to_string())).collect();
        assert_eq!(found, [Ok((1, "a")), Ok((4, "b")), Err("line 5: not UTF-8 text".to_owned())]);
    }

    /// Each process has its own files under these names.
    #[test]
    fn a_file_is_named_as_every_process_knows_it() {
        use std::os::fd::AsRawFd as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        fs::write(&path, "7\n").unwrap();
        let open = File::open(&path).unwrap();
        let names = [format!("/dev/fd/{}", open.as_raw_fd()), format!("/proc/self/fd/{}", open.as_raw_fd())];
        for name in &names {
            let (file, copy) = InputFile::take(Path::new(name), "keys").unwrap();
            assert_eq!((&file.path, &file.name, copy.is_none()), (&path.canonicalize().unwrap(), name, true));
        }
        // Nobody else can open it any more.
        fs::remove_file(&path).unwrap();
        for name in &names {
            let (file, copy) = InputFile::take(Path::new(name), "keys").unwrap();
            assert!(file.path.starts_with(copy.unwrap().path()), "{file:?}");
        }
    }

    #[test]
    fn problems_are_told_and_counted() {
        let parse = |fails: u32| all_sound((0..9).map(|at| if at < fails { Err(anyhow!("{at}")) } else { Ok(at) }));
        assert_eq!(parse(0).unwrap(), (0..9).collect::<Vec<_>>());
        assert_eq!(parse(2).unwrap_err().to_string(), "0; 1");
        assert_eq!(parse(4).unwrap_err().to_string(), "0; 1; 2; and 1 more problem");
        assert_eq!(parse(9).unwrap_err().to_string(), "0; 1; 2; and 6 more problems");
    }
}
