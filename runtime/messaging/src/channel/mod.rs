//! A worker's side: requests, their replies, and what happens when a connection is lost.
//!
//! A worker has one channel to each memory server, whoever asks for it. Requests are numbered and wait in slots, with
//! their words, until their replies have come: so they can be sent again. The worker looks at its channels at every exchange
//! ([`Channels::turn`]); all that tasks have asked for since the last one goes out together.
//!
//! When the memory server has dismissed the connection, the worker connects again. If the same server answers and still has the
//! session, everything unanswered is sent again, and nothing is done twice. If it is another incarnation, or it is gone, what
//! was sent and not answered ends in [`Error::OutcomeUnknown`]; unless it has ended in good order, and said so: then it has not taken
//! that, which counts as not sent. One that is there and stands still for too long ends it in
//! [`Error::NoAnswer`]: the session is closed then, and nothing is sent again; what the server has taken already it may still carry out.

mod batch;
mod core;
mod host;
mod list;
mod reply;
mod silence;
#[cfg(all(test, not(loom)))]
mod tests;
mod waiting;

use std::{cell::RefCell, fmt, future::poll_fn, rc::Rc, task::Poll};

pub use self::{
    batch::Batch,
    host::{Host, Tasks, Waiter},
    list::Channels,
    reply::Reply,
};
use self::{
    core::{Core, Phase, Progress, window},
    list::State,
    reply::{Pending, first_item_of, items_of},
    waiting::{For, Place},
};
use crate::error::Error;
use crate::{
    load::Load,
    message::{ReplyItem, ReplyView, begin_request, push_item},
    protocol::{ITEMS_MAX, Kind, MESSAGE_WORDS_MAX, Priority, Refusal},
};
#[cfg(doc)]
use farlink_fabric::Capabilities;
use farlink_fabric::{Error as FabricError, ptr::ServerId, wire::Wire};

/// How a channel sends, in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelOptions {
    /// The eager limit: messages of at most so many words are written into the ring (eager), longer ones are
    /// read by the receiver (rendezvous). `None` for the fabric's own, [`Capabilities::eager_words`].
    pub eager_words: Option<usize>,
    /// Sends several requests in one write, and gets several replies in one.
    pub coalesce: bool,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        Self { eager_words: None, coalesce: true }
    }
}

/// A worker's way to send requests to one memory server. Cheap to clone; see the [module](super) for an example.
#[derive(Clone)]
pub struct Channel {
    host: Rc<dyn Host>,
    state: Rc<State>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("server", &self.state.server).finish_non_exhaustive()
    }
}

impl Channel {
    /// The channel of a worker to a memory server, opened with these options if it is not open.
    ///
    /// # Errors
    /// [`ServerMissing`](farlink_fabric::Error::ServerMissing) if the memory server takes no messages.
    pub async fn open(host: Rc<dyn Host>, server: ServerId, options: ChannelOptions) -> Result<Self, Error> {
        let channels = host.channels();
        let found = channels.list.borrow().iter().find(|state| state.server == server).cloned();
        let state = match found {
            Some(state) => state,
            None if host.has_ended() => return Err(missing(server, HAS_ENDED)),
            None => {
                let core = Core::new(options, &host.capabilities());
                let state = Rc::new(State { server, core: RefCell::new(core) });
                let mut core = state.core.borrow_mut();
                state.connect(&mut core, &*host)?;
                drop(core);
                channels.list.borrow_mut().push(Rc::clone(&state));
                channels.any.set(true);
                state
            }
        };
        let channel = Self { host, state };
        channel.connected().await?;
        Ok(channel)
    }

    /// The memory server.
    pub fn server(&self) -> ServerId {
        self.state.server
    }

    /// What the memory server last said of its load; none before its first report.
    pub fn load(&self) -> Option<Load> {
        self.state.core.borrow().connection.as_ref().and_then(|connection| Load::read(connection.control_word()))
    }

    /// Its eager limit: see [`ChannelOptions::eager_words`].
    pub fn eager_words(&self) -> usize {
        self.state.core.borrow().eager_words
    }

    /// Messages that made no sense to the memory server, or that it sent and that made no sense here.
    pub fn nacks(&self) -> u64 {
        self.state.core.borrow().nacks
    }

    /// Sends a request and waits for the reply. Waits first while there are [`WINDOW`](crate::WINDOW) others (of a
    /// best-effort one, seven eighths of that), from the oldest one on that is unanswered, or whose answer nobody has taken. Once
    /// begun it goes on if the future is dropped; only its reply is lost.
    ///
    /// # Errors
    /// [`Error::Refused`] if the memory server or its service refuses; [`ServerMissing`](farlink_fabric::Error::ServerMissing) if it is
    /// not there, and the request was not sent, or not taken before it ended; [`Error::OutcomeUnknown`] if it was sent and the server lost; [`Error::NoAnswer`] if it was
    /// sent, and the server stands still;
    /// [`Error::BadSize`] if the parameters are longer than a message.
    pub async fn request<P: Wire>(&self, kind: Kind, params: &P, priority: Priority) -> Result<Reply, Error> {
        let words = self.send(priority, 1, |to| push_item(to, kind, |to| params.encode(to))).await?;
        let item = first_item_of(&words);
        self.reply(words, item, kind)
    }

