//! The operations of ordered maps, as values. What they do to a structure's pages is up to the structure.

use std::marker::PhantomData;

use farlink_runtime::{
    access::{Access, Interrupt, Start},
    error::Error,
    operation::Operation,
    wire::Wire,
};

use super::OrderedMap;

/// What a put does, depending on whether the key is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Only if it is absent.
    Insert,
    /// Only if it is there.
    Update,
    /// In either case.
    Upsert,
}

impl Wire for PutMode {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(*self as u64);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        match u64::decode(from)? {
            0 => Ok(Self::Insert),
            1 => Ok(Self::Update),
            2 => Ok(Self::Upsert),
            _ => Err(Error::Malformed("a put has no such mode")),
        }
    }
}

impl PutMode {
    /// What stands under a key after a put of `value`, by what stood there before.
    pub fn apply(self, before: Option<u64>, value: u64) -> Option<u64> {
        match self {
            Self::Insert => before.or(Some(value)),
            Self::Update => before.and(Some(value)),
            Self::Upsert => Some(value),
        }
    }
}

/// Looks a key up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Get<S> {
    /// The key.
    pub key: u64,
    /// The structure.
    pub of: PhantomData<S>,
}

/// Stores a value under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Put<S> {
    /// The key.
    pub key: u64,
    /// The value.
    pub value: u64,
    /// Whether the key must be absent or there.
    pub mode: PutMode,
    /// The structure.
    pub of: PhantomData<S>,
}

/// Removes a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remove<S> {
    /// The key.
    pub key: u64,
    /// The structure.
    pub of: PhantomData<S>,
}

/// Entries in key order, from one end of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scan<S> {
    /// The least key of the range.
    pub low: u64,
    /// The greatest key of the range; none if it is less than `low`.
    pub high: u64,
    /// How many entries to return, at most.
    pub limit: u64,
    /// From `high` downwards.
    pub descending: bool,
    /// The structure.
    pub of: PhantomData<S>,
}

/// A part of a scan's answer: entries, and the key from which the rest continues, if there is a rest.
pub type ScanPart = (Vec<(u64, u64)>, Option<u64>);

/// Counts entries from `low` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count<S> {
    /// The least key to count.
    pub low: u64,
    /// How many entries to count, about, before the answer is given.
    pub limit: u64,
    /// The structure.
    pub of: PhantomData<S>,
}

impl<S: OrderedMap> Operation for Get<S> {
    /// Its value.
    type Output = Option<u64>;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::get(access, from, self.key).await
    }
}

impl<S: OrderedMap> Operation for Put<S> {
    /// The value before: what an update replaced, or what an insert found and left.
    type Output = Option<u64>;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::put(access, from, self).await
    }
}

impl<S: OrderedMap> Operation for Remove<S> {
    /// The value that was removed.
    type Output = Option<u64>;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::remove(access, from, self.key).await
    }
}

impl<S: OrderedMap> Operation for Scan<S> {
    type Output = ScanPart;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<ScanPart, Interrupt> {
        if self.low > self.high || self.limit == 0 {
            return Ok((Vec::new(), None));
        }
        S::scan(access, from, self).await
    }
}

impl<S: OrderedMap> Operation for Count<S> {
    /// The count, and the key from which the rest continues, if there is a rest.
    type Output = (u64, Option<u64>);

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<(u64, Option<u64>), Interrupt> {
        S::count(access, from, self.low, self.limit).await
    }
}

impl<S> Wire for Get<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.key.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        Ok(Self { key: u64::decode(from)?, of: PhantomData })
    }
}

impl<S> Wire for Put<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.key, self.value, self.mode as u64]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        let (key, value) = <(u64, u64)>::decode(from)?;
        let mode = match u64::decode(from)? {
            0 => PutMode::Insert,
            1 => PutMode::Update,
            2 => PutMode::Upsert,
            _ => return Err(Error::Malformed("a put has no such mode")),
        };
        Ok(Self { key, value, mode, of: PhantomData })
    }
}

impl<S> Wire for Remove<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.key.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        Ok(Self { key: u64::decode(from)?, of: PhantomData })
    }
}

impl<S> Wire for Scan<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.low, self.high, self.limit, u64::from(self.descending)]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        let ((low, high), (limit, descending)) = <((u64, u64), (u64, bool))>::decode(from)?;
        Ok(Self { low, high, limit, descending, of: PhantomData })
    }
}

impl<S> Wire for Count<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.low, self.limit]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        let (low, limit) = <(u64, u64)>::decode(from)?;
        Ok(Self { low, limit, of: PhantomData })
    }
}
