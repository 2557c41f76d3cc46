//! A worker's side: requests, their replies, and what happens when a link is lost.
//!
//! A worker has one channel to each memory server, whoever asks for it. Requests are numbered and wait in slots, with
//! their words, until their replies have come: so they can be sent again. The worker looks at its channels at every exchange
//! ([`Channels::turn`]); all that tasks have asked for since the last one goes out together.
//!
//! When the memory server has dismissed the link, the worker connects again. If the same server answers and still has the
//! session, everything unanswered is sent again, and nothing is done twice. If it is another incarnation, or it is gone, what
//! was sent and not answered ends in [`Error::OutcomeUnknown`].

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    fmt,
    future::{Future, poll_fn},
    ops::Range,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use super::{
    Kind, Load, MESSAGE_WORDS_MAX, Priority, Refusal, WINDOW,
    link::{Broken, Carrier, HowToSend, Item, Link, Sending, Source},
    message::{FromServer, ITEMS_MAX, ReplyItem, ReplyView, begin_request, push_item, read_from_server},
};
use crate::{
    buffer::Buffer,
    error::Error,
    fabric::{
        Completion, Request,
        link::{LinkState, PeerId},
    },
    ptr::ServerId,
    wire::{Wire, decode_all},
    worker::{Handle, Inner, counters::add, ops::Waiter},
};

/// Exchanges without news after which a channel that waits asks what has become of its link.
const LOOKS_MAX: u32 = 4096;
/// Links that may be lost one after another without a single reply.
const FRUITLESS_MAX: u32 = 3;
/// Best-effort replies that one exchange takes.
const BEST_EFFORT_MAX: usize = 16;
/// Vectors that are kept, and words of the largest.
const SPARE_MAX: usize = 64;
const SPARE_WORDS_MAX: usize = 4 << 20;

/// From which size on a message is announced and fetched instead of written into the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SwitchOver {
    /// As measured, once, by the first channel of the compute server.
    #[default]
    Measured,
    /// Messages of more than so many words; `usize::MAX` for none.
    Above(usize),
}

/// How a channel sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// When to announce.
    pub switch_over: SwitchOver,
    /// Sends several requests in one write, and gets several replies in one.
    pub coalesce: bool,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        Self { switch_over: SwitchOver::Measured, coalesce: true }
    }
}

/// Why there is no reply.
#[derive(Debug, Clone)]
enum Failure {
    /// It was sent, and nobody can say what became of it.
    Unknown(Rc<str>),
    /// It was not sent.
    Missing(Rc<str>),
}

impl Failure {
    fn into_error(self, server: ServerId) -> Error {
        match self {
            Self::Unknown(why) => Error::OutcomeUnknown { server, why: why.to_string() },
            Self::Missing(why) => Error::ServerMissing { server, why: why.to_string() },
        }
    }
}

#[derive(Debug, Default)]
enum Progress {
    #[default]
    Free,
    /// Not in a link's queue.
    Waiting,
    Sent,
    Answered(Vec<u64>),
    Failed(Failure),
    /// Answered or failed, and nobody wanted to know.
    Over,
}

#[derive(Debug, Default)]
struct Slot {
    progress: Progress,
    message: Vec<u64>,
    priority: Option<Priority>,
    waiter: Option<Waiter>,
    /// Whoever asked does not wait any more.
    abandoned: bool,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Phase {
    Connecting,
    Up,
    Down,
}

#[derive(Debug)]
struct Core {
    phase: Phase,
    link: Option<Link>,
    generation: u32,
    /// The incarnation of the memory server that knows this worker's session.
    incarnation: Option<u64>,
    slots: Slots,
    next: u64,
    /// Everything below has been answered, or given up.
    lowest: u64,
    /// Who waits for room, by priority, and who for a connection.
    waiting: [VecDeque<Waiter>; 2],
    connecting: Vec<Waiter>,
    to_wake: Vec<Waiter>,
    spare: Vec<Vec<u64>>,
    options: ChannelOptions,
    switch_words: usize,
    dirty: bool,
    /// Measuring: does not count.
    quiet: bool,
    looks: u32,
    fruitless: u32,
    complaints: u64,
    why_down: Rc<str>,
}

#[derive(Debug)]
struct Slots(Vec<Slot>);

impl Slots {
    fn of(&mut self, sequence: u64) -> &mut Slot {
        &mut self.0[sequence as usize % WINDOW]
    }
}

impl Source for Slots {
    fn message(&self, number: u64) -> Option<&[u64]> {
        let slot = &self.0[number as usize % WINDOW];
        // A reply that comes before its request was sent whole is the server's mistake; the request still goes out whole.
        (slot.message.get(1) == Some(&number)).then_some(&slot.message)
    }
}

/// What a worker keeps of a channel.
#[derive(Debug)]
struct State {
    server: ServerId,
    core: RefCell<Core>,
}

/// The channels of a worker.
#[derive(Debug, Default)]
pub(crate) struct Channels {
    list: RefCell<Vec<Rc<State>>>,
    any: Cell<bool>,
}

/// What links need of their worker.
struct WorkerCarrier<'a> {
    inner: &'a Inner,
    spare: &'a mut Vec<Vec<u64>>,
}