    /// As [`Channel::request`], with parameters that are words already.
    ///
    /// # Errors
    /// As [`Channel::request`].
    pub async fn request_words(&self, kind: Kind, params: &[u64], priority: Priority) -> Result<Reply, Error> {
        let words = self.send(priority, 1, |to| push_item(to, kind, |to| to.extend_from_slice(params))).await?;
        let item = first_item_of(&words);
        self.reply(words, item, kind)
    }

    /// Sends the requests of a batch in one message and waits for all their replies, which come in one message too. The
    /// outer error is that of the message.
    ///
    /// # Errors
    /// As [`Channel::request`]; [`Error::BadSize`] if the batch is empty.
    pub async fn batch(&self, batch: &Batch, priority: Priority) -> Result<Vec<Result<Reply, Error>>, Error> {
        if batch.kinds.is_empty() || batch.kinds.len() > ITEMS_MAX {
            return Err(Error::BadSize { items: batch.kinds.len(), words: batch.words.len() });
        }
        let words = self.send(priority, batch.kinds.len(), |to| to.extend_from_slice(&batch.words)).await?;
        let mut items: Vec<Option<ReplyItem>> = vec![None; batch.kinds.len()];
        let is_whole = ReplyView::of(&words).is_some_and(|reply| reply.items == 1);
        for item in items_of(&words) {
            // A message that was refused as a whole has one item.
            if is_whole && item.status.is_err() {
                items.fill(Some(item));
                break;
            }
            let index = item.index;
            if let Some(place) = items.get_mut(index) {
                *place = Some(item);
            }
        }
        let replies = items.into_iter().zip(&batch.kinds);
        let replies = replies.map(|(item, &kind)| {
            let mut own = self.state.core.borrow_mut().spare.take();
            let item = item.map(|item| {
                own.extend_from_slice(&words[item.words.clone()]);
                ReplyItem { words: 0..own.len(), ..item }
            });
            self.reply(own, item, kind)
        });
        let replies = replies.collect();
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

    /// Waits until the connection is up. Opens it if it is down.
    async fn connected(&self) -> Result<(), Error> {
        let mut tried = false;
        let mut place = Place::new(self, For::Connection);
        poll_fn(|cx| {
            let host = &*self.host;
            let core = &mut *self.state.core.borrow_mut();
            if core.phase == Phase::Down {
                let why = &core.why_down;
                if std::mem::replace(&mut tried, true) {
                    return Poll::Ready(Err(missing(self.state.server, why)));
                }
                if host.has_ended() {
                    return Poll::Ready(Err(missing(self.state.server, HAS_ENDED)));
                }
                core.failed_attempts = 0;
                if let Err(error) = self.state.connect(core, host) {
                    return Poll::Ready(Err(error.into()));
                }
            }
            if core.phase == Phase::Up {
                return Poll::Ready(Ok(()));
            }
            tried = true;
            place.wait(core, cx);
            Poll::Pending
        })
        .await
    }

    /// Sends a message of so many items; the words of its reply.
    async fn send(
        &self,
        priority: Priority,
        items: usize,
        encode: impl FnOnce(&mut Vec<u64>),
    ) -> Result<Vec<u64>, Error> {
        let server = self.state.server;
        if !self.has_room(priority) {
            self.room(priority).await?;
        }
        let (sequence, begun) = {
            let core = &mut *self.state.core.borrow_mut();
            let sequence = core.next;
            let lowest = core.lowest;
            let slot = core.slots.of(sequence);
            slot.message.clear();
            if slot.message.capacity() == 0 {
                slot.message = core.spare.take();
            }
            begin_request(&mut slot.message, items, sequence, lowest);
            encode(&mut slot.message);
            if slot.message.len() > MESSAGE_WORDS_MAX {
                let words = std::mem::take(&mut slot.message).len();
                // It may have been woken to have this room.
                core.let_in(&*self.host);
                return Err(Error::BadSize { items, words });
            }
            slot.priority = Some(priority);
            slot.progress = Progress::Waiting;
            core.next += 1;
            if core.phase == Phase::Up && core.send(sequence) {
                self.host.channels().pressing.set(true);
            }
            (sequence, self.host.message_begins())
        };
        let outcome = Pending { state: &self.state, host: &*self.host, sequence, over: false }.await;
        self.host.message_ends(begun);
        outcome.map_err(|failure| failure.into_error(server))
    }

    #[inline]
    fn has_room(&self, priority: Priority) -> bool {
        let core = self.state.core.borrow();
        core.phase != Phase::Down && core.next - core.lowest < window(priority)
    }

    /// Waits for a free slot, and for the connection to be opened again if it is down.
    async fn room(&self, priority: Priority) -> Result<(), Error> {
        let mut place = Place::new(self, For::Room(priority));
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
                    place.leave(core);
                    return Poll::Ready(false);
                }
                place.wait(core, cx);
                Poll::Pending
            });
            if !is_down.await {
                return Ok(());
            }
        }
    }
}

const HAS_ENDED: &str = "this worker has ended";

/// A memory server cannot be asked.
fn missing(server: ServerId, why: &str) -> Error {
    FabricError::ServerMissing { server, why: why.to_owned() }.into()
}
