//! An endpoint of the `mem` fabric: executes requests, and hands out completions when they are due.

use std::{collections::VecDeque, ptr::NonNull};

use super::{MemOptions, nasty::Nasty, region::Region};
use crate::{
    clock::Clock,
    error::Error,
    fabric::{Capabilities, Completion, Done, Endpoint, LocalKey, Request, Verb},
    ptr::RemotePtr,
    sync::{Arc, AtomicU64, Ordering, fence},
};

#[derive(Debug)]
pub(super) struct MemEndpoint {
    regions: Arc<Vec<Region>>,
    options: MemOptions,
    mode: Mode,
}

#[derive(Debug)]
enum Mode {
    /// Requests are executed at the doorbell.
    Direct {
        done: Vec<Completion>,
    },
    /// Requests are executed when they are due.
    Timed(Timed),
    Nasty {
        nasty: Box<Nasty>,
        timed: Timed,
    },
}

/// Requests, or what they came to, on their way.
#[derive(Debug)]
struct Timed {
    clock: Clock,
    /// The time at the doorbell, until the poll that follows: one reading of the clock serves both.
    rung_at_ns: Option<u64>,
    /// When the link to each server is free again.
    link_free_ns: Vec<u64>,
    waiting: VecDeque<(u64, Request)>,
    /// What nasty mode has executed already.
    executed: Vec<(u64, Completion)>,
}

impl Timed {
    /// When a request posted at `now_ns` is due.
    fn due_ns(&mut self, options: &MemOptions, request: &Request, now_ns: u64) -> u64 {
        let mut sent_ns = now_ns;
        let bandwidth = options.bandwidth_bytes_per_s;
        if let (1.., Some(free_ns)) = (bandwidth, self.link_free_ns.get_mut(request.at.server().index())) {
            let transfer_ns = u128::from(request.verb.bytes() as u64) * 1_000_000_000 / u128::from(bandwidth);
            *free_ns = now_ns.max(*free_ns) + transfer_ns as u64;
            sent_ns = *free_ns;
        }
        sent_ns + options.latency_ns
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.executed.is_empty()
    }

    /// Now, or at the doorbell just before.
    fn now_ns(&mut self, options: &MemOptions) -> u64 {
        match self.rung_at_ns.take() {
            _ if !options.is_timed() => 0,
            Some(rung_at_ns) => rung_at_ns,
            None => self.clock.now_ns(),
        }
    }
}

impl MemEndpoint {
    pub(super) fn new(regions: Arc<Vec<Region>>, options: MemOptions, seed: u64, clock: Clock) -> Self {
        let timed = Timed {
            clock,
            rung_at_ns: None,
            link_free_ns: vec![0; regions.len()],
            waiting: VecDeque::new(),
            executed: Vec::new(),
        };
        let mode = match options {
            MemOptions { nasty: true, .. } => {
                Mode::Nasty { nasty: Box::new(Nasty::new(seed, options.ordered_writes)), timed }
            }
            _ if options.is_timed() => Mode::Timed(timed),
            _ => Mode::Direct { done: Vec::new() },
        };
        Self { regions, options, mode }
    }
}

impl Endpoint for MemEndpoint {
    fn capabilities(&self) -> Capabilities {
        self.options.capabilities()
    }