impl Carrier for WorkerCarrier<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, Error> {
        self.inner.registered_buffer(words)
    }

    fn post(&mut self, request: Request) {
        self.inner.outbox.borrow_mut().push(request);
    }

    fn vector(&mut self) -> Vec<u64> {
        self.spare.pop().unwrap_or_default()
    }
}

impl Channels {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.get()
    }

    /// Takes what has come and posts what is to be sent; false if there was neither.
    pub(crate) fn turn(&self, inner: &Inner) -> bool {
        let mut progress = false;
        for index in 0.. {
            let Some(state) = self.list.borrow().get(index).cloned() else { break };
            progress |= state.turn(inner);
        }
        progress
    }

    /// Takes a completion of a link's request.
    pub(crate) fn complete(&self, completion: Completion) {
        let server = Link::other_of(completion.ticket);
        let list = self.list.borrow();
        let Some(state) = list.iter().find(|state| state.server == server) else { return };
        let core = &mut *state.core.borrow_mut();
        core.dirty = true;
        if let Some(link) = &mut core.link {
            link.complete(completion);
        }
    }

    /// The worker ends: closes all links.
    pub(crate) fn close(&self, inner: &Inner) {
        for state in self.list.take() {
            state.fail(inner, "its worker has ended");
        }
        self.any.set(false);
    }
}

impl State {
    fn turn(&self, inner: &Inner) -> bool {
        let core = &mut *self.core.borrow_mut();
        let Some(link) = &mut core.link else { return false };
        let news = core.dirty || link.has_news();
        if news {
            core.looks = 0;
            core.dirty = false;
            match core.exchange(inner) {
                Ok(()) => {}
                Err(Broken::Flaw(flaw)) => core.fail(&format!("the memory server broke the protocol: {flaw}")),
                Err(Broken::Failed(error)) => self.connect_again(core, inner, &error.to_string()),
            }
        } else {
            core.looks += 1;
            if core.looks < LOOKS_MAX {
                return false;
            }
            core.looks = 0;
            self.look_after(core, inner);
        }
        if core.phase == Phase::Down && core.link.take().is_some() {
            inner.endpoint.borrow_mut().disconnect(self.server);
        }
        core.wake(inner);
        news
    }

    /// Nothing has come for a while: asks what has become of the link, if somebody waits.
    fn look_after(&self, core: &mut Core, inner: &Inner) {
        let is_sending = core.link.as_ref().is_some_and(Link::is_sending);
        if core.phase == Phase::Connecting || core.next != core.lowest || is_sending {
            let state = inner.endpoint.borrow_mut().link_state(self.server);
            match state {
                LinkState::Up => {}
                LinkState::Dismissed => self.connect_again(core, inner, "the memory server has closed the link"),
                LinkState::Dead => core.fail("the memory server is gone"),
            }
        }
    }

    fn fail(&self, inner: &Inner, why: &str) {
        let core = &mut *self.core.borrow_mut();
        core.fail(why);
        core.link = None;
        inner.endpoint.borrow_mut().disconnect(self.server);
        core.wake(inner);
    }

