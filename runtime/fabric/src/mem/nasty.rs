//! Nasty mode: all that one-sided access permits, on purpose and from a seed.
//!
//! A READ or WRITE, gathered or not, becomes a step per cache line, or a few, taken in shuffled order, its words shuffled too; each poll takes a few
//! steps of the pending requests at random, and now and then lets other threads run in mid-line. Completions wait for a
//! random number of polls. What is kept, because a reliable connection keeps it (unless
//! [`ordered_writes`](super::MemOptions::ordered_writes) is off): a request to a server does not begin before all earlier
//! WRITEs and atomics of this endpoint to that server are placed.
//!
//! Without [`atomic_against_writes`](super::MemOptions::atomic_against_writes) an atomic reads its word and writes it back,
//! changed or not; a WRITE that comes in between is lost. Only in memory of one process: in files it is the processor's.

use std::time::{Duration, Instant};

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use super::{
    MemOptions,
    endpoint::{Space, closed, compare_swap, not_gathered, outside},
};
use crate::{
    endpoint::{Completion, Done, Request, Verb},
    ptr::{RemotePtr, ServerId},
    sync::{AtomicU64, Mutex, Ordering, fence, lock, yield_thread},
};

const WORDS_PER_LINE: usize = 8;

/// Letting others run may take so long; for each time that it has taken longer by, it is left out once.
const REST_MAX: Duration = Duration::from_micros(100);
/// Left out so often at most.
const LEFT_OUT_MAX: u32 = 64;

#[derive(Debug)]
struct Pending {
    request: Request,
    due_ns: u64,
    /// Lines still to move, in the order they will be (from the back); empty and `done` unset for an atomic.
    lines: Vec<u16>,
    /// Of the line that is being moved, the words still to move.
    line: Line,
    done: Option<Done>,
    /// Polls to wait after the last step.
    hold: u32,
}

impl Pending {
    fn is_read(&self) -> bool {
        matches!(self.request.verb, Verb::Read(_))
    }

    fn is_placed(&self) -> bool {
        let moves_lines = matches!(self.request.verb, Verb::Read(_) | Verb::Write(_) | Verb::Gather(_));
        self.done.is_some() || (self.lines.is_empty() && self.line.is_empty() && moves_lines)
    }
}

/// Lets other threads run, seldom where that takes long: besides what computes on the same core and never rests, each time
/// costs milliseconds, and little else would happen.
#[derive(Debug, Default)]
struct Rest {
    left_out: u32,
}

impl Rest {
    fn rest(&mut self) {
        if self.left_out > 0 {
            self.left_out -= 1;
            return;
        }
        let begun = Instant::now();
        yield_thread();
        let times = begun.elapsed().as_nanos() / REST_MAX.as_nanos();
        self.left_out = u32::try_from(times).unwrap_or(u32::MAX).min(LEFT_OUT_MAX);
    }
}

#[derive(Debug)]
pub(super) struct Nasty {
    rng: StdRng,
    rest: Rest,
    ordered: bool,
    /// Whether an atomic undoes WRITEs that come in its midst, where that can be had.
    overwrites: bool,
    pending: Vec<Pending>,
    refused: Vec<(u64, Completion)>,
}

