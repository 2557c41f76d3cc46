//! `--keys-file`: keys from a file, in one of two formats that are told apart by content.
//!
//! - **SOSD**, the binary format of the index benchmark of that name: a count and then that many keys, each a
//!   little-endian 64-bit word. A file is SOSD if its size is exactly what its first word says.
//! - **Text**: one decimal integer a line; blank lines and lines that start with `#` are skipped.
//!
//! The two cannot be confused: eight characters of text read as a count are more than 2^59, and no file has room
//! for that many keys. A file that is neither is reported as what it most resembles: with a zero byte or invalid UTF-8
//! in it, as a damaged SOSD file, and otherwise as text with a bad line.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::units::{NumberError, parse_u64, shorten};

/// Bytes that are read at a time, so that a large SOSD file is not held twice.
const CHUNK_BYTES: usize = 1 << 20;
const WORD_BYTES: u64 = 8;

/// Which of the formats a file had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Sosd,
    Text,
}

/// Keys, sorted and distinct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) sorted: Vec<u64>,
    pub(crate) duplicates_dropped: u64,
    pub(crate) format: Format,
}

/// Why a file gives no keys. `Display` names the file, where in it, and the reason.
#[derive(Debug)]
pub(crate) struct KeysFileError {
    path: PathBuf,
    reason: Reason,
}

/// The reason alone.
#[derive(Debug)]
pub(crate) enum Reason {
    /// The file cannot be opened or read.
    Io(io::Error),
    /// No keys at all.
    Empty,
    /// Binary, and shorter than its own count says.
    Truncated { count: u64, file_bytes: u64 },
    /// Binary, and longer than its own count says.
    TrailingBytes { count: u64, offset: u64, extra_bytes: u64 },
    /// Binary, and too short even for a count.
    NoCount { file_bytes: u64 },
    /// The file shrank while it was read.
    Shrank { offset: u64 },
    /// Text with a line that is no key.
    BadLine { line: u64, error: NumberError },
    /// More keys than memory can hold.
    TooMany { count: u64 },
}

impl fmt::Display for KeysFileError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.reason {
            Reason::Io(error) => write!(out, "cannot read the keys file {path}: {error}"),
            Reason::Empty => write!(out, "{path} holds no keys; give one integer a line, or a SOSD file"),
            Reason::Truncated { count, file_bytes } => write!(
                out,
                "{path} is truncated: its first word, at offset 0, counts {count} keys, which take {} bytes, and the \
                 file has {file_bytes}",
                8 + 8 * u128::from(*count)
            ),
            Reason::TrailingBytes { count, offset, extra_bytes } => write!(
                out,
                "{path} has {extra_bytes} trailing bytes at offset {offset}, after the {count} keys that its first \
                 word counts"
            ),
            Reason::NoCount { file_bytes } => write!(
                out,
                "{path} is neither text nor SOSD: it is binary, and its {file_bytes} bytes are fewer than the 8 of a \
                 count"
            ),
            Reason::Shrank { offset } => write!(out, "{path} ended at offset {offset} while it was being read"),
            Reason::BadLine { line, error } => write!(out, "{path}, line {line}: {error}"),
            Reason::TooMany { count } => write!(out, "{path} counts {count} keys, more than memory can hold"),
        }
    }
}

impl std::error::Error for KeysFileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.reason {
            Reason::Io(error) => Some(error),
            _ => None,
        }
    }
}

/// Reads a keys file.
pub(crate) fn read(path: &Path) -> Result<Keys, KeysFileError> {
    let open = || -> Result<Keys, Reason> {
        let mut file = File::open(path).map_err(Reason::Io)?;
        let metadata = file.metadata().map_err(Reason::Io)?;
        // Only a regular file knows its size before it is read; a pipe is read whole first.
        if metadata.is_file() {
            decode(&mut file, metadata.len())
        } else {
            let mut content = Vec::new();
            file.read_to_end(&mut content).map_err(Reason::Io)?;
            decode(&mut content.as_slice(), content.len() as u64)
        }
    };
    open().map_err(|reason| KeysFileError { path: path.to_owned(), reason })
}

/// Decodes content of a known size.
fn decode(content: &mut impl Read, size: u64) -> Result<Keys, Reason> {
    if size == 0 {
        return Err(Reason::Empty);
    }
    let mut head = Vec::with_capacity(WORD_BYTES as usize);
    content.take(WORD_BYTES).read_to_end(&mut head).map_err(Reason::Io)?;
    if let Ok(word) = <[u8; 8]>::try_from(head.as_slice()) {
        let count = u64::from_le_bytes(word);
        if count.checked_mul(WORD_BYTES).and_then(|bytes| bytes.checked_add(WORD_BYTES)) == Some(size) {
            return decode_sosd(content, count);
        }
    }
    content.read_to_end(&mut head).map_err(Reason::Io)?;
    decode_text(&head)
}

fn decode_sosd(content: &mut impl Read, count: u64) -> Result<Keys, Reason> {
    let mut keys: Vec<u64> = Vec::new();
    let room = usize::try_from(count).map_err(|_| Reason::TooMany { count })?;
    keys.try_reserve_exact(room).map_err(|_| Reason::TooMany { count })?;
    let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(room.saturating_mul(8)));
    while (keys.len() as u64) < count {
        let left_bytes = (count - keys.len() as u64) * WORD_BYTES;
        let wanted = left_bytes.min(CHUNK_BYTES as u64);
        chunk.clear();
        let got = content.take(wanted).read_to_end(&mut chunk).map_err(Reason::Io)? as u64;
        if got < wanted {
            return Err(Reason::Shrank { offset: (keys.len() as u64 + 1) * WORD_BYTES + got });
        }
        let (words, _) = chunk.as_chunks::<8>();
        keys.extend(words.iter().map(|word| u64::from_le_bytes(*word)));
    }
    finish(keys, Format::Sosd)
}

