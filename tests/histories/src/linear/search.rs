//! The search for an order; see the head of [the module](super).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::{Limits, LinearError, NOT_READ, Reason, Register, State, StateShown, Violation};
use crate::history::{NEVER_NS, mix};
use crate::model::{After, Before};

/// The keys of the memo are hashes already.
#[derive(Default)]
struct TakeHash(u64);

impl Hasher for TakeHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 ^= u64::from_le_bytes(word);
        }
    }

    fn write_u128(&mut self, hash: u128) {
        self.0 = hash as u64;
    }
}

fn token(kind: u64, at: u64) -> u128 {
    let low = mix(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ kind);
    let high = mix(low ^ at.rotate_left(32) ^ 0xd1b5_4a32_d192_ed03);
    (u128::from(mix(high.wrapping_add(kind))) << 64) | u128::from(low)
}

/// Whether a node of the search's list is the invocation of its operation.
fn is_invocation(node: u32) -> bool {
    node & 1 == 0
}

/// A step of the search: an index into `ops`, or one into `optional` with this bit.
const OPTIONAL_BIT: u32 = 1 << 31;

#[derive(Debug)]
struct Frame {
    /// Length of the trail before the step that led here.
    trail_start: usize,
    state: State,
    /// Its steps begin here in `moves`, and go on to the end.
    moves_start: usize,
    moves_next: usize,
    /// Entered by an optional step that nothing has observed yet, so that only some steps were considered.
    restricted: bool,
}

pub(super) struct Search<'a> {
    register: &'a Register<'a>,
    /// Node 2i is the invocation of op i, 2i + 1 its return; the last node is both ends of the list.
    next: Vec<u32>,
    previous: Vec<u32>,
    end: u32,
    left: usize,
    /// By value id: how many operations that found it are still to be placed, and how many that can write it.
    finders_left: Vec<u32>,
    writers_left: Vec<u32>,
    /// How many of each group of optional operations have been used.
    used: Vec<u32>,
    /// The hash of the set of placed operations.
    hash: u128,
    trail: Vec<u32>,
    moves: Vec<u32>,
    frames: Vec<Frame>,
    /// Failed configurations, and how many removals and insertions of the interchangeable kind were used up there:
    /// having used more of them cannot help.
    failed: HashMap<u128, (u32, u32), BuildHasherDefault<TakeHash>>,
    configurations: u64,
    furthest: Option<(usize, Violation)>,
}

impl<'a> Search<'a> {
    pub(super) fn new(register: &'a Register<'a>) -> Self {
        let ops = &register.ops;
        let end = ops.len() as u32 * 2;
        let time = |node: u32| {
            let op = &ops[node as usize / 2];
            // At the same time, invocations come first: those operations are concurrent.
            if is_invocation(node) { (op.invoked_ns, false) } else { (op.returned_ns, true) }
        };
        let mut order: Vec<u32> = (0..end).collect();
        order.sort_by_key(|node| time(*node));
        let mut next = vec![end; end as usize + 1];
        let mut previous = vec![end; end as usize + 1];
        let mut last = end;
        for node in order {
            next[last as usize] = node;
            previous[node as usize] = last;
            last = node;
        }
        next[last as usize] = end;
        previous[end as usize] = last;

        let mut finders_left = vec![0; register.clusters.len()];
        let mut writers_left = vec![0; register.clusters.len()];
        for op in ops {
            if let Before::Is(value) = op.before {
                finders_left[value as usize] += 1;
            }
            if let After::Is(value) = op.after {
                writers_left[value as usize] += 1;
            }
        }
        for optional in &register.optional {
            if let After::Is(value) = optional.after {
                writers_left[value as usize] += optional.calls.len() as u32;
            }
        }
        Self {
            register,
            next,
            previous,
            end,
            left: ops.len(),
            finders_left,
            writers_left,
            used: vec![0; register.optional.len()],
            hash: 0,
            trail: Vec::with_capacity(ops.len()),
            moves: Vec::new(),
            frames: Vec::new(),
            failed: HashMap::default(),
            configurations: 0,
            furthest: None,
        }
    }