    /// Opens a link. What is unanswered stays in its slots.
    fn connect(&self, core: &mut Core, inner: &Inner) -> Result<(), Error> {
        let who = PeerId { owner: inner.compute.owner, worker: inner.number };
        let memory = inner.endpoint.borrow_mut().connect(self.server, who)?;
        core.generation = core.generation.wrapping_add(1);
        let sending = Sending {
            ordered: inner.capabilities.ordered_writes,
            coalesce: core.options.coalesce,
            switch_words: core.switch_words,
        };
        let link = Link::new(memory, self.server, core.generation, sending);
        let too_small = || Error::ServerMissing { server: self.server, why: "it opens too little memory".into() };
        core.link = Some(link.ok_or_else(too_small)?);
        core.phase = Phase::Connecting;
        core.dirty = true;
        Ok(())
    }

    fn connect_again(&self, core: &mut Core, inner: &Inner, why: &str) {
        core.fruitless += 1;
        tracing::debug!(server = %self.server, why, "lost a link");
        let connected =
            if core.fruitless > FRUITLESS_MAX { Err(None) } else { self.connect(core, inner).map_err(Some) };
        match connected {
            Ok(()) => {}
            Err(None) => core.fail(why),
            Err(Some(error)) => core.fail(&format!("{why}, and: {error}")),
        }
    }
}

impl Core {
    /// Receives and sends.
    fn exchange(&mut self, inner: &Inner) -> Result<(), Broken> {
        for priority in Priority::ALL {
            let mut taken = 0;
            loop {
                let Some(link) = &mut self.link else { return Ok(()) };
                let carrier = &mut WorkerCarrier { inner, spare: &mut self.spare };
                let Some(message) = link.receive(priority, carrier)? else { break };
                self.take_message(inner, message);
                taken += 1;
                if priority == Priority::BestEffort && taken == BEST_EFFORT_MAX {
                    self.dirty = true;
                    break;
                }
            }
        }
        let Some(link) = &mut self.link else { return Ok(()) };
        let carrier = &mut WorkerCarrier { inner, spare: &mut self.spare };
        link.release(carrier);
        if self.phase == Phase::Up {
            link.send_out(&self.slots, carrier)?;
            link.sent.clear();
        }
        let moved = std::mem::take(&mut link.words_moved);
        if !self.quiet {
            add(&inner.counters.bytes, moved * 8);
        }
        Ok(())
    }

    fn take_message(&mut self, inner: &Inner, message: Vec<u64>) {
        match read_from_server(&message) {
            Ok(FromServer::Reply(reply)) => {
                let sequence = reply.sequence;
                let in_window = self.lowest <= sequence && sequence < self.next;
                if in_window && matches!(self.slots.of(sequence).progress, Progress::Sent) {
                    self.fruitless = 0;
                    self.settle(sequence, Progress::Answered(message));
                    return;
                }
            }
            Ok(FromServer::Welcome { server, resumed }) => self.welcome(inner, server, resumed),
            Ok(FromServer::Complaint(_)) => self.complaints += 1,
            Err(why) => {
                tracing::warn!(%why, "a malformed message of the memory server");
                self.complaints += 1;
            }
        }
        self.recycle(message);
    }

    fn recycle(&mut self, mut message: Vec<u64>) {
        if self.spare.len() < SPARE_MAX && message.capacity() <= SPARE_WORDS_MAX {
            message.clear();
            self.spare.push(message);
        }
    }

    fn welcome(&mut self, inner: &Inner, server: u64, resumed: bool) {
        let same = self.incarnation.replace(server) == Some(server) && resumed;
        self.phase = Phase::Up;
        self.dirty = true;
        if let Some(link) = &mut self.link {
            // The welcome is nobody's message.
            link.words_moved = 0;
        }
        self.tell_how_to_send(inner);
        for sequence in self.lowest..self.next {
            match self.slots.of(sequence).progress {
                Progress::Sent if !same => {
                    let why = "it has lost what it knew of this worker";
                    self.settle(sequence, Progress::Failed(Failure::Unknown(why.into())));
                }
                Progress::Sent | Progress::Waiting => self.send(sequence),
                _ => {}
            }
        }
        self.to_wake.append(&mut self.connecting);
    }

