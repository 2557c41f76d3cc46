//! One thread of a message server: its turns, its sleep, and its reports.

use std::{cell::Cell, collections::HashMap, rc::Rc, time::Duration};

use super::{
    ServeMessages, Shared, Wait,
    counts::{RELAXED, ThreadCounts, bump},
    peers::Peer,
    requests::any_has_news,
};
use crate::{
    connection::{Carrier, Connection},
    load::Load,
    protocol::Priority,
    serve::{Finished, Replies, Service, Turn},
    session::Session,
};
use farlink_fabric::{
    Completion, Error as FabricError, Request as Post,
    buffer::{Buffer, Buffers},
    clock::Clock,
    connection::PeerId,
    listener::{Change, ServerEndpoint},
    sync::yield_thread,
};

/// Idle turns before a thread sleeps.
const IDLE_TURNS_MAX: u32 = 100;
/// Idle turns before a thread that polls offers its core, at each further one: the worker may be waiting for it.
const POLLS_MAX: u32 = 200;
/// Turns between two looks at the clock, while busy.
const TURNS_PER_CLOCK_SAMPLE: u32 = 64;
/// Requests after which it looks even so: with many of them, a turn is long.
const REQUESTS_PER_CLOCK_SAMPLE: usize = 64;

/// A sleep without peers, and any at most: not for ever, because what wakes it lies where others can write.
const LONG: Duration = Duration::from_secs(1);

/// The longest time there is stands for all that are longer.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// What connections need of their thread.
pub(super) struct EndpointCarrier<'a> {
    pub(super) endpoint: &'a mut dyn ServerEndpoint,
    pub(super) buffers: &'a Buffers,
    pub(super) outbox: &'a mut Vec<Post>,
    pub(super) replies: &'a Replies,
}

impl Carrier for EndpointCarrier<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, FabricError> {
        // SAFETY: the memory lives as long as the thread's `buffers`, which are dropped after its endpoint; only buffers refer to it.
        self.buffers.take(words, |base, words| unsafe { self.endpoint.register(base, words) })
    }

    fn post(&mut self, request: Post) {
        self.outbox.push(request);
    }

    fn vector(&mut self) -> Vec<u64> {
        self.replies.vector()
    }
}

pub(super) struct Thread {
    // The endpoint goes first, before what it may still use: the buffers, and the pieces of replies, which the service's worker keeps.
    pub(super) endpoint: Box<dyn ServerEndpoint>,
    pub(super) buffers: Buffers,
    pub(super) service: Box<dyn Service>,
    pub(super) outbox: Vec<Post>,
    pub(super) completions: Vec<Completion>,
    pub(super) changes: Vec<Change>,
    pub(super) replies: Rc<Replies>,
    pub(super) finished: Vec<Finished>,
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) sessions: Vec<Option<Session>>,
    pub(super) by_worker: HashMap<PeerId, usize>,
    pub(super) shared: Shared,
    pub(super) number: usize,
    pub(super) options: ServeMessages,
    pub(super) clock: Clock,
    pub(super) generation: u32,
    pub(super) first_peer: usize,
    pub(super) next_unique: u64,
    /// Connections that sessions have lost.
    pub(super) departures: u64,
    pub(super) report: u16,
    pub(super) reported_at_ns: u64,
    pub(super) checked_at_ns: u64,
    pub(super) busy_since_ns: Option<u64>,
    pub(super) busy_ns: u64,
    /// Since the last look at the clock.
    pub(super) handled: usize,
    /// Connections, and the most that there were at a time.
    pub(super) present: usize,
    pub(super) present_max: usize,
    /// It takes nothing more, and nobody.
    pub(super) is_ending: bool,
    pub(super) has_latest: Cell<bool>,
}