    /// Returns how many configurations it visited.
    pub(super) fn run(mut self, limits: Limits) -> Result<u64, LinearError> {
        if self.enter(self.register.initial, 0, false) {
            return Ok(self.configurations);
        }
        let configurations_max = limits.configurations_max.saturating_add(self.register.ops.len() as u64);
        while let Some(frame) = self.frames.last_mut() {
            if self.configurations > configurations_max {
                return Err(LinearError::Undecided {
                    key: self.register.key,
                    configurations: self.configurations,
                    operations: self.register.records.len(),
                });
            }
            if frame.moves_next < self.moves.len() {
                let step = self.moves[frame.moves_next];
                frame.moves_next += 1;
                let state = frame.state.then(self.effect(step).1);
                let trail_start = self.trail.len();
                self.apply(step);
                if self.enter(state, trail_start, self.is_interchangeable(step)) {
                    return Ok(self.configurations);
                }
            } else {
                if !frame.restricted {
                    let (state, uses) = (frame.state, self.uses());
                    self.failed.insert(self.configuration(state), uses);
                }
                self.leave();
            }
        }
        let violation = match self.furthest {
            Some((_, violation)) => violation,
            // Not reached: the search fails only at a dead end, and the first dead end is the furthest so far.
            None => self.register.violation(self.stuck_reason(self.register.initial), []),
        };
        Err(LinearError::Violation(Box::new(violation)))
    }

    fn effect(&self, step: u32) -> (Before<u32>, After<u32>) {
        if step & OPTIONAL_BIT == 0 {
            let op = &self.register.ops[step as usize];
            (op.before, op.after)
        } else {
            let optional = &self.register.optional[(step ^ OPTIONAL_BIT) as usize];
            (optional.before, optional.after)
        }
    }

    /// An optional step whose effect only shows in whether the key is present.
    fn is_interchangeable(&self, step: u32) -> bool {
        step & OPTIONAL_BIT != 0 && matches!(self.effect(step).1, After::Absent | After::Is(NOT_READ))
    }

    /// Enters the configuration that a step led to. Returns true if it is the end of a valid order.
    fn enter(&mut self, state: State, trail_start: usize, interchangeable: bool) -> bool {
        self.configurations += 1;
        let placed_before = self.trail.len();
        let moves_start = self.moves.len();
        let frontier_ns = self.place_observers(state);
        if self.left == 0 {
            return true;
        }
        let state = self.simplified(state);
        if self.has_failed(state) {
            self.moves.truncate(moves_start);
            self.undo(trail_start);
            return false;
        }
        let restricted = interchangeable && self.trail.len() == placed_before;
        self.order_moves(state, moves_start, frontier_ns, restricted);
        if self.moves.len() == moves_start {
            self.note_dead_end(state);
        }
        self.frames.push(Frame { trail_start, state, moves_start, moves_next: moves_start, restricted });
        false
    }

    fn leave(&mut self) {
        if let Some(frame) = self.frames.pop() {
            self.moves.truncate(frame.moves_start);
            self.undo(frame.trail_start);
        }
    }

    /// Places every operation that may come next, agrees with the state and does not change it. Collects in `moves`
    /// those that would change it. Returns the time of the first return that is left.
    fn place_observers(&mut self, state: State) -> u64 {
        let mut node = self.next[self.end as usize];
        while node != self.end && is_invocation(node) {
            let op = self.register.ops[node as usize / 2];
            if !state.allows(op.before) {
                node = self.next[node as usize];
            } else if op.after == After::Same {
                // Its return goes first, and may be the very next node.
                let index = node / 2;
                let before = self.previous[node as usize];
                self.apply(index);
                node = self.next[before as usize];
            } else {
                self.moves.push(node / 2);
                node = self.next[node as usize];
            }
        }
        if node == self.end { NEVER_NS } else { self.register.ops[node as usize / 2].returned_ns }
    }

