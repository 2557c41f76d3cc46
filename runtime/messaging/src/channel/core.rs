//! A channel's requests and what becomes of them: the slots, the connection that carries them, and who waits for what.

use std::{rc::Rc, time::Duration};

use super::{
    ChannelOptions, Host, Waiter,
    silence::Silence,
    waiting::{For, Line},
};
use crate::{
    connection::{Broken, Carrier, Connection, SendConfig, Source},
    error::Error,
    message::{FromServer, read_from_server},
    pieces::Outbound,
    protocol::{CHUNK_WORDS, Priority, WINDOW},
    spare::Spare,
};
use farlink_fabric::{Capabilities, Error as FabricError, Request, buffer::Buffer, ptr::ServerId};

/// Best-effort replies that one exchange takes, and their words.
const BEST_EFFORT_MAX: usize = 64;
const BEST_EFFORT_WORDS_MAX: usize = CHUNK_WORDS;
/// A best-effort message of at most so many words waits for others, until the turn's end or there are so many.
const COALESCE_WORDS: usize = 512;
const COALESCE_MESSAGES: usize = 32;
/// A slot keeps the memory of a message of at most so many words.
const SLOT_WORDS_MAX: usize = 16 << 10;

/// Why there is no reply.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// It was sent, and nobody can say what became of it.
    Unknown(Rc<str>),
    /// It was sent, and the memory server has given no sign of life for so long.
    Silent(Duration),
    /// It was not sent, or not taken.
    Missing(Rc<str>),
}

impl Failure {
    pub(super) fn into_error(self, server: ServerId) -> Error {
        match self {
            Self::Unknown(why) => Error::OutcomeUnknown { server, why: why.to_string() },
            Self::Silent(waited) => Error::NoAnswer { server, waited },
            Self::Missing(why) => FabricError::ServerMissing { server, why: why.to_string() }.into(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) enum Progress {
    #[default]
    Free,
    /// Not in a connection's queue.
    Waiting,
    Sent,
    Answered(Vec<u64>),
    Failed(Failure),
    /// Answered or failed, and nobody wanted to know.
    Over,
}

#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) progress: Progress,
    pub(super) message: Vec<u64>,
    pub(super) priority: Option<Priority>,
    pub(super) waiter: Option<Waiter>,
    /// Whoever asked does not wait any more.
    pub(super) abandoned: bool,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub(super) enum Phase {
    Connecting,
    Up,
    Down,
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) phase: Phase,
    pub(super) connection: Option<Connection>,
    pub(super) generation: u32,
    /// The incarnation of the memory server that was last heard of, and this worker's session there.
    pub(super) session: Option<(u64, u64)>,
    pub(super) slots: Slots,
    pub(super) next: u64,
    /// Everything below has been answered, or dropped.
    pub(super) lowest: u64,
    /// Who waits for room, by priority, and who for a connection.
    pub(super) waiting: [Line; 2],
    pub(super) connecting: Line,
    pub(super) spare: Spare,
    pub(super) options: ChannelOptions,
    /// Messages of more words go by rendezvous.
    pub(super) eager_words: usize,
    pub(super) dirty: bool,
    /// Exchanges without news, and since when.
    pub(super) idle_polls: u32,
    pub(super) idle_since_ns: u64,
    /// When it asked last, without waiting for anything.
    pub(super) asked_at_ns: u64,
    pub(super) silence: Silence,
    pub(super) failed_attempts: u32,
    pub(super) nacks: u64,
    /// The memory server has said that it takes nothing more.
    pub(super) has_goodbye: bool,
    pub(super) why_down: Rc<str>,
}

#[derive(Debug)]
pub(super) struct Slots(Vec<Slot>);

impl Slots {
    pub(super) fn of(&mut self, sequence: u64) -> &mut Slot {
        &mut self.0[sequence as usize % WINDOW]
    }
}

impl Source for Slots {
    fn message(&self, number: u64, begun: bool) -> Option<Outbound<'_>> {
        let slot = &self.0[number as usize % WINDOW];
        // The reply may come before its request was repeated.
        let is_wanted = begun || matches!(slot.progress, Progress::Sent);
        (is_wanted && slot.message.get(1) == Some(&number)).then(|| Outbound::of(&slot.message))
    }
}

/// What connections need of their worker.
pub(super) struct WorkerCarrier<'a> {
    host: &'a dyn Host,
    spare: &'a mut Spare,
}

