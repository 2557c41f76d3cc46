//! `--trace`: a list of operations as text, parsed whole before any of it is applied.
//!
//! One operation a line: `get K`, `put K V` (insert or overwrite), `del K`, `scan K N` (up to N entries from K on).
//! Blank lines and lines that start with `#` are skipped. A line that is anything else is an error with its number, and
//! then nothing at all has been applied. Replay answers with one line an operation, as [`Answer`] prints it.

use std::fmt::{self, Write as _};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::units::{NumberError, parse_u64, shorten};

/// The most entries that one `scan` line may ask for.
const SCAN_LIMIT_MAX: u64 = u32::MAX as u64;

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

/// Why a trace cannot be replayed.
#[derive(Debug)]
pub(crate) enum TraceError {
    /// The file cannot be read.
    Io { path: PathBuf, error: io::Error },
    /// A line is malformed.
    Line { path: PathBuf, line: u64, reason: LineError },
}

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LineError {
    NotText,
    UnknownOperation(String),
    WrongCount { operation: &'static str, usage: &'static str, found: usize },
    Number { name: &'static str, error: NumberError },
    ScanTooLong(u64),
}

impl fmt::Display for LineError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotText => write!(out, "not UTF-8 text"),
            Self::UnknownOperation(word) => {
                write!(out, "unknown operation `{word}`; use `get K`, `put K V`, `del K` or `scan K N`")
            }
            Self::WrongCount { operation, usage, found } => {
                write!(out, "`{operation}` is written `{usage}`, and this one has {found} numbers")
            }
            Self::Number { name, error } => write!(out, "the {name}: {error}"),
            Self::ScanTooLong(limit) => write!(out, "a scan of {limit} entries is more than {SCAN_LIMIT_MAX}"),
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, error } => write!(out, "cannot read the trace {}: {error}", path.display()),
            Self::Line { path, line, reason } => {
                write!(out, "{}, line {line}: {reason}; nothing was applied", path.display())
            }
        }
    }
}

impl std::error::Error for TraceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            Self::Line { .. } => None,
        }
    }
}

/// Reads and parses a trace; `-` is standard input.
pub(crate) fn read(path: &Path) -> Result<Vec<Step>, TraceError> {
    let (name, content) = if path == Path::new("-") {
        let mut content = Vec::new();
        (PathBuf::from("standard input"), io::stdin().lock().read_to_end(&mut content).map(|_| content))
    } else {
        (path.to_owned(), std::fs::read(path))
    };
    match content {
        Err(error) => Err(TraceError::Io { path: name, error }),
        Ok(content) => parse(&content).map_err(|(line, reason)| TraceError::Line { path: name, line, reason }),
    }
}

/// Parses a whole trace; an error carries the number of its line, counted from 1.
pub(crate) fn parse(content: &[u8]) -> Result<Vec<Step>, (u64, LineError)> {
    let mut steps = Vec::new();
    for (number, line) in (1u64..).zip(content.split(|byte| *byte == b'\n')) {
        if let Some(step) = parse_line(line).map_err(|reason| (number, reason))? {
            steps.push(step);
        }
    }
    Ok(steps)
}

fn parse_line(line: &[u8]) -> Result<Option<Step>, LineError> {
    let line = str::from_utf8(line).map_err(|_| LineError::NotText)?.trim();
    if line.starts_with('#') {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let Some(operation) = words.next() else { return Ok(None) };
    let numbers: Vec<&str> = words.collect();
    let step = match operation {
        "get" => {
            let [key] = exactly("get", "get K", &numbers)?;
            Step::Get(number("key", key)?)
        }
        "put" => {
            let [key, value] = exactly("put", "put K V", &numbers)?;
            Step::Put(number("key", key)?, number("value", value)?)
        }
        "del" => {
            let [key] = exactly("del", "del K", &numbers)?;
            Step::Del(number("key", key)?)
        }
        "scan" => {
            let [from, limit] = exactly("scan", "scan K N", &numbers)?;
            let (from, limit) = (number("key", from)?, number("count", limit)?);
            Step::Scan(from, u32::try_from(limit).map_err(|_| LineError::ScanTooLong(limit))?)
        }
        other => return Err(LineError::UnknownOperation(shorten(other))),
    };
    Ok(Some(step))
}

fn exactly<'a, const N: usize>(
    operation: &'static str,
    usage: &'static str,
    numbers: &[&'a str],
) -> Result<[&'a str; N], LineError> {
    numbers.try_into().map_err(|_| LineError::WrongCount { operation, usage, found: numbers.len() })
}

fn number(name: &'static str, token: &str) -> Result<u64, LineError> {
    parse_u64(token).map_err(|error| LineError::Number { name, error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn error(text: &str) -> (u64, String) {
        let (line, reason) = parse(text.as_bytes()).unwrap_err();
        (line, reason.to_string())
    }

    #[test]
    fn steps_comments_and_blank_lines() {
        let steps = parse(b"# start\nget 5\r\n\n  put 5 7\ndel 5\nscan 0 18\n#get x").unwrap();
        assert_eq!(steps, [Step::Get(5), Step::Put(5, 7), Step::Del(5), Step::Scan(0, 18)]);
        assert_eq!(parse(b""), Ok(vec![]));
    }

    #[test]
    fn errors_say_which_line_and_why() {
        assert_eq!(error("get 1\npush 2"), (2, LineError::UnknownOperation("push".into()).to_string()));
        assert!(error("get").1.contains("`get` is written `get K`, and this one has 0 numbers"));
        assert!(error("put 1").1.contains("`put K V`"));
        assert!(error("del 1 2").1.contains("2 numbers"));
        assert_eq!(error("\n\nget 5x").0, 3);
        assert!(error("put 1 -2").1.contains("the value: `-2` is not an unsigned integer"));
        assert!(error("get 18446744073709551616").1.contains("larger"));
        assert!(error("scan 1 4294967296").1.contains("4294967296 entries"));
        assert_eq!(parse(b"get 1\nget \xff"), Err((2, LineError::NotText)));
    }

    #[test]
    fn read_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.trace");
        assert!(read(&path).unwrap_err().to_string().contains("t.trace"));
        std::fs::write(&path, "get 1\nget one\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        assert!(error.contains("t.trace, line 2: the key: `one`") && error.ends_with("nothing was applied"), "{error}");
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
            if let Err((line, reason)) = parse(&bytes) {
                prop_assert!(line >= 1 && !reason.to_string().is_empty());
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
