//! Who waits for room, or for the connection: each has one place in a line, however often it is polled, and none once it is dropped.

use std::{collections::VecDeque, task::Context};

use super::{Channel, Host, Waiter, core::Core};
use crate::protocol::Priority;

/// Those who wait for the same, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Line {
    waiters: VecDeque<(u64, Waiter)>,
    /// The number of the last place that was given out.
    last: u64,
}

impl Line {
    #[cfg(all(test, not(loom)))]
    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Lets the first ones go on, so many at most.
    pub(super) fn wake(&mut self, count: usize, host: &dyn Host) {
        let count = count.min(self.waiters.len());
        self.waiters.drain(..count).for_each(|(_, waiter)| waiter.wake(host.tasks()));
    }

    fn find(&self, number: u64) -> Result<usize, usize> {
        self.waiters.binary_search_by_key(&number, |(number, _)| *number)
    }
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Room(Priority),
    Connection,
}

/// A place in a line, from the first time that its owner has to wait. Who was woken to have room and is dropped instead passes it on.
pub(super) struct Place<'a> {
    channel: &'a Channel,
    what: For,
    number: Option<u64>,
}

impl<'a> Place<'a> {
    pub(super) fn new(channel: &'a Channel, what: For) -> Self {
        Self { channel, what, number: None }
    }

    /// Is woken later. Who was woken in vain is where it was before.
    pub(super) fn wait(&mut self, core: &mut Core, cx: &Context<'_>) {
        let waiter = Waiter::of(cx, self.channel.host.tasks());
        let line = core.line(self.what);
        let number = *self.number.get_or_insert_with(|| {
            line.last += 1;
            line.last
        });
        match line.find(number) {
            Ok(index) => line.waiters[index].1 = waiter,
            Err(index) => line.waiters.insert(index, (number, waiter)),
        }
    }

    /// Waits no longer; false if it was woken already, or has never waited.
    pub(super) fn leave(&mut self, core: &mut Core) -> bool {
        let line = core.line(self.what);
        let index = self.number.take().and_then(|number| line.find(number).ok());
        index.and_then(|index| line.waiters.remove(index)).is_some()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.number.is_none() {
            return;
        }
        let core = &mut *self.channel.state.core.borrow_mut();
        if !self.leave(core) && self.what != For::Connection {
            core.let_in(&*self.channel.host);
        }
    }
}
