//! The operations of ordered maps, as values. What they do to a structure's pages is up to the structure.

use std::marker::PhantomData;

use farlink_runtime::{
    access::{Access, Interrupt, Start},
    error::Error,
    operation::{Code, Cut, Operation, Parts, Routed},
    ptr::RemotePtr,
    structure::Layout,
    wire::{DecodeError, Wire},
};

use super::{KeyRange, OrderedMap};

/// Entries that one answer from afar holds at most.
pub const ANSWER_ENTRIES_MAX: u64 = 4096;

const fn code<S: OrderedMap>(operation: u16) -> Code {
    Code { structure: S::KIND, operation }
}

type Region<S> = <<S as OrderedMap>::Layout as Layout>::Region;

fn begins<S: OrderedMap>(key: u64) -> Option<Region<S>> {
    S::region(KeyRange::only(key))
}

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

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        match u64::decode(from)? {
            0 => Ok(Self::Insert),
            1 => Ok(Self::Update),
            2 => Ok(Self::Upsert),
            _ => Err(DecodeError("a put has no such mode")),
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
    type Layout = S::Layout;
    const CODE: Code = code::<S>(1);
    const READS_ONLY: bool = true;

    fn begins(&self) -> Option<Region<S>> {
        begins::<S>(self.key)
    }

    #[inline(always)]
    fn at_once<A: Access>(&self, access: &A) -> Result<Option<u64>, Start> {
        S::get_at_once(access, self.key)
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::get(access, from, self.key).await
    }
}

impl<S: OrderedMap> Operation for Put<S> {
    /// The value before: what an update replaced, or what an insert found and left.
    type Output = Option<u64>;
    type Layout = S::Layout;
    const CODE: Code = code::<S>(2);

    fn begins(&self) -> Option<Region<S>> {
        begins::<S>(self.key)
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::put(access, from, self).await
    }
}

impl<S: OrderedMap> Operation for Remove<S> {
    /// The value that was removed.
    type Output = Option<u64>;
    type Layout = S::Layout;
    const CODE: Code = code::<S>(3);

    fn begins(&self) -> Option<Region<S>> {
        begins::<S>(self.key)
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::remove(access, from, self.key).await
    }
}

impl<S: OrderedMap> Operation for Scan<S> {
    type Output = ScanPart;
    type Layout = S::Layout;
    const CODE: Code = code::<S>(4);
    const READS_ONLY: bool = true;

    fn begins(&self) -> Option<Region<S>> {
        begins::<S>(self.key())
    }

    fn limit(&mut self) {
        self.limit = self.limit.min(ANSWER_ENTRIES_MAX);
    }

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
    type Layout = S::Layout;
    const CODE: Code = code::<S>(5);
    const READS_ONLY: bool = true;

    fn begins(&self) -> Option<Region<S>> {
        begins::<S>(self.low)
    }

    fn limit(&mut self) {
        self.limit = self.limit.min(ANSWER_ENTRIES_MAX);
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<(u64, Option<u64>), Interrupt> {
        S::count(access, from, self.low, self.limit).await
    }
}

/// Finds a page of a level, or of the lowest that there is to be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Locate<S> {
    /// The key that belongs to the page.
    pub key: u64,
    /// Its level.
    pub level: u8,
    /// The structure.
    pub of: PhantomData<S>,
}

impl<S: OrderedMap> Operation for Locate<S> {
    /// Where the page is.
    type Output = RemotePtr;
    type Layout = S::Layout;
    const CODE: Code = code::<S>(6);
    const READS_ONLY: bool = true;

    fn begins(&self) -> Option<Region<S>> {
        begins::<S>(self.key)
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<RemotePtr, Interrupt> {
        S::locate(access, from, self.key, self.level).await
    }
}

impl<S> Wire for Locate<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.key, self.level.into()]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (key, level) = <(u64, u64)>::decode(from)?;
        let level = u8::try_from(level).map_err(|_| DecodeError("there is no such level"))?;
        Ok(Self { key, level, of: PhantomData })
    }
}

/// The operations that are about one key.
macro_rules! routed_by_key {
    ($($operation:ident),+) => {$(
        impl<S: OrderedMap> Routed for $operation<S> {
            type Locate = Locate<S>;

            fn key(&self) -> u64 {
                self.key
            }

            fn locate(&self) -> Locate<S> {
                Locate { key: self.key, level: 0, of: PhantomData }
            }
        }
    )+};
}