    /// Sends as the channel is set to, and has the memory server do the same.
    fn tell_how_to_send(&mut self, inner: &Inner) {
        let Some(link) = &mut self.link else { return };
        let how = HowToSend { switch_words: self.switch_words, coalesce: self.options.coalesce };
        how.apply(link.sending());
        link.post_control_word(how.word(), &mut WorkerCarrier { inner, spare: &mut self.spare });
    }

    /// Puts a request in the link's queue.
    fn send(&mut self, sequence: u64) {
        let slot = self.slots.of(sequence);
        let (Some(link), Some(priority)) = (&mut self.link, slot.priority) else { return };
        link.enqueue(priority, Item::Held(sequence));
        slot.progress = Progress::Sent;
        self.dirty = true;
    }

    /// Everything unanswered fails.
    fn fail(&mut self, why: &str) {
        let why: Rc<str> = why.into();
        self.phase = Phase::Down;
        self.why_down = Rc::clone(&why);
        for sequence in self.lowest..self.next {
            let failure = match self.slots.of(sequence).progress {
                Progress::Sent => Failure::Unknown(Rc::clone(&why)),
                Progress::Waiting => Failure::Missing(Rc::clone(&why)),
                _ => continue,
            };
            self.settle(sequence, Progress::Failed(failure));
        }
        self.to_wake.append(&mut self.connecting);
        self.waiting.iter_mut().for_each(|waiting| self.to_wake.extend(waiting.drain(..)));
    }

    /// A request has come to its end.
    fn settle(&mut self, sequence: u64, end: Progress) {
        let slot = self.slots.of(sequence);
        slot.progress = end;
        if slot.abandoned {
            if let Progress::Answered(message) = std::mem::replace(&mut slot.progress, Progress::Over) {
                self.recycle(message);
            }
        } else if let Some(waiter) = slot.waiter.take() {
            self.to_wake.push(waiter);
        }
        self.advance();
    }

    /// Frees the slots that are over, in order.
    fn advance(&mut self) {
        while self.lowest < self.next && matches!(self.slots.of(self.lowest).progress, Progress::Over) {
            let slot = self.slots.of(self.lowest);
            slot.progress = Progress::Free;
            slot.abandoned = false;
            slot.message.clear();
            slot.message.shrink_to(SPARE_WORDS_MAX / WINDOW);
            self.lowest += 1;
        }
        for priority in Priority::ALL {
            let room = window(priority).saturating_sub(self.next - self.lowest) as usize;
            let waiting = &mut self.waiting[priority.index()];
            self.to_wake.extend(waiting.drain(..room.min(waiting.len())));
        }
    }

    fn wake(&mut self, inner: &Inner) {
        for waiter in self.to_wake.drain(..) {
            waiter.wake(&inner.executor);
        }
    }
}

/// A worker's way to send requests to one memory server. Cheap to clone; see the [module](super) for an example.
#[derive(Clone)]
pub struct Channel {
    handle: Handle,
    state: Rc<State>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("server", &self.state.server).finish_non_exhaustive()
    }
}

impl Handle {
    /// The channel to a memory server, opened if it is not. The first one of a compute server measures which messages are
    /// better announced than written, which takes some milliseconds.
    ///
    /// # Errors
    /// [`Error::ServerMissing`] if the memory server takes no messages.
    pub async fn channel(&self, server: ServerId) -> Result<Channel, Error> {
        self.channel_with(server, ChannelOptions::default()).await
    }