/// The connections' part of a thread, borrowed apart from the rest.
macro_rules! carrier {
    ($thread:expr) => {
        $crate::server::thread::EndpointCarrier {
            endpoint: &mut *$thread.endpoint,
            buffers: &$thread.buffers,
            outbox: &mut $thread.outbox,
            replies: &$thread.replies,
        }
    };
}

pub(super) use carrier;

impl Thread {
    pub(super) fn new(
        endpoint: Box<dyn ServerEndpoint>,
        service: Box<dyn Service>,
        shared: Shared,
        number: usize,
        options: ServeMessages,
        clock: Clock,
    ) -> Self {
        Self {
            service,
            endpoint,
            buffers: Buffers::default(),
            outbox: Vec::new(),
            completions: Vec::new(),
            changes: Vec::new(),
            replies: Rc::default(),
            finished: Vec::new(),
            peers: Vec::new(),
            sessions: Vec::new(),
            by_worker: HashMap::new(),
            shared,
            number,
            options,
            clock,
            generation: 0,
            first_peer: 0,
            // Sessions of other threads have other numbers.
            next_unique: (number as u64) << 48,
            departures: 0,
            report: 0,
            reported_at_ns: 0,
            checked_at_ns: 0,
            busy_since_ns: None,
            busy_ns: 0,
            handled: 0,
            present: 0,
            present_max: 0,
            is_ending: false,
            has_latest: Cell::new(false),
        }
    }

    pub(super) fn counts(&self) -> &ThreadCounts {
        &self.shared.threads[self.number]
    }

    fn is_stopping(&self) -> bool {
        self.shared.stop.load(std::sync::atomic::Ordering::Acquire)
    }

    pub(super) fn run(&mut self) {
        let (mut idle_turns, mut turns) = (0u32, 0u32);
        while !self.is_stopping() {
            // A turn with something to do is busy from its beginning on.
            let began_ns = self.busy_since_ns.or_else(|| Some(self.clock.now_ns()));
            let progress = self.turn();
            turns = turns.wrapping_add(1);
            if progress {
                idle_turns = 0;
                self.busy_since_ns = began_ns;
                if turns.is_multiple_of(TURNS_PER_CLOCK_SAMPLE) || self.handled >= REQUESTS_PER_CLOCK_SAMPLE {
                    self.sample_clock();
                }
                continue;
            }
            idle_turns += 1;
            // Once it yields, a turn may take as long as all others that want the core.
            if idle_turns == 1 || idle_turns > POLLS_MAX || idle_turns.is_multiple_of(TURNS_PER_CLOCK_SAMPLE) {
                self.sample_clock();
            }
            if idle_turns > IDLE_TURNS_MAX && self.may_sleep() {
                self.sleep();
            } else if idle_turns > POLLS_MAX {
                yield_thread();
            } else {
                std::hint::spin_loop();
            }
        }
        self.end_in_order();
        self.close_all();
    }

    pub(super) fn close_all(&mut self) {
        for index in 0..self.peers.len() {
            self.close(index);
        }
    }

    /// One turn of a thread that is turned by hand; false if there was nothing to do. A turn with something to do counts as busy
    /// until the next: no time passes in it where time is virtual.
    pub(super) fn turn_by_hand(&mut self) -> bool {
        let progress = self.turn();
        self.sample_clock();
        self.busy_since_ns = progress.then(|| self.clock.now_ns());
        progress
    }

    /// One turn; false if there was nothing to do.
    pub(super) fn turn(&mut self) -> bool {
        let mut progress = self.take_changes(false);
        progress |= self.take_requests(Priority::Latency);
        progress |= self.take_requests(Priority::BestEffort);
        let busy = self.service.turn() == Turn::Busy;
        self.has_latest.set(busy);
        progress |= self.take_replies();
        progress |= self.send();
        progress |= !self.outbox.is_empty();
        self.exchange();
        progress
    }

