//! Exactly once, on the memory server's side: what each worker has asked for and not yet acknowledged.
//!
//! A session belongs to a worker, not to a connection. It holds a place for each request from the last acknowledged one on,
//! [`WINDOW`] at most. A request that is new runs. A repeat of one that runs waits for it; a repeat of one that is done gets
//! the reply that was kept. Replies are kept until the worker acknowledges them, which every request does along the way; if
//! they become too many words, those that were sent already are dropped, the oldest first, and a repeat is told so.
//!
//! A worker whose connections have failed acknowledges requests though they may still run. Those are counted: while there are [`WINDOW`]
//! of them, nothing more is taken from their worker. So whatever it acknowledges, twice as many run for a session at most.
//!
//! A reply with pieces is not kept once it is sent, or its connection is lost: its place is open again, and a repeat of its request is
//! carried out again. Only requests that change nothing are answered so.

use std::collections::VecDeque;

use crate::{
    connection::Source,
    message::{REPLY_HEADER, reply_header, reply_item},
    pieces::{Held, Outbound},
    protocol::{MESSAGE_WORDS_MAX, Priority, Refusal, WINDOW},
    serve::Replies,
};
use farlink_fabric::{connection::PeerId, ptr::ServerId};

/// Words of kept replies of one session, of those that were sent already.
const KEPT_WORDS_MAX: usize = 1 << 20;

#[derive(Debug)]
enum Place {
    /// Not seen yet.
    Open,
    /// Under way: what of the reply there is, and how many items are missing.
    Running { reply: Vec<u64>, missing: usize, priority: Priority },
    /// Done; sent, or in a connection's queue. With pieces: not sent.
    Done { reply: Vec<u64>, held: Option<Box<Held>>, priority: Priority, sent: bool },
    /// Done, sent and dropped.
    Forgotten,
}

/// What to do with a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Carry it out.
    New,
    /// A repeat: nothing; its reply comes, or is on its way already.
    Pending,
    /// A repeat: send the reply of this number again.
    Answered(Priority),
    /// A repeat whose reply is gone.
    Forgotten,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) who: PeerId,
    /// Another number for each session of a memory server's incarnation.
    pub(super) unique: u64,
    /// The peer whose connection it has; none while the worker is away.
    pub(super) peer: Option<ServerId>,
    /// Among the departures of its thread's workers, the last one of its own.
    pub(super) away_since: u64,
    /// The number of the first place.
    base: u64,
    places: VecDeque<Place>,
    /// Requests that run though they were acknowledged, and how many items of each are missing.
    abandoned: Vec<(u64, usize)>,
    /// Words of replies that wait to be sent, their pieces among them, or for their other items.
    pub(super) unsent_words: usize,
    kept_words: usize,
}

impl Session {
    pub(super) fn new(who: PeerId, unique: u64) -> Self {
        Self {
            who,
            unique,
            peer: None,
            away_since: 0,
            base: 1,
            places: VecDeque::new(),
            abandoned: Vec::new(),
            unsent_words: 0,
            kept_words: 0,
        }
    }

    fn place(&mut self, sequence: u64) -> Option<&mut Place> {
        self.places.get_mut(usize::try_from(sequence.checked_sub(self.base)?).ok()?)
    }

    /// Takes notice of a request of so many items; none if its numbers cannot be.
    pub(super) fn admit(
        &mut self,
        (sequence, acknowledged): (u64, u64),
        items: usize,
        priority: Priority,
        replies: &Replies,
    ) -> Option<Admission> {
        self.acknowledge(acknowledged, replies);
        let index = usize::try_from(sequence.checked_sub(self.base)?).ok().filter(|&index| index < WINDOW)?;
        while self.places.len() <= index {
            self.places.push_back(Place::Open);
        }
        Some(match &mut self.places[index] {
            place @ Place::Open => {
                *place = Place::Running { reply: Vec::new(), missing: items, priority };
                Admission::New
            }
            Place::Running { .. } | Place::Done { sent: false, .. } => Admission::Pending,
            Place::Done { priority, reply, sent, .. } => {
                *sent = false;
                self.kept_words -= reply.len();
                self.unsent_words += reply.len();
                Admission::Answered(*priority)
            }
            Place::Forgotten => Admission::Forgotten,
        })
    }