    /// A value that nothing left to be placed found is as good as any other such value.
    fn simplified(&self, state: State) -> State {
        match state {
            State::Is(value) if self.finders_left[value as usize] == 0 => State::Is(NOT_READ),
            _ => state,
        }
    }

    /// Drops the steps that cannot succeed, orders the others, and adds the optional ones at the end.
    fn order_moves(&mut self, state: State, start: usize, frontier_ns: u64, restricted: bool) {
        let useful = |before: Before<u32>| match state {
            // A removal, or an insertion of a value that nobody found, that nothing observes was useful only if the
            // next step needs its state; if not, that step could have come without it.
            _ if !restricted => true,
            State::Absent => before == Before::Absent,
            State::Is(_) => before == Before::Present,
        };
        let register = self.register;
        let mut kept = start;
        for at in start..self.moves.len() {
            let step = self.moves[at];
            let before = register.ops[step as usize].before;
            if useful(before) && self.may_leave(state, before) {
                self.moves[kept] = step;
                kept += 1;
            }
        }
        self.moves.truncate(kept);
        self.moves[start..].sort_by_key(|step| {
            let op = &register.ops[*step as usize];
            match op.after {
                After::Is(value) => {
                    let cluster = &register.clusters[value as usize];
                    cluster.round.map_or(op.returned_ns.min(cluster.deadline_ns), |round| round.returned_ns)
                }
                _ => op.returned_ns,
            }
        });
        self.drop_dominated_rounds(start, frontier_ns);
        for (at, optional) in register.optional.iter().enumerate() {
            let step = at as u32 | OPTIONAL_BIT;
            let Some((invoked_ns, _)) = optional.calls.get(self.used[at] as usize) else { continue };
            if *invoked_ns <= frontier_ns
                && state.allows(optional.before)
                && state.then(optional.after) != state
                && self.may_leave(state, optional.before)
                && useful(optional.before)
                && !(restricted && self.is_interchangeable(step))
            {
                self.moves.push(step);
            }
        }
    }

    /// Of the steps that begin a round that can be gone through now, drops those for which another one is as good. They
    /// are in the order of the first returns already.
    fn drop_dominated_rounds(&mut self, start: usize, frontier_ns: u64) {
        let mut removed_first_ns = None;
        let mut kept = start;
        for at in start..self.moves.len() {
            let step = self.moves[at];
            let round = match self.register.ops[step as usize].after {
                After::Is(value) => self.register.clusters[value as usize].round,
                _ => None,
            };
            if let Some(round) = round.filter(|round| round.invoked_ns <= frontier_ns) {
                if removed_first_ns.is_some_and(|first_ns| first_ns <= round.removed_ns) {
                    continue;
                }
                removed_first_ns = Some(round.removed_ns);
            }
            self.moves[kept] = step;
            kept += 1;
        }
        self.moves.truncate(kept);
    }

    /// Whether no operation would be left that found the present value, which nothing can write again.
    fn may_leave(&self, state: State, before: Before<u32>) -> bool {
        let State::Is(value) = state else { return true };
        let finders = self.finders_left[value as usize] - u32::from(before == Before::Is(value));
        finders == 0 || self.writers_left[value as usize] > 0
    }

    fn apply(&mut self, step: u32) {
        let (before, after) = self.effect(step);
        if step & OPTIONAL_BIT == 0 {
            for node in [step * 2 + 1, step * 2] {
                let (previous, next) = (self.previous[node as usize], self.next[node as usize]);
                self.next[previous as usize] = next;
                self.previous[next as usize] = previous;
            }
            self.left -= 1;
            self.hash ^= token(1, u64::from(step));
            if let Before::Is(value) = before {
                self.finders_left[value as usize] -= 1;
            }
        } else {
            let group = (step ^ OPTIONAL_BIT) as usize;
            if !self.is_interchangeable(step) {
                self.hash ^= token(2 + group as u64, u64::from(self.used[group]));
            }
            self.used[group] += 1;
        }
        if let After::Is(value) = after {
            self.writers_left[value as usize] -= 1;
        }
        self.trail.push(step);
    }