    pub(super) fn exchange(&mut self) {
        if !self.outbox.is_empty() {
            self.endpoint.ring(&mut self.outbox);
        }
        self.endpoint.poll(&mut self.completions);
        for completion in self.completions.drain(..) {
            let index = Connection::other_of(completion.ticket).index();
            if let Some(Some(peer)) = self.peers.get_mut(index) {
                peer.dirty = true;
                peer.connection.complete(completion);
            }
        }
    }

    pub(super) fn sample_clock(&mut self) {
        self.handled = 0;
        let now_ns = self.clock.now_ns();
        if let Some(since_ns) = self.busy_since_ns.take() {
            self.busy_ns += now_ns.saturating_sub(since_ns);
        }
        let interval_ns = nanos(self.options.report_interval);
        if now_ns - self.checked_at_ns >= interval_ns.saturating_mul(10) {
            self.checked_at_ns = now_ns;
            self.take_changes(true);
            self.drop_silent(now_ns);
        }
        if now_ns - self.reported_at_ns >= interval_ns {
            self.report_load(now_ns);
        }
    }

    fn report_load(&mut self, now_ns: u64) {
        let passed_ns = (now_ns - self.reported_at_ns).max(1);
        let busy = (self.busy_ns.saturating_mul(1000) / passed_ns).min(1000);
        (self.busy_ns, self.reported_at_ns) = (0, now_ns);
        self.counts().busy_permille.store(busy, RELAXED);
        let threads = &self.shared.threads;
        let sum = |of: fn(&ThreadCounts) -> u64| threads.iter().map(|thread| of(thread)).sum::<u64>();
        self.report = self.report.wrapping_add(1).max(1);
        let load = Load {
            report: self.report,
            busy_permille: (sum(|thread| thread.busy_permille.load(RELAXED)) / threads.len() as u64) as u16,
            threads: threads.len() as u16,
            peers: sum(|thread| thread.peers_now.load(RELAXED)).min(u64::from(u16::MAX)) as u16,
        };
        // Where each takes long, there would always be one under way, and never have all arrived.
        for peer in self.peers.iter_mut().flatten().filter(|peer| !peer.connection.is_telling()) {
            peer.connection.post_control_word(load.word(), &mut carrier!(self));
        }
    }

