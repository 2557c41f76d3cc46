//! What is promised of scans, and its check against the point operations of the same history.
//!
//! A scan reads a tree leaf by leaf while others change it, so it is not one atomic look at the map. The promise is:
//!
//! 1. **Form.** At most `limit` entries; their keys strictly ascend, or strictly descend in a descending scan; none is
//!    before `from`, which is itself included.
//! 2. **No phantoms.** An entry (k, v) was in the map at some moment between the scan's invocation and its return.
//! 3. **Nothing missed.** A key that was in the map during the whole scan is returned if it lies in the range that the
//!    scan covered: from `from` to the last key returned, or to the end of the key space if fewer than `limit` entries
//!    were returned.
//!
//! Different entries may be seen at different moments: a scan may miss a key that was inserted while it ran and yet
//! return another one that was inserted later.
//!
//! The check is sound: it finds a violation only where no linearizable order of the point operations allows the scan.
//! It is not complete. An entry counts as a phantom if no write of (k, v) was invoked before the scan returned, or if
//! each of them was certainly replaced before the scan began: by an operation that itself returned before that, and
//! that either was invoked after the write had returned (or after its value had been found) and left another state, or
//! found v and replaced it where v was written only once. A key counts as present during the whole scan if an
//! operation that left it present returned before the scan began, and every removal either returned before that
//! operation was invoked, or was invoked after the scan had returned. Removals with an unknown outcome never return, so
//! after one of them this says nothing more of its key. What does is a value that was written only once: if it was
//! there before the scan began, as its write had returned or it had been found, and an operation that was invoked after
//! the scan had returned found it still, then the scan must have returned the key with this value.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use crate::history::{History, NEVER_NS, Op, Outcome, Record};
use crate::model::{After, Before, Known, Transition};

/// What was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScanReport {
    /// Scans with a known outcome.
    pub scans: usize,
    /// Entries that they returned, each checked not to be a phantom.
    pub entries: usize,
    /// Times that a key was certainly present in the range of a scan, each checked not to be missed.
    pub certainly_present: usize,
}

/// Why the scans of a history do not keep the promise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScanError {
    /// A record whose outcome does not fit its operation, or that returned before it was invoked.
    #[error("malformed record: {0}")]
    Malformed(Box<Record>),
    /// A scan breaks the promise.
    #[error("{0}")]
    Violation(Box<ScanViolation>),
}

/// A scan that breaks the promise.
#[derive(Clone, Debug)]
pub struct ScanViolation {
    /// The scan.
    pub scan: Record,
    /// What is wrong.
    pub reason: ScanReason,
    /// Operations on the key in question around the time of the scan.
    pub operations: Vec<Record>,
}

impl fmt::Display for ScanViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n    {}", self.reason, self.scan)?;
        if !self.operations.is_empty() {
            writeln!(f, "  operations on the key at that time:")?;
        }
        self.operations.iter().try_for_each(|record| writeln!(f, "    {record}"))
    }
}

/// What is wrong with a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScanReason {
    /// More entries than asked for.
    #[error("the scan returned {count} entries of at most {limit}")]
    TooMany {
        /// Entries returned.
        count: usize,
        /// Entries asked for.
        limit: u32,
    },
    /// A key comes before the one that the scan began at.
    #[error("the scan returned {key}, which lies before its start")]
    BeforeStart {
        /// The key.
        key: u64,
    },
    /// Two entries are in the wrong order, or have the same key.
    #[error("the scan returned {second} after {first}")]
    OutOfOrder {
        /// The key that came first.
        first: u64,
        /// The key that came right after it.
        second: u64,
    },
    /// An entry was in the map at no moment of the scan.
    #[error("the scan returned {key} with {value:#x}, which the map did not hold at any moment of the scan")]
    Phantom {
        /// The key.
        key: u64,
        /// The value.
        value: u64,
    },
    /// A key was in the map during the whole scan and in its range, and was not returned.
    #[error("the scan missed {key}, which was in the map during the whole scan")]
    Missed {
        /// The key.
        key: u64,
    },
}

