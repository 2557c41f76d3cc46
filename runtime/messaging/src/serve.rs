//! What a memory server does with requests: the trait that services implement, and the address of a reply.

use std::{any::Any, cell::RefCell, fmt, rc::Rc};

use crate::{
    message::{REPLY_HEADER, reply_item},
    pieces::{Held, Pieces},
    protocol::{Kind, MESSAGE_WORDS_MAX, Priority, Refusal, WINDOW},
    spare::Spare,
};
use farlink_fabric::{connection::PeerId, wire::Wire};

/// Carries out requests on one thread of a [`MessageServer`](super::MessageServer).
pub trait Service {
    /// Carries out a request, or begins to. Called once for each, never again for a repeat. Whatever it takes, other
    /// requests of this thread wait for: what is long belongs into [`Service::turn`].
    fn handle(&mut self, request: Request<'_>, reply: Responder);

    /// Goes on with what was begun. Called at every turn of the thread.
    fn turn(&mut self) -> Turn {
        Turn::Idle
    }
}

/// Whether a service has something to do without a new request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It waits for requests only: the thread may sleep.
    Idle,
    /// It is to be called again soon.
    Busy,
}

/// A request as a service sees it: a private copy, whole, and nothing else is known of it.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub(super) peer: PeerId,
    pub(super) kind: Kind,
    pub(super) priority: Priority,
    pub(super) words: &'a [u64],
}

impl<'a> Request<'a> {
    /// Who asks.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// What for.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// With what priority; the reply has the same.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// The parameters, to be checked: see [`decode_all`](farlink_fabric::wire::decode_all).
    pub fn words(&self) -> &'a [u64] {
        self.words
    }
}

/// A reply on its way from a service to its session. The first words are left for headers.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) to: Address,
    pub(super) words: Vec<u64>,
    pub(super) held: Option<Box<Held>>,
}

/// Words in front of a reply's own.
const HEADERS: usize = REPLY_HEADER + 1;

/// Words of the reply to one request at most, as a service sees it: the rest of a message is headers.
pub const REPLY_WORDS_MAX: usize = MESSAGE_WORDS_MAX - HEADERS;

/// Which item of which request a reply is for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Address {
    pub(super) session: usize,
    /// Tells apart sessions that had the same place.
    pub(super) unique: u64,
    pub(super) sequence: u64,
    pub(super) index: u16,
}

/// What the responders of one thread share.
#[derive(Debug)]
pub(super) struct Replies {
    pub(super) finished: RefCell<Vec<Finished>>,
    spare: RefCell<Spare>,
}

impl Default for Replies {
    fn default() -> Self {
        Self { finished: RefCell::default(), spare: RefCell::new(Spare::new(2 * WINDOW)) }
    }
}

impl Replies {
    /// An empty vector.
    pub(super) fn vector(&self) -> Vec<u64> {
        self.spare.borrow_mut().take()
    }

    pub(super) fn recycle(&self, vector: Vec<u64>) {
        self.spare.borrow_mut().put(vector);
    }
}

/// Where a reply goes. Stays on the thread that got the request; answers once, now or later. Dropping it unused refuses.
pub struct Responder {
    replies: Rc<Replies>,
    to: Address,
    answered: bool,
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder").field("sequence", &self.to.sequence).finish_non_exhaustive()
    }
}

impl Responder {
    pub(super) fn new(replies: Rc<Replies>, to: Address) -> Self {
        Self { replies, to, answered: false }
    }

    /// Replies with a value.
    pub fn send<T: Wire>(self, value: &T) {
        self.send_with(|to| value.encode(to));
    }

    /// Replies with these words.
    pub fn send_words(self, words: &[u64]) {
        self.send_with(|to| to.extend_from_slice(words));
    }

    /// Replies with the words that `encode` appends.
    pub fn send_with(mut self, encode: impl FnOnce(&mut Vec<u64>)) {
        self.answer(Ok(()), encode);
    }

    /// Replies with what `make` appends: words, and pieces of the memory server's region that are sent from where they lie.
    /// `guard` keeps them what they are; it is dropped, on this thread, once they are sent, or nobody waits for them any more. That
    /// takes [`ServeMessages::silence_max`](super::ServeMessages::silence_max) at most, and 20 report intervals until it is noticed.
    ///
    /// Such a reply is not kept: *a repeat of the request is handled again*. So this is for requests that change nothing. Pieces
    /// are copied after all, and the guard dropped at once, where [`ServeMessages::gather`](super::ServeMessages::gather) says so, the
    /// endpoint gathers nothing, the reply is so short that it travels inline, or the request is one of several in a message.
    pub fn send_pieces(mut self, guard: impl Any, make: impl FnOnce(&mut Pieces)) {
        let mut pieces = Pieces::after(self.begin());
        make(&mut pieces);
        let total = pieces.words();
        let (words, held) = pieces.split(Box::new(guard));
        self.finish(Ok(()), words, total, held);
    }

    /// Refuses.
    pub fn refuse(mut self, why: Refusal) {
        self.answer(Err(why), |_| ());
    }

    fn answer(&mut self, status: Result<(), Refusal>, encode: impl FnOnce(&mut Vec<u64>)) {
        let mut words = self.begin();
        encode(&mut words);
        let total = words.len();
        self.finish(status, words, total, None);
    }

    /// Room for the headers.
    fn begin(&self) -> Vec<u64> {
        let mut words = self.replies.vector();
        words.extend([0; HEADERS]);
        words
    }

    fn finish(&mut self, status: Result<(), Refusal>, mut words: Vec<u64>, total: usize, held: Option<Box<Held>>) {
        words[REPLY_HEADER] = reply_item(total - HEADERS, self.to.index, status);
        self.answered = true;
        self.replies.finished.borrow_mut().push(Finished { to: self.to, words, held });
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Err(Refusal::Unanswered), |_| ());
        }
    }
}
