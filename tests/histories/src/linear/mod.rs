//! A linearizability checker for histories of a key-value map.
//!
//! A history is linearizable if every operation can be given one moment between its invocation and its return such
//! that the operations, applied in the order of these moments, return what they returned. Linearizability is local
//! (Herlihy and Wing, 1990), so the point operations of a map are checked key by key; the state of one key is absent
//! or a value. Scans span keys and are checked against a weaker promise, in [`crate::scans`].
//!
//! # The search
//!
//! Wing and Gong's search with Lowe's memo ("Testing for linearizability", 2017): invocations and returns stand in a
//! doubly linked list in the order of time. Whatever was invoked before the first return in the list may come next.
//! The search takes one such operation that agrees with the state, unlinks it, and goes on; where nothing agrees, it
//! puts the last one back and tries another. A *configuration*, the set of placed operations with the state, that led
//! nowhere is remembered and not entered again. Four things keep the search short, none of which changes its answer:
//!
//! - An operation that only observes, agrees with the state and may come next is placed at once. If there is a valid
//!   order with it later, moving it here leaves every other operation its state.
//! - A value is not replaced while operations that found this value are still to be placed and nothing can write it
//!   once more. With a distinct value for every write, this makes the search all but deterministic.
//! - Of several writes, the one whose value must be seen first comes first. Among writes that begin a *round*, from
//!   absent through values written once to absent again, all of whose operations have been invoked, a round is not
//!   tried if another one has an earlier first return and an earlier return of its removal: in a valid order that
//!   begins with the former, the two can change places. (What was placed before the other round, or between its parts,
//!   was invoked before these returns, and so may come before the former round, or before its removal.)
//! - Only configurations that failed are remembered, so a history that is in order costs no memory for them; and the
//!   set is represented by the exclusive or of a 128-bit token for each placed operation, so that an entry has a fixed
//!   size. Two sets with the same hash, for which the chance is below 10^-20 at the default limit, could raise a
//!   false alarm and could not hide a violation.
//!
//! # Unknown outcomes
//!
//! An operation with an unknown outcome may take effect at any time after its invocation, or never. Three cases:
//!
//! - It alone can have written a value that some operation found: it did take effect, before the first of those
//!   returned. It is treated like any other.
//! - Nobody found its value: only that the key became present can be noticed. Then such operations are
//!   interchangeable, as are all removals, and the search uses the one that was invoked first, only where nothing else
//!   is possible, and only if something then observes it.
//! - Otherwise, it is tried like a write without a return.
//!
//! # Explanations
//!
//! Before the search, conditions that hold in every linearizable history are checked one by one: no value without its
//! write, none replaced twice, none found after its replacement returned, no two values at one time, none that is gone
//! though nothing can have replaced it. They find most violations, and their messages name the two or three operations
//! at fault. Where the search finds no order, the message shows the furthest point that it reached.

mod register;
mod search;
#[cfg(test)]
mod tests;

use std::fmt;

use self::search::Search;
use crate::history::{History, NEVER_NS, Outcome, Record};
use crate::model::{After, Before};

/// Bounds on what a check may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many configurations are visited for one key, beyond one for each operation, before the check gives up. Each
    /// that fails is remembered in up to 64 bytes.
    pub configurations_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { configurations_max: 4_000_000 }
    }
}

/// What was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Keys with at least one operation.
    pub keys: usize,
    /// Point operations, those with unknown outcomes included.
    pub operations: usize,
    /// Point operations whose outcome is unknown.
    pub unknown: usize,
    /// Configurations that the search visited.
    pub configurations: u64,
}

/// Why a history was not found linearizable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinearError {
    /// A record whose outcome does not fit its operation, or that returned before it was invoked.
    #[error("malformed record: {0}")]
    Malformed(Box<Record>),
    /// The history is not linearizable.
    #[error("{0}")]
    Violation(Box<Violation>),
    /// The search reached a limit: the history may be linearizable or not.
    #[error("key {key}: undecided after {configurations} configurations of {operations} operations")]
    Undecided {
        /// The key that was being checked.
        key: u64,
        /// Configurations visited.
        configurations: u64,
        /// Operations on the key.
        operations: usize,
    },
}

/// A key whose operations have no valid order.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The key.
    pub key: u64,
    /// What is wrong.
    pub reason: Reason,
    /// The operations at fault; of [`Reason::NoOrder`], those that could come next and could not be placed, beginning
    /// with the one that returns first.
    pub operations: Vec<Record>,
    /// Of [`Reason::NoOrder`]: the last operations that the search placed, in their order.
    pub placed: Vec<Record>,
}

/// What is wrong with the operations on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// A value was found that nothing can have written.
    #[error("{value:#x} was found and never written")]
    NeverWritten {
        /// The value.
        value: u64,
    },
    /// A value was found by an operation that returned before the write was invoked.
    #[error("{value:#x} was found before it was written")]
    FoundBeforeWritten {
        /// The value.
        value: u64,
    },
    /// Two operations each replaced or removed the same, once written value: one of their effects is lost.
    #[error("{value:#x} was written once and replaced twice")]
    ReplacedTwice {
        /// The value.
        value: u64,
    },
    /// A value was found by an operation invoked after the one that replaced or removed it had returned.
    #[error("{value:#x} was found after it had been replaced (stale)")]
    FoundAfterReplaced {
        /// The value.
        value: u64,
    },
    /// A value was written and later was not there, though no operation with a known outcome replaced it and those
    /// with unknown outcomes are too few to account for it and others like it.
    #[error("{value:#x} was written and is gone, and nothing can have replaced it (lost)")]
    Vanished {
        /// The value.
        value: u64,
    },
    /// For some time the key must have had two values.
    #[error("the key must have been {first:#x} and {second:#x} at the same time")]
    TwoValuesAtOnce {
        /// One value.
        first: u64,
        /// The other value.
        second: u64,
    },
    /// The key was found absent, or was made absent, while it must have had a value.
    #[error("the key was absent at a time when it must have been {value:#x}")]
    AbsentWhilePresent {
        /// The value.
        value: u64,
    },
    /// No order of the operations explains their outcomes.
    #[error(
        "no order of the operations explains their outcomes; {placed} of {total} can be placed, then the key is {state}"
    )]
    NoOrder {
        /// The state of the key at the furthest point.
        state: StateShown,
        /// How many operations were placed there.
        placed: usize,
        /// How many there are, without those that may never have taken effect.
        total: usize,
    },
}

