//! `--keys-file`: keys from a file, in one of two formats that are told apart by content.
//!
//! - **SOSD**, the binary format of the index benchmark of that name: a count and then that many keys, each a
//!   little-endian 64-bit word. A file is SOSD if its size is exactly what its first word says.
//! - **Text**: one decimal integer a line; blank lines and lines that start with `#` are skipped.
//!
//! The two cannot be confused: eight characters of text read as a count are more than 2^59, and no file has room
//! for that many keys. A file that is neither is reported as what it most resembles: with a zero byte or invalid UTF-8
//! in it, as a damaged SOSD file, and otherwise as text with a bad line.

use std::fs::File;
use std::io::{self, Read};

use anyhow::{Context as _, bail, ensure};

use crate::input::{self, InputFile};
use crate::units::parse_u64;

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

/// Reads a keys file. Errors name the file, where in it, and the reason.
pub(crate) fn read(InputFile { path, name }: &InputFile) -> anyhow::Result<Keys> {
    let read = || {
        let mut file = File::open(path)?;
        let bytes = file.metadata()?.len();
        io::Result::Ok(decode(&mut file, bytes))
    };
    let decoded = read().with_context(|| format!("cannot read the keys file {name}"))?;
    decoded.with_context(|| format!("the keys file {name}"))
}

/// Decodes content of a known size.
fn decode(content: &mut impl Read, size: u64) -> anyhow::Result<Keys> {
    let mut head = Vec::with_capacity(WORD_BYTES as usize);
    content.take(WORD_BYTES).read_to_end(&mut head)?;
    if let Ok(word) = <[u8; 8]>::try_from(head.as_slice()) {
        let count = u64::from_le_bytes(word);
        if sosd_bytes(count) == Some(size) {
            return decode_sosd(content, count);
        }
    }
    content.read_to_end(&mut head)?;
    decode_text(&head)
}

/// The size of a SOSD file of so many keys.
fn sosd_bytes(count: u64) -> Option<u64> {
    count.checked_mul(WORD_BYTES)?.checked_add(WORD_BYTES)
}

fn decode_sosd(content: &mut impl Read, count: u64) -> anyhow::Result<Keys> {
    let mut keys: Vec<u64> = Vec::new();
    let too_many = || format!("it counts {count} keys, more than memory can hold");
    let room = usize::try_from(count).with_context(too_many)?;
    keys.try_reserve_exact(room).with_context(too_many)?;
    let mut chunk = Vec::with_capacity(CHUNK_BYTES.min(room.saturating_mul(8)));
    while (keys.len() as u64) < count {
        let left_bytes = (count - keys.len() as u64) * WORD_BYTES;
        let wanted = left_bytes.min(CHUNK_BYTES as u64);
        chunk.clear();
        let got = content.take(wanted).read_to_end(&mut chunk)? as u64;
        let offset = (keys.len() as u64 + 1) * WORD_BYTES + got;
        ensure!(got == wanted, "it ended at offset {offset} while it was being read");
        let (words, _) = chunk.as_chunks::<8>();
        keys.extend(words.iter().map(|word| u64::from_le_bytes(*word)));
    }
    finish(keys, Format::Sosd)
}

fn decode_text(content: &[u8]) -> anyhow::Result<Keys> {
    if content.contains(&0) || str::from_utf8(content).is_err() {
        bail!(damaged_sosd(content));
    }
    let parse = |(number, line)| parse_u64(line).with_context(|| format!("line {number}"));
    finish(input::all_sound(input::lines(content).map(|line| line.and_then(parse)))?, Format::Text)
}

/// What is wrong with binary content whose size does not match its count.
fn damaged_sosd(content: &[u8]) -> String {
    let file_bytes = content.len() as u64;
    let Some(word) = content.first_chunk::<8>() else {
        return format!("neither text nor SOSD: its {file_bytes} bytes are fewer than the 8 of a count");
    };
    let count = u64::from_le_bytes(*word);
    match sosd_bytes(count) {
        Some(needed) if needed < file_bytes => format!(
            "it has {} trailing bytes at offset {needed}, after the {count} keys that its first word counts",
            file_bytes - needed
        ),
        _ => format!(
            "it is truncated: its first word counts {count} keys, which take {} bytes, and the file has {file_bytes}",
            8 + 8 * u128::from(count)
        ),
    }
}

fn finish(mut keys: Vec<u64>, format: Format) -> anyhow::Result<Keys> {
    ensure!(!keys.is_empty(), "it holds no keys; give one integer a line, or a SOSD file");
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

    fn from_bytes(bytes: &[u8]) -> anyhow::Result<Keys> {
        decode(&mut &bytes[..], bytes.len() as u64)
    }

    fn error(bytes: &[u8]) -> String {
        format!("{:#}", from_bytes(bytes).unwrap_err())
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
        assert_eq!(error(b"1\n2\nthree\n"), "line 3: `three` is not an unsigned integer");
        assert_eq!(error(b"1 2\n"), "line 1: `1 2` is not an unsigned integer");
        assert!(error(b"\n18446744073709551616").contains("line 2: `18446744073709551616` is larger"));
        assert!(error(b"-4").contains("line 1: `-4`"));
        assert!(error(&[0xFF; 64]).contains("truncated"));
    }

    #[test]
    fn files_are_named_in_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent");
        let read = |path: &std::path::Path| read(&InputFile { path: path.to_owned(), name: "mine".into() });
        assert!(read(&path).unwrap_err().to_string().contains("cannot read the keys file mine"));
        assert!(read(folder.path()).is_err());
        std::fs::write(&path, sosd(&(0..300_000).rev().collect::<Vec<u64>>())).unwrap();
        assert_eq!(read(&path).unwrap().sorted, (0..300_000).collect::<Vec<u64>>());
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let whole = sosd(&[1, 2, 3]);
        let error = decode(&mut &whole[..20], whole.len() as u64).unwrap_err();
        assert!(error.to_string().contains("ended at offset 20"), "{error}");
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
