//! Several requests in one message, and one request to several memory servers.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
};

use super::{Channel, Reply};
use crate::{
    error::Error,
    messaging::{Kind, Priority, message::push_item},
    wire::Wire,
};

/// Several requests for one message.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    pub(super) kinds: Vec<Kind>,
    pub(super) words: Vec<u64>,
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