impl Nasty {
    pub(super) fn new(seed: u64, options: &MemOptions) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            rest: Rest::default(),
            ordered: options.ordered_writes,
            overwrites: !options.atomic_against_writes,
            pending: Vec::new(),
            refused: Vec::new(),
        }
    }

    pub(super) fn accept(&mut self, space: &Space, request: Request, due_ns: u64) {
        if space.words_at(request.at, request.verb.bytes()).is_none() {
            let outcome = Err(outside(request.at, &request.verb));
            self.refused.push((due_ns, Completion { ticket: request.ticket, outcome }));
            return;
        }
        if let Verb::Gather(gather) = &request.verb
            && space.source_of(gather).is_none()
        {
            let outcome = Err(not_gathered(request.at, gather));
            self.refused.push((due_ns, Completion { ticket: request.ticket, outcome }));
            return;
        }
        let lines = match &request.verb {
            Verb::Read(_) | Verb::Write(_) | Verb::Gather(_) => {
                let mut lines: Vec<u16> = (0..lines_of(&request, request.verb.bytes() / 8)).collect();
                lines.shuffle(&mut self.rng);
                lines
            }
            _ => Vec::new(),
        };
        let hold = if self.rng.random_ratio(1, 4) { self.rng.random_range(1..16) } else { 0 };
        self.pending.push(Pending { request, due_ns, lines, line: Line::default(), done: None, hold });
    }

    /// Ends what is under way to a connection that is closed.
    pub(super) fn abort(&mut self, is_aborted: impl Fn(&Request) -> bool) {
        for Pending { request, due_ns, .. } in self.pending.extract_if(.., |pending| is_aborted(&pending.request)) {
            let outcome = Err(closed(request.at, &request.verb));
            self.refused.push((due_ns, Completion { ticket: request.ticket, outcome }));
        }
    }

    /// Takes some steps and moves what has completed to `executed`.
    pub(super) fn step(&mut self, space: &Space, executed: &mut Vec<(u64, Completion)>) {
        executed.append(&mut self.refused);
        let steps = self.rng.random_range(1..=8 + 4 * self.pending.len());
        let mut eligible = self.eligible();
        for _ in 0..steps {
            let Some(&index) = eligible.get(self.rng.next_u32() as usize % eligible.len().max(1)) else { break };
            self.advance(space, index);
            if self.pending[index].is_placed() {
                eligible = self.eligible();
            }
            if self.rng.random_ratio(1, 16) {
                self.rest.rest();
            }
        }
        let mut index = 0;
        while index < self.pending.len() {
            let pending = &mut self.pending[index];
            if pending.is_placed() && pending.hold == 0 {
                let Pending { request, due_ns, done, .. } = self.pending.remove(index);
                let done = done.unwrap_or_else(|| match request.verb {
                    Verb::Read(buffer) => Done::Read(buffer),
                    _ => Done::Written,
                });
                let outcome = space.lost(request.at).map_or(Ok(done), Err);
                let completion = Completion { ticket: request.ticket, outcome };
                executed.push((due_ns, completion));
            } else {
                pending.hold = pending.hold.saturating_sub(u32::from(pending.is_placed()));
                index += 1;
            }
        }
    }

    /// The requests of which a line, or all, may be carried out next.
    fn eligible(&self) -> Vec<usize> {
        let mut held_back: Vec<ServerId> = Vec::new();
        let is_eligible = |pending: &Pending| {
            let server = pending.request.at.server();
            let is_held_back = held_back.contains(&server);
            if self.ordered && !is_held_back && !pending.is_read() && !pending.is_placed() {
                held_back.push(server);
            }
            !is_held_back && !pending.is_placed()
        };
        self.pending.iter().map(is_eligible).enumerate().filter_map(|(index, is)| is.then_some(index)).collect()
    }

    fn advance(&mut self, space: &Space, index: usize) {
        let pending = &mut self.pending[index];
        let at = pending.request.at;
        let Some(words) = space.words_at(at, pending.request.verb.bytes()) else { return };
        if space.own_lost().is_some() {
            // It is over, and fails.
            (pending.lines, pending.line, pending.done) = (Vec::new(), Line::default(), Some(Done::Written));
            return;
        }
        match &mut pending.request.verb {
            Verb::Read(buffer) => {
                pending.line.step(&mut pending.lines, at, buffer.len(), (&mut self.rng, &mut self.rest), |word| {
                    buffer[word] = words[word].load(Ordering::Relaxed);
                });
                fence(Ordering::Acquire);
            }
            Verb::Write(buffer) => {
                fence(Ordering::Release);
                pending.line.step(&mut pending.lines, at, buffer.len(), (&mut self.rng, &mut self.rest), |word| {
                    words[word].store(buffer[word], Ordering::Relaxed);
                });
            }
            Verb::Gather(gather) => {
                fence(Ordering::Release);
                let own = space.source_of(gather);
                pending.line.step(&mut pending.lines, at, gather.words(), (&mut self.rng, &mut self.rest), |word| {
                    if let Some(own) = own {
                        words[word].store(gather.word(own, word).unwrap_or_default(), Ordering::Relaxed);
                    }
                });
            }
            verb => {
                let order = if self.overwrites { space.atomics(at) } else { None };
                pending.done = Some(match order {
                    Some(order) => execute_in_two_steps(&words[0], verb, order, (&mut self.rng, &mut self.rest)),
                    None => execute_word(&words[0], verb),
                });
                if matches!(verb, Verb::Notify(_)) {
                    space.notify(at);
                }
            }
        }
    }
}

