//! The operations of ordered maps, as values. What they do to a structure's pages is up to the structure.

use std::marker::PhantomData;

use farlink_runtime::{
    access::{Access, Interrupt, Merge, Operation, Operations, Shards, Start, route_to_all},
    error::Error,
    wire::{DecodeError, Wire, wire},
};

use futures_util::future::join_all;

use super::{KeyRange, OrderedMap};

/// Entries that one answer from afar holds at most.
pub const ANSWER_ENTRIES_MAX: u64 = 4096;

/// Names all operations of an ordered map.
pub fn operations<S: OrderedMap>(to: &mut impl Operations<S>) {
    to.add::<Get<S>>().add::<Put<S>>().add::<Remove<S>>().add::<Scan<S>>().add::<Count<S>>();
}

wire! {
    struct Get<S> { key, of }
    struct Put<S> { key, value, mode, of }
    struct Remove<S> { key, of }
    struct Scan<S> { low, high, limit, descending, of }
    struct Count<S> { low, high, limit, of }
    struct ScanPart { entries, rest, descending }
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
    /// How many entries to return, at most. With 0 there is no rest either.
    pub limit: u64,
    /// From `high` downwards.
    pub descending: bool,
    /// The structure.
    pub of: PhantomData<S>,
}

/// A part of a scan's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanPart {
    /// Entries, in the direction of the scan.
    pub entries: Vec<(u64, u64)>,
    /// The key from which the rest continues; `None` if there is no rest.
    pub rest: Option<u64>,
    /// From high keys to low ones.
    pub descending: bool,
}

impl ScanPart {
    /// At most so many entries; what is left out is in the rest.
    fn cut(&mut self, limit: u64) {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        if let Some(&(key, _)) = self.entries.get(limit) {
            self.rest = Some(key);
            self.entries.truncate(limit);
        }
    }
}

/// What is known of both: the entries up to where the first of them ends.
impl Merge for ScanPart {
    fn merge(&mut self, other: Self) {
        let descending = self.descending;
        let place = |key: u64| if descending { u64::MAX - key } else { key };
        self.rest = [self.rest, other.rest].into_iter().flatten().min_by_key(|&rest| place(rest));
        self.entries.extend(other.entries);
        self.entries.retain(|&(key, _)| self.rest.is_none_or(|rest| place(key) < place(rest)));
        self.entries.sort_unstable_by_key(|&(key, _)| place(key));
    }
}

/// Counts entries from one end of a range on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Count<S> {
    /// The least key to count.
    pub low: u64,
    /// The greatest key to count; none if it is less than `low`.
    pub high: u64,
    /// How many entries to count, about, before the answer is given.
    pub limit: u64,
    /// The structure.
    pub of: PhantomData<S>,
}

impl<S: OrderedMap> Operation for Get<S> {
    /// Its value.
    type Output = Option<u64>;
    type Plugin = S;
    const NAME: &'static str = "get";
    const READS_ONLY: bool = true;

    fn scope(&self) -> KeyRange {
        KeyRange::only(self.key)
    }

    #[inline(always)]
    fn try_sync<A: Access<Plugin = S>>(&self, access: &A) -> Result<Option<u64>, Start> {
        S::try_get(access, self.key)
    }

    async fn run<A: Access<Plugin = S>>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::get(access, from, self.key).await
    }
}

impl<S: OrderedMap> Operation for Put<S> {
    /// The value before: what an update replaced, or what an insert found and left.
    type Output = Option<u64>;
    type Plugin = S;
    const NAME: &'static str = "put";

    fn scope(&self) -> KeyRange {
        KeyRange::only(self.key)
    }

    async fn run<A: Access<Plugin = S>>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::put(access, from, self).await
    }
}

impl<S: OrderedMap> Operation for Remove<S> {
    /// The value that was removed.
    type Output = Option<u64>;
    type Plugin = S;
    const NAME: &'static str = "remove";

    fn scope(&self) -> KeyRange {
        KeyRange::only(self.key)
    }

    async fn run<A: Access<Plugin = S>>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        S::remove(access, from, self.key).await
    }
}

impl<S: OrderedMap> Operation for Scan<S> {
    type Output = ScanPart;
    type Plugin = S;
    const NAME: &'static str = "scan";
    const READS_ONLY: bool = true;

    fn scope(&self) -> KeyRange {
        KeyRange { low: self.low, high: self.high.checked_add(1) }
    }

    fn within(&self, range: &KeyRange) -> Self {
        let (low, high) = clipped((self.low, self.high), range);
        Self { low, high, ..*self }
    }

    fn limit(&mut self) {
        self.limit = self.limit.min(ANSWER_ENTRIES_MAX);
    }

