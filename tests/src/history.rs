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
//! # Files
//!
//! Every process appends to files of its own, and the parent merges them ([`History::read_dir`]). A file is a sequence
//! of 64-byte little-endian cells, the first of them a header:
//!
//! ```text
//! 0     1   2        3      4       8         16           24            32       40        48   56
//! kind  op  outcome  flags  client  key/from  value/limit  result/count  invoked  returned  seq  checksum
//! ```
//!
//! A `DONE` cell holds a whole operation. An `INVOKED` cell holds one whose outcome was not known when it was written;
//! a later `DONE` cell with the same `seq` supersedes it, a `WITHDRAWN` cell strikes it out, and if none follows, the
//! outcome is unknown. The entries that a scan returned follow its `DONE` cell in `ENTRIES` cells, three to a cell.
//!
//! A process that is killed tears at most what it wrote last, so a short or damaged last cell is dropped, and so is a
//! scan whose entries are not all there. Damage anywhere else is an error. No input makes [`History::decode`] panic.
//!
//! A recorder that is to survive SIGKILL uses [`Flush::Invocations`]: each invocation reaches the kernel before its
//! operation starts, so no effect in the shared memory lacks its record. With [`Flush::WhenFull`] a killed process
//! loses records, and a checker would then blame the survivors for reading values that nobody wrote.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

/// Bytes of one cell of a history file.
pub const CELL_BYTES: usize = 64;

/// The extension of history files, which [`History::read_dir`] looks for.
pub const FILE_EXTENSION: &str = "history";

/// The return time of an operation that never returned.
pub const NEVER_NS: u64 = u64::MAX;

const MAGIC: [u8; 8] = *b"FLHIST01";
const KIND_DONE: u8 = 1;
const KIND_INVOKED: u8 = 2;
const KIND_ENTRIES: u8 = 3;
const KIND_WITHDRAWN: u8 = 4;
const FLAG_DESCENDING: u8 = 1;
const ENTRIES_PER_CELL: usize = 3;

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
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What it said.
        source: io::Error,
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
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with its contents.
        source: Box<HistoryError>,
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
        let bytes = fs::read(path).map_err(|source| HistoryError::Io { path: path.to_owned(), source })?;
        Self::decode(&bytes).map_err(|source| HistoryError::File { path: path.to_owned(), source: Box::new(source) })
    }

    /// Reads and merges every file of a directory whose extension is [`FILE_EXTENSION`], in the order of their names.
    pub fn read_dir(directory: &Path) -> Result<Self, HistoryError> {
        let io_error = |source| HistoryError::Io { path: directory.to_owned(), source };
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

/// When a [`Recorder`] passes its cells on to the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// When its buffer is full: for processes that are not killed.
    WhenFull,
    /// Before each operation starts: for processes that may be killed. Costs a system call for each operation.
    Invocations,
}

/// An operation that has begun and not ended.
#[derive(Debug)]
#[must_use = "an operation whose ticket is dropped has an unknown outcome"]
pub struct Ticket {
    seq: u64,
}

/// Appends the operations of one client to a file. It is shared by the tasks of one thread.
pub struct Recorder<W: Write> {
    client: u32,
    flush: Flush,
    state: RefCell<RecorderState<W>>,
}

struct RecorderState<W> {
    /// `None` once finished.
    out: Option<W>,
    seq_next: u64,
    /// What has begun and not ended: operation and invocation time.
    open: HashMap<u64, (Op, u64)>,
}

impl<W: Write> fmt::Debug for Recorder<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("client", &self.client).field("flush", &self.flush).finish_non_exhaustive()
    }
}

impl Recorder<BufWriter<File>> {
    /// Creates the history file of one client, called after it, in a directory.
    pub fn in_dir(directory: &Path, client: u32, flush: Flush) -> Result<Self, HistoryError> {
        let path = directory.join(format!("client-{client:06}.{FILE_EXTENSION}"));
        let file = File::create_new(&path).map_err(|source| HistoryError::Io { path, source })?;
        Self::new(BufWriter::with_capacity(1 << 16, file), client, flush)
    }
}

