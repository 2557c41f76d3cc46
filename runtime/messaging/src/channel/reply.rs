//! Waiting for a reply, and what it holds.

use std::{
    fmt,
    future::Future,
    ops::Range,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use super::{
    Host, Waiter,
    core::{Failure, Progress},
    list::State,
};
use crate::{
    error::Error,
    message::{ReplyItem, ReplyView},
};
use farlink_fabric::wire::{Wire, decode_all};

/// The first item of a reply that was checked when it came.
#[inline]
pub(super) fn first_item_of(words: &[u64]) -> Option<ReplyItem> {
    ReplyView::of(words)?.into_items().next()?.ok()
}

/// The items of a reply that was checked when it came.
pub(super) fn items_of(words: &[u64]) -> impl Iterator<Item = ReplyItem> {
    ReplyView::of(words).into_iter().flat_map(ReplyView::into_items).flatten()
}

/// Waits for one reply. Dropped, it leaves the slot to the reply.
pub(super) struct Pending<'a> {
    pub(super) state: &'a State,
    pub(super) host: &'a dyn Host,
    pub(super) sequence: u64,
    pub(super) over: bool,
}

impl Future for Pending<'_> {
    type Output = Result<Vec<u64>, Failure>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let host = self.host;
        let core = &mut *self.state.core.borrow_mut();
        let slot = core.slots.of(self.sequence);
        let outcome = match std::mem::replace(&mut slot.progress, Progress::Over) {
            Progress::Answered(message) => Ok(message),
            Progress::Failed(failure) => Err(failure),
            progress => {
                slot.progress = progress;
                slot.waiter = Some(Waiter::of(cx, host.tasks()));
                return Poll::Pending;
            }
        };
        self.over = true;
        core.advance(host);
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
            core.advance(self.host);
        }
    }
}

/// A reply's words. Their memory goes back to the channel when it is dropped.
pub struct Reply {
    pub(super) words: Vec<u64>,
    pub(super) range: Range<usize>,
    pub(super) home: Rc<State>,
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
        Ok(decode_all(self.words())?)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Ok(mut core) = self.home.core.try_borrow_mut() {
            core.recycle(std::mem::take(&mut self.words));
        }
    }
}