fn decode_text(content: &[u8]) -> Result<Keys, Reason> {
    let text = match str::from_utf8(content) {
        Ok(text) if !content.contains(&0) => text,
        _ => return Err(damaged_sosd(content)),
    };
    let mut keys = Vec::new();
    for (number, line) in (1u64..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        keys.push(parse_u64(line).map_err(|error| Reason::BadLine { line: number, error: sharpen(line, error) })?);
    }
    finish(keys, Format::Text)
}

/// The first token says more than a whole line when the line holds several.
fn sharpen(line: &str, error: NumberError) -> NumberError {
    if line.split_whitespace().count() > 1 { NumberError::NotAnInteger(shorten(line)) } else { error }
}

/// What is wrong with binary content whose size does not match its count.
fn damaged_sosd(content: &[u8]) -> Reason {
    let file_bytes = content.len() as u64;
    let Some(word) = content.first_chunk::<8>() else { return Reason::NoCount { file_bytes } };
    let count = u64::from_le_bytes(*word);
    match count.checked_mul(WORD_BYTES).and_then(|bytes| bytes.checked_add(WORD_BYTES)) {
        Some(needed) if needed < file_bytes => {
            Reason::TrailingBytes { count, offset: needed, extra_bytes: file_bytes - needed }
        }
        _ => Reason::Truncated { count, file_bytes },
    }
}

fn finish(mut keys: Vec<u64>, format: Format) -> Result<Keys, Reason> {
    if keys.is_empty() {
        return Err(Reason::Empty);
    }
    let all = keys.len();
    keys.sort_unstable();
    keys.dedup();
    let duplicates_dropped = (all - keys.len()) as u64;
    Ok(Keys { sorted: keys, duplicates_dropped, format })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sosd(keys: &[u64]) -> Vec<u8> {
        let mut bytes = (keys.len() as u64).to_le_bytes().to_vec();
        bytes.extend(keys.iter().flat_map(|key| key.to_le_bytes()));
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Keys, KeysFileError> {
        decode(&mut &bytes[..], bytes.len() as u64).map_err(|reason| KeysFileError { path: "keys".into(), reason })
    }

    fn error(bytes: &[u8]) -> String {
        from_bytes(bytes).unwrap_err().to_string()
    }

    #[test]
    fn both_formats_sort_and_drop_duplicates() {
        let text = from_bytes(b"# keys\n5\r\n\n 3 \n5\n18446744073709551615").unwrap();
        assert_eq!(text, Keys { sorted: vec![3, 5, u64::MAX], duplicates_dropped: 1, format: Format::Text });
        let binary = from_bytes(&sosd(&[9, 0, 9, u64::MAX])).unwrap();
        assert_eq!(binary, Keys { sorted: vec![0, 9, u64::MAX], duplicates_dropped: 1, format: Format::Sosd });
    }

    #[test]
    fn errors_say_where_and_why() {
        let whole = sosd(&[1, 2, 3]);
        assert!(error(&whole[..30]).contains("counts 3 keys, which take 32 bytes, and the file has 30"));
        let mut longer = whole.clone();
        longer.extend([0, 1]);
        assert!(error(&longer).contains("2 trailing bytes at offset 32"));
        assert!(error(&[1, 0, 0]).contains("fewer than the 8"));
        assert!(error(b"").contains("holds no keys"));
        assert!(error(b"# nothing\n\n").contains("holds no keys"));
        assert!(error(&sosd(&[])).contains("holds no keys"));
        assert_eq!(error(b"1\n2\nthree\n"), "keys, line 3: `three` is not an unsigned integer");
        assert_eq!(error(b"1 2\n"), "keys, line 1: `1 2` is not an unsigned integer");
        assert!(error(b"\n18446744073709551616").contains("line 2: `18446744073709551616` is larger"));
        assert!(error(b"-4").contains("line 1: `-4`"));
        assert!(error(&[0xFF; 64]).contains("truncated"));
    }

    #[test]
    fn files_are_named_in_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent");
        assert!(read(&path).unwrap_err().to_string().contains("absent"));
        assert!(read(folder.path()).is_err());
        std::fs::write(&path, sosd(&(0..300_000).rev().collect::<Vec<u64>>())).unwrap();
        assert_eq!(read(&path).unwrap().sorted, (0..300_000).collect::<Vec<u64>>());
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let whole = sosd(&[1, 2, 3]);
        let reason = decode(&mut &whole[..20], whole.len() as u64).unwrap_err();
        assert!(matches!(reason, Reason::Shrank { offset: 20 }), "{reason:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_give_keys_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            match from_bytes(&bytes) {
                Ok(keys) => prop_assert!(!keys.sorted.is_empty()),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }

        #[test]
        fn damaged_files_never_pass_for_whole(
            keys in proptest::collection::vec(any::<u64>(), 1..20),
            cut in 1usize..8,
        ) {
            let whole = sosd(&keys);
            prop_assert_eq!(from_bytes(&whole).unwrap().format, Format::Sosd);
            prop_assert!(from_bytes(&whole[..whole.len() - cut]).is_err());
        }

        #[test]
        fn text_round_trips(keys in proptest::collection::btree_set(any::<u64>(), 1..50)) {
            let text: String = keys.iter().map(|key| format!("{key}\n")).collect();
            let read = from_bytes(text.as_bytes()).unwrap();
            prop_assert_eq!(read.sorted, keys.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(read.duplicates_dropped, 0);
        }
    }
}