    /// The channel to a memory server, opened with these options if it is not open.
    ///
    /// # Errors
    /// As [`Handle::channel`].
    pub async fn channel_with(&self, server: ServerId, options: ChannelOptions) -> Result<Channel, Error> {
        let channels = &self.inner().channels;
        let found = channels.list.borrow().iter().find(|state| state.server == server).cloned();
        let state = match found {
            Some(state) => state,
            None => {
                let switch_words = match options.switch_over {
                    SwitchOver::Above(words) => words,
                    SwitchOver::Measured => usize::MAX,
                };
                let core = Core {
                    phase: Phase::Down,
                    link: None,
                    generation: 0,
                    incarnation: None,
                    slots: Slots((0..WINDOW).map(|_| Slot::default()).collect()),
                    next: 1,
                    lowest: 1,
                    waiting: Default::default(),
                    connecting: Vec::new(),
                    to_wake: Vec::new(),
                    spare: Vec::new(),
                    options,
                    switch_words,
                    dirty: false,
                    quiet: false,
                    looks: 0,
                    fruitless: 0,
                    complaints: 0,
                    why_down: "".into(),
                };
                let state = Rc::new(State { server, core: RefCell::new(core) });
                let mut core = state.core.borrow_mut();
                state.connect(&mut core, self.inner())?;
                drop(core);
                channels.list.borrow_mut().push(Rc::clone(&state));
                channels.any.set(true);
                state
            }
        };
        let channel = Channel { handle: self.clone(), state };
        channel.connected().await?;
        if channel.state.core.borrow().options.switch_over == SwitchOver::Measured {
            let words = super::probe::switch_words(&channel).await?;
            channel.set_switch_over(words);
        }
        Ok(channel)
    }
}

impl Channel {
    /// The memory server.
    pub fn server(&self) -> ServerId {
        self.state.server
    }

    /// What the memory server last said of its load; none before its first report.
    pub fn load(&self) -> Option<Load> {
        self.state.core.borrow().link.as_ref().and_then(|link| Load::read(link.control_word()))
    }

    /// Messages of more words are announced and fetched.
    pub fn switch_words(&self) -> usize {
        self.state.core.borrow().switch_words
    }

    /// Messages that made no sense to the memory server, or that it sent and that made no sense here.
    pub fn complaints(&self) -> u64 {
        self.state.core.borrow().complaints
    }

    /// From now on messages of more words are announced and fetched, in both directions.
    pub fn set_switch_over(&self, words: usize) {
        let core = &mut *self.state.core.borrow_mut();
        core.switch_words = words;
        core.tell_how_to_send(self.handle.inner());
    }