fn execute_word(word: &AtomicU64, verb: &Verb) -> Done {
    match *verb {
        Verb::CompareSwap { expected, new } => Done::Previous(compare_swap(word, expected, new)),
        Verb::FetchAdd(add) => Done::Previous(word.fetch_add(add, Ordering::AcqRel)),
        Verb::WriteWord(value) | Verb::Notify(value) => {
            word.store(value, Ordering::Release);
            Done::Written
        }
        Verb::Read(_) | Verb::Write(_) | Verb::Gather(_) => Done::Written,
    }
}

/// [`execute_word`], by which atomics are atomic against each other only: what the word was, or became, is written back.
fn execute_in_two_steps(
    word: &AtomicU64,
    verb: &Verb,
    order: &Mutex<()>,
    (rng, rest): (&mut StdRng, &mut Rest),
) -> Done {
    let change: &dyn Fn(u64) -> u64 = match *verb {
        Verb::CompareSwap { expected, new } => &move |found| if found == expected { new } else { found },
        Verb::FetchAdd(add) => &move |found| found.wrapping_add(add),
        _ => return execute_word(word, verb),
    };
    let _alone = lock(order);
    let found = word.load(Ordering::Acquire);
    if rng.random_ratio(1, 8) {
        rest.rest();
    }
    word.store(change(found), Ordering::Release);
    Done::Previous(found)
}

/// The position of a request's first word in its cache line.
fn first_in_line(offset: u64) -> usize {
    (offset / 8) as usize % WORDS_PER_LINE
}

fn lines_of(request: &Request, words: usize) -> u16 {
    (first_in_line(request.at.offset()) + words).div_ceil(WORDS_PER_LINE) as u16
}

/// Words of one cache line of a request, by their place in the request.
#[derive(Debug, Default)]
struct Line {
    words: [usize; WORDS_PER_LINE],
    left: usize,
}

impl Line {
    fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// The words of a line that lie in a request, in shuffled order.
    fn of(line: u16, at: RemotePtr, words: usize, rng: &mut StdRng) -> Self {
        let line_start = usize::from(line) * WORDS_PER_LINE;
        let mut order: [usize; WORDS_PER_LINE] = std::array::from_fn(|word| word);
        order.shuffle(rng);
        let mut found = Self::default();
        for word in order {
            if let Some(index) = (line_start + word).checked_sub(first_in_line(at.offset()))
                && index < words
            {
                found.words[found.left] = index;
                found.left += 1;
            }
        }
        found
    }

    /// Calls `move_word` for what is left of this line, or for a part of it; if nothing is, for the next of `lines`.
    fn step(
        &mut self,
        lines: &mut Vec<u16>,
        at: RemotePtr,
        words: usize,
        (rng, rest): (&mut StdRng, &mut Rest),
        mut move_word: impl FnMut(usize),
    ) {
        if self.is_empty() {
            let Some(line) = lines.pop() else { return };
            *self = Self::of(line, at, words, rng);
        }
        let stays = if rng.random_ratio(1, 4) { rng.random_range(0..self.left) } else { 0 };
        while self.left > stays {
            self.left -= 1;
            move_word(self.words[self.left]);
            if rng.random_ratio(1, 64) {
                rest.rest();
            }
        }
    }
}