impl<W: Write> Recorder<W> {
    /// Starts a history in `out` and writes the header.
    pub fn new(mut out: W, client: u32, flush: Flush) -> Result<Self, HistoryError> {
        out.write_all(&header_cell()).map_err(HistoryError::Append)?;
        if flush == Flush::Invocations {
            out.flush().map_err(HistoryError::Append)?;
        }
        let state = RecorderState { out: Some(out), seq_next: 0, open: HashMap::new() };
        Ok(Self { client, flush, state: RefCell::new(state) })
    }

    /// Notes that an operation is about to start.
    pub fn begin(&self, op: Op) -> Result<Ticket, HistoryError> {
        let invoked_ns = now_ns();
        let mut state = self.state.borrow_mut();
        let seq = state.seq_next;
        if self.flush == Flush::Invocations {
            let record =
                Record { client: self.client, op, outcome: Outcome::Unknown, invoked_ns, returned_ns: NEVER_NS };
            let out = state.out.as_mut().ok_or_else(finished)?;
            encode_record(KIND_INVOKED, seq, &record, out).and_then(|()| out.flush()).map_err(HistoryError::Append)?;
        }
        state.seq_next += 1;
        state.open.insert(seq, (op, invoked_ns));
        drop(state);
        fence(Ordering::SeqCst);
        Ok(Ticket { seq })
    }

    /// Notes what an operation returned. With [`Outcome::Unknown`], that it ended and nobody knows what it did.
    pub fn end(&self, ticket: Ticket, outcome: Outcome) -> Result<(), HistoryError> {
        fence(Ordering::SeqCst);
        let ended_ns = now_ns();
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let (op, invoked_ns) = state.open.remove(&ticket.seq).ok_or_else(finished)?;
        let returned_ns = if outcome == Outcome::Unknown { NEVER_NS } else { ended_ns };
        let record = Record { client: self.client, op, outcome, invoked_ns, returned_ns };
        let out = state.out.as_mut().ok_or_else(finished)?;
        encode_record(KIND_DONE, ticket.seq, &record, out).map_err(HistoryError::Append)
    }

    /// Takes an operation back that was refused: it had no effect, and is no part of the history. If it had one all the
    /// same, a value shows up that nobody wrote, or a key is gone that nobody removed.
    pub fn withdraw(&self, ticket: Ticket) -> Result<(), HistoryError> {
        let mut state = self.state.borrow_mut();
        state.open.remove(&ticket.seq).ok_or_else(finished)?;
        if self.flush == Flush::Invocations {
            let mut cell = [0; CELL_BYTES];
            cell[0] = KIND_WITHDRAWN;
            set_word(&mut cell, 48, ticket.seq);
            let out = state.out.as_mut().ok_or_else(finished)?;
            out.write_all(&seal(cell)).map_err(HistoryError::Append)?;
        }
        Ok(())
    }

    /// Ends the history; operations that have not ended get an unknown outcome.
    pub fn finish(self) -> Result<W, HistoryError> {
        self.close()
    }

    fn close(&self) -> Result<W, HistoryError> {
        let mut state = self.state.borrow_mut();
        let mut out = state.out.take().ok_or_else(finished)?;
        let mut open: Vec<_> = state.open.drain().collect();
        open.sort_unstable_by_key(|(seq, _)| *seq);
        for (seq, (op, invoked_ns)) in open {
            let record =
                Record { client: self.client, op, outcome: Outcome::Unknown, invoked_ns, returned_ns: NEVER_NS };
            encode_record(KIND_DONE, seq, &record, &mut out).map_err(HistoryError::Append)?;
        }
        out.flush().map_err(HistoryError::Append)?;
        Ok(out)
    }
}

impl<W: Write> Drop for Recorder<W> {
    fn drop(&mut self) {
        // Whoever cares for errors has called `finish`; what is lost here would only be unknown outcomes.
        let _ = self.close();
    }
}

fn finished() -> HistoryError {
    HistoryError::Append(io::Error::other("the recorder is finished, or the ticket is another recorder's"))
}

/// A strong 64-bit mix (the finaliser of SplitMix64).
pub(crate) fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

type Cell = [u8; CELL_BYTES];

fn word(cell: &Cell, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&cell[at..at + 8]);
    u64::from_le_bytes(bytes)
}

