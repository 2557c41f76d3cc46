//! The end of a thread in good order: what it has taken is answered, and its peers learn that nothing else was taken.
//!
//! A peer is told once all answers have arrived, so it has them before it reads that. One that has come back after a lost connection is not:
//! the answer to a request may have been lost with that connection, and a repeat of the request may stand in the ring now. What such a peer
//! was not answered has an unknown outcome. Who comes now is dismissed.

use super::thread::{Thread, nanos};
use crate::message::GOODBYE;
use farlink_fabric::sync::yield_thread;

impl Thread {
    pub(super) fn end_in_order(&mut self) {
        let until_ns = self.clock.now_ns().saturating_add(nanos(self.options.end_wait));
        self.is_ending = true;
        while self.clock.now_ns() < until_ns {
            // Also says that it lives, to who waits for an answer.
            self.sample_clock();
            self.take_changes(false);
            self.service.turn();
            self.take_replies();
            self.send();
            self.exchange();
            if self.tell_end() == 0 {
                break;
            }
            yield_thread();
        }
    }

    /// How many peers wait for an answer still, or are being told.
    fn tell_end(&mut self) -> usize {
        let mut waiting = 0;
        for peer in self.peers.iter_mut().flatten() {
            let is_answered = self.sessions[peer.session].as_ref().is_none_or(|session| session.is_answered());
            if !is_answered || !peer.connection.has_delivered() {
                waiting += 1;
            } else if !peer.was_told && !peer.is_back {
                peer.was_told = true;
                peer.dirty = true;
                peer.connection.enqueue_notice(&[GOODBYE]);
                waiting += 1;
            }
        }
        waiting
    }
}