/// Checks the scans of a history.
pub fn check(history: &History) -> Result<ScanReport, ScanError> {
    if let Some(record) = history.records().iter().find(|record| !record.is_well_formed()) {
        return Err(ScanError::Malformed(Box::new(record.clone())));
    }
    let timelines = Timelines::new(history);
    let mut report = ScanReport::default();
    for scan in history.records() {
        let (Op::Scan { from, limit, descending }, Outcome::Entries(entries)) = (scan.op, &scan.outcome) else {
            continue;
        };
        report.scans += 1;
        report.entries += entries.len();
        let fail = |reason| {
            let operations = match reason {
                ScanReason::Phantom { key, .. } | ScanReason::Missed { key } => timelines.around(history, key, scan),
                _ => Vec::new(),
            };
            Err(ScanError::Violation(Box::new(ScanViolation { scan: scan.clone(), reason, operations })))
        };
        if let Some(reason) = wrong_form(from, limit, descending, entries) {
            return fail(reason);
        }
        for &(key, value) in entries {
            if !timelines.may_hold(key, value, scan) {
                return fail(ScanReason::Phantom { key, value });
            }
        }
        let Some(covered) = covered(from, limit, descending, entries) else { continue };
        for (&key, timeline) in timelines.by_key.range(covered) {
            let kept = timeline.kept(scan);
            if kept.is_none() && !timeline.certainly_present(scan) {
                continue;
            }
            report.certainly_present += 1;
            let returned = if descending {
                entries.binary_search_by(|entry| key.cmp(&entry.0))
            } else {
                entries.binary_search_by(|entry| entry.0.cmp(&key))
            };
            let Ok(at) = returned else { return fail(ScanReason::Missed { key }) };
            let (_, value) = entries[at];
            if kept.is_some_and(|kept| kept != value) {
                return fail(ScanReason::Phantom { key, value });
            }
        }
    }
    Ok(report)
}

fn wrong_form(from: u64, limit: u32, descending: bool, entries: &[(u64, u64)]) -> Option<ScanReason> {
    if entries.len() > limit as usize {
        return Some(ScanReason::TooMany { count: entries.len(), limit });
    }
    let before = |a: u64, b: u64| if descending { a > b } else { a < b };
    for pair in entries.windows(2) {
        if !before(pair[0].0, pair[1].0) {
            return Some(ScanReason::OutOfOrder { first: pair[0].0, second: pair[1].0 });
        }
    }
    let first = entries.first()?.0;
    before(first, from).then_some(ScanReason::BeforeStart { key: first })
}

/// The keys that the scan has looked at, if any.
fn covered(from: u64, limit: u32, descending: bool, entries: &[(u64, u64)]) -> Option<RangeInclusive<u64>> {
    let full = entries.len() >= limit as usize;
    match (entries.last(), descending) {
        (None, _) if full => None, // A limit of zero.
        (Some((last, _)), false) if full => Some(from..=*last),
        (Some((last, _)), true) if full => Some(*last..=from),
        (_, false) => Some(from..=u64::MAX),
        (_, true) => Some(0..=from),
    }
}

/// When one write of a value may have been in the map: not before `born_ns`, and not after `dead_ns`.
#[derive(Clone, Copy, Debug)]
struct Life {
    value: u64,
    born_ns: u64,
    dead_ns: u64,
}

/// What the point operations say of one key.
#[derive(Debug, Default)]
struct Timeline {
    /// By value.
    lives: Vec<Life>,
    /// Operations that left the key present, by return: return, and the latest invocation up to here.
    present: Vec<(u64, u64)>,
    /// Removals, by invocation: invocation, and the latest return up to here.
    removed: Vec<(u64, u64)>,
    /// When values that were written once were certainly there, in order: since when, until when, and the value.
    kept: Vec<(u64, u64, u64)>,
}

