//! The peers of a thread: they come, go, and are dropped.

use super::{
    counts::{RELAXED, bump},
    thread::{Thread, carrier},
};
use crate::{
    connection::{Broken, Connection, Sending},
    message::{hello_ack, nack},
    protocol::Refusal,
    session::Session,
};
use farlink_fabric::{
    Capabilities,
    connection::{OpenMemory, PeerId},
    listener::Change,
    ptr::ServerId,
};

/// Sessions without a connection that a thread keeps, if it has not had more connections at a time: all may be lost at once.
const AWAY_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) connection: Connection,
    pub(super) session: usize,
    /// What the peer had done when that was last looked at, and when it last did something.
    pub(super) trace: u64,
    pub(super) moved_at_ns: u64,
    /// Something of this side's has changed: a completion came, or there is something to send.
    pub(super) dirty: bool,
    /// It has come back after a lost connection: an answer that went over that one may have been lost with it.
    pub(super) is_back: bool,
    /// It knows that nothing more is taken.
    pub(super) was_told: bool,
}

impl Thread {
    /// Peers that come and go.
    pub(super) fn take_changes(&mut self, thorough: bool) -> bool {
        self.endpoint.changes(thorough, &mut self.changes);
        if self.changes.is_empty() {
            return false;
        }
        let mut changes = std::mem::take(&mut self.changes);
        for change in changes.drain(..) {
            match change {
                Change::Joined { peer, who, memory } => {
                    bump(&self.counts().joined, 1);
                    self.open(peer, who, memory);
                }
                Change::Left { peer, in_order } => {
                    bump(&self.counts().left, 1);
                    self.forget(peer.index(), in_order);
                }
            }
        }
        self.changes = changes;
        true
    }

    pub(super) fn open(&mut self, peer: ServerId, who: PeerId, memory: OpenMemory) {
        self.generation = self.generation.wrapping_add(1);
        let Capabilities { ordered_writes: ordered, gather_max, .. } = self.endpoint.capabilities();
        let sending = Sending { ordered, coalesce: true, eager_words: usize::MAX, gather_max };
        let connection = Connection::new(memory, peer, self.generation, sending).filter(|_| !self.is_ending);
        let Some(mut connection) = connection else { return self.endpoint.dismiss(peer) };
        let known = self.by_worker.get(&who).copied();
        let session = known.unwrap_or_else(|| {
            self.next_unique += 1;
            let session = Session::new(who, self.next_unique);
            let free = self.sessions.iter().position(Option::is_none).unwrap_or(self.sessions.len());
            if free == self.sessions.len() {
                self.sessions.push(None);
            }
            self.sessions[free] = Some(session);
            self.by_worker.insert(who, free);
            free
        });
        // A worker has one connection to a server; of two, the newer one counts.
        if let Some(older) = self.sessions[session].as_mut().and_then(|session| session.peer.replace(peer)) {
            self.close(older.index());
        }
        let unique = self.sessions[session].as_ref().map_or(0, |session| session.unique);
        connection.enqueue_notice(&hello_ack(self.shared.incarnation, unique));
        let moved_at_ns = self.clock.now_ns();
        let peer_state =
            Peer { connection, session, trace: 0, moved_at_ns, dirty: true, is_back: known.is_some(), was_told: false };
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(peer_state);
        self.present += 1;
        self.present_max = self.present_max.max(self.present);
        self.counts().peers_now.store(self.present as u64, RELAXED);
    }

    /// Closes a connection on this side's own account. Its session waits for the worker to come again.
    pub(super) fn close(&mut self, index: usize) {
        if let Some(Some(_)) = self.peers.get(index) {
            let other = peer_number(index);
            self.endpoint.dismiss(other);
            self.forget(index, false);
        }
    }

    /// Frees what a connection had.
    pub(super) fn forget(&mut self, index: usize, in_order: bool) {
        let Some(peer) = self.peers.get_mut(index).and_then(Option::take) else { return };
        // Its number may be given out again before the next doorbell, and what is held for its pieces goes now.
        self.outbox.retain(|post| post.at.server() != peer_number(index));
        self.present -= 1;
        self.counts().peers_now.store(self.present as u64, RELAXED);
        let Some(session) = &mut self.sessions[peer.session] else { return };
        if in_order {
            self.by_worker.remove(&session.who);
            self.sessions[peer.session] = None;
            return;
        }
        session.lose_connection();
        // Its worker may have come again already.
        if session.peer != Some(peer_number(index)) {
            return;
        }
        session.peer = None;
        self.departures += 1;
        session.away_since = self.departures;
        let away = self.sessions.iter().flatten().filter(|session| session.peer.is_none());
        if away.clone().count() > self.present_max.max(AWAY_MAX)
            && let Some(who) = away.min_by_key(|session| session.away_since).map(|session| session.who)
            && let Some(place) = self.by_worker.remove(&who)
        {
            self.sessions[place] = None;
        }
    }

    /// Drops a connection that makes no sense.
    pub(super) fn drop_peer(&mut self, index: usize, why: &Broken) {
        tracing::warn!(peer = index, %why, "dropped a peer");
        bump(&self.counts().dropped, 1);
        if let Broken::Protocol(_) = why {
            bump(&self.counts().malformed, 1);
            self.notify(index, &nack(Refusal::Malformed));
            self.exchange();
        }
        self.close(index);
    }

    fn notify(&mut self, index: usize, words: &[u64]) {
        let Some(Some(peer)) = self.peers.get_mut(index) else { return };
        peer.connection.enqueue_notice(words);
        if let Some(session) = &self.sessions[peer.session] {
            let _ = peer.connection.send_out(session, &mut carrier!(self));
        }
    }
}

fn peer_number(index: usize) -> ServerId {
    u16::try_from(index).ok().and_then(ServerId::new).expect("an endpoint numbers its peers so")
}
