//! Recording of concurrent histories of a key-value map.
//!
//! A history is a set of [`Record`]s: which client ran which [`Op`], when it was invoked, when it returned and with
//! which [`Outcome`]. The outcome is [`Outcome::Unknown`] where an operation ended in an error, was abandoned, or its
//! process died: such an operation may have taken effect at any time after its invocation, or never.
//!
//! # Time
//!
//! Timestamps are nanoseconds of `CLOCK_MONOTONIC` ([`now_ns`]), so they compare across the processes of one machine.
//! [`Recorder::begin`] reads the clock before the operation and [`Recorder::end`] after it, each with a full fence
//! between the clock and the operation, so that a store still in the store buffer does not fall out of its interval.
//! Two events with the same timestamp count as concurrent. [`History::widen`] stretches every interval where a clock
//! is trusted less than that.
//!
//! # Processes that are killed
//!
//! A recorder that is to survive SIGKILL uses [`Flush::Invocations`]: each invocation reaches the kernel before its
//! operation starts, so no effect in the shared memory lacks its record. With [`Flush::WhenFull`] a killed process
//! loses records, and a checker would then blame the survivors for reading values that nobody wrote.

mod cells;
mod recorder;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use self::cells::Decoder;
pub use self::cells::mix;
pub use self::{
    cells::CELL_BYTES,
    recorder::{Flush, Recorder, Ticket},
};

/// The extension of history files, which [`History::read_dir`] looks for.
pub const FILE_EXTENSION: &str = "history";

/// The return time of an operation that never returned.
pub const NEVER_NS: u64 = u64::MAX;

/// Nanoseconds of `CLOCK_MONOTONIC`: comparable across the threads and processes of one machine.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid, writable timespec for the whole call.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    // It fails only for a clock id that the kernel does not know.
    assert_eq!(status, 0, "clock_gettime(CLOCK_MONOTONIC) failed");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// An operation on a map from u64 to u64, with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Returns the value of a key.
    Get {
        /// The key.
        key: u64,
    },
    /// Sets the value of an absent key, and says whether it did; a present key keeps its value.
    Insert {
        /// The key.
        key: u64,
        /// The value.
        value: u64,
    },
    /// Sets the value of a key and returns the previous one.
    Upsert {
        /// The key.
        key: u64,
        /// The value.
        value: u64,
    },
    /// Sets the value of a present key and returns the previous one; an absent key stays absent.
    Update {
        /// The key.
        key: u64,
        /// The value.
        value: u64,
    },
    /// Removes a key and returns its value.
    Remove {
        /// The key.
        key: u64,
    },
    /// Returns up to `limit` entries in key order, beginning at `from`, which is included.
    Scan {
        /// The first key that may be returned.
        from: u64,
        /// How many entries at most.
        limit: u32,
        /// From high keys to low ones.
        descending: bool,
    },
}

impl Op {
    /// The key of a point operation; `None` for a scan.
    pub fn key(&self) -> Option<u64> {
        match *self {
            Op::Get { key }
            | Op::Insert { key, .. }
            | Op::Upsert { key, .. }
            | Op::Update { key, .. }
            | Op::Remove { key } => Some(key),
            Op::Scan { .. } => None,
        }
    }
}

/// What an operation returned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Not known: the operation took effect at some time after its invocation, or will, or never.
    Unknown,
    /// Of Get, Upsert, Update and Remove: the value found, if any.
    Value(Option<u64>),
    /// Of Insert: whether the key was absent and has been set.
    Inserted(bool),
    /// Of Scan: the entries in the order of the scan.
    Entries(Box<[(u64, u64)]>),
}

/// One operation of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The process or worker that ran it. One client may have several operations in flight.
    pub client: u32,
    /// The operation.
    pub op: Op,
    /// What it returned.
    pub outcome: Outcome,
    /// A time before it could have any effect.
    pub invoked_ns: u64,
    /// A time after it returned; [`NEVER_NS`] if the outcome is unknown.
    pub returned_ns: u64,
}

impl Record {
    /// Whether the outcome is of the kind that the operation has, and the times are in order.
    pub fn is_well_formed(&self) -> bool {
        let fits = match self.outcome {
            Outcome::Unknown => true,
            Outcome::Inserted(_) => matches!(self.op, Op::Insert { .. }),
            Outcome::Entries(_) => matches!(self.op, Op::Scan { .. }),
            Outcome::Value(_) => !matches!(self.op, Op::Insert { .. } | Op::Scan { .. }),
        };
        fits && self.invoked_ns <= self.returned_ns
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{} .. ", self.invoked_ns)?;
        match self.returned_ns {
            NEVER_NS => write!(f, "?")?,
            time_ns => write!(f, "{time_ns}")?,
        }
        write!(f, "] client {}: ", self.client)?;
        match self.op {
            Op::Get { key } => write!(f, "get({key})")?,
            Op::Insert { key, value } => write!(f, "insert({key}, {value:#x})")?,
            Op::Upsert { key, value } => write!(f, "upsert({key}, {value:#x})")?,
            Op::Update { key, value } => write!(f, "update({key}, {value:#x})")?,
            Op::Remove { key } => write!(f, "remove({key})")?,
            Op::Scan { from, limit, descending } => {
                write!(f, "scan(from {from}, limit {limit}{})", if descending { ", descending" } else { "" })?
            }
        }
        match &self.outcome {
            Outcome::Unknown => write!(f, " -> unknown"),
            Outcome::Value(None) => write!(f, " -> none"),
            Outcome::Value(Some(value)) => write!(f, " -> {value:#x}"),
            Outcome::Inserted(inserted) => write!(f, " -> {inserted}"),
            Outcome::Entries(entries) => {
                const SHOWN_MAX: usize = 16;
                write!(f, " -> {} entries [", entries.len())?;
                for (at, (key, value)) in entries.iter().take(SHOWN_MAX).enumerate() {
                    write!(f, "{}{key}: {value:#x}", if at == 0 { "" } else { ", " })?;
                }
                write!(f, "{}]", if entries.len() > SHOWN_MAX { ", ..." } else { "" })
            }
        }
    }
}