impl Timeline {
    /// The value that the key certainly had during a whole scan, if that is known.
    fn kept(&self, scan: &Record) -> Option<u64> {
        let since = self.kept.partition_point(|(since_ns, ..)| *since_ns < scan.invoked_ns);
        let (_, until_ns, value) = self.kept[since.checked_sub(1)?];
        (until_ns > scan.returned_ns).then_some(value)
    }

    fn certainly_present(&self, scan: &Record) -> bool {
        let since = self.present.partition_point(|(returned_ns, _)| *returned_ns < scan.invoked_ns);
        let Some((_, present_ns)) = since.checked_sub(1).map(|at| self.present[at]) else { return false };
        let removed = self.removed.partition_point(|(invoked_ns, _)| *invoked_ns <= scan.returned_ns);
        removed.checked_sub(1).is_none_or(|at| self.removed[at].1 < present_ns)
    }
}

/// What the point operations say of every key.
#[derive(Debug)]
struct Timelines {
    by_key: BTreeMap<u64, Timeline>,
}

impl Timelines {
    fn new(history: &History) -> Self {
        let mut calls: BTreeMap<u64, Vec<Call>> = BTreeMap::new();
        for (&key, &value) in history.initial() {
            let transition = Transition { before: Before::Absent, after: After::Is(value), certain: true };
            calls.entry(key).or_default().push(Call { transition, invoked_ns: 0, returned_ns: 0 });
        }
        for record in history.records() {
            let (Some(key), Some(transition)) = (record.op.key(), Transition::of(record)) else { continue };
            let returned_ns = if transition.certain { record.returned_ns } else { NEVER_NS };
            calls.entry(key).or_default().push(Call { transition, invoked_ns: record.invoked_ns, returned_ns });
        }
        Self { by_key: calls.into_iter().map(|(key, calls)| (key, timeline(calls))).collect() }
    }

    /// Whether the map may have held an entry at some moment of a scan.
    fn may_hold(&self, key: u64, value: u64, scan: &Record) -> bool {
        let Some(timeline) = self.by_key.get(&key) else { return false };
        let from = timeline.lives.partition_point(|life| life.value < value);
        timeline.lives[from..]
            .iter()
            .take_while(|life| life.value == value)
            .any(|life| life.born_ns <= scan.returned_ns && life.dead_ns >= scan.invoked_ns)
    }

