//! `--trace`: a list of operations as text, parsed whole before any of it is applied.
//!
//! One operation a line: `get K`, `put K V` (insert or overwrite), `del K`, `scan K N` (up to N entries from K on).
//! Blank lines and lines that start with `#` are skipped. A line that is anything else is an error with its number, and
//! then nothing at all has been applied. Replay answers with one line an operation, as [`Answer`] prints it.

use std::fmt::{self, Write as _};
use std::io::{self, Read as _};
use std::path::Path;

use anyhow::{Context as _, bail, ensure};

use crate::units::{parse_u64, shorten};

/// One line of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Get(u64),
    Put(u64, u64),
    Del(u64),
    Scan(u64, u32),
}

/// What a step answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The value found, or that was there before.
    Value(Option<u64>),
    /// The entries of a scan.
    Entries(Vec<(u64, u64)>),
}

impl fmt::Display for Step {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Get(key) => write!(out, "get {key}"),
            Self::Put(key, value) => write!(out, "put {key} {value}"),
            Self::Del(key) => write!(out, "del {key}"),
            Self::Scan(from, limit) => write!(out, "scan {from} {limit}"),
        }
    }
}

/// The output line of a step and its answer, without a line end.
pub(crate) fn answer_line(step: Step, answer: &Answer) -> String {
    let mut line = format!("{step} ->");
    let written = match (step, answer) {
        (Step::Put(..), Answer::Value(None)) => write!(line, " new"),
        (Step::Put(..), Answer::Value(Some(before))) => write!(line, " replaced {before}"),
        (Step::Del(_), Answer::Value(Some(before))) => write!(line, " removed {before}"),
        (_, Answer::Value(Some(value))) => write!(line, " {value}"),
        (_, Answer::Value(None)) => write!(line, " none"),
        (_, Answer::Entries(entries)) if entries.is_empty() => write!(line, " none"),
        (_, Answer::Entries(entries)) => entries.iter().try_for_each(|(key, value)| write!(line, " {key}={value}")),
    };
    // Writing to a String cannot fail.
    debug_assert!(written.is_ok());
    line
}

/// Reads and parses a trace; `-` is standard input.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Step>> {
    let (name, content) = if path == Path::new("-") {
        let mut content = Vec::new();
        ("standard input".to_owned(), io::stdin().lock().read_to_end(&mut content).map(|_| content))
    } else {
        (path.display().to_string(), std::fs::read(path))
    };
    let content = content.with_context(|| format!("cannot read the trace {name}"))?;
    parse(&name, &content).context("nothing was applied")
}

/// Parses a whole trace; an error names its line, counted from 1.
fn parse(name: &str, content: &[u8]) -> anyhow::Result<Vec<Step>> {
    let mut steps = Vec::new();
    for (number, line) in (1u64..).zip(content.split(|byte| *byte == b'\n')) {
        steps.extend(parse_line(line).with_context(|| format!("{name}, line {number}"))?);
    }
    Ok(steps)
}

fn parse_line(line: &[u8]) -> anyhow::Result<Option<Step>> {
    let line = str::from_utf8(line).context("not UTF-8 text")?.trim();
    let mut words = line.split_whitespace();
    let Some(operation) = words.next().filter(|_| !line.starts_with('#')) else { return Ok(None) };
    let usage = match operation {
        "get" => "get K",
        "put" => "put K V",
        "del" => "del K",
        "scan" => "scan K N",
        _ => bail!("unknown operation `{}`; use `get K`, `put K V`, `del K` or `scan K N`", shorten(operation)),
    };
    let words: Vec<&str> = words.collect();
    let wanted = usage.split(' ').count() - 1;
    ensure!(words.len() == wanted, "`{operation}` is written `{usage}`, and this one has {} numbers", words.len());
    let numbers = words.iter().map(|word| parse_u64(word)).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(match (operation, numbers.as_slice()) {
        ("get", [key]) => Step::Get(*key),
        ("put", [key, value]) => Step::Put(*key, *value),
        ("del", [key]) => Step::Del(*key),
        ("scan", [from, limit]) => {
            let limit = u32::try_from(*limit);
            Step::Scan(*from, limit.with_context(|| format!("a scan asks for {} entries at most", u32::MAX))?)
        }
        _ => bail!("`{operation}` is written `{usage}`"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(content: &[u8]) -> Result<Vec<Step>, String> {
        super::parse("t", content).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn steps_comments_and_blank_lines() {
        let steps = parse(b"# start\nget 5\r\n\n  put 5 7\ndel 5\nscan 0 18\n#get x").unwrap();
        assert_eq!(steps, [Step::Get(5), Step::Put(5, 7), Step::Del(5), Step::Scan(0, 18)]);
        assert_eq!(parse(b""), Ok(vec![]));
    }

    #[test]
    fn errors_say_which_line_and_why() {
        for (text, says) in [
            (&b"get 1\npush 2"[..], "t, line 2: unknown operation `push`"),
            (b"get", "`get` is written `get K`, and this one has 0 numbers"),
            (b"put 1", "`put K V`"),
            (b"del 1 2", "2 numbers"),
            (b"\n\nget 5x", "line 3"),
            (b"put 1 -2", "`-2` is not an unsigned integer"),
            (b"get 18446744073709551616", "larger"),
            (b"scan 1 4294967296", "4294967295 entries at most"),
            (b"get 1\nget \xff", "line 2: not UTF-8"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn read_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.trace");
        assert!(read(&path).unwrap_err().to_string().contains("t.trace"));
        std::fs::write(&path, "get 1\nget one\n").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("nothing was applied") && error.contains("t.trace, line 2: `one`"), "{error}");
    }

    #[test]
    fn answers() {
        let line = |step, answer: Answer| answer_line(step, &answer);
        assert_eq!(line(Step::Get(5), Answer::Value(Some(7))), "get 5 -> 7");
        assert_eq!(line(Step::Get(5), Answer::Value(None)), "get 5 -> none");
        assert_eq!(line(Step::Put(5, 7), Answer::Value(None)), "put 5 7 -> new");
        assert_eq!(line(Step::Put(5, 7), Answer::Value(Some(3))), "put 5 7 -> replaced 3");
        assert_eq!(line(Step::Del(5), Answer::Value(Some(7))), "del 5 -> removed 7");
        assert_eq!(line(Step::Del(5), Answer::Value(None)), "del 5 -> none");
        assert_eq!(line(Step::Scan(5, 3), Answer::Entries(vec![(5, 7), (8, 1)])), "scan 5 3 -> 5=7 8=1");
        assert_eq!(line(Step::Scan(5, 3), Answer::Entries(vec![])), "scan 5 3 -> none");
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            any::<u64>().prop_map(Step::Get),
            any::<(u64, u64)>().prop_map(|(key, value)| Step::Put(key, value)),
            any::<u64>().prop_map(Step::Del),
            any::<(u64, u32)>().prop_map(|(from, limit)| Step::Scan(from, limit)),
        ]
    }

    proptest! {
        #[test]
        fn any_bytes_give_steps_or_a_line(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Err(error) = parse(&bytes) {
                prop_assert!(error.contains("line"));
            }
        }

        #[test]
        fn any_words_give_steps_or_a_line(text in "((get|put|del|scan|#|[0-9]{1,22}|x)[ \n]){0,20}") {
            let _ = parse(text.as_bytes());
        }

        #[test]
        fn steps_round_trip(steps in proptest::collection::vec(any_step(), 0..50)) {
            let text: String = steps.iter().map(|step| format!("{step}\n")).collect();
            prop_assert_eq!(parse(text.as_bytes()), Ok(steps));
        }
    }
}