/// Why a history could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The file system refused.
    #[error("{}: {cause}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What it said.
        cause: io::Error,
    },
    /// A record could not be appended.
    #[error("a record could not be appended: {0}")]
    Append(io::Error),
    /// The first cell is not the header of a history of this version.
    #[error("not a history, or of another version")]
    Header,
    /// A cell before the last one is damaged, or a cell says what no writer writes.
    #[error("damaged cell at byte {offset}: {what}")]
    Damaged {
        /// Where the cell begins.
        offset: usize,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A file of a directory has contents that cannot be decoded.
    #[error("{}: {cause}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with its contents.
        cause: Box<HistoryError>,
    },
}

/// The operations of a run, and what the map held before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    records: Vec<Record>,
    initial: BTreeMap<u64, u64>,
}

impl History {
    /// A history without operations, of a map that was empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// States what the map held before the first operation was invoked.
    pub fn set_initial(&mut self, initial: BTreeMap<u64, u64>) {
        self.initial = initial;
    }

    /// What the map held before the first operation was invoked.
    pub fn initial(&self) -> &BTreeMap<u64, u64> {
        &self.initial
    }

    /// The operations, in no particular order.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The operations, to be changed: for tests that damage a history on purpose.
    pub fn records_mut(&mut self) -> &mut Vec<Record> {
        &mut self.records
    }

    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are no operations.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Adds one operation.
    pub fn push(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Adds the operations and the initial entries of another history of the same map.
    pub fn merge(&mut self, other: History) {
        self.records.extend(other.records);
        self.initial.extend(other.initial);
    }

    /// The part of the history that is about keys from `low` to `high`, both included. A scan belongs to the part where it
    /// begins, and must have been confined to it.
    pub fn part(&self, low: u64, high: u64) -> Self {
        let begins = |op: &Op| match *op {
            Op::Scan { from, .. } => from,
            ref op => op.key().unwrap_or(low),
        };
        let is_in = |record: &&Record| (low..=high).contains(&begins(&record.op));
        Self {
            records: self.records.iter().filter(is_in).cloned().collect(),
            initial: self.initial.range(low..=high).map(|(&key, &value)| (key, value)).collect(),
        }
    }

    /// Lets every operation begin and end this much earlier and later, for clocks that are less exact than that.
    /// It weakens what a checker can find and never makes a legal history illegal.
    pub fn widen(&mut self, slack_ns: u64) {
        for record in &mut self.records {
            record.invoked_ns = record.invoked_ns.saturating_sub(slack_ns);
            record.returned_ns = record.returned_ns.saturating_add(slack_ns);
        }
    }

    /// How many operations were in flight at once, at most, not counting those with unknown outcomes: what a test
    /// asserts to be sure that its history is a concurrent one.
    pub fn in_flight_max(&self) -> usize {
        let known = || self.records.iter().filter(|record| record.returned_ns != NEVER_NS);
        let mut begins: Vec<u64> = known().map(|record| record.invoked_ns).collect();
        let mut ends: Vec<u64> = known().map(|record| record.returned_ns).collect();
        begins.sort_unstable();
        ends.sort_unstable();
        let (mut ended, mut max) = (0, 0);
        for (begun, begin_ns) in begins.iter().enumerate() {
            while ended < ends.len() && ends[ended] < *begin_ns {
                ended += 1;
            }
            max = max.max(begun + 1 - ended);
        }
        max
    }

    /// Reads the contents of one history file.
    pub fn decode(bytes: &[u8]) -> Result<Self, HistoryError> {
        Decoder::new().run(bytes)
    }

    /// Reads one history file.
    pub fn read_file(path: &Path) -> Result<Self, HistoryError> {
        let bytes = fs::read(path).map_err(|cause| HistoryError::Io { path: path.to_owned(), cause })?;
        Self::decode(&bytes).map_err(|cause| HistoryError::File { path: path.to_owned(), cause: Box::new(cause) })
    }

    /// Reads and merges every file of a directory whose extension is [`FILE_EXTENSION`], in the order of their names.
    pub fn read_dir(directory: &Path) -> Result<Self, HistoryError> {
        let io_error = |cause| HistoryError::Io { path: directory.to_owned(), cause };
        let mut paths = Vec::new();
        for entry in fs::read_dir(directory).map_err(io_error)? {
            let path = entry.map_err(io_error)?.path();
            if path.extension().is_some_and(|extension| extension == FILE_EXTENSION) {
                paths.push(path);
            }
        }
        paths.sort();
        let mut merged = History::new();
        for path in paths {
            merged.merge(Self::read_file(&path)?);
        }
        Ok(merged)
    }
}

impl FromIterator<Record> for History {
    fn from_iter<I: IntoIterator<Item = Record>>(records: I) -> Self {
        Self { records: records.into_iter().collect(), initial: BTreeMap::new() }
    }
}
