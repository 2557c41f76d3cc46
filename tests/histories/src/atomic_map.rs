//! A simulated concurrent map whose histories are legal by construction.
//!
//! Simulated clients keep operations in flight against an ordinary `BTreeMap`, in simulated time. A point operation is
//! applied at one random moment between its invocation and its return. A scan reads a few entries at a time, at
//! several moments, so it keeps the promise of [`crate::scans`] and no stronger one. An operation may lose its outcome;
//! then it is applied late, or never. A checker that refuses such a history is wrong.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::history::{History, NEVER_NS, Op, Outcome, Record, mix};
use crate::workload::{Workload, WorkloadError, WorkloadSpec};

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// The operations, and the seed of everything.
    pub workload: WorkloadSpec,
    /// Clients.
    pub clients: u32,
    /// Operations that each client keeps in flight.
    pub in_flight: u32,
    /// Operations altogether.
    pub operations: usize,
    /// The probability that an operation's outcome is lost.
    pub unknown: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A slot of a client invokes its next operation.
    Invoke { client: u32 },
    /// An operation takes effect, or a scan reads on.
    Apply { call: usize },
    /// An operation returns.
    Return { call: usize },
}

struct Call {
    record: Record,
    /// Entries that a scan has read, and where it reads on.
    entries: Vec<(u64, u64)>,
    cursor: Option<u64>,
    lost: bool,
}

struct Run {
    random: StdRng,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    event_count: u64,
    map: BTreeMap<u64, u64>,
    calls: Vec<Call>,
}

impl Simulation {
    /// Runs it. The same simulation gives the same history.
    pub fn run(&self) -> Result<History, WorkloadError> {
        let mut workloads = (0..self.clients)
            .map(|client| Workload::new(&self.workload, client))
            .collect::<Result<Vec<_>, WorkloadError>>()?;
        let mut run = Run {
            random: StdRng::seed_from_u64(mix(self.workload.seed ^ 0x6174_6f6d_6963)),
            events: BinaryHeap::new(),
            event_count: 0,
            map: BTreeMap::new(),
            calls: Vec::with_capacity(self.operations),
        };
        for client in 0..self.clients {
            for _ in 0..self.in_flight {
                let start_ns = 1 + run.random.random_range(0..1000);
                run.at(start_ns, Event::Invoke { client });
            }
        }
        while let Some(Reverse((now_ns, _, event))) = run.events.pop() {
            match event {
                Event::Invoke { client } if run.calls.len() < self.operations => {
                    run.invoke(now_ns, client, workloads[client as usize].next_op(), self.unknown);
                }
                Event::Invoke { .. } => {}
                Event::Apply { call } => run.apply(now_ns, call),
                Event::Return { call } => run.finish(now_ns, call),
            }
        }
        Ok(run.calls.into_iter().map(|call| call.record).collect())
    }
}

impl Run {
    fn at(&mut self, time_ns: u64, event: Event) {
        self.event_count += 1;
        self.events.push(Reverse((time_ns, self.event_count, event)));
    }

    /// Mostly short, sometimes long.
    fn delay_ns(&mut self) -> u64 {
        let scale = if self.random.random_bool(0.02) { 20_000 } else { 1000 };
        self.random.random_range(0..scale)
    }

    fn invoke(&mut self, now_ns: u64, client: u32, op: Op, unknown: f64) {
        let call = self.calls.len();
        let lost = self.random.random_bool(unknown);
        let cursor = match op {
            Op::Scan { from, .. } => Some(from),
            _ => None,
        };
        let record = Record { client, op, outcome: Outcome::Unknown, invoked_ns: now_ns, returned_ns: NEVER_NS };
        self.calls.push(Call { record, entries: Vec::new(), cursor, lost });
        let mut delay_ns = self.delay_ns();
        if lost {
            // The client learns of the loss and goes on; the effect may come long after, or never.
            self.at(now_ns + delay_ns, Event::Invoke { client });
            if self.random.random() {
                return;
            }
            delay_ns = self.random.random_range(0..200_000);
        }
        self.at(now_ns + delay_ns, Event::Apply { call });
    }

    fn apply(&mut self, now_ns: u64, call: usize) {
        if let Op::Scan { limit, descending, .. } = self.calls[call].record.op {
            self.read_on(call, limit, descending);
            if self.calls[call].cursor.is_some() {
                let delay_ns = self.random.random_range(0..300);
                return self.at(now_ns + delay_ns, Event::Apply { call });
            }
            let entries = std::mem::take(&mut self.calls[call].entries);
            self.calls[call].record.outcome = Outcome::Entries(entries.into());
        } else {
            let outcome = apply(&mut self.map, &self.calls[call].record.op);
            self.calls[call].record.outcome = outcome;
        }
        if self.calls[call].lost {
            self.calls[call].record.outcome = Outcome::Unknown;
        } else {
            let delay_ns = self.delay_ns();
            self.at(now_ns + delay_ns, Event::Return { call });
        }
    }

    /// A scan reads the next few entries, as if they were those of one leaf.
    fn read_on(&mut self, call: usize, limit: u32, descending: bool) {
        const LEAF_ENTRIES: usize = 4;
        let Call { entries, cursor, .. } = &mut self.calls[call];
        let Some(from) = cursor.take() else { return };
        let count = LEAF_ENTRIES.min((limit as usize).saturating_sub(entries.len()));
        let length = entries.len();
        if descending {
            entries.extend(self.map.range(..=from).rev().take(count).map(|(k, v)| (*k, *v)));
        } else {
            entries.extend(self.map.range(from..).take(count).map(|(k, v)| (*k, *v)));
        }
        if entries.len() - length == LEAF_ENTRIES && entries.len() < limit as usize {
            let (last, _) = entries[entries.len() - 1];
            *cursor = if descending { last.checked_sub(1) } else { last.checked_add(1) };
        }
    }

    fn finish(&mut self, now_ns: u64, call: usize) {
        let record = &mut self.calls[call].record;
        record.returned_ns = now_ns;
        let client = record.client;
        let delay_ns = self.random.random_range(0..50);
        self.at(now_ns + delay_ns, Event::Invoke { client });
    }
}

/// Applies a point operation to a map: the sequential meaning of every operation, and of a scan that is atomic.
pub fn apply(map: &mut BTreeMap<u64, u64>, op: &Op) -> Outcome {
    match *op {
        Op::Get { key } => Outcome::Value(map.get(&key).copied()),
        Op::Insert { key, value } => {
            let absent = !map.contains_key(&key);
            if absent {
                map.insert(key, value);
            }
            Outcome::Inserted(absent)
        }
        Op::Upsert { key, value } => Outcome::Value(map.insert(key, value)),
        Op::Update { key, value } => Outcome::Value(map.get_mut(&key).map(|held| std::mem::replace(held, value))),
        Op::Remove { key } => Outcome::Value(map.remove(&key)),
        Op::Scan { from, limit, descending: false } => {
            Outcome::Entries(map.range(from..).take(limit as usize).map(|(k, v)| (*k, *v)).collect())
        }
        Op::Scan { from, limit, descending: true } => {
            Outcome::Entries(map.range(..=from).rev().take(limit as usize).map(|(k, v)| (*k, *v)).collect())
        }
    }
}
