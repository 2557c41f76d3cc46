//! Requests that a thread takes from its peers, and the replies that it sends.

use std::rc::Rc;

use super::{
    counts::bump,
    peers::Peer,
    thread::{Thread, carrier},
};
use crate::{
    message::{REPLY_HEADER, nack, read_request, refusal, reply_item},
    pieces::{Outbound, copy},
    protocol::{CHUNK_WORDS, Kind, MESSAGE_WORDS_MAX, Priority, Refusal, WINDOW},
    serve::{Address, Finished, Request, Responder},
    session::{Admission, Session},
};
use farlink_fabric::Capabilities;

/// Requests of one peer that a turn takes, of each priority.
const REQUESTS_PER_TURN: usize = 16;
/// Best-effort words of all peers that a turn takes.
const WORDS_PER_TURN: usize = CHUNK_WORDS;
/// A peer with so many words of unsent replies is not asked for more requests.
const UNSENT_WORDS_MAX: usize = 2 * MESSAGE_WORDS_MAX;
/// A peer with so many messages to take is not asked for more requests: each makes one, at most.
const QUEUED_MAX: usize = 2 * WINDOW;

/// Whether a peer is not asked for more requests.
fn is_full(peer: &Peer, sessions: &[Option<Session>]) -> bool {
    let has_enough = |session: &Session| session.unsent_words > UNSENT_WORDS_MAX || session.has_abandoned_many();
    sessions[peer.session].as_ref().is_some_and(has_enough) || peer.connection.queued() > QUEUED_MAX
}

/// Whether the next turn takes something from one of them, or sends it something.
pub(super) fn any_has_news(peers: &[Option<Peer>], sessions: &[Option<Session>]) -> bool {
    peers
        .iter()
        .flatten()
        .any(|peer| peer.connection.has_room() || (peer.connection.has_messages() && !is_full(peer, sessions)))
}

impl Thread {
    pub(super) fn take_requests(&mut self, priority: Priority) -> bool {
        let mut progress = false;
        let mut words_left = WORDS_PER_TURN;
        let count = self.peers.len();
        for step in 0..count {
            let index = (self.first_peer + step) % count;
            let mut requests = 0;
            while let Some(peer) = &mut self.peers[index] {
                if !peer.dirty && !peer.connection.has_news() {
                    break;
                }
                if requests == REQUESTS_PER_TURN || is_full(peer, &self.sessions) {
                    progress |= requests != 0;
                    break;
                }
                peer.dirty = true;
                match peer.connection.receive(priority, &mut carrier!(self)) {
                    Ok(Some(message)) => {
                        progress = true;
                        requests += 1;
                        self.take_message(index, priority, &message);
                        words_left = words_left.saturating_sub(message.len());
                        self.replies.recycle(message);
                    }
                    Ok(None) => break,
                    Err(why) => {
                        progress = true;
                        self.drop_peer(index, &why);
                        break;
                    }
                }
                if priority == Priority::BestEffort && words_left == 0 {
                    self.first_peer = (index + 1) % count;
                    return true;
                }
            }
        }
        if count > 0 {
            self.first_peer = (self.first_peer + 1) % count;
        }
        progress
    }

    fn take_message(&mut self, index: usize, priority: Priority, message: &[u64]) {
        let Some(Some(peer)) = self.peers.get(index) else { return };
        let session_index = peer.session;
        let Some(session) = &mut self.sessions[session_index] else { return };
        let (view, malformed) = match read_request(message) {
            Ok(view) => (Some(view), None),
            Err((why, sequence)) => {
                tracing::debug!(peer = index, %why, "malformed");
                (None, Some(sequence))
            }
        };
        let numbers = match (&view, malformed) {
            (Some(view), _) => Some((view.sequence, view.acknowledged)),
            // Nothing that it says is believed, but its number is answered.
            (None, Some(Some(sequence))) => Some((sequence, 0)),
            _ => None,
        };
        let items = view.map_or(1, |view| view.items);
        let admission = numbers.and_then(|numbers| session.admit(numbers, items, priority, &self.replies));
        let (unique, who) = (session.unique, session.who);
        match (admission, view, numbers) {
            (Some(Admission::New), Some(view), _) => {
                self.handled += items;
                for (place, (kind, words)) in view.items().enumerate() {
                    let to = Address { session: session_index, unique, sequence: view.sequence, index: place as u16 };
                    let reply = Responder::new(Rc::clone(&self.replies), to);
                    match kind {
                        Kind(Kind::RESERVED..) => reply.refuse(Refusal::UnknownKind),
                        kind => {
                            bump(&self.shared.threads[self.number].requests, 1);
                            self.service.handle(Request { peer: who, kind, priority, words }, reply);
                        }
                    }
                }
            }
            (Some(Admission::New), None, Some((sequence, _))) => {
                bump(&self.shared.threads[self.number].malformed, 1);
                session.refuse(sequence, Refusal::Malformed, &self.replies);
                self.answer(index, sequence, priority);
            }
            (Some(Admission::Pending), ..) => bump(&self.counts().repeats, 1),
            (Some(Admission::Answered(priority)), _, Some((sequence, _))) => {
                bump(&self.counts().repeats, 1);
                self.answer(index, sequence, priority);
            }
            (Some(Admission::Forgotten), _, Some((sequence, _))) => {
                bump(&self.counts().repeats, 1);
                self.refuse_forgotten(index, sequence);
            }
            _ => {
                bump(&self.counts().malformed, 1);
                if let Some(Some(peer)) = self.peers.get_mut(index) {
                    peer.connection.enqueue_notice(&nack(Refusal::Malformed));
                }
            }
        }
    }

