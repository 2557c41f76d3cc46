//! What stands where in the memory that a side of a connection opens; the same on both sides.
//!
//! ```text
//! lines 0..5      words that the other side writes, each in a cache line of its own (see Control)
//! word 64         ring of latency-sensitive messages, written by the other side
//! ...             ring of best-effort messages, likewise
//! ...             pool: slabs from which the other side fetches
//! ```

use crate::protocol::{Priority, SLAB_WORDS};

const LINE: usize = 8;
const CONTROL_WORDS: usize = 64;
/// A ring has at most so many words: a frame's length has 16 bits and is a quarter of a ring.
const RING_WORDS_MAX: usize = 1 << 17;

/// A word that the other side writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Control {
    /// How far the other side has written my ring.
    Head(Priority),
    /// How far the other side has finished with its ring, which I write.
    Tail(Priority),
    /// To a worker: the memory server's load. To the server: how it is to send.
    Word,
}

impl Control {
    pub(crate) fn index(self) -> usize {
        let line = match self {
            Self::Head(priority) => priority.index(),
            Self::Tail(priority) => 2 + priority.index(),
            Self::Word => 4,
        };
        line * LINE
    }
}

/// Sizes that follow from how much was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Words of each ring.
    pub(crate) ring_words: usize,
    pub(crate) slabs: usize,
}

impl Shape {
    /// None if so few words are no use.
    pub(crate) fn of(words: usize) -> Option<Self> {
        let sixteenth = words / 16;
        let ring_words = (1usize << sixteenth.checked_ilog2()?).min(RING_WORDS_MAX);
        let slabs = words.checked_sub(CONTROL_WORDS + 2 * ring_words)? / SLAB_WORDS;
        (ring_words >= 64 && slabs > 0).then_some(Self { ring_words, slabs })
    }

    pub(crate) fn ring(&self, priority: Priority) -> usize {
        CONTROL_WORDS + priority.index() * self.ring_words
    }

    pub(crate) fn pool(&self) -> usize {
        CONTROL_WORDS + 2 * self.ring_words
    }

    pub(crate) fn pool_words(&self) -> usize {
        self.slabs * SLAB_WORDS
    }

    /// Words of the longest frame's body. Frames are short beside the ring, so that a reader which releases a quarter at a
    /// time never keeps a writer waiting for ever.
    pub(crate) fn body_max(&self) -> usize {
        self.ring_words / 4 - 1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use farlink_fabric::listener::{CONNECTION_BYTES_MIN, DEFAULT_CONNECTION_BYTES};

    #[test]
    fn nothing_overlaps_and_everything_fits() {
        let default = Shape::of(DEFAULT_CONNECTION_BYTES / 8).unwrap();
        assert_eq!((default.ring_words * 8, default.slabs), (64 << 10, 16));
        for bytes in [CONNECTION_BYTES_MIN, 200 << 10, DEFAULT_CONNECTION_BYTES, 1 << 26, 1 << 30] {
            let shape = Shape::of(bytes / 8).unwrap();
            assert!(shape.ring_words.is_power_of_two() && shape.body_max() < 1 << 16);
            assert_eq!(shape.ring(Priority::Latency) + shape.ring_words, shape.ring(Priority::BestEffort));
            assert_eq!(shape.ring(Priority::BestEffort) + shape.ring_words, shape.pool());
            assert!(shape.pool() + shape.pool_words() <= bytes / 8);
        }
        assert!(Control::Word.index() < CONTROL_WORDS);
        assert!((0..8000).all(|words| Shape::of(words).is_none()));
    }
}
