//! The pool: memory that a side opened, from which the other side fetches. Blocks are cut into pieces of one size class
//! each, and are whole again when their last piece comes back.

use crate::protocol::{BLOCK_WORDS, PIECE_WORDS, Priority};

/// Words of the smallest piece: a block has as many as a word has bits.
const SMALLEST: usize = BLOCK_WORDS / 64;

/// A part of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Its first word, from the pool's start.
    pub(crate) first: usize,
    words: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Block {
    /// Words of its pieces; 0 while it is whole.
    piece_words: usize,
    used: u64,
}

#[derive(Debug)]
pub(crate) struct Pool {
    blocks: Vec<Block>,
    whole: usize,
}

impl Pool {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { blocks: vec![Block::default(); blocks], whole: blocks }
    }

    /// A piece of at least `words`, at most [`PIECE_WORDS`]; none while others have it all. The last quarter of the blocks is
    /// cut only for what is latency-sensitive.
    pub(crate) fn take(&mut self, words: usize, priority: Priority) -> Option<Piece> {
        let piece_words = words.next_power_of_two().clamp(SMALLEST, PIECE_WORDS);
        let all = all_pieces(piece_words);
        let spared = match priority {
            Priority::Latency => 0,
            Priority::BestEffort => self.blocks.len() / 4,
        };
        let cut = self.blocks.iter().position(|block| block.piece_words == piece_words && block.used != all);
        let index = cut.or_else(|| {
            let found =
                if self.whole > spared { self.blocks.iter().position(|block| block.piece_words == 0) } else { None };
            self.whole -= usize::from(found.is_some());
            found
        })?;
        let block = &mut self.blocks[index];
        block.piece_words = piece_words;
        let free = block.used.trailing_ones();
        block.used |= 1 << free;
        Some(Piece { first: index * BLOCK_WORDS + free as usize * piece_words, words: piece_words })
    }

    pub(crate) fn give_back(&mut self, piece: Piece) {
        let block = &mut self.blocks[piece.first / BLOCK_WORDS];
        debug_assert_eq!(block.piece_words, piece.words);
        block.used &= !(1 << (piece.first % BLOCK_WORDS / piece.words));
        if block.used == 0 {
            block.piece_words = 0;
            self.whole += 1;
        }
    }
}

/// The bits of all pieces of a block.
fn all_pieces(piece_words: usize) -> u64 {
    u64::MAX >> (64 - BLOCK_WORDS / piece_words)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_are_disjoint_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1..=PIECE_WORDS, any::<bool>()), 1..200), blocks in 1usize..9
        ) {
            let mut pool = Pool::new(blocks);
            let mut held: Vec<Piece> = Vec::new();
            for (take, words, latency) in steps {
                if take {
                    let priority = if latency { Priority::Latency } else { Priority::BestEffort };
                    if let Some(piece) = pool.take(words, priority) {
                        prop_assert!(piece.words >= words && piece.first + piece.words <= blocks * BLOCK_WORDS);
                        let apart = |other: &Piece| {
                            piece.first + piece.words <= other.first || other.first + other.words <= piece.first
                        };
                        prop_assert!(held.iter().all(apart));
                        held.push(piece);
                    }
                } else if !held.is_empty() {
                    pool.give_back(held.swap_remove(words % held.len()));
                }
            }
            held.into_iter().for_each(|piece| pool.give_back(piece));
            let chunks = (0..blocks * BLOCK_WORDS / PIECE_WORDS).filter(|_| {
                pool.take(PIECE_WORDS, Priority::Latency).is_some()
            });
            prop_assert_eq!(chunks.count(), blocks * BLOCK_WORDS / PIECE_WORDS);
        }
    }

    #[test]
    fn best_effort_leaves_room_for_the_latency_sensitive() {
        let mut pool = Pool::new(8);
        while pool.take(PIECE_WORDS, Priority::BestEffort).is_some() {}
        assert!(pool.take(PIECE_WORDS, Priority::Latency).is_some());
    }
}
