//! The sequential model: what one operation says of the state of its key.
//!
//! The state of a key is absent, or present with a value. A recorded operation with its outcome is a [`Transition`]:
//! it can happen in some states ([`Before`]) and leaves another, or the same ([`After`]). Both checkers see histories
//! through this module only.

use crate::history::{Op, Outcome, Record};

/// The states in which an operation can have had its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before<V> {
    /// Any state.
    Any,
    /// The key is absent.
    Absent,
    /// The key is present.
    Present,
    /// The key has this value.
    Is(V),
}

/// What an operation does to the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After<V> {
    /// Nothing: it only observes.
    Same,
    /// The key is absent.
    Absent,
    /// The key has this value.
    Is(V),
}

/// What a recorded operation says of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition<V> {
    /// The state it was applied to.
    pub before: Before<V>,
    /// The state it left.
    pub after: After<V>,
    /// Whether it took effect for certain. If not, it may also have had no effect at all.
    pub certain: bool,
}

/// What is known of the state right after an operation took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// The key was absent.
    Absent,
    /// The key was present, with some value.
    Present,
    /// The key had this value.
    Is(u64),
}

impl Transition<u64> {
    /// The transition of a point operation. `None` for scans, and for operations with an unknown outcome that could
    /// not have changed anything. The record must be well-formed.
    pub fn of(record: &Record) -> Option<Self> {
        let certain = record.outcome != Outcome::Unknown;
        let (before, after) = match (record.op, &record.outcome) {
            (Op::Scan { .. }, _) | (Op::Get { .. }, Outcome::Unknown) => return None,
            (Op::Insert { value, .. }, Outcome::Unknown) => (Before::Absent, After::Is(value)),
            (Op::Upsert { value, .. }, Outcome::Unknown) => (Before::Any, After::Is(value)),
            (Op::Update { value, .. }, Outcome::Unknown) => (Before::Present, After::Is(value)),
            (Op::Remove { .. }, Outcome::Unknown) => (Before::Present, After::Absent),
            (Op::Get { .. }, Outcome::Value(Some(found))) => (Before::Is(*found), After::Same),
            (Op::Insert { value, .. }, Outcome::Inserted(true)) => (Before::Absent, After::Is(value)),
            (Op::Insert { .. }, Outcome::Inserted(false)) => (Before::Present, After::Same),
            (Op::Upsert { value, .. }, Outcome::Value(None)) => (Before::Absent, After::Is(value)),
            (Op::Upsert { value, .. } | Op::Update { value, .. }, Outcome::Value(Some(found))) => {
                (Before::Is(*found), if value == *found { After::Same } else { After::Is(value) })
            }
            (Op::Remove { .. }, Outcome::Value(Some(found))) => (Before::Is(*found), After::Absent),
            (Op::Get { .. } | Op::Update { .. } | Op::Remove { .. }, Outcome::Value(None)) => {
                (Before::Absent, After::Same)
            }
            _ => return None,
        };
        Some(Self { before, after, certain })
    }

    /// What is known of the state right after it, given that it took effect.
    pub fn leaves(&self) -> Option<Known> {
        match (self.before, self.after) {
            (_, After::Absent) | (Before::Absent, After::Same) => Some(Known::Absent),
            (_, After::Is(value)) | (Before::Is(value), After::Same) => Some(Known::Is(value)),
            (Before::Present, After::Same) => Some(Known::Present),
            (Before::Any, After::Same) => None,
        }
    }
}