impl Carrier for WorkerCarrier<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, FabricError> {
        self.host.buffer(words)
    }

    fn post(&mut self, request: Request) {
        self.host.post(request);
    }

    fn vector(&mut self) -> Vec<u64> {
        self.spare.take()
    }
}

impl Core {
    /// Without a connection; nothing was asked yet.
    pub(super) fn new(options: ChannelOptions, capabilities: &Capabilities) -> Self {
        Self {
            phase: Phase::Down,
            connection: None,
            generation: 0,
            session: None,
            slots: Slots((0..WINDOW).map(|_| Slot::default()).collect()),
            next: 1,
            lowest: 1,
            waiting: Default::default(),
            connecting: Line::default(),
            spare: Spare::new(WINDOW),
            options,
            eager_words: options.eager_words.unwrap_or(capabilities.eager_words),
            dirty: false,
            idle_polls: 0,
            idle_since_ns: 0,
            asked_at_ns: 0,
            silence: Silence::default(),
            failed_attempts: 0,
            nacks: 0,
            has_goodbye: false,
            why_down: "".into(),
        }
    }

    /// Receives and sends.
    pub(super) fn exchange(&mut self, host: &dyn Host) -> Result<(), Broken> {
        for priority in Priority::ALL {
            let (mut taken, mut words) = (0, 0);
            loop {
                let Some(connection) = &mut self.connection else { return Ok(()) };
                let carrier = &mut WorkerCarrier { host, spare: &mut self.spare };
                let Some(message) = connection.take(priority, carrier)? else { break };
                taken += 1;
                words += message.len();
                self.take_message(host, message);
                let enough = taken == BEST_EFFORT_MAX || words >= BEST_EFFORT_WORDS_MAX;
                if priority == Priority::BestEffort && enough {
                    self.dirty = true;
                    break;
                }
            }
        }
        let Some(connection) = &mut self.connection else { return Ok(()) };
        connection.check()?;
        let carrier = &mut WorkerCarrier { host, spare: &mut self.spare };
        if self.phase == Phase::Up && !self.has_goodbye {
            self.dirty |= connection.send_out(&self.slots, carrier)?.owes;
            connection.sent.clear();
        }
        connection.release(carrier);
        let moved = std::mem::take(&mut connection.words_moved);
        host.count_bytes(moved * 8);
        Ok(())
    }

    /// Whether the memory server has sent something that was not looked at.
    pub(super) fn has_messages(&self) -> bool {
        self.connection.as_ref().is_some_and(Connection::has_messages)
    }

    fn take_message(&mut self, host: &dyn Host, message: Vec<u64>) {
        match read_from_server(&message) {
            Ok(FromServer::Reply(reply)) => {
                let sequence = reply.sequence;
                let in_window = self.lowest <= sequence && sequence < self.next;
                if in_window && matches!(self.slots.of(sequence).progress, Progress::Sent) {
                    self.failed_attempts = 0;
                    self.settle(host, sequence, Progress::Answered(message));
                    return;
                }
            }
            Ok(FromServer::HelloAck { server, session }) => self.hello_ack(host, (server, session)),
            Ok(FromServer::Nack(_)) => self.nacks += 1,
            Ok(FromServer::Goodbye) => self.has_goodbye = true,
            Err(why) => {
                tracing::warn!(%why, "a malformed message of the memory server");
                self.nacks += 1;
            }
        }
        self.recycle(message);
    }

    pub(super) fn recycle(&mut self, message: Vec<u64>) {
        self.spare.put(message);
    }

    fn hello_ack(&mut self, host: &dyn Host, session: (u64, u64)) {
        // Not whether the server knows the worker: it may know it from a connection whose hello-ack was lost, in a session that
        // knows nothing of what was asked before.
        let same = self.session.replace(session) == Some(session);
        self.phase = Phase::Up;
        self.dirty = true;
        if let Some(connection) = &mut self.connection {
            // The hello-ack is nobody's message.
            connection.words_moved = 0;
            // The memory server sends its replies in the same way.
            let config = SendConfig { eager_words: self.eager_words, coalesce: self.options.coalesce };
            connection.post_control_word(config.word(), &mut WorkerCarrier { host, spare: &mut self.spare });
        }
        for sequence in self.lowest..self.next {
            match self.slots.of(sequence).progress {
                Progress::Sent if !same => {
                    let why = "it has lost what it knew of this worker";
                    self.settle(host, sequence, Progress::Failed(Failure::Unknown(why.into())));
                }
                Progress::Sent | Progress::Waiting => {
                    self.send(sequence);
                }
                _ => {}
            }
        }
        self.wake_connecting(host);
    }