fn set_word(cell: &mut Cell, at: usize, word: u64) {
    cell[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

fn checksum(cell: &Cell) -> u64 {
    (0..CELL_BYTES - 8).step_by(8).fold(0x6661_726c_696e_6b21, |sum: u64, at| mix(sum.rotate_left(9) ^ word(cell, at)))
}

fn seal(mut cell: Cell) -> Cell {
    let sum = checksum(&cell);
    set_word(&mut cell, CELL_BYTES - 8, sum);
    cell
}

fn header_cell() -> Cell {
    let mut cell = [0; CELL_BYTES];
    cell[..8].copy_from_slice(&MAGIC);
    seal(cell)
}

/// Writes the cells of one operation.
fn encode_record(kind: u8, seq: u64, record: &Record, out: &mut impl Write) -> io::Result<()> {
    let (op, key, value, flags) = match record.op {
        Op::Get { key } => (0, key, 0, 0),
        Op::Insert { key, value } => (1, key, value, 0),
        Op::Upsert { key, value } => (2, key, value, 0),
        Op::Update { key, value } => (3, key, value, 0),
        Op::Remove { key } => (4, key, 0, 0),
        Op::Scan { from, limit, descending } => {
            (5, from, u64::from(limit), if descending { FLAG_DESCENDING } else { 0 })
        }
    };
    let (outcome, result) = match &record.outcome {
        Outcome::Unknown => (0, 0),
        Outcome::Value(None) => (1, 0),
        Outcome::Value(Some(value)) => (2, *value),
        Outcome::Inserted(inserted) => (3, u64::from(*inserted)),
        Outcome::Entries(entries) => (4, entries.len() as u64),
    };
    let mut cell = [0; CELL_BYTES];
    cell[..4].copy_from_slice(&[kind, op, outcome, flags]);
    cell[4..8].copy_from_slice(&record.client.to_le_bytes());
    for (at, word) in
        [(8, key), (16, value), (24, result), (32, record.invoked_ns), (40, record.returned_ns), (48, seq)]
    {
        set_word(&mut cell, at, word);
    }
    out.write_all(&seal(cell))?;
    if let Outcome::Entries(entries) = &record.outcome {
        for chunk in entries.chunks(ENTRIES_PER_CELL) {
            let mut cell = [0; CELL_BYTES];
            cell[0] = KIND_ENTRIES;
            cell[1] = chunk.len() as u8;
            for (at, (key, value)) in chunk.iter().enumerate() {
                set_word(&mut cell, 8 + at * 16, *key);
                set_word(&mut cell, 16 + at * 16, *value);
            }
            out.write_all(&seal(cell))?;
        }
    }
    Ok(())
}

struct Decoder {
    done: Vec<Record>,
    /// Invoked and not yet done, in the order of their sequence numbers so that decoding is deterministic.
    invoked: BTreeMap<u64, Record>,
    /// A scan that still lacks entries.
    scan: Option<OpenScan>,
}

struct OpenScan {
    record: Record,
    seq: u64,
    entries: Vec<(u64, u64)>,
    left: u64,
}

impl Decoder {
    fn new() -> Self {
        Self { done: Vec::new(), invoked: BTreeMap::new(), scan: None }
    }

    fn run(mut self, bytes: &[u8]) -> Result<History, HistoryError> {
        let (cells, _torn) = bytes.as_chunks::<CELL_BYTES>();
        let Some((header, cells)) = cells.split_first() else {
            // Killed before the header was out. Anything else that is this short is not a history either, but empty.
            return Ok(History::new());
        };
        if *header != header_cell() {
            return Err(HistoryError::Header);
        }
        for (at, cell) in cells.iter().enumerate() {
            let damaged = |what| HistoryError::Damaged { offset: (at + 1) * CELL_BYTES, what };
            if word(cell, CELL_BYTES - 8) != checksum(cell) {
                if at + 1 == cells.len() {
                    break; // Torn when its process was killed.
                }
                return Err(damaged("wrong checksum"));
            }
            self.cell(cell).map_err(damaged)?;
        }
        let Self { mut done, invoked, .. } = self;
        done.extend(invoked.into_values());
        Ok(History { records: done, initial: BTreeMap::new() })
    }

    fn cell(&mut self, cell: &Cell) -> Result<(), &'static str> {
        match (cell[0], self.scan.is_some()) {
            (KIND_ENTRIES, true) => self.entries(cell),
            (KIND_ENTRIES, false) => Err("entries without a scan"),
            (_, true) => Err("a scan lacks entries"),
            (KIND_INVOKED, false) => {
                let (record, seq, _) = decode_record(cell)?;
                if record.outcome != Outcome::Unknown {
                    return Err("an invocation with an outcome");
                }
                self.invoked.insert(seq, record);
                Ok(())
            }
            (KIND_WITHDRAWN, false) => {
                self.invoked.remove(&word(cell, 48));
                Ok(())
            }
            (KIND_DONE, false) => {
                let (record, seq, entries_left) = decode_record(cell)?;
                if entries_left > 0 {
                    self.scan = Some(OpenScan { record, seq, entries: Vec::new(), left: entries_left });
                } else {
                    self.finish(record, seq);
                }
                Ok(())
            }
            _ => Err("unknown kind"),
        }
    }

    fn entries(&mut self, cell: &Cell) -> Result<(), &'static str> {
        let Some(mut scan) = self.scan.take() else { return Err("entries without a scan") };
        let count = usize::from(cell[1]);
        if count as u64 != scan.left.min(ENTRIES_PER_CELL as u64) {
            return Err("wrong number of entries");
        }
        scan.entries.extend((0..count).map(|at| (word(cell, 8 + at * 16), word(cell, 16 + at * 16))));
        scan.left -= count as u64;
        if scan.left > 0 {
            self.scan = Some(scan);
        } else {
            let outcome = Outcome::Entries(scan.entries.into());
            self.finish(Record { outcome, ..scan.record }, scan.seq);
        }
        Ok(())
    }

    fn finish(&mut self, record: Record, seq: u64) {
        self.invoked.remove(&seq);
        self.done.push(record);
    }
}