/// The state of a key, in an explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateShown {
    /// The key is absent.
    Absent,
    /// The key has a value that some operation found.
    Value(u64),
    /// The key has a value that no operation still to be placed found.
    ValueNotRead,
}

impl fmt::Display for StateShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => write!(f, "absent"),
            Self::Value(value) => write!(f, "{value:#x}"),
            Self::ValueNotRead => write!(f, "present, with a value that no other operation found"),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "key {}: {}", self.key, self.reason)?;
        if !self.placed.is_empty() {
            writeln!(f, "  placed last, in this order:")?;
            self.placed.iter().try_for_each(|record| writeln!(f, "    {record}"))?;
            writeln!(f, "  could come next:")?;
        }
        self.operations.iter().try_for_each(|record| writeln!(f, "    {record}"))
    }
}

/// Checks that the point operations of a history are linearizable, with the default limits.
pub fn check(history: &History) -> Result<Report, LinearError> {
    check_with(history, Limits::default())
}

/// Checks that the point operations of a history are linearizable.
pub fn check_with(history: &History, limits: Limits) -> Result<Report, LinearError> {
    let records = history.records();
    if let Some(record) = records.iter().find(|record| !record.is_well_formed()) {
        return Err(LinearError::Malformed(Box::new(record.clone())));
    }
    let mut by_key: Vec<(u64, usize)> =
        records.iter().enumerate().filter_map(|(at, record)| Some((record.op.key()?, at))).collect();
    by_key.sort_unstable();
    let mut report = Report { operations: by_key.len(), ..Report::default() };
    for group in by_key.chunk_by(|a, b| a.0 == b.0) {
        let key = group[0].0;
        let of_key: Vec<&Record> = group.iter().map(|(_, at)| &records[*at]).collect();
        report.keys += 1;
        report.unknown += of_key.iter().filter(|record| record.outcome == Outcome::Unknown).count();
        let register = Register::new(key, &of_key, history.initial().get(&key).copied());
        register.check_conditions().map_err(|violation| LinearError::Violation(Box::new(violation)))?;
        report.configurations += Search::new(&register).run(limits)?;
    }
    Ok(report)
}

/// The id of every value that no operation with a known outcome found. Such values cannot be told apart.
const NOT_READ: u32 = 0;

/// An operation that took effect.
#[derive(Clone, Copy, Debug)]
struct StructurePlacement {
    before: Before<u32>,
    after: After<u32>,
    invoked_ns: u64,
    returned_ns: u64,
    /// Index into the records of the key.
    record: u32,
}

/// Interchangeable operations, each of which may or may not have taken effect.
#[derive(Debug)]
struct Optional {
    before: Before<u32>,
    after: After<u32>,
    /// Invocation time and record of each, earliest first.
    calls: Vec<(u64, u32)>,
}

/// What is known of one value that was found.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    /// How many operations can have written it, and 1 more if the key had it initially.
    writers: u32,
    /// The last of them, if it is among the placed ones.
    writer: Option<u32>,
    /// The operation with a known outcome that found it and returned first; the same that was invoked last.
    found_first: Option<u32>,
    found_last: Option<u32>,
    /// An operation that found and replaced it.
    replaced_by: Option<u32>,
    /// When it must have been written at the latest: see [`Register::deadlines`].
    deadline_ns: u64,
    initial: bool,
    /// If its writer begins a round.
    round: Option<Round>,
}

/// The operations that take the key from absent to absent again.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// When all of them have been invoked.
    invoked_ns: u64,
    /// The first return of one of them.
    returned_ns: u64,
    /// The return of the removal.
    removed_ns: u64,
}

impl Cluster {
    const EMPTY: Self = Self {
        writers: 0,
        writer: None,
        found_first: None,
        found_last: None,
        replaced_by: None,
        deadline_ns: NEVER_NS,
        initial: false,
        round: None,
    };
}

/// All operations on one key.
#[derive(Debug)]
struct Register<'a> {
    key: u64,
    records: &'a [&'a Record],
    /// The values that were found; the id of `values[i]` is i + 1.
    values: Vec<u64>,
    /// By value id; the entry of [`NOT_READ`] is unused.
    clusters: Vec<Cluster>,
    initial: State,
    initial_value: u64,
    ops: Vec<StructurePlacement>,
    optional: Vec<Optional>,
}

/// The state of a key: absent, or a value id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Is(u32),
}

impl State {
    fn allows(self, before: Before<u32>) -> bool {
        match (self, before) {
            (_, Before::Any) | (Self::Absent, Before::Absent) | (Self::Is(_), Before::Present) => true,
            (Self::Is(now), Before::Is(value)) => now == value,
            _ => false,
        }
    }

    fn then(self, after: After<u32>) -> Self {
        match after {
            After::Same => self,
            After::Absent => Self::Absent,
            After::Is(value) => Self::Is(value),
        }
    }
}