    /// Puts a request in the connection's queue; true if it should not wait there for others.
    pub(super) fn send(&mut self, sequence: u64) -> bool {
        let slot = self.slots.of(sequence);
        let (Some(connection), Some(priority)) = (&mut self.connection, slot.priority) else { return false };
        connection.enqueue(priority, sequence);
        slot.progress = Progress::Sent;
        self.dirty = true;
        let is_small = self.options.coalesce && slot.message.len() <= COALESCE_WORDS;
        let unanswered = (self.next - self.lowest) as usize;
        !is_small
            || priority == Priority::Latency
            || connection.queued() >= (unanswered / 4).clamp(4, COALESCE_MESSAGES)
    }

    /// Everything unanswered fails.
    pub(super) fn fail(&mut self, host: &dyn Host, why: &str) {
        let why: Rc<str> = why.into();
        self.end(host, Rc::clone(&why), Failure::Unknown(why));
    }

    /// Everything unanswered was not taken: the memory server has ended in good order.
    pub(super) fn leave(&mut self, host: &dyn Host) {
        let why: Rc<str> = "it has ended, and has not taken the request".into();
        self.end(host, Rc::clone(&why), Failure::Missing(why));
    }

    /// Everything unanswered fails: the memory server has given no sign of life for so long.
    pub(super) fn fail_silent(&mut self, host: &dyn Host, waited: Duration) {
        let why =
            format!("it has given no sign of life for {} ms; continue or restart its process", waited.as_millis());
        self.end(host, why.into(), Failure::Silent(waited));
    }

    fn end(&mut self, host: &dyn Host, why: Rc<str>, of_sent: Failure) {
        self.phase = Phase::Down;
        self.why_down = Rc::clone(&why);
        for sequence in self.lowest..self.next {
            let failure = match self.slots.of(sequence).progress {
                Progress::Sent => of_sent.clone(),
                Progress::Waiting => Failure::Missing(Rc::clone(&why)),
                _ => continue,
            };
            self.settle(host, sequence, Progress::Failed(failure));
        }
        self.wake_connecting(host);
        self.waiting.iter_mut().for_each(|line| line.wake(usize::MAX, host));
    }

    /// A request has come to its end.
    fn settle(&mut self, host: &dyn Host, sequence: u64, end: Progress) {
        let slot = self.slots.of(sequence);
        slot.progress = end;
        if slot.abandoned {
            if let Progress::Answered(message) = std::mem::replace(&mut slot.progress, Progress::Over) {
                self.recycle(message);
            }
        } else if let Some(waiter) = slot.waiter.take() {
            waiter.wake(host.tasks());
        }
        self.advance(host);
    }

    /// Frees the slots that are over, in order, and lets those go on that wait for one.
    pub(super) fn advance(&mut self, host: &dyn Host) {
        let before = self.lowest;
        while self.lowest < self.next {
            let slot = self.slots.of(self.lowest);
            if !matches!(slot.progress, Progress::Over) {
                break;
            }
            slot.progress = Progress::Free;
            slot.abandoned = false;
            if slot.message.capacity() > SLOT_WORDS_MAX {
                self.spare.put(std::mem::take(&mut slot.message));
            }
            self.lowest += 1;
        }
        if self.lowest != before {
            self.let_in(host);
        }
    }

    /// Lets as many go on as there is room for.
    pub(super) fn let_in(&mut self, host: &dyn Host) {
        for priority in Priority::ALL {
            let room = window(priority).saturating_sub(self.next - self.lowest) as usize;
            self.waiting[priority.index()].wake(room, host);
        }
    }

    fn wake_connecting(&mut self, host: &dyn Host) {
        self.connecting.wake(usize::MAX, host);
    }

    /// Those who wait for this.
    pub(super) fn line(&mut self, what: For) -> &mut Line {
        match what {
            For::Room(priority) => &mut self.waiting[priority.index()],
            For::Connection => &mut self.connecting,
        }
    }
}

/// Requests from the oldest unanswered one on, up to one of this priority: the urgent ones have the last part for themselves.
pub(super) fn window(priority: Priority) -> u64 {
    match priority {
        Priority::Latency => WINDOW as u64,
        Priority::BestEffort => WINDOW as u64 * 7 / 8,
    }
}
