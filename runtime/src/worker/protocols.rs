//! A worker as the poster of the requests of protocols.

use std::future::Future;

use super::Handle;
use crate::{
    buffer::Buffer,
    counters::bump,
    error::Error,
    fabric::{Capabilities, Liveness},
    layout::Records,
    lock::OwnerId,
    ptr::RemotePtr,
    remote::{Count, LockWait, Misfit, Payload, Remote, TORN_WAIT},
};

impl Remote for Handle {
    fn owner(&self) -> OwnerId {
        self.owner()
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities()
    }

    fn buffer(&self, words: usize) -> Result<Buffer, Error> {
        self.buffer(words)
    }

    fn read(&self, at: RemotePtr, words: usize) -> impl Future<Output = Result<Buffer, Box<Error>>> {
        self.read(at, words)
    }

    fn write(&self, at: RemotePtr, payload: Payload) -> impl Future<Output = Result<(), Box<Error>>> {
        match payload {
            Payload::Word(word) => self.write_word(at, word),
            Payload::Words(buffer) => self.write(at, buffer),
        }
    }

    fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> impl Future<Output = Result<u64, Box<Error>>> {
        self.compare_swap(at, expected, new)
    }

    fn load(&self, at: RemotePtr) -> impl Future<Output = Result<u64, Box<Error>>> {
        self.load(at)
    }

    fn before_trying_again(
        &self,
        error: Box<Error>,
        attempt: &mut u32,
    ) -> impl Future<Output = Result<(), Box<Error>>> {
        self.before_trying_again(error, attempt)
    }

    fn back_off(&self, attempt: u32) -> impl Future<Output = ()> {
        self.back_off(attempt)
    }

    fn rest(&self, ns: u64) -> impl Future<Output = ()> {
        self.sleep_until(self.clock().now_ns() + ns)
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        self.compute().fabric.liveness(owner)
    }

    fn records(&self) -> Records {
        self.compute().geometry.first().map_or(Records::All, |geometry| geometry.records)
    }

    fn lock_wait(&self) -> Option<LockWait> {
        let limit = self.compute().lock_wait?;
        Some(LockWait::new(self.clock().now_ns(), limit))
    }

    fn torn_wait(&self) -> Option<LockWait> {
        Some(LockWait::new(self.clock().now_ns(), TORN_WAIT))
    }

    fn is_known_corrupt(&self, at: RemotePtr, copy: &[u64]) -> bool {
        self.0.corrupt.borrow().has(at, copy)
    }

    fn note_corrupt(&self, misfit: Misfit) {
        self.0.corrupt.borrow_mut().add(misfit);
    }

    fn count(&self, what: Count) {
        let counters = self.counts();
        bump(match what {
            Count::RoundTrip => return self.count_round_trip(),
            Count::LockedRead => &counters.locked_reads,
            Count::TornRead => &counters.torn_reads,
            Count::StalePage => &counters.stale_pages,
        });
    }
}