    fn acknowledge(&mut self, acknowledged: u64, replies: &Replies) {
        while self.base < acknowledged {
            match self.places.pop_front() {
                Some(Place::Done { reply, held, sent, .. }) => {
                    *(if sent { &mut self.kept_words } else { &mut self.unsent_words }) -= words_of(&reply, &held);
                    replies.recycle(reply);
                }
                // The worker abandons what it has not got; whoever carries it out finds no place for it.
                Some(Place::Running { reply, missing, .. }) => {
                    self.abandoned.push((self.base, missing));
                    self.unsent_words -= reply.len();
                    replies.recycle(reply);
                }
                Some(Place::Open | Place::Forgotten) => {}
                None => {
                    self.base = acknowledged;
                    return;
                }
            }
            self.base += 1;
        }
    }

    /// Takes the reply to one item, headers left out; the priority if that makes the whole reply.
    pub(super) fn finish(
        &mut self,
        sequence: u64,
        mut words: Vec<u64>,
        held: Option<Box<Held>>,
        replies: &Replies,
    ) -> Option<Priority> {
        let Some(place) = self.place(sequence) else {
            self.finish_abandoned(sequence);
            return None;
        };
        let Place::Running { reply, missing, priority } = place else { return None };
        let (priority, len_before) = (*priority, reply.len());
        *missing = missing.saturating_sub(1);
        // Room is left for the items that are missing to be refused, too.
        if reply.len().max(REPLY_HEADER) + words.len() - REPLY_HEADER + *missing > MESSAGE_WORDS_MAX {
            let index = (words[REPLY_HEADER] >> 16) as u16;
            tracing::error!(index, "the reply to a batch would be too long, and one of its items is refused");
            words.truncate(REPLY_HEADER);
            words.push(reply_item(0, index, Err(Refusal::Unanswered)));
        }
        if reply.is_empty() {
            std::mem::swap(reply, &mut words);
        } else {
            reply.extend_from_slice(&words[REPLY_HEADER..]);
        }
        // Counts the items that are there.
        reply[1] += 1;
        let added = words_of(reply, &held) - len_before;
        let done = *missing == 0;
        if done {
            let mut reply = std::mem::take(reply);
            let items = reply[1] as usize;
            reply[..REPLY_HEADER].copy_from_slice(&reply_header(items, sequence));
            debug_assert!(held.is_none() || items == 1);
            *place = Place::Done { reply, held, priority, sent: false };
        }
        self.unsent_words += added;
        replies.recycle(words);
        done.then_some(priority)
    }

    fn finish_abandoned(&mut self, sequence: u64) {
        let Some(index) = self.abandoned.iter().position(|(abandoned, _)| *abandoned == sequence) else { return };
        self.abandoned[index].1 -= 1;
        if self.abandoned[index].1 == 0 {
            self.abandoned.swap_remove(index);
        }
    }

    /// Whether as many requests that were acknowledged still run as a worker may have at all.
    pub(super) fn has_abandoned_many(&self) -> bool {
        self.abandoned.len() >= WINDOW
    }

    /// Answers a whole request with a refusal.
    pub(super) fn refuse(&mut self, sequence: u64, why: Refusal, replies: &Replies) -> Option<Priority> {
        if let Some(Place::Running { missing, .. }) = self.place(sequence) {
            *missing = 1;
        }
        let mut words = replies.vector();
        words.extend([0, 0, reply_item(0, 0, Err(why))]);
        self.finish(sequence, words, None, replies)
    }

    /// Whether a reply with pieces can be the whole reply to this request: then a repeat of the request is carried out again.
    pub(super) fn takes_pieces(&mut self, sequence: u64) -> bool {
        matches!(self.place(sequence), Some(Place::Running { reply, missing: 1, .. }) if reply.is_empty())
    }

    /// Whether all that was asked for is answered, and on its way.
    pub(super) fn is_answered(&self) -> bool {
        !self.places.iter().any(|place| matches!(place, Place::Running { .. } | Place::Done { sent: false, .. }))
    }

    /// Since when pieces of replies have been held: those that are seen for the first time, since now.
    pub(super) fn held_since_ns(&mut self, now_ns: u64) -> Option<u64> {
        let since = |place: &mut Place| match place {
            Place::Done { held: Some(held), .. } => Some(*held.since_ns.get_or_insert(now_ns)),
            _ => None,
        };
        self.places.iter_mut().filter_map(since).min()
    }

