//! The operations on one key, made ready for the search, and the conditions that are checked before it.

use super::{Cluster, NOT_READ, Optional, Reason, Register, Round, State, StructurePlacement, Violation};
use crate::history::{NEVER_NS, Op, Record};
use crate::model::{After, Before, Transition};

impl<'a> Register<'a> {
    pub(super) fn new(key: u64, records: &'a [&'a Record], initial: Option<u64>) -> Self {
        let transitions: Vec<(u32, Transition<u64>)> =
            records.iter().enumerate().filter_map(|(at, r)| Some((at as u32, Transition::of(r)?))).collect();
        let mut values: Vec<u64> = transitions
            .iter()
            .filter_map(|(_, transition)| match transition.before {
                Before::Is(value) => Some(value),
                _ => None,
            })
            .collect();
        values.sort_unstable();
        values.dedup();
        let id = |value: u64| values.binary_search(&value).map_or(NOT_READ, |at| at as u32 + 1);
        let transitions: Vec<(u32, Transition<u32>)> = transitions
            .into_iter()
            .map(|(record, t)| {
                let before = match t.before {
                    Before::Any => Before::Any,
                    Before::Absent => Before::Absent,
                    Before::Present => Before::Present,
                    Before::Is(value) => Before::Is(id(value)),
                };
                let after = match t.after {
                    After::Same => After::Same,
                    After::Absent => After::Absent,
                    After::Is(value) => After::Is(id(value)),
                };
                (record, Transition { before, after, certain: t.certain })
            })
            .collect();
        let initial_value = initial.unwrap_or_default();
        let initial = initial.map_or(State::Absent, |value| State::Is(id(value)));
        let clusters = vec![Cluster::EMPTY; values.len() + 1];
        let ops = Vec::with_capacity(records.len());
        let mut register = Self { key, records, clusters, initial, initial_value, ops, optional: Vec::new(), values };
        register.add(&transitions);
        register.deadlines();
        for value in 1..register.clusters.len() as u32 {
            register.clusters[value as usize].round = register.round(value);
        }
        register
    }

    fn add(&mut self, transitions: &[(u32, Transition<u32>)]) {
        if let State::Is(value) = self.initial {
            self.clusters[value as usize].writers += 1;
            self.clusters[value as usize].initial = true;
        }
        for (_, t) in transitions {
            if let After::Is(value) = t.after {
                self.clusters[value as usize].writers += 1;
            }
        }
        for (record, t) in transitions.iter().filter(|(_, t)| t.certain) {
            self.place(*record, t, self.records[*record as usize].returned_ns);
        }
        for (record, t) in transitions.iter().filter(|(_, t)| !t.certain) {
            let (before, value) = match (t.before, t.after) {
                // As long as the key stays present, a value that nobody finds changes nothing for anyone, so these
                // matter only where the key was absent.
                (Before::Present, After::Is(NOT_READ)) => continue,
                (Before::Any, After::Is(NOT_READ)) => (Before::Absent, None),
                (before, After::Is(value)) if value != NOT_READ => (before, Some(value)),
                (before, _) => (before, None),
            };
            let invoked_ns = self.records[*record as usize].invoked_ns;
            match value.map(|value| self.clusters[value as usize]) {
                Some(Cluster { writers: 1, found_first: Some(first), .. }) => {
                    let returned_ns = self.ops[first as usize].returned_ns.max(invoked_ns);
                    self.place(*record, t, returned_ns);
                }
                _ => match self.optional.iter_mut().find(|o| o.before == before && o.after == t.after) {
                    Some(optional) => optional.calls.push((invoked_ns, *record)),
                    None => {
                        self.optional.push(Optional { before, after: t.after, calls: vec![(invoked_ns, *record)] });
                    }
                },
            }
        }
        self.optional.iter_mut().for_each(|optional| optional.calls.sort_unstable());
    }

    fn place(&mut self, record: u32, t: &Transition<u32>, returned_ns: u64) {
        let at = self.ops.len() as u32;
        let invoked_ns = self.records[record as usize].invoked_ns;
        self.ops.push(StructurePlacement { before: t.before, after: t.after, invoked_ns, returned_ns, record });
        let ops = &self.ops;
        if let Before::Is(value) = t.before {
            let cluster = &mut self.clusters[value as usize];
            if cluster.found_first.is_none_or(|first| returned_ns < ops[first as usize].returned_ns) {
                cluster.found_first = Some(at);
            }
            if cluster.found_last.is_none_or(|last| invoked_ns > ops[last as usize].invoked_ns) {
                cluster.found_last = Some(at);
            }
            if t.after != After::Same {
                cluster.replaced_by = Some(at);
            }
        }
        if let After::Is(value) = t.after {
            self.clusters[value as usize].writer = Some(at);
        }
    }

    /// For each value that is written once: the first return of an operation that found it, or found a value that
    /// must have followed it. A hint for the order in which the search tries writes.
    fn deadlines(&mut self) {
        let mut order: Vec<(u64, u32)> = (1..self.clusters.len() as u32)
            .filter_map(|value| {
                Some((self.ops[self.clusters[value as usize].found_first? as usize].returned_ns, value))
            })
            .collect();
        order.sort_unstable();
        for (deadline_ns, value) in order {
            let mut at = value;
            // Earlier deadlines come first, so each cluster is visited once.
            while self.clusters[at as usize].deadline_ns == NEVER_NS && self.clusters[at as usize].writers == 1 {
                self.clusters[at as usize].deadline_ns = deadline_ns;
                let Some(writer) = self.clusters[at as usize].writer else { break };
                let Before::Is(previous) = self.ops[writer as usize].before else { break };
                at = previous;
            }
        }
    }

    /// Follows the values from one that was written to an absent key until the key is absent again. Each must have been
    /// written once, found, and replaced by an operation that took effect.
    fn round(&self, first: u32) -> Option<Round> {
        let begun_by = &self.ops[self.clusters[first as usize].writer? as usize];
        if begun_by.before != Before::Absent {
            return None;
        }
        let (mut invoked_ns, mut returned_ns) = (begun_by.invoked_ns, begun_by.returned_ns);
        let mut value = first;
        // A value can occur once, so this ends even where the history makes no sense.
        for _ in 0..self.clusters.len() {
            let cluster = &self.clusters[value as usize];
            if cluster.writers != 1 {
                return None;
            }
            invoked_ns = invoked_ns.max(self.ops[cluster.found_last? as usize].invoked_ns);
            returned_ns = returned_ns.min(self.ops[cluster.found_first? as usize].returned_ns);
            let replaced_by = &self.ops[cluster.replaced_by? as usize];
            match replaced_by.after {
                After::Absent => return Some(Round { invoked_ns, returned_ns, removed_ns: replaced_by.returned_ns }),
                After::Is(next) if next != NOT_READ => value = next,
                _ => return None,
            }
        }
        None
    }

    pub(super) fn value(&self, id: u32) -> u64 {
        // Ids other than NOT_READ come from `values`; explanations never ask for that one.
        self.values.get((id as usize).wrapping_sub(1)).copied().unwrap_or_default()
    }

    pub(super) fn violation(&self, reason: Reason, ops: impl IntoIterator<Item = u32>) -> Violation {
        let operations = ops.into_iter().map(|op| self.record(op).clone()).collect();
        Violation { key: self.key, reason, operations, placed: Vec::new() }
    }

    pub(super) fn record(&self, op: u32) -> &Record {
        self.records[self.ops[op as usize].record as usize]
    }

    /// Conditions that every linearizable history meets, each with a message of its own.
    pub(super) fn check_conditions(&self) -> Result<(), Violation> {
        let mut replaced: Vec<Option<u32>> = vec![None; self.clusters.len()];
        for (at, op) in self.ops.iter().enumerate() {
            if let Before::Is(id) = op.before
                && op.after != After::Same
                && self.clusters[id as usize].writers == 1
                && let Some(other) = replaced[id as usize].replace(at as u32)
            {
                let reason = Reason::ReplacedTwice { value: self.value(id) };
                return Err(
                    self.violation(reason, self.clusters[id as usize].writer.into_iter().chain([other, at as u32]))
                );
            }
        }
        // Times during which the key must have one value: from the first return to the last invocation of the
        // operations that wrote it or found it.
        let mut zones: Vec<Zone> = Vec::new();
        for id in 1..self.clusters.len() as u32 {
            self.check_cluster(id)?;
            zones.extend(self.zone(id));
        }
        zones.sort_unstable_by_key(|zone| (zone.begin_ns, zone.end_ns));
        for pair in zones.windows(2) {
            // Up to here no zones overlapped, so their ends are in order, too.
            if pair[1].begin_ns < pair[0].end_ns {
                let reason =
                    Reason::TwoValuesAtOnce { first: self.value(pair[0].value), second: self.value(pair[1].value) };
                return Err(self.violation(reason, pair.iter().flat_map(|zone| zone.ops)));
            }
        }
        for (at, op) in self.ops.iter().enumerate() {
            if op.before != Before::Absent && op.after != After::Absent {
                continue;
            }
            let Some(zone) = zones[..zones.partition_point(|zone| zone.begin_ns < op.invoked_ns)].last() else {
                continue;
            };
            if op.returned_ns < zone.end_ns {
                let reason = Reason::AbsentWhilePresent { value: self.value(zone.value) };
                return Err(self.violation(reason, [zone.ops[0], at as u32, zone.ops[1]]));
            }
        }
        self.check_vanished()
    }

    fn check_cluster(&self, id: u32) -> Result<(), Violation> {
        let cluster = &self.clusters[id as usize];
        let value = self.value(id);
        let (Some(first), Some(last)) = (cluster.found_first, cluster.found_last) else { return Ok(()) };
        if cluster.writers == 0 {
            return Err(self.violation(Reason::NeverWritten { value }, [first]));
        }
        if cluster.writers > 1 {
            return Ok(());
        }
        if let Some(writer) = cluster.writer
            && self.ops[first as usize].returned_ns < self.ops[writer as usize].invoked_ns
        {
            return Err(self.violation(Reason::FoundBeforeWritten { value }, [first, writer]));
        }
        if let Some(replaced_by) = cluster.replaced_by
            && self.ops[replaced_by as usize].returned_ns < self.ops[last as usize].invoked_ns
        {
            let ops = cluster.writer.into_iter().chain([replaced_by, last]);
            return Err(self.violation(Reason::FoundAfterReplaced { value }, ops));
        }
        Ok(())
    }

    /// A value that no operation with a known outcome replaced can only have gone through one with an unknown outcome;
    /// and each of those replaces one value, some time after it was invoked.
    fn check_vanished(&self) -> Result<(), Violation> {
        // Operations that tell the state they met, by invocation, with the one that returned first from each on.
        let mut tellers: Vec<u32> = (0..self.ops.len() as u32)
            .filter(|op| matches!(self.ops[*op as usize].before, Before::Absent | Before::Is(_)))
            .collect();
        tellers.sort_by_key(|op| self.ops[*op as usize].invoked_ns);
        let mut first_returns = tellers.clone();
        for at in (1..tellers.len()).rev() {
            let (this, next) = (first_returns[at - 1], first_returns[at]);
            if self.ops[next as usize].returned_ns < self.ops[this as usize].returned_ns {
                first_returns[at - 1] = next;
            }
        }
        // Values that were written and gone: the first return that tells, its operation, the write.
        let mut gone: Vec<(u64, u32, Option<u32>)> = Vec::new();
        let mut note = |written_ns: u64, writer: Option<u32>| {
            let from = tellers.partition_point(|op| self.ops[*op as usize].invoked_ns <= written_ns);
            if let Some(teller) = first_returns.get(from) {
                gone.push((self.ops[*teller as usize].returned_ns, *teller, writer));
            }
        };
        for (at, op) in self.ops.iter().enumerate() {
            match op.after {
                After::Is(NOT_READ) => note(op.returned_ns, Some(at as u32)),
                After::Is(value) => {
                    let cluster = &self.clusters[value as usize];
                    if let (1, None, Some(found_last)) = (cluster.writers, cluster.replaced_by, cluster.found_last) {
                        // Those that found it tell of it; the first to tell of something else was invoked later.
                        note(op.returned_ns.max(self.ops[found_last as usize].invoked_ns), Some(at as u32));
                    }
                }
                _ => {}
            }
        }
        if self.initial == State::Is(NOT_READ) {
            note(0, None);
        }
        gone.sort_unstable();
        let mut unknown: Vec<u64> = self
            .records
            .iter()
            .filter(|record| Transition::of(record).is_some_and(|t| !t.certain && t.before != Before::Absent))
            .map(|record| record.invoked_ns)
            .collect();
        unknown.sort_unstable();
        for (at, (told_ns, teller, writer)) in gone.iter().enumerate() {
            if at < unknown.partition_point(|invoked_ns| invoked_ns <= told_ns) {
                continue;
            }
            let value = match writer.map(|writer| (self.ops[writer as usize].after, self.record(writer).op)) {
                Some((After::Is(value), _)) if value != NOT_READ => self.value(value),
                Some((_, Op::Insert { value, .. } | Op::Upsert { value, .. } | Op::Update { value, .. })) => value,
                _ => self.initial_value,
            };
            return Err(self.violation(Reason::Vanished { value }, writer.iter().copied().chain([*teller])));
        }
        Ok(())
    }

    fn zone(&self, id: u32) -> Option<Zone> {
        let cluster = &self.clusters[id as usize];
        let (first, last) = (cluster.found_first?, cluster.found_last?);
        if cluster.writers != 1 {
            return None;
        }
        let begun_by = cluster
            .writer
            .filter(|writer| self.ops[*writer as usize].returned_ns <= self.ops[first as usize].returned_ns)
            .unwrap_or(first);
        let begin_ns = if cluster.initial { 0 } else { self.ops[begun_by as usize].returned_ns };
        let end_ns = self.ops[last as usize].invoked_ns;
        (begin_ns < end_ns).then_some(Zone { begin_ns, end_ns, value: id, ops: [begun_by, last] })
    }
}

/// A time during which the key must have had one value.
#[derive(Clone, Copy, Debug)]
struct Zone {
    begin_ns: u64,
    end_ns: u64,
    value: u32,
    /// The operations from whose times this follows.
    ops: [u32; 2],
}
