//! Several requests in one message.

use crate::{message::push_item, protocol::Kind};
use farlink_fabric::wire::Wire;

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