    fn answer(&mut self, index: usize, sequence: u64, priority: Priority) {
        if let Some(Some(peer)) = self.peers.get_mut(index) {
            peer.connection.enqueue(priority, sequence);
            peer.dirty = true;
        }
    }

    /// Says that a reply was not kept: a short reply that is made up here.
    fn refuse_forgotten(&mut self, index: usize, sequence: u64) {
        let Some(Some(peer)) = self.peers.get_mut(index) else { return };
        let words = refusal(sequence, Refusal::Forgotten);
        peer.connection.enqueue_notice(&words);
    }

    /// Replies that services have made.
    pub(super) fn take_replies(&mut self) -> bool {
        std::mem::swap(&mut self.finished, &mut *self.replies.finished.borrow_mut());
        let progress = !self.finished.is_empty();
        let mut finished = std::mem::take(&mut self.finished);
        let Capabilities { gather_max, inline_bytes, .. } = self.endpoint.capabilities();
        for Finished { to, mut words, mut held } in finished.drain(..) {
            let total = held.as_ref().map_or(words.len(), |held| held.total);
            let is_in_region =
                held.as_ref().is_none_or(|held| Outbound::with(&words, held).is_in(self.endpoint.memory()));
            if total > MESSAGE_WORDS_MAX || !is_in_region {
                held = None;
                tracing::error!(
                    words = total,
                    is_in_region,
                    "a reply is too long, or not in the region, and is refused"
                );
                words.truncate(REPLY_HEADER);
                words.push(reply_item(0, to.index, Err(Refusal::Unanswered)));
            }
            if words[REPLY_HEADER] & 0xffff != 0 {
                bump(&self.counts().refused, 1);
            }
            let session = self.sessions.get_mut(to.session).and_then(Option::as_mut);
            let Some(session) = session.filter(|session| session.unique == to.unique) else {
                self.replies.recycle(words);
                continue;
            };
            if let Some(pieces) = &held {
                let rule = self.options.gather;
                let is_gathered = gather_max > 1
                    && total * 8 > inline_bytes
                    && rule.gathers(pieces.count(), pieces.bytes)
                    && session.takes_pieces(to.sequence);
                if !is_gathered {
                    let copied = copy(Outbound::with(&words, pieces), self.endpoint.memory());
                    // Only if its memory was lost just now. Then it sends nothing any more.
                    let refused =
                        || [&words[..REPLY_HEADER], &[reply_item(0, to.index, Err(Refusal::Unanswered))]].concat();
                    let copied = copied.unwrap_or_else(refused);
                    self.replies.recycle(std::mem::replace(&mut words, copied));
                    bump(&self.shared.threads[self.number].copied_words, total as u64);
                    held = None;
                } else {
                    bump(&self.shared.threads[self.number].gathered, 1);
                }
            }
            let whole = session.finish(to.sequence, words, held, &self.replies);
            match (whole, session.peer) {
                (Some(priority), Some(peer)) => self.answer(peer.index(), to.sequence, priority),
                // Its worker is away: the reply is kept like one that was sent.
                (Some(_), None) => session.sent(to.sequence, &self.replies),
                (None, _) => {}
            }
        }
        self.finished = finished;
        progress
    }

    /// Sends what peers are to get.
    pub(super) fn send(&mut self) -> bool {
        let mut progress = false;
        for index in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[index] else { continue };
            if !peer.dirty && !peer.connection.has_news() {
                continue;
            }
            let Some(session) = &mut self.sessions[peer.session] else { continue };
            if let Some(config) = peer.connection.remote_config() {
                config.apply(peer.connection.sending());
            }
            let outcome = peer.connection.send_out(session, &mut carrier!(self));
            peer.dirty = false;
            for sequence in peer.connection.sent.drain(..) {
                session.sent(sequence, &self.replies);
            }
            self.shared.threads[self.number].add_posted(&mut peer.connection);
            match outcome {
                Ok(sent) => {
                    peer.connection.release(&mut carrier!(self));
                    progress |= sent.moved;
                    peer.dirty = sent.owes;
                }
                Err(why) => self.drop_peer(index, &why),
            }
        }
        progress
    }
}