    /// Takes notice that a connection has taken over a whole reply, or, of one with pieces, that it has been sent.
    pub(super) fn sent(&mut self, sequence: u64, replies: &Replies) {
        if let Some(place @ Place::Done { held: Some(_), .. }) = self.place(sequence) {
            // Not kept: whoever asks again has it carried out again.
            if let Place::Done { reply, held, .. } = std::mem::replace(place, Place::Open) {
                self.unsent_words -= words_of(&reply, &held);
                replies.recycle(reply);
            }
        } else if let Some(Place::Done { reply, sent: sent @ false, .. }) = self.place(sequence) {
            *sent = true;
            let len = reply.len();
            self.unsent_words -= len;
            self.kept_words += len;
        }
        let mut index = 0;
        while self.kept_words > KEPT_WORDS_MAX && index < self.places.len() {
            if let Place::Done { reply, sent: true, .. } = &mut self.places[index] {
                self.kept_words -= reply.len();
                replies.recycle(std::mem::take(reply));
                self.places[index] = Place::Forgotten;
            }
            index += 1;
        }
    }

    /// A connection is gone, and with it what it had in its queue.
    pub(super) fn lose_connection(&mut self) {
        for place in &mut self.places {
            if let Place::Done { reply, held: held @ Some(_), .. } = place {
                self.unsent_words -= words_of(reply, held);
                *place = Place::Open;
            } else if let Place::Done { reply, sent: sent @ false, .. } = place {
                *sent = true;
                self.unsent_words -= reply.len();
                self.kept_words += reply.len();
            }
        }
    }
}

/// Words of a reply, its pieces among them.
fn words_of(reply: &[u64], held: &Option<Box<Held>>) -> usize {
    held.as_ref().map_or(reply.len(), |held| held.total)
}

impl Source for Session {
    fn message(&self, number: u64, _begun: bool) -> Option<Outbound<'_>> {
        match self.places.get(usize::try_from(number.checked_sub(self.base)?).ok()?)? {
            Place::Done { reply, held: Some(held), .. } => Some(Outbound::with(reply, held)),
            Place::Done { reply, .. } => Some(Outbound::of(reply)),
            _ => None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::pieces::Pieces;
    use farlink_fabric::{lock::OwnerId, ptr::RemotePtr};

    const FAST: Priority = Priority::Latency;

    fn session() -> (Session, Replies) {
        (Session::new(PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 }, 1), Replies::default())
    }

    fn item(result: &[u64], index: u16) -> Vec<u64> {
        let mut words = vec![0, 0, reply_item(result.len(), index, Ok(()))];
        words.extend_from_slice(result);
        words
    }

    #[test]
    fn a_repeat_runs_once_and_is_answered_from_what_was_kept() {
        let (mut session, replies) = session();
        assert_eq!(session.admit((1, 1), 1, FAST, &replies), Some(Admission::New));
        assert_eq!(session.admit((1, 1), 1, FAST, &replies), Some(Admission::Pending));
        assert_eq!(session.finish(1, item(&[42], 0), None, &replies), Some(FAST));
        assert_eq!(session.admit((1, 1), 1, FAST, &replies), Some(Admission::Pending));
        session.sent(1, &replies);
        assert_eq!(session.admit((1, 1), 1, FAST, &replies), Some(Admission::Answered(FAST)));
        assert_eq!(session.message(1, false).unwrap().words.last(), Some(&42));
        // Acknowledged: gone, and older numbers make no sense any more.
        assert_eq!(session.admit((3, 2), 1, FAST, &replies), Some(Admission::New));
        assert!(session.message(1, false).is_none());
        assert_eq!(session.admit((1, 1), 1, FAST, &replies), None);
        assert_eq!(session.admit((2 + WINDOW as u64, 2), 1, FAST, &replies), None);
    }

    #[test]
    fn the_items_of_a_batch_make_one_reply() {
        let (mut session, replies) = session();
        session.admit((1, 1), 3, FAST, &replies).unwrap();
        assert_eq!(session.finish(1, item(&[7, 8], 2), None, &replies), None);
        assert_eq!(session.finish(1, item(&[], 0), None, &replies), None);
        assert_eq!(session.unsent_words, REPLY_HEADER + 4, "what is there of a reply counts before all of it is");
        assert_eq!(session.finish(1, item(&[9], 1), None, &replies), Some(FAST));
        let reply = session.message(1, false).unwrap().words.to_vec();
        let super::super::FromServer::Reply(view) = super::super::read_from_server(&reply).unwrap() else { panic!() };
        let found: Vec<_> =
            view.items().map(|item| item.unwrap()).map(|item| (item.index, reply[item.words].to_vec())).collect();
        assert_eq!(found, [(2, vec![7, 8]), (0, vec![]), (1, vec![9])]);
    }