    /// Takes back the steps of the trail beyond `length`, the last one first.
    fn undo(&mut self, length: usize) {
        while self.trail.len() > length {
            let Some(step) = self.trail.pop() else { return };
            let (before, after) = self.effect(step);
            if step & OPTIONAL_BIT == 0 {
                for node in [step * 2, step * 2 + 1] {
                    let (previous, next) = (self.previous[node as usize], self.next[node as usize]);
                    self.next[previous as usize] = node;
                    self.previous[next as usize] = node;
                }
                self.left += 1;
                self.hash ^= token(1, u64::from(step));
                if let Before::Is(value) = before {
                    self.finders_left[value as usize] += 1;
                }
            } else {
                let group = (step ^ OPTIONAL_BIT) as usize;
                self.used[group] -= 1;
                if !self.is_interchangeable(step) {
                    self.hash ^= token(2 + group as u64, u64::from(self.used[group]));
                }
            }
            if let After::Is(value) = after {
                self.writers_left[value as usize] += 1;
            }
        }
    }

    fn configuration(&self, state: State) -> u128 {
        let state = match state {
            State::Absent => 0,
            State::Is(value) => u64::from(value) + 1,
        };
        self.hash ^ token(0, state)
    }

    /// How many interchangeable removals and insertions have been used.
    fn uses(&self) -> (u32, u32) {
        let mut uses = (0, 0);
        for (optional, used) in self.register.optional.iter().zip(&self.used) {
            match optional.after {
                After::Absent => uses.0 += used,
                After::Is(NOT_READ) => uses.1 += used,
                _ => {}
            }
        }
        uses
    }

    fn has_failed(&self, state: State) -> bool {
        let (removals, insertions) = self.uses();
        self.failed.get(&self.configuration(state)).is_some_and(|failed| failed.0 <= removals && failed.1 <= insertions)
    }

    fn stuck_reason(&self, state: State) -> Reason {
        let state = match state {
            State::Absent => StateShown::Absent,
            State::Is(NOT_READ) => StateShown::ValueNotRead,
            State::Is(value) => StateShown::Value(self.register.value(value)),
        };
        let total = self.register.ops.len();
        Reason::NoOrder { state, placed: total - self.left, total }
    }

    /// Keeps an explanation of this point if none is further.
    fn note_dead_end(&mut self, state: State) {
        const PLACED_SHOWN_MAX: usize = 12;
        const NEXT_SHOWN_MAX: usize = 40;
        let placed = self.register.ops.len() - self.left;
        if self.furthest.as_ref().is_some_and(|(furthest, _)| *furthest >= placed) {
            return;
        }
        let mut candidates = Vec::new();
        let mut node = self.next[self.end as usize];
        while node != self.end && is_invocation(node) {
            candidates.push(node / 2);
            node = self.next[node as usize];
        }
        candidates.sort_by_key(|op| self.register.ops[*op as usize].returned_ns);
        candidates.truncate(NEXT_SHOWN_MAX);
        let mut violation = self.register.violation(self.stuck_reason(state), candidates);
        let mut used = self.used.clone();
        for step in self.trail.iter().rev().take(PLACED_SHOWN_MAX) {
            let record = if step & OPTIONAL_BIT == 0 {
                self.register.record(*step)
            } else {
                let group = (step ^ OPTIONAL_BIT) as usize;
                used[group] -= 1;
                self.register.records[self.register.optional[group].calls[used[group] as usize].1 as usize]
            };
            violation.placed.push(record.clone());
        }
        violation.placed.reverse();
        self.furthest = Some((placed, violation));
    }
}