    async fn run<A: Access<Plugin = S>>(&self, access: &A, from: Start) -> Result<ScanPart, Interrupt> {
        if self.low > self.high || self.limit == 0 {
            return Ok(ScanPart { entries: Vec::new(), rest: None, descending: self.descending });
        }
        S::scan(access, from, self).await
    }

    /// Of ranges the first is asked, then the next two at once, the next four, and so on, each for what is missing then. So more parts
    /// are asked for something than in vain, because those before them had enough. Parts by hash are asked all at once.
    async fn route<D: Shards<Plugin = S>>(&self, parts: &D) -> Result<ScanPart, Error> {
        let mut answer = ScanPart { entries: Vec::new(), rest: None, descending: self.descending };
        if self.limit == 0 {
            return Ok(answer);
        }
        let Some(about) = in_order(parts, &self.scope(), self.descending) else {
            // Each answers up to the limit.
            answer = route_to_all(self, parts).await?;
            answer.cut(self.limit);
            return Ok(answer);
        };
        let (mut asked, mut at_once) = (0, 1);
        while asked < about.len() {
            let missing = Self { limit: self.limit - answer.entries.len() as u64, ..*self };
            let batch = &about[asked..about.len().min(asked + at_once)];
            let answers = join_all(batch.iter().map(|&(part, _)| parts.on(part, &missing))).await;
            for (&(_, start), part) in batch.iter().zip(answers) {
                let mut part = part?;
                let room = self.limit.saturating_sub(answer.entries.len() as u64);
                if room == 0 {
                    answer.rest = start;
                    return Ok(answer);
                }
                part.cut(room);
                answer.rest = part.rest;
                answer.entries.extend(part.entries);
                if answer.rest.is_some() {
                    return Ok(answer);
                }
            }
            asked += batch.len();
            at_once *= 2;
            if answer.entries.len() as u64 >= self.limit {
                answer.rest = about.get(asked).and_then(|&(_, start)| start);
                break;
            }
        }
        Ok(answer)
    }
}

impl<S: OrderedMap> Operation for Count<S> {
    /// The count, and the key from which the rest continues, if there is a rest.
    type Output = (u64, Option<u64>);
    type Plugin = S;
    const NAME: &'static str = "count";
    const READS_ONLY: bool = true;

    fn scope(&self) -> KeyRange {
        KeyRange { low: self.low, high: self.high.checked_add(1) }
    }

    fn within(&self, range: &KeyRange) -> Self {
        let (low, high) = clipped((self.low, self.high), range);
        Self { low, high, ..*self }
    }

    fn limit(&mut self) {
        self.limit = self.limit.min(ANSWER_ENTRIES_MAX);
    }

    async fn run<A: Access<Plugin = S>>(&self, access: &A, from: Start) -> Result<(u64, Option<u64>), Interrupt> {
        if self.low > self.high {
            return Ok((0, None));
        }
        S::count(access, from, &Self { limit: self.limit.max(1), ..*self }).await
    }

    async fn route<D: Shards<Plugin = S>>(&self, parts: &D) -> Result<(u64, Option<u64>), Error> {
        let Self { low, high, limit, of } = *self;
        if low > high {
            return Ok((0, None));
        }
        if let Some(about) = in_order(parts, &self.scope(), false) {
            let &(part, _) = about.first().ok_or(Error::Malformed("an operation is about no part of its structure"))?;
            let (count, rest) = parts.on(part, self).await?;
            return Ok((count, rest.or(about.get(1).and_then(|&(_, start)| start))));
        }
        let limit = limit.clamp(1, ANSWER_ENTRIES_MAX);
        let all = Scan { low, high, limit, descending: false, of }.route(parts).await?;
        Ok((all.entries.len() as u64, all.rest))
    }
}

/// Of the keys from one to another, both included, those in a range; there are some.
fn clipped((low, high): (u64, u64), range: &KeyRange) -> (u64, u64) {
    (low.max(range.low), range.high.map_or(high, |end| high.min(end.saturating_sub(1))))
}

/// The parts that have something of a range of keys, in order, and the key where each begins; `None` if parts are cut by hash.
fn in_order<D: Shards<Plugin: OrderedMap>>(
    parts: &D,
    range: &KeyRange,
    descending: bool,
) -> Option<Vec<(usize, Option<u64>)>> {
    let mut about = Vec::new();
    for part in parts.about(range) {
        about.push((part, *parts.region(part)?));
    }
    about.sort_unstable_by_key(|(_, region)| region.low);
    if descending {
        about.reverse();
    }
    let start =
        |region: KeyRange| if descending { region.high.and_then(|high| high.checked_sub(1)) } else { Some(region.low) };
    Some(about.into_iter().map(|(part, region)| (part, start(region))).collect())
}