    /// From now on several messages go in one write, or each in its own, in both directions.
    pub fn set_coalesce(&self, coalesce: bool) {
        let core = &mut *self.state.core.borrow_mut();
        core.options.coalesce = coalesce;
        core.tell_how_to_send(self.handle.inner());
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(super) fn set_quiet(&self, quiet: bool) {
        self.state.core.borrow_mut().quiet = quiet;
    }

    /// Sends a request and waits for the reply. Waits first while [`WINDOW`] others are unanswered (of a
    /// best-effort one, seven eighths of that). Once begun it goes on if
    /// the future is dropped; only its reply is lost.
    ///
    /// # Errors
    /// [`Error::Refused`] if the memory server or its service refuses; [`Error::ServerMissing`] if it is not there, and the
    /// request was not sent; [`Error::OutcomeUnknown`] if it was sent and the server lost; [`Error::Malformed`] if the
    /// parameters are longer than a message.
    pub async fn request<P: Wire>(&self, kind: Kind, params: &P, priority: Priority) -> Result<Reply, Error> {
        let words = self.send(priority, 1, |to| push_item(to, kind, |to| params.encode(to))).await?;
        let item = items_of(&words).next();
        self.reply(words, item, kind)
    }

    /// As [`Channel::request`], with parameters that are words already.
    ///
    /// # Errors
    /// As [`Channel::request`].
    pub async fn request_words(&self, kind: Kind, params: &[u64], priority: Priority) -> Result<Reply, Error> {
        let words = self.send(priority, 1, |to| push_item(to, kind, |to| to.extend_from_slice(params))).await?;
        let item = items_of(&words).next();
        self.reply(words, item, kind)
    }

    /// Sends the requests of a batch in one message and waits for all their replies, which come in one message too. The
    /// outer error is that of the message.
    ///
    /// # Errors
    /// As [`Channel::request`]; [`Error::BadOption`] if the batch is empty.
    pub async fn batch(&self, batch: &Batch, priority: Priority) -> Result<Vec<Result<Reply, Error>>, Error> {
        if batch.kinds.is_empty() || batch.kinds.len() > ITEMS_MAX {
            let why = format!("{} requests; a batch has 1 to {ITEMS_MAX}", batch.kinds.len());
            return Err(Error::BadOption { option: "batch", why });
        }
        let words = self.send(priority, batch.kinds.len(), |to| to.extend_from_slice(&batch.words)).await?;
        let mut items: Vec<Option<ReplyItem>> = vec![None; batch.kinds.len()];
        for item in items_of(&words) {
            // A message that was refused as a whole has one item.
            if item.status == Err(Refusal::Malformed) && item.index == 0 {
                items.fill(Some(item.clone()));
            }
            let index = item.index;
            if let Some(place) = items.get_mut(index) {
                *place = Some(item);
            }
        }
        let replies = items.into_iter().zip(&batch.kinds);
        let replies = replies.map(|(item, &kind)| self.reply(words.clone(), item, kind)).collect();
        self.state.core.borrow_mut().recycle(words);
        Ok(replies)
    }

    fn reply(&self, words: Vec<u64>, item: Option<ReplyItem>, kind: Kind) -> Result<Reply, Error> {
        let (status, range) = item.map_or((Err(Refusal::Unanswered), 0..0), |item| (item.status, item.words));
        let reply = Reply { words, range, home: Rc::clone(&self.state) };
        match status {
            Ok(()) => Ok(reply),
            Err(Refusal::Forgotten) => {
                let why = "it was carried out once, and its reply is lost".into();
                Err(Error::OutcomeUnknown { server: self.state.server, why })
            }
            Err(why) => Err(Error::Refused { server: self.state.server, kind: kind.0, why }),
        }
    }

    /// Waits until the link is up. Opens it if it is down.
    async fn connected(&self) -> Result<(), Error> {
        let mut tried = false;
        poll_fn(|cx| {
            let inner = self.handle.inner();
            let core = &mut *self.state.core.borrow_mut();
            if core.phase == Phase::Down {
                let why = &core.why_down;
                if std::mem::replace(&mut tried, true) {
                    return Poll::Ready(Err(Error::ServerMissing { server: self.state.server, why: why.to_string() }));
                }
                if inner.ended.get() {
                    let why = "this worker has ended".into();
                    return Poll::Ready(Err(Error::ServerMissing { server: self.state.server, why }));
                }
                core.fruitless = 0;
                if let Err(error) = self.state.connect(core, inner) {
                    return Poll::Ready(Err(error));
                }
            }
            if core.phase == Phase::Up {
                return Poll::Ready(Ok(()));
            }
            tried = true;
            core.connecting.push(Waiter::of(cx, &inner.executor));
            Poll::Pending
        })
        .await
    }

    /// Sends a message of so many items; the words of its reply.
    pub(super) async fn send(
        &self,
        priority: Priority,
        items: usize,
        encode: impl FnOnce(&mut Vec<u64>),
    ) -> Result<Vec<u64>, Error> {
        let server = self.state.server;
        self.room(priority).await?;
        let sequence = {
            let core = &mut *self.state.core.borrow_mut();
            let sequence = core.next;
            let lowest = core.lowest;
            let slot = core.slots.of(sequence);
            slot.message.clear();
            begin_request(&mut slot.message, items, sequence, lowest);
            encode(&mut slot.message);
            if slot.message.len() > MESSAGE_WORDS_MAX {
                slot.message = Vec::new();
                return Err(Error::Malformed("a request is longer than MESSAGE_WORDS_MAX"));
            }
            slot.priority = Some(priority);
            slot.progress = Progress::Waiting;
            core.next += 1;
            if core.phase == Phase::Up {
                core.send(sequence);
            }
            if !core.quiet {
                let counters = &self.handle.inner().counters;
                add(&counters.two_sided, 1);
                add(&counters.round_trips, 1);
            }
            sequence
        };
        let outcome = Pending { state: &self.state, handle: &self.handle, sequence, over: false }.await;
        outcome.map_err(|failure| failure.into_error(server))
    }

    /// Waits for a free slot, and for the link to be opened again if it is down.
    async fn room(&self, priority: Priority) -> Result<(), Error> {
        loop {
            if self.state.core.borrow().phase == Phase::Down {
                self.connected().await?;
            }
            let is_down = poll_fn(|cx| {
                let core = &mut *self.state.core.borrow_mut();
                if core.phase == Phase::Down {
                    return Poll::Ready(true);
                }
                if core.next - core.lowest < window(priority) {
                    return Poll::Ready(false);
                }
                core.waiting[priority.index()].push_back(Waiter::of(cx, &self.handle.inner().executor));
                Poll::Pending
            });
            if !is_down.await {
                return Ok(());
            }
        }
    }
}

/// Unanswered requests of this priority at most: the urgent ones have the last part for themselves.
fn window(priority: Priority) -> u64 {
    match priority {
        Priority::Latency => WINDOW as u64,
        Priority::BestEffort => WINDOW as u64 * 7 / 8,
    }
}

/// The items of a reply that was checked when it came.
fn items_of(words: &[u64]) -> impl Iterator<Item = ReplyItem> {
    ReplyView::of(words).into_iter().flat_map(ReplyView::into_items).flatten()
}

/// Waits for one reply. Dropped, it leaves the slot to the reply.
struct Pending<'a> {
    state: &'a State,
    handle: &'a Handle,
    sequence: u64,
    over: bool,
}