    /// For an explanation: the operations on a key that overlap a scan, and the nearest ones before it and after it.
    fn around(&self, history: &History, key: u64, scan: &Record) -> Vec<Record> {
        const SHOWN_MAX: usize = 20;
        let distance = |record: &Record| {
            let before_ns = scan.invoked_ns.saturating_sub(record.returned_ns);
            before_ns.max(record.invoked_ns.saturating_sub(scan.returned_ns))
        };
        let mut records: Vec<_> = history.records().iter().filter(|record| record.op.key() == Some(key)).collect();
        records.sort_by_key(|record| distance(record));
        records.truncate(SHOWN_MAX);
        records.sort_by_key(|record| record.invoked_ns);
        records.into_iter().cloned().collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Call {
    transition: Transition<u64>,
    invoked_ns: u64,
    returned_ns: u64,
}

/// How often a value may have been written, and what the operations that found it say.
#[derive(Clone, Copy, Debug)]
struct Found {
    writers: u32,
    /// The first return of an operation that found it.
    found_ns: u64,
    /// The last invocation of one.
    last_found_ns: u64,
    /// The first return of an operation that found and replaced it.
    replaced_ns: u64,
}

fn timeline(mut calls: Vec<Call>) -> Timeline {
    let mut found: BTreeMap<u64, Found> = BTreeMap::new();
    for call in &calls {
        let none = Found { writers: 0, found_ns: NEVER_NS, last_found_ns: 0, replaced_ns: NEVER_NS };
        if let After::Is(value) = call.transition.after {
            found.entry(value).or_insert(none).writers += 1;
        }
        if let (Before::Is(value), true) = (call.transition.before, call.transition.certain) {
            let found = found.entry(value).or_insert(none);
            found.found_ns = found.found_ns.min(call.returned_ns);
            found.last_found_ns = found.last_found_ns.max(call.invoked_ns);
            if call.transition.after != After::Same {
                found.replaced_ns = found.replaced_ns.min(call.returned_ns);
            }
        }
    }
    calls.sort_unstable_by_key(|call| call.invoked_ns);
    let others = FirstReturns::new(&calls);
    let mut timeline = Timeline::default();
    for call in &calls {
        if let After::Is(value) = call.transition.after
            && let Some(found) = found.get(&value)
        {
            let only = found.writers == 1;
            let written_ns = if only { call.returned_ns.min(found.found_ns) } else { call.returned_ns };
            let replaced_ns = if only { found.replaced_ns } else { NEVER_NS };
            let dead_ns = replaced_ns.min(others.of_other_states(&calls, written_ns, value));
            if only && written_ns < found.last_found_ns {
                timeline.kept.push((written_ns, found.last_found_ns, value));
            }
            timeline.lives.push(Life { value, born_ns: call.invoked_ns, dead_ns });
        }
        if call.transition.after == After::Absent {
            timeline.removed.push((call.invoked_ns, call.returned_ns));
        }
        if call.transition.certain && matches!(call.transition.leaves(), Some(Known::Is(_) | Known::Present)) {
            timeline.present.push((call.returned_ns, call.invoked_ns));
        }
    }
    timeline.lives.sort_unstable_by_key(|life| (life.value, life.born_ns));
    timeline.kept.sort_unstable();
    timeline.present.sort_unstable();
    for list in [&mut timeline.present, &mut timeline.removed] {
        let mut latest_ns = 0;
        for (_, time_ns) in list {
            latest_ns = latest_ns.max(*time_ns);
            *time_ns = latest_ns;
        }
    }
    timeline
}

/// For every suffix of the calls by invocation: the first return of a call that left a known state, and the first
/// return of one that left a different state than that.
#[derive(Debug)]
struct FirstReturns {
    suffixes: Vec<[(u64, Known); 2]>,
}

impl FirstReturns {
    fn new(calls: &[Call]) -> Self {
        let mut best = [(NEVER_NS, Known::Present); 2];
        let mut suffixes = vec![best; calls.len() + 1];
        for (at, call) in calls.iter().enumerate().rev() {
            if let (Some(state @ (Known::Absent | Known::Is(_))), true) =
                (call.transition.leaves(), call.transition.certain)
            {
                let new = (call.returned_ns, state);
                if state == best[0].1 {
                    best[0].0 = best[0].0.min(new.0);
                } else if new.0 < best[0].0 {
                    best = [new, best[0]];
                } else if new.0 < best[1].0 {
                    best[1] = new;
                }
            }
            suffixes[at] = best;
        }
        Self { suffixes }
    }

    /// The first return of a call, invoked after a time, that left another state than this value.
    fn of_other_states(&self, calls: &[Call], after_ns: u64, value: u64) -> u64 {
        let suffix = self.suffixes[calls.partition_point(|call| call.invoked_ns <= after_ns)];
        if suffix[0].1 == Known::Is(value) { suffix[1].0 } else { suffix[0].0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic_map::Simulation;
    use crate::linear;
    use crate::workload::{Mix, WorkloadSpec, spread_keys};

    fn record(op: Op, outcome: Outcome, times: (u64, u64)) -> Record {
        Record { client: 0, op, outcome, invoked_ns: times.0, returned_ns: times.1 }
    }

    fn insert(key: u64, value: u64, times: (u64, u64)) -> Record {
        record(Op::Insert { key, value }, Outcome::Inserted(true), times)
    }

    fn upsert(key: u64, value: u64, found: u64, times: (u64, u64)) -> Record {
        record(Op::Upsert { key, value }, Outcome::Value(Some(found)), times)
    }

    fn remove(key: u64, found: u64, times: (u64, u64)) -> Record {
        record(Op::Remove { key }, Outcome::Value(Some(found)), times)
    }

    fn unknown(op: Op, invoked_ns: u64) -> Record {
        record(op, Outcome::Unknown, (invoked_ns, NEVER_NS))
    }

    fn up(from: u64, limit: u32, entries: &[(u64, u64)], times: (u64, u64)) -> Record {
        record(Op::Scan { from, limit, descending: false }, Outcome::Entries(entries.into()), times)
    }

    fn down(from: u64, limit: u32, entries: &[(u64, u64)], times: (u64, u64)) -> Record {
        record(Op::Scan { from, limit, descending: true }, Outcome::Entries(entries.into()), times)
    }

    /// The keys 10, 20, 30, 40 with the values 1, 2, 3, 4, written in the times up to 10.
    fn four_and(records: impl IntoIterator<Item = Record>) -> Option<ScanReason> {
        let four = (1..=4).map(|at| insert(at * 10, at, (at, at + 1)));
        let history: History = four.chain(records).collect();
        match check(&history) {
            Ok(_) => None,
            Err(ScanError::Violation(violation)) => Some(violation.reason),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn legal_scans() {
        let at = (100, 200);
        let all = [(10, 1), (20, 2), (30, 3), (40, 4)];
        let back = [(40, 4), (30, 3), (20, 2), (10, 1)];
        for scan in [
            up(0, 10, &all, at),
            up(10, 4, &all, at),
            up(0, 2, &all[..2], at),
            up(11, 1, &all[1..2], at),
            up(41, 5, &[], at),
            up(0, 0, &[], at),
            down(u64::MAX, 10, &back, at),
            down(40, 2, &back[..2], at),
            down(29, 9, &back[2..], at),
            down(9, 1, &[], at),
        ] {
            assert_eq!(four_and([scan.clone()]), None, "{scan}");
        }
    }

    #[test]
    fn control_form() {
        let at = (100, 200);
        let reason = four_and([up(0, 1, &[(10, 1), (20, 2)], at)]);
        assert_eq!(reason, Some(ScanReason::TooMany { count: 2, limit: 1 }));
        let reason = four_and([up(0, 4, &[(20, 2), (10, 1)], at)]);
        assert_eq!(reason, Some(ScanReason::OutOfOrder { first: 20, second: 10 }));
        let reason = four_and([up(0, 4, &[(10, 1), (10, 1)], at)]);
        assert_eq!(reason, Some(ScanReason::OutOfOrder { first: 10, second: 10 }));
        let reason = four_and([down(50, 4, &[(30, 3), (40, 4)], at)]);
        assert_eq!(reason, Some(ScanReason::OutOfOrder { first: 30, second: 40 }));
        assert_eq!(four_and([up(11, 1, &[(10, 1)], at)]), Some(ScanReason::BeforeStart { key: 10 }));
        assert_eq!(four_and([down(39, 1, &[(40, 4)], at)]), Some(ScanReason::BeforeStart { key: 40 }));
    }

    #[test]
    fn control_missed_key() {
        let at = (100, 200);
        let missed = |key| Some(ScanReason::Missed { key });
        assert_eq!(four_and([up(0, 4, &[(10, 1), (30, 3), (40, 4)], at)]), missed(20));
        assert_eq!(four_and([up(0, 2, &[(10, 1), (30, 3)], at)]), missed(20));
        assert_eq!(four_and([up(0, 9, &[(10, 1), (20, 2), (30, 3)], at)]), missed(40));
        assert_eq!(four_and([up(20, 2, &[(30, 3), (40, 4)], at)]), missed(20));
        // A scan that stops because its start key is absent.
        assert_eq!(four_and([up(15, 2, &[], at)]), missed(20));
        assert_eq!(four_and([down(45, 2, &[(40, 4), (20, 2)], at)]), missed(30));
        assert_eq!(four_and([down(35, 9, &[(30, 3), (20, 2)], at)]), missed(10));
        // The removal returned before the key was inserted again; the other was invoked after the scan.
        let again = [remove(20, 2, (20, 30)), insert(20, 7, (31, 40)), remove(20, 7, (201, 210))];
        let scan = up(0, 2, &[(10, 1), (30, 3)], at);
        assert_eq!(four_and(again.into_iter().chain([scan.clone()])), missed(20));
        // A key that a point operation found is there, too.
        let found = record(Op::Insert { key: 25, value: 9 }, Outcome::Inserted(false), (60, 70));
        assert_eq!(
            four_and([unknown(Op::Upsert { key: 25, value: 8 }, 50), found, up(21, 1, &[(30, 3)], at)]),
            missed(25)
        );
    }

    /// A removal without an outcome may come at any time, and here has not: the value is still found behind the scan.
    #[test]
    fn control_missed_key_after_a_removal_without_an_outcome() {
        let at = (100, 200);
        let get = |key, found, times| record(Op::Get { key }, Outcome::Value(Some(found)), times);
        let lost = || unknown(Op::Remove { key: 20 }, 15);
        let scan = up(0, 2, &[(10, 1), (30, 3)], at);
        let missed = Some(ScanReason::Missed { key: 20 });
        assert_eq!(four_and([lost(), scan.clone(), get(20, 2, (201, 210))]), missed);
        let found_by_a_removal = [lost(), scan.clone(), remove(20, 2, (300, 310))];
        assert_eq!(four_and(found_by_a_removal), missed);
        let down = down(39, 2, &[(30, 3), (10, 1)], at);
        assert_eq!(four_and([lost(), down, get(20, 2, (201, 210))]), missed);
        // Its write is without an outcome, too, but was found.
        let written = [unknown(Op::Insert { key: 25, value: 9 }, 20), unknown(Op::Remove { key: 25 }, 30)];
        let found = [get(25, 9, (40, 50)), up(21, 1, &[(30, 3)], at), get(25, 9, (201, 210))];
        assert_eq!(four_and(written.into_iter().chain(found)), Some(ScanReason::Missed { key: 25 }));
        // Another value is as wrong as none.
        let other = [unknown(Op::Upsert { key: 20, value: 9 }, 15), get(20, 2, (201, 210))];
        let scan_of_other = up(0, 2, &[(10, 1), (20, 9)], at);
        assert_eq!(four_and(other.into_iter().chain([scan_of_other])), Some(ScanReason::Phantom { key: 20, value: 9 }));
    }

    #[test]
    fn a_key_that_may_have_been_removed_and_written_again_may_be_missing() {
        let at = (100, 200);
        let get = |found, times| record(Op::Get { key: 20 }, Outcome::Value(Some(found)), times);
        let lost = || unknown(Op::Remove { key: 20 }, 15);
        let scan = up(0, 2, &[(10, 1), (30, 3)], at);
        // Found too early, or by who may have looked while the scan ran.
        for times in [(50, 60), (90, 210), (200, 210)] {
            assert_eq!(four_and([lost(), scan.clone(), get(2, times)]), None, "{times:?}");
        }
        // Written a second time, perhaps.
        let again = unknown(Op::Upsert { key: 20, value: 2 }, 16);
        assert_eq!(four_and([lost(), again, scan.clone(), get(2, (201, 210))]), None);
        // Written while the scan ran.
        let late = insert(15, 9, (20, 100));
        let found = record(Op::Get { key: 15 }, Outcome::Value(Some(9)), (201, 210));
        assert_eq!(four_and([late, up(0, 2, &[(10, 1), (20, 2)], at), found]), None);
    }

    #[test]
    fn a_key_that_may_have_been_removed_may_be_missing() {
        let at = (100, 200);
        let scan = up(0, 2, &[(10, 1), (30, 3)], at);
        for removal in [
            remove(20, 2, (20, 30)),
            remove(20, 2, (90, 110)),
            remove(20, 2, (200, 210)),
            unknown(Op::Remove { key: 20 }, 50),
        ] {
            assert_eq!(four_and([removal, scan.clone()]), None);
        }
        let removed_and_back = [remove(20, 2, (110, 120)), insert(20, 9, (130, 140))];
        assert_eq!(four_and(removed_and_back.into_iter().chain([scan.clone()])), None);
        // The insert may have been refused at 30 by what was removed at 30.
        let refused = record(Op::Insert { key: 20, value: 9 }, Outcome::Inserted(false), (30, 40));
        assert_eq!(four_and([remove(20, 2, (20, 30)), refused, scan.clone()]), None);
        // Written while the scan ran, or too late.
        assert_eq!(four_and([insert(15, 9, (90, 100)), up(0, 2, &[(10, 1), (20, 2)], at)]), None);
    }

    #[test]
    fn control_phantom() {
        let at = (100, 200);
        let phantom = |key, value| Some(ScanReason::Phantom { key, value });
        assert_eq!(four_and([up(0, 1, &[(5, 1)], at)]), phantom(5, 1), "no such key");
        assert_eq!(four_and([up(0, 1, &[(10, 2)], at)]), phantom(10, 2), "the value of another key");
        assert_eq!(four_and([insert(5, 9, (201, 210)), up(0, 1, &[(5, 9)], at)]), phantom(5, 9), "not written yet");
        let old = up(0, 1, &[(10, 1)], at);
        assert_eq!(four_and([remove(10, 1, (50, 60)), old.clone()]), phantom(10, 1));
        assert_eq!(four_and([upsert(10, 9, 1, (50, 60)), old.clone()]), phantom(10, 1));
        // Replaced by someone whose outcome is lost, as a later reader saw.
        let get = |found, times| record(Op::Get { key: 10 }, Outcome::Value(found), times);
        let lost = unknown(Op::Upsert { key: 10, value: 9 }, 50);
        assert_eq!(four_and([lost.clone(), get(Some(9), (60, 70)), old.clone()]), phantom(10, 1));
        // The write overlaps its replacement, which found its value.
        let overlapping = [insert(5, 9, (20, 80)), remove(5, 9, (30, 40)), up(0, 1, &[(5, 9)], at)];
        assert_eq!(four_and(overlapping), phantom(5, 9));
        // The write has no return, but its value was found, and later it was gone.
        let lost = unknown(Op::Insert { key: 5, value: 9 }, 20);
        let seen = record(Op::Get { key: 5 }, Outcome::Value(Some(9)), (30, 40));
        let gone = record(Op::Get { key: 5 }, Outcome::Value(None), (50, 60));
        assert_eq!(four_and([lost, seen, gone, up(0, 1, &[(5, 9)], at)]), phantom(5, 9));
    }

    #[test]
    fn an_entry_that_may_have_been_there_may_be_returned() {
        let at = (100, 200);
        let old = up(0, 1, &[(10, 1)], at);
        assert_eq!(four_and([remove(10, 1, (50, 100)), old.clone()]), None, "removed while the scan began");
        assert_eq!(four_and([unknown(Op::Remove { key: 10 }, 50), old.clone()]), None);
        assert_eq!(four_and([unknown(Op::Upsert { key: 10, value: 9 }, 50), old.clone()]), None);
        assert_eq!(four_and([insert(5, 9, (200, 210)), up(0, 1, &[(5, 9)], at)]), None, "written as the scan ended");
        assert_eq!(four_and([unknown(Op::Insert { key: 5, value: 9 }, 20), up(0, 1, &[(5, 9)], at)]), None);
        // Absent at 30, and written at 30.
        let absent = record(Op::Get { key: 5 }, Outcome::Value(None), (30, 40));
        assert_eq!(four_and([insert(5, 9, (20, 30)), absent, up(0, 1, &[(5, 9)], at)]), None);
        // Found, then absent, then perhaps written by the other one.
        let lost = unknown(Op::Upsert { key: 5, value: 9 }, 20);
        let seen = record(Op::Get { key: 5 }, Outcome::Value(Some(9)), (30, 40));
        let gone = record(Op::Get { key: 5 }, Outcome::Value(None), (50, 60));
        assert_eq!(four_and([lost.clone(), lost, seen, gone, up(0, 1, &[(5, 9)], at)]), None);
        // The same value written a second time.
        let again = [remove(10, 1, (50, 60)), insert(10, 1, (70, 80))];
        assert_eq!(four_and(again.into_iter().chain([old])), None);
    }

    #[test]
    fn the_initial_entries_count() {
        let mut history: History = [up(0, 9, &[], (5, 6))].into_iter().collect();
        history.set_initial(BTreeMap::from([(7, 70)]));
        assert!(matches!(check(&history), Err(ScanError::Violation(v)) if v.reason == ScanReason::Missed { key: 7 }));
        history.records_mut()[0].outcome = Outcome::Entries([(7, 70)].into());
        let report = check(&history).unwrap();
        assert_eq!(report, ScanReport { scans: 1, entries: 1, certainly_present: 1 });
        history.records_mut()[0].outcome = Outcome::Entries([(7, 71)].into());
        assert!(check(&history).is_err());
    }

    #[test]
    fn a_malformed_record_is_an_error() {
        let history = [record(Op::Scan { from: 0, limit: 1, descending: false }, Outcome::Value(None), (0, 1))];
        assert!(matches!(check(&history.into_iter().collect()), Err(ScanError::Malformed(_))));
    }

    fn simulated(seed: u64) -> History {
        let keys = spread_keys([5, 30, 200][seed as usize % 3]);
        let workload = WorkloadSpec { seed, keys, theta: 0.5, mix: Mix::ALL, scan_limit_max: 20 };
        let unknown = [0.0, 0.01][seed as usize % 2];
        Simulation { workload, clients: 4, in_flight: 8, operations: 5000, unknown }.run().unwrap()
    }

    #[test]
    fn legal_histories_pass() {
        let mut total = ScanReport::default();
        for seed in 0..60 {
            let history = simulated(seed);
            linear::check(&history).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let report = check(&history).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            total.entries += report.entries;
            total.certainly_present += report.certainly_present;
        }
        println!("{total:?}");
        assert!(total.certainly_present > 10_000, "the check of missed keys has something to check: {total:?}");
    }

    /// Changes one entry of one scan of a legal history; most such changes must be noticed.
    #[test]
    fn damaged_scans_are_found() {
        let mut noticed = [0; 3];
        const RUNS: u64 = 90;
        for seed in 0..RUNS {
            let mut history = simulated(seed);
            let kind = seed as usize / 6 % 3;
            let scan = history.records_mut()[2000..]
                .iter_mut()
                .find_map(|record| match &mut record.outcome {
                    Outcome::Entries(entries) if entries.len() >= 3 => Some(entries),
                    _ => None,
                })
                .unwrap();
            match kind {
                0 => scan[1].1 ^= 1 << 63,
                1 => *scan = [&scan[..1], &scan[2..]].concat().into(),
                _ => scan.swap(0, 1),
            }
            noticed[kind] += u64::from(check(&history).is_err());
        }
        println!("{noticed:?}");
        // A key that is written all the time may be missing.
        assert!(noticed[0] == RUNS / 3 && noticed[1] > RUNS / 9 && noticed[2] == RUNS / 3, "{noticed:?}");
    }
}
