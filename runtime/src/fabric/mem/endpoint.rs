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
    clock: Clock,
    /// When the link to each server is free again; used with a bandwidth limit.
    link_free_ns: Vec<u64>,
    arrived: VecDeque<(u64, Completion)>,
    nasty: Option<Nasty>,
}

impl MemEndpoint {
    pub(super) fn new(regions: Arc<Vec<Region>>, options: MemOptions, seed: u64, clock: Clock) -> Self {
        let link_free_ns = vec![0; regions.len()];
        let nasty = options.nasty.then(|| Nasty::new(seed, options.ordered_writes));
        Self { regions, options, clock, link_free_ns, arrived: VecDeque::new(), nasty }
    }

    fn is_timed(&self) -> bool {
        self.options.latency_ns != 0 || self.options.bandwidth_bytes_per_s != 0
    }

    /// When a request posted at `now_ns` may complete.
    fn due_ns(&mut self, request: &Request, now_ns: u64) -> u64 {
        let mut sent_ns = now_ns;
        let bandwidth = self.options.bandwidth_bytes_per_s;
        if let (1.., Some(free_ns)) = (bandwidth, self.link_free_ns.get_mut(request.at.server().index())) {
            let transfer_ns = u128::from(request.verb.bytes() as u64) * 1_000_000_000 / u128::from(bandwidth);
            *free_ns = now_ns.max(*free_ns) + transfer_ns as u64;
            sent_ns = *free_ns;
        }
        sent_ns + self.options.latency_ns
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
        let now_ns = if self.is_timed() { self.clock.now_ns() } else { 0 };
        for request in requests.drain(..) {
            let due_ns = if self.is_timed() { self.due_ns(&request, now_ns) } else { 0 };
            match &mut self.nasty {
                Some(nasty) => nasty.accept(&self.regions, request, due_ns),
                None => self.arrived.push_back((due_ns, execute(&self.regions, request))),
            }
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if let Some(nasty) = &mut self.nasty {
            nasty.step(&self.regions, &mut self.arrived);
        }
        if self.arrived.is_empty() {
            return;
        }
        if !self.is_timed() {
            completions.extend(self.arrived.drain(..).map(|(_, completion)| completion));
            return;
        }
        let now_ns = self.clock.now_ns();
        if self.nasty.is_none() && self.options.bandwidth_bytes_per_s == 0 {
            // Equal latencies: due in the order of posting.
            while self.arrived.front().is_some_and(|&(due_ns, _)| due_ns <= now_ns) {
                completions.extend(self.arrived.pop_front().map(|(_, completion)| completion));
            }
            return;
        }
        for _ in 0..self.arrived.len() {
            let Some((due_ns, completion)) = self.arrived.pop_front() else { break };
            if due_ns <= now_ns {
                completions.push(completion);
            } else {
                self.arrived.push_back((due_ns, completion));
            }
        }
    }

    fn next_due_ns(&self) -> Option<u64> {
        self.arrived.iter().map(|&(due_ns, _)| due_ns).min()
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

pub(super) fn outside(request: Request) -> Completion {
    let why = "the address is not inside the memory server's region, or not aligned to 8 bytes".into();
    let outcome = Err(Error::Fabric { what: request.verb.name(), at: request.at, why });
    Completion { ticket: request.ticket, outcome }
}

/// Executes a request at once. The fences give what a reliable connection gives: a WRITE is placed after all before it,
/// and what a READ returns is no older than what the READs completed before it returned.
fn execute(regions: &[Region], request: Request) -> Completion {
    let Some(words) = words_at(regions, request.at, request.verb.bytes()) else { return outside(request) };
    let done = match request.verb {
        Verb::Read(mut buffer) => {
            for (to, from) in buffer.iter_mut().zip(words) {
                *to = from.load(Ordering::Relaxed);
            }
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
    };
    Completion { ticket: request.ticket, outcome: Ok(done) }
}

pub(super) fn compare_swap(word: &AtomicU64, expected: u64, new: u64) -> u64 {
    match word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(previous) | Err(previous) => previous,
    }
}