impl Future for Pending<'_> {
    type Output = Result<Vec<u64>, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let inner = self.handle.inner();
        let core = &mut *self.state.core.borrow_mut();
        let slot = core.slots.of(self.sequence);
        let outcome = match std::mem::replace(&mut slot.progress, Progress::Over) {
            Progress::Answered(message) => Ok(message),
            Progress::Failed(failure) => Err(failure),
            progress => {
                slot.progress = progress;
                slot.waiter = Some(Waiter::of(cx, &inner.executor));
                return Poll::Pending;
            }
        };
        self.over = true;
        core.advance();
        core.wake(inner);
        Poll::Ready(outcome)
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let core = &mut *self.state.core.borrow_mut();
        let slot = core.slots.of(self.sequence);
        slot.waiter = None;
        slot.abandoned = true;
        if matches!(slot.progress, Progress::Answered(_) | Progress::Failed(_)) {
            slot.progress = Progress::Over;
            core.advance();
        }
        core.wake(self.handle.inner());
    }
}

/// A reply's words. Their memory goes back to the channel when it is dropped.
pub struct Reply {
    words: Vec<u64>,
    range: Range<usize>,
    home: Rc<State>,
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reply({} words)", self.range.len())
    }
}

impl Reply {
    /// What the service sent.
    pub fn words(&self) -> &[u64] {
        &self.words[self.range.clone()]
    }

    /// The value that the service sent.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it is none of this type.
    pub fn decode<T: Wire>(&self) -> Result<T, Error> {
        decode_all(self.words())
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Ok(mut core) = self.home.core.try_borrow_mut() {
            core.recycle(std::mem::take(&mut self.words));
        }
    }
}

/// Several requests for one message.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    kinds: Vec<Kind>,
    words: Vec<u64>,
}

impl Batch {
    /// Appends a request.
    pub fn push<P: Wire>(&mut self, kind: Kind, params: &P) {
        push_item(&mut self.words, kind, |to| params.encode(to));
        self.kinds.push(kind);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Removes all, and keeps the memory.
    pub fn clear(&mut self) {
        self.kinds.clear();
        self.words.clear();
    }
}

/// Sends one request to several memory servers at once, encoded once; their replies, in the order of the channels.
pub async fn multicast<P: Wire>(
    channels: &[Channel],
    kind: Kind,
    params: &P,
    priority: Priority,
) -> Vec<Result<Reply, Error>> {
    let mut words = Vec::new();
    params.encode(&mut words);
    type Waiting<'a> = Pin<Box<dyn Future<Output = Result<Reply, Error>> + 'a>>;
    let mut waiting: Vec<Waiting<'_>> = Vec::with_capacity(channels.len());
    for channel in channels {
        waiting.push(Box::pin(channel.request_words(kind, &words, priority)));
    }
    let mut replies: Vec<Option<Result<Reply, Error>>> = channels.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (reply, waits) in replies.iter_mut().zip(&mut waiting) {
            if reply.is_none()
                && let Poll::Ready(outcome) = waits.as_mut().poll(cx)
            {
                *reply = Some(outcome);
            }
        }
        if replies.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    replies.into_iter().flatten().collect()
}