    fn register(&mut self, _base: NonNull<u64>, _words: usize) -> Result<LocalKey, Error> {
        Ok(LocalKey::default())
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        if requests.len() > 1 || self.options.is_timed() {
            // As a card would fetch ahead, so that the processor waits for memory once, not for each request.
            requests.iter().for_each(|request| prefetch(&self.regions, request));
        }
        match &mut self.mode {
            Mode::Direct { done } => {
                for Request { ticket, at, verb } in requests.drain(..) {
                    done.push(Completion { ticket, outcome: execute(&self.regions, at, verb) });
                }
            }
            Mode::Timed(timed) => {
                let now_ns = timed.clock.now_ns();
                timed.rung_at_ns = Some(now_ns);
                for request in requests.drain(..) {
                    let due_ns = timed.due_ns(&self.options, &request, now_ns);
                    timed.waiting.push_back((due_ns, request));
                }
            }
            Mode::Nasty { nasty, timed } => {
                let now_ns = timed.now_ns(&self.options);
                for request in requests.drain(..) {
                    let due_ns =
                        if self.options.is_timed() { timed.due_ns(&self.options, &request, now_ns) } else { 0 };
                    nasty.accept(&self.regions, request, due_ns);
                }
            }
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let timed = match &mut self.mode {
            Mode::Direct { done } => return completions.append(done),
            Mode::Timed(timed) => timed,
            Mode::Nasty { nasty, timed } => {
                nasty.step(&self.regions, &mut timed.executed);
                timed
            }
        };
        if timed.is_idle() {
            return;
        }
        let now_ns = timed.now_ns(&self.options);
        // To one server, requests are due in the order of their posting. With a limited bandwidth, another server's may
        // have to wait behind them: a request is never early.
        while let Some((_, Request { ticket, at, verb })) =
            timed.waiting.pop_front_if(|&mut (due_ns, _)| due_ns <= now_ns)
        {
            completions.push(Completion { ticket, outcome: execute(&self.regions, at, verb) });
        }
        let due = timed.executed.extract_if(.., |&mut (due_ns, _)| due_ns <= now_ns);
        completions.extend(due.map(|(_, completion)| completion));
    }

    fn next_due_ns(&self) -> Option<u64> {
        match &self.mode {
            Mode::Direct { .. } => None,
            Mode::Timed(timed) | Mode::Nasty { timed, .. } => {
                let executed = timed.executed.iter().map(|&(due_ns, _)| due_ns).min();
                timed.waiting.front().map(|&(due_ns, _)| due_ns).into_iter().chain(executed).min()
            }
        }
    }
}

/// Asks the processor for the cache lines that a READ will copy.
fn prefetch(regions: &[Region], request: &Request) {
    let Verb::Read(buffer) = &request.verb else { return };
    let Some(words) = words_at(regions, request.at, buffer.len() * 8) else { return };
    for line in (0..words.len()).step_by(8) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch reads nothing and cannot fault; SSE is part of x86-64.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().wrapping_add(line).cast());
        }
        let _ = line;
    }
}

/// Copies word by word, a cache line at a time.
fn copy_out(from: &[AtomicU64], to: &mut [u64]) {
    let (lines, rest) = to.as_chunks_mut::<8>();
    let (from_lines, from_rest) = from.as_chunks::<8>();
    for (to, from) in lines.iter_mut().zip(from_lines) {
        *to = std::array::from_fn(|word| from[word].load(Ordering::Relaxed));
    }
    for (to, from) in rest.iter_mut().zip(from_rest) {
        *to = from.load(Ordering::Relaxed);
    }
}

/// The words that a request covers, if they lie inside the region of its server.
pub(super) fn words_at(regions: &[Region], at: RemotePtr, bytes: usize) -> Option<&[AtomicU64]> {
    let words = regions.get(at.server().index())?.words();
    let first = usize::try_from(at.offset() / 8).ok()?;
    if !at.offset().is_multiple_of(8) {
        return None;
    }
    words.get(first..first.checked_add(bytes / 8)?)
}

pub(super) fn outside(at: RemotePtr, verb: &Verb) -> Box<Error> {
    let why = "the address is not inside the memory server's region, or not aligned to 8 bytes".into();
    Box::new(Error::Fabric { what: verb.name(), at, why })
}

/// Executes a request at once. The fences give what a reliable connection gives: a WRITE is placed after all before it,
/// and what a READ returns is no older than what the READs completed before it returned.
// Inlined: its result would otherwise be written in words and read back as a vector, which stalls the processor.
#[inline(always)]
fn execute(regions: &[Region], at: RemotePtr, verb: Verb) -> Result<Done, Box<Error>> {
    let Some(words) = words_at(regions, at, verb.bytes()) else { return Err(outside(at, &verb)) };
    Ok(match verb {
        Verb::Read(mut buffer) => {
            copy_out(words, &mut buffer);
            fence(Ordering::Acquire);
            Done::Read(buffer)
        }
        Verb::Write(buffer) => {
            fence(Ordering::Release);
            for (to, from) in words.iter().zip(buffer.iter()) {
                to.store(*from, Ordering::Relaxed);
            }
            Done::Written
        }
        Verb::WriteWord(word) => {
            words[0].store(word, Ordering::Release);
            Done::Written
        }
        Verb::CompareSwap { expected, new } => Done::Previous(compare_swap(&words[0], expected, new)),
        Verb::FetchAdd(add) => Done::Previous(words[0].fetch_add(add, Ordering::AcqRel)),
    })
}

pub(super) fn compare_swap(word: &AtomicU64, expected: u64, new: u64) -> u64 {
    match word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(previous) | Err(previous) => previous,
    }
}