    #[test]
    fn what_a_reply_has_no_room_for_is_refused() {
        let (mut session, replies) = session();
        session.admit((1, 1), 4, FAST, &replies).unwrap();
        // All of the room but the last three items' headers.
        let most = item(&vec![7; MESSAGE_WORDS_MAX - REPLY_HEADER - 4], 0);
        session.finish(1, most, None, &replies);
        for (index, result) in [(1, &[1][..]), (2, &[]), (3, &[2, 3])] {
            session.finish(1, item(result, index), None, &replies);
        }
        let reply = session.message(1, false).unwrap().words;
        assert_eq!(reply.len(), MESSAGE_WORDS_MAX);
        let super::super::FromServer::Reply(view) = super::super::read_from_server(reply).unwrap() else { panic!() };
        let found: Vec<_> = view.items().map(|item| item.unwrap()).map(|item| (item.index, item.status)).collect();
        let none = Err(Refusal::Unanswered);
        assert_eq!(found, [(0, Ok(())), (1, none), (2, Ok(())), (3, none)]);
        assert_eq!(session.unsent_words, MESSAGE_WORDS_MAX);
    }

    #[test]
    fn large_replies_are_given_up_and_small_memory_stays() {
        let (mut session, replies) = session();
        for sequence in 1..=9 {
            session.admit((sequence, 1), 1, FAST, &replies).unwrap();
            session.finish(sequence, item(&vec![0; KEPT_WORDS_MAX / 4], 0), None, &replies).unwrap();
            session.sent(sequence, &replies);
            assert!(session.kept_words <= KEPT_WORDS_MAX && session.unsent_words == 0);
        }
        assert_eq!(session.admit((1, 1), 1, FAST, &replies), Some(Admission::Forgotten));
        assert_eq!(session.admit((9, 1), 1, FAST, &replies), Some(Admission::Answered(FAST)));
        session.acknowledge(10, &replies);
        assert_eq!((session.kept_words, session.unsent_words, session.base), (0, 0, 10));
    }

    #[test]
    fn what_is_acknowledged_and_runs_counts_until_it_is_done() {
        let (mut session, replies) = session();
        for sequence in 1..=WINDOW as u64 {
            session.admit((sequence, sequence), 2, FAST, &replies).unwrap();
            assert!(!session.has_abandoned_many());
        }
        session.finish(WINDOW as u64, item(&[7], 0), None, &replies);
        session.acknowledge(WINDOW as u64 + 1, &replies);
        assert!(session.has_abandoned_many());
        assert_eq!(session.unsent_words, 0);
        session.finish(1, item(&[7], 0), None, &replies);
        assert!(session.has_abandoned_many(), "one item of it still runs");
        session.finish(1, item(&[7], 1), None, &replies);
        assert!(!session.has_abandoned_many());
        session.finish(WINDOW as u64, item(&[7], 1), None, &replies);
        assert_eq!((session.abandoned.len(), session.unsent_words, session.kept_words), (WINDOW - 2, 0, 0));
    }

    #[test]
    fn the_pieces_of_a_reply_count_until_it_is_sent_or_its_connection_is_lost() {
        let (mut session, replies) = session();
        for (sequence, is_lost) in [(1, false), (2, true)] {
            session.admit((sequence, sequence), 1, FAST, &replies).unwrap();
            let mut pieces = Pieces::after(item(&[7], 0));
            pieces.push(RemotePtr::from_raw(4096).unwrap(), 500);
            let (words, held) = pieces.split(Box::new(()));
            session.finish(sequence, words, held, &replies).unwrap();
            assert_eq!(session.unsent_words, REPLY_HEADER + 2 + 500);
            if is_lost {
                session.lose_connection();
            } else {
                session.sent(sequence, &replies);
            }
            assert_eq!((session.unsent_words, session.kept_words), (0, 0));
        }
        // Not sent, and acknowledged.
        session.admit((3, 3), 1, FAST, &replies).unwrap();
        let mut pieces = Pieces::after(item(&[], 0));
        pieces.push(RemotePtr::from_raw(4096).unwrap(), 500);
        let (words, held) = pieces.split(Box::new(()));
        session.finish(3, words, held, &replies).unwrap();
        session.acknowledge(4, &replies);
        assert_eq!((session.unsent_words, session.kept_words), (0, 0));
    }

    #[test]
    fn a_refusal_answers_a_whole_batch() {
        let (mut session, replies) = session();
        session.admit((1, 1), 3, FAST, &replies).unwrap();
        assert_eq!(session.refuse(1, Refusal::Malformed, &replies), Some(FAST));
        assert!(session.message(1, false).is_some());
    }
}