    /// Drops peers that leave what is theirs where it is.
    fn drop_silent(&mut self, now_ns: u64) {
        let silence_max_ns = nanos(self.options.silence_max);
        for index in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[index] else { continue };
            // A reply with pieces holds back what the region reuses.
            let since_ns = self.sessions[peer.session].as_mut().and_then(|session| session.held_since_ns(now_ns));
            if since_ns.is_some_and(|since_ns| now_ns.saturating_sub(since_ns) > silence_max_ns) {
                tracing::warn!(peer = index, "dropped a peer that took too long over a reply with pieces");
                bump(&self.counts().dropped, 1);
                self.close(index);
                continue;
            }
            let trace = peer.connection.trace();
            if trace != peer.trace || !peer.connection.is_sending() {
                (peer.trace, peer.moved_at_ns) = (trace, now_ns);
            } else if now_ns.saturating_sub(peer.moved_at_ns) > silence_max_ns {
                tracing::warn!(peer = index, "dropped a peer that does not take its replies");
                bump(&self.counts().dropped, 1);
                self.close(index);
            }
        }
    }

    fn may_sleep(&self) -> bool {
        let event = match self.options.wait {
            Wait::Event => true,
            Wait::Poll => self.present == 0,
            Wait::Auto => {
                let peers: u64 = self.shared.threads.iter().map(|thread| thread.peers_now.load(RELAXED)).sum();
                self.present == 0 || peers as usize >= self.shared.cores
            }
        };
        // Nobody rings for completions.
        event
            && !self.has_latest.get()
            && !self.peers.iter().flatten().any(|peer| peer.dirty || peer.connection.is_waiting())
    }

    fn sleep(&mut self) {
        bump(&self.counts().sleeps, 1);
        let limit = if self.present == 0 { LONG } else { self.options.report_interval.min(LONG) };
        let (peers, sessions, shared, replies) = (&self.peers, &self.sessions, &self.shared, &self.replies);
        self.endpoint.sleep(limit, &mut || {
            shared.stop.load(std::sync::atomic::Ordering::Acquire)
                || !replies.finished.borrow().is_empty()
                || any_has_news(peers, sessions)
        });
        self.sample_clock();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{
        message::REPLY_HEADER,
        serve::{Address, Request, Responder},
        server::SharedState,
    };
    use farlink_fabric::{
        listener::ListenOptions,
        mem::{MemFabric, MemOptions},
        ptr::ServerId,
        region::Region,
    };

    const TURNS: u64 = 3 * POLLS_MAX as u64;

    fn thread_of(serve: impl FnOnce(&Clock, &Shared, &Rc<Replies>) -> Box<dyn Service>) -> Thread {
        let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
        let listener = fabric.listen(ServerId::new(0).unwrap(), &ListenOptions::default()).unwrap();
        let (clock, shared, replies) =
            (Clock::Virtual(Rc::default()), SharedState::new(1, 1), Rc::<Replies>::default());
        let endpoint = listener.endpoint(0, 1, clock.clone()).unwrap();
        let service = serve(&clock, &shared, &replies);
        let thread = Thread::new(endpoint, service, shared, 0, ServeMessages::default(), clock);
        Thread { replies, ..thread }
    }

    /// It waits for something else, and each of its turns takes as long as the time between two reports.
    struct Waits {
        clock: Clock,
        shared: Shared,
        turns: u64,
    }

    impl Service for Waits {
        fn handle(&mut self, _: Request<'_>, _: Responder) {}

        fn turn(&mut self) -> Turn {
            self.turns += 1;
            self.clock.skip_to(self.turns * ServeMessages::default().report_interval.as_nanos() as u64);
            self.shared.stop.store(self.turns == TURNS, std::sync::atomic::Ordering::Release);
            Turn::Busy
        }
    }

    /// Answers somebody in every sixth turn, which takes 500 us. A turn with nothing to do takes 100 us.
    struct Answers {
        clock: Clock,
        shared: Shared,
        replies: Rc<Replies>,
        turns: u64,
    }

    impl Service for Answers {
        fn handle(&mut self, _: Request<'_>, _: Responder) {}

        fn turn(&mut self) -> Turn {
            self.turns += 1;
            let answers = self.turns.is_multiple_of(6);
            self.clock.skip_to(self.clock.now_ns() + if answers { 500_000 } else { 100_000 });
            if answers {
                let to = Address { session: 0, unique: 0, sequence: 0, index: 0 };
                self.replies.finished.borrow_mut().push(Finished { to, words: vec![0; REPLY_HEADER + 1], held: None });
            }
            self.shared.stop.store(self.turns == TURNS, std::sync::atomic::Ordering::Release);
            Turn::Idle
        }
    }

    /// And what the next turn took, behind which it looks at the clock.
    #[test]
    fn a_thread_reports_what_its_turns_with_something_to_do_took() {
        let mut thread = thread_of(|clock, shared, replies| {
            Box::new(Answers { clock: clock.clone(), shared: shared.clone(), replies: Rc::clone(replies), turns: 0 })
        });
        thread.run();
        let busy = thread.counts().busy_permille.load(RELAXED);
        assert!((500..=600).contains(&busy), "{busy} of 1000");
    }

    /// Where other threads want its core, each yield takes milliseconds: it still says that it lives.
    #[test]
    fn a_thread_that_yields_reports_at_each_turn() {
        let mut thread =
            thread_of(|clock, shared, _| Box::new(Waits { clock: clock.clone(), shared: shared.clone(), turns: 0 }));
        thread.run();
        assert!(u64::from(thread.report) >= TURNS - u64::from(POLLS_MAX), "{} reports", thread.report);
    }
}
