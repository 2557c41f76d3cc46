//! Vectors that are kept for messages to come: a large one costs page faults when it is had from the allocator anew.

/// Empty vectors, so many at most, with room for so many words together.
#[derive(Debug)]
pub(super) struct Spare {
    vectors: Vec<Vec<u64>>,
    words: usize,
    vectors_max: usize,
}

/// Room of all vectors together: for several of the largest messages that are usual, or one of the longest.
const WORDS_MAX: usize = super::MESSAGE_WORDS_MAX;

impl Spare {
    pub(super) fn new(vectors_max: usize) -> Self {
        Self { vectors: Vec::new(), words: 0, vectors_max }
    }

    /// An empty vector; the last that was put, which is the likeliest to be in the processor's cache.
    #[inline]
    pub(super) fn take(&mut self) -> Vec<u64> {
        let vector = self.vectors.pop().unwrap_or_default();
        self.words -= vector.capacity();
        vector
    }

    /// Keeps a vector's memory, unless there is enough.
    #[inline]
    pub(super) fn put(&mut self, mut vector: Vec<u64>) {
        if self.vectors.len() < self.vectors_max && self.words + vector.capacity() <= WORDS_MAX {
            vector.clear();
            self.words += vector.capacity();
            self.vectors.push(vector);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_so_much_and_no_more() {
        let mut spare = Spare::new(3);
        for _ in 0..5 {
            spare.put(Vec::with_capacity(10));
        }
        assert_eq!(spare.vectors.len(), 3);
        assert_eq!(spare.take().capacity(), 10);
        spare.put(Vec::with_capacity(WORDS_MAX));
        assert_eq!((spare.vectors.len(), spare.words), (2, 20));
        for _ in 0..3 {
            spare.take();
        }
        assert_eq!(spare.words, 0);
        spare.put(Vec::with_capacity(WORDS_MAX));
        assert_eq!(spare.words, WORDS_MAX);
    }
}