routed_by_key!(Get, Put, Remove);

/// What is left of an answer about a range of keys when the last part that was asked has none: the next part.
fn rest_in_next_part(parts: &impl Parts, key: u64, descending: bool) -> Option<u64> {
    let Cut::Range(lows) = parts.cut() else { return None };
    let part = parts.part_of(key);
    if descending { lows[..part].last().and_then(|low| low.checked_sub(1)) } else { lows.get(part).copied() }
}

impl<S: OrderedMap> Routed for Scan<S> {
    type Locate = Locate<S>;

    fn key(&self) -> u64 {
        if self.descending { self.high } else { self.low }
    }

    fn locate(&self) -> Locate<S> {
        Locate { key: self.key(), level: 1, of: PhantomData }
    }

    /// Ranges are asked one after another, each for what the one before has not; parts by hash are asked all at once.
    async fn over<P: Parts>(&self, parts: &P) -> Result<ScanPart, Error> {
        let Self { low, high, descending, .. } = *self;
        if *parts.cut() == Cut::Hash {
            return Ok(merge(parts.on_all(self).await?, self.limit, descending));
        }
        let (entries, rest) = parts.on(parts.part_of(self.key()), self).await?;
        let next = || rest_in_next_part(parts, self.key(), descending).filter(|&next| next >= low && next <= high);
        Ok((entries, rest.or_else(next)))
    }
}

/// The entries next in order of several answers; the answers end at different keys, and what comes after the first of those
/// is not known.
fn merge(answers: Vec<ScanPart>, limit: u64, descending: bool) -> ScanPart {
    let place = |key: u64| if descending { u64::MAX - key } else { key };
    let end = answers.iter().filter_map(|(_, rest)| *rest).min_by_key(|&rest| place(rest));
    let mut entries: Vec<_> = answers.into_iter().flat_map(|(entries, _)| entries).collect();
    entries.retain(|&(key, _)| end.is_none_or(|end| place(key) < place(end)));
    entries.sort_unstable_by_key(|&(key, _)| place(key));
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let rest = entries.get(limit).map(|&(key, _)| key).or(end);
    entries.truncate(limit);
    (entries, rest)
}

impl<S: OrderedMap> Routed for Count<S> {
    type Locate = Locate<S>;

    fn key(&self) -> u64 {
        self.low
    }

    fn locate(&self) -> Locate<S> {
        Locate { key: self.low, level: 1, of: PhantomData }
    }

    async fn over<P: Parts>(&self, parts: &P) -> Result<(u64, Option<u64>), Error> {
        let Self { low, limit, of } = *self;
        if *parts.cut() == Cut::Hash {
            let limit = limit.min(ANSWER_ENTRIES_MAX);
            let (entries, rest) = Scan { low, high: u64::MAX, limit, descending: false, of }.over(parts).await?;
            return Ok((entries.len() as u64, rest));
        }
        let (count, rest) = parts.on(parts.part_of(low), self).await?;
        Ok((count, rest.or_else(|| rest_in_next_part(parts, low, false))))
    }
}

impl<S> Wire for Get<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.key.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self { key: u64::decode(from)?, of: PhantomData })
    }
}

impl<S> Wire for Put<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.key, self.value, self.mode as u64]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (key, value) = <(u64, u64)>::decode(from)?;
        let mode = match u64::decode(from)? {
            0 => PutMode::Insert,
            1 => PutMode::Update,
            2 => PutMode::Upsert,
            _ => return Err(DecodeError("a put has no such mode")),
        };
        Ok(Self { key, value, mode, of: PhantomData })
    }
}

impl<S> Wire for Remove<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.key.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self { key: u64::decode(from)?, of: PhantomData })
    }
}

impl<S> Wire for Scan<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.low, self.high, self.limit, u64::from(self.descending)]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let ((low, high), (limit, descending)) = <((u64, u64), (u64, bool))>::decode(from)?;
        Ok(Self { low, high, limit, descending, of: PhantomData })
    }
}

impl<S> Wire for Count<S> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.low, self.limit]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (low, limit) = <(u64, u64)>::decode(from)?;
        Ok(Self { low, limit, of: PhantomData })
    }
}