/// The record of a `DONE` or `INVOKED` cell, its sequence number, and how many entries are to follow.
fn decode_record(cell: &Cell) -> Result<(Record, u64, u64), &'static str> {
    let [key, value, result, invoked_ns, returned_ns, seq] = [8, 16, 24, 32, 40, 48].map(|at| word(cell, at));
    let mut client = [0; 4];
    client.copy_from_slice(&cell[4..8]);
    let op = match cell[1] {
        0 => Op::Get { key },
        1 => Op::Insert { key, value },
        2 => Op::Upsert { key, value },
        3 => Op::Update { key, value },
        4 => Op::Remove { key },
        5 => {
            let limit = u32::try_from(value).map_err(|_| "limit out of range")?;
            Op::Scan { from: key, limit, descending: cell[3] & FLAG_DESCENDING != 0 }
        }
        _ => return Err("unknown operation"),
    };
    let (outcome, entries_left) = match cell[2] {
        0 => (Outcome::Unknown, 0),
        1 => (Outcome::Value(None), 0),
        2 => (Outcome::Value(Some(result)), 0),
        3 => (Outcome::Inserted(result != 0), 0),
        4 => (Outcome::Entries(Box::default()), result),
        _ => return Err("unknown outcome"),
    };
    let record = Record { client: u32::from_le_bytes(client), op, outcome, invoked_ns, returned_ns };
    if !record.is_well_formed() {
        return Err("an outcome that its operation does not have, or a return before the invocation");
    }
    Ok((record, seq, entries_left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            any::<u64>().prop_map(|key| Op::Get { key }),
            any::<(u64, u64)>().prop_map(|(key, value)| Op::Insert { key, value }),
            any::<(u64, u64)>().prop_map(|(key, value)| Op::Upsert { key, value }),
            any::<(u64, u64)>().prop_map(|(key, value)| Op::Update { key, value }),
            any::<u64>().prop_map(|key| Op::Remove { key }),
            any::<(u64, u32, bool)>().prop_map(|(from, limit, descending)| Op::Scan { from, limit, descending }),
        ]
    }

    /// An operation with an outcome that it can have.
    fn call() -> impl Strategy<Value = (Op, Outcome)> {
        let result = (any::<Option<u64>>(), any::<bool>(), prop::collection::vec(any::<(u64, u64)>(), 0..8), 0..5);
        (op(), result).prop_map(|(op, (value, inserted, entries, lost))| {
            let outcome = match op {
                _ if lost == 0 => Outcome::Unknown,
                Op::Insert { .. } => Outcome::Inserted(inserted),
                Op::Scan { .. } => Outcome::Entries(entries.into()),
                _ => Outcome::Value(value),
            };
            (op, outcome)
        })
    }

    fn record_all(calls: &[(Op, Outcome)], flush: Flush) -> Vec<u8> {
        let recorder = Recorder::new(Vec::new(), 7, flush).unwrap();
        for (op, outcome) in calls {
            let ticket = recorder.begin(*op).unwrap();
            recorder.end(ticket, outcome.clone()).unwrap();
        }
        recorder.finish().unwrap()
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(calls in prop::collection::vec(call(), 0..20), kill_proof: bool) {
            let bytes = record_all(&calls, if kill_proof { Flush::Invocations } else { Flush::WhenFull });
            let history = History::decode(&bytes).unwrap();
            let read: Vec<_> = history.records().iter().map(|r| (r.op, r.outcome.clone())).collect();
            prop_assert_eq!(read, calls);
            prop_assert!(history.records().iter().all(|r| r.client == 7 && r.is_well_formed()));
        }

        #[test]
        fn a_torn_tail_loses_results_but_no_invocation(
            calls in prop::collection::vec(call(), 1..10),
            cut: prop::sample::Index,
        ) {
            let bytes = record_all(&calls, Flush::Invocations);
            let whole = History::decode(&bytes).unwrap();
            let kept = CELL_BYTES + cut.index(bytes.len() - CELL_BYTES + 1);
            let torn = History::decode(&bytes[..kept]).unwrap();
            let (cells, _) = bytes[CELL_BYTES..kept].as_chunks::<CELL_BYTES>();
            let invoked = cells.iter().filter(|cell| cell[0] == KIND_INVOKED).count();
            prop_assert_eq!(torn.len(), invoked);
            for (at, record) in torn.records().iter().enumerate() {
                let full = &whole.records()[at];
                prop_assert_eq!(record.op, full.op);
                prop_assert!(record == full || (record.outcome == Outcome::Unknown && at + 1 == torn.len()));
            }
        }

        #[test]
        fn a_damaged_byte_is_noticed(
            calls in prop::collection::vec(call(), 2..6),
            at: prop::sample::Index,
            flip in 1u8..,
        ) {
            let mut bytes = record_all(&calls, Flush::WhenFull);
            let whole = History::decode(&bytes).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            match History::decode(&bytes) {
                Err(HistoryError::Header) => prop_assert!(at < CELL_BYTES),
                Err(HistoryError::Damaged { offset, .. }) => {
                    prop_assert_eq!(offset, at / CELL_BYTES * CELL_BYTES);
                    prop_assert!(offset + CELL_BYTES < bytes.len(), "a damaged last cell is a torn one");
                }
                Err(error) => prop_assert!(false, "{}", error),
                Ok(history) => {
                    prop_assert!(at / CELL_BYTES == bytes.len() / CELL_BYTES - 1, "damage at {} went unnoticed", at);
                    prop_assert_eq!(history.records(), &whole.records()[..history.len()]);
                }
            }
        }

        #[test]
        fn random_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = History::decode(&bytes);
        }

        /// Cells whose checksum is right and whose contents are not reach the decoder proper.
        #[test]
        fn wrong_contents_do_not_panic(
            calls in prop::collection::vec(call(), 1..12),
            changes in prop::collection::vec((any::<prop::sample::Index>(), 0..56usize, any::<u8>(), 0..4u8), 1..4),
        ) {
            let mut bytes = record_all(&calls, Flush::Invocations);
            let (cells, _) = bytes.as_chunks_mut::<CELL_BYTES>();
            for (at, byte, random, small) in changes {
                let cells = &mut cells[1..];
                let cell = &mut cells[at.index(calls.len())];
                // Most of what is decided on is in the first bytes, and small.
                let (byte, new) = if small < 3 { (byte % 4, small * 2 + random % 2) } else { (byte, random) };
                cell[byte] = new;
                *cell = seal(*cell);
            }
            if let Ok(history) = History::decode(&bytes) {
                prop_assert!(history.records().iter().all(Record::is_well_formed));
            }
        }
    }

    #[test]
    fn cells_that_no_recorder_writes_are_refused() {
        let scan = Op::Scan { from: 1, limit: 9, descending: false };
        let bytes = record_all(&[(scan, Outcome::Entries([(1, 1), (2, 2), (3, 3), (4, 4)].into()))], Flush::WhenFull);
        assert_eq!(History::decode(&bytes).unwrap().len(), 1);
        let refused = |cell: usize, byte: usize, new: u8, expected: &str| {
            let mut bytes = bytes.clone();
            let cell = &mut bytes.as_chunks_mut::<CELL_BYTES>().0[cell];
            cell[byte] = new;
            *cell = seal(*cell);
            match History::decode(&bytes) {
                Err(HistoryError::Damaged { what, .. }) => assert_eq!(what, expected),
                other => panic!("{other:?} instead of {expected}"),
            }
        };
        refused(1, 0, 9, "unknown kind");
        refused(1, 1, 6, "unknown operation");
        refused(1, 2, 5, "unknown outcome");
        refused(1, 1, 0, "an outcome that its operation does not have, or a return before the invocation");
        refused(1, 39, 0xff, "an outcome that its operation does not have, or a return before the invocation");
        refused(1, 20, 1, "limit out of range");
        refused(1, 0, KIND_INVOKED, "an invocation with an outcome");
        refused(1, 24, 0, "entries without a scan");
        refused(1, 24, 3, "entries without a scan");
        refused(2, 0, KIND_DONE, "a scan lacks entries");
        refused(2, 1, 255, "wrong number of entries");
        refused(3, 1, 3, "wrong number of entries");
    }

    #[test]
    fn an_operation_that_never_ends_is_unknown() {
        for flush in [Flush::WhenFull, Flush::Invocations] {
            let recorder = Recorder::new(Vec::new(), 1, flush).unwrap();
            let lost = recorder.begin(Op::Remove { key: 5 }).unwrap();
            let ended = recorder.begin(Op::Get { key: 6 }).unwrap();
            recorder.end(ended, Outcome::Value(None)).unwrap();
            drop(lost);
            let history = History::decode(&recorder.finish().unwrap()).unwrap();
            assert_eq!(history.len(), 2);
            let unknown: Vec<_> = history.records().iter().filter(|r| r.outcome == Outcome::Unknown).collect();
            assert_eq!((unknown.len(), unknown[0].op, unknown[0].returned_ns), (1, Op::Remove { key: 5 }, NEVER_NS));
        }
    }

    #[test]
    fn files_of_a_directory_are_merged() {
        let directory = tempfile::tempdir().unwrap();
        for client in 0..3 {
            let recorder = Recorder::in_dir(directory.path(), client, Flush::WhenFull).unwrap();
            let ticket = recorder.begin(Op::Get { key: u64::from(client) }).unwrap();
            recorder.end(ticket, Outcome::Value(None)).unwrap();
            assert!(
                Recorder::in_dir(directory.path(), client, Flush::WhenFull).is_err(),
                "a file is never overwritten"
            );
        }
        fs::write(directory.path().join("notes.txt"), "not a history").unwrap();
        fs::write(directory.path().join("killed-at-once.history"), "").unwrap();
        let history = History::read_dir(directory.path()).unwrap();
        assert_eq!(history.records().iter().map(|r| r.client).collect::<Vec<_>>(), [0, 1, 2]);
        fs::write(directory.path().join("z.history"), [1; 200]).unwrap();
        assert!(matches!(History::read_dir(directory.path()), Err(HistoryError::File { .. })));
    }

    #[test]
    fn a_ticket_of_another_recorder_is_refused() {
        let one = Recorder::new(Vec::new(), 1, Flush::WhenFull).unwrap();
        let other = Recorder::new(Vec::new(), 2, Flush::WhenFull).unwrap();
        let ticket = one.begin(Op::Get { key: 1 }).unwrap();
        assert!(matches!(other.end(ticket, Outcome::Value(None)), Err(HistoryError::Append(_))));
    }

    #[test]
    fn the_clock_is_shared_by_threads_and_goes_forward() {
        let before_ns = now_ns();
        let other_ns = std::thread::spawn(now_ns).join().unwrap();
        let after_ns = now_ns();
        assert!(before_ns <= other_ns && other_ns <= after_ns);
    }
}
