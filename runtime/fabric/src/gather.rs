//! What one WRITE is put together from: words of the poster's own, and pieces of a memory server's region where they lie.
//!
//! Nothing of the region is copied by the processor: a card reads it, from [`Endpoint::ring`](crate::Endpoint::ring) to the
//! completion, at any time and in any order. So whoever posts it makes sure that the pieces stay what they are until then.

use std::ops::Range;

use crate::{buffer::Buffer, memory::LocalMemory, ptr::RemotePtr, sync::Ordering};

/// A part of what a [`Gather`] sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// These words of its buffer.
    Own(Range<usize>),
    /// So many words of the memory server's region from an address on.
    Region(RemotePtr, usize),
}

impl Piece {
    /// How many words it has.
    pub fn words(&self) -> usize {
        match self {
            Self::Own(range) => range.len(),
            Self::Region(_, words) => *words,
        }
    }
}

/// Pieces that one WRITE sends, one behind the other.
#[derive(Debug)]
pub struct Gather {
    pub(crate) buffer: Buffer,
    pieces: Vec<Piece>,
    words: usize,
}

impl Gather {
    /// These pieces; those of its own are words of `buffer`.
    ///
    /// # Panics
    /// If the buffer has not all of those.
    pub fn new(buffer: Buffer, pieces: Vec<Piece>) -> Self {
        let is_there = |piece: &Piece| match piece {
            Piece::Own(range) => range.start <= range.end && range.end <= buffer.len(),
            Piece::Region(..) => true,
        };
        assert!(pieces.iter().all(is_there), "a piece of its own lies in the buffer");
        let words = pieces.iter().map(Piece::words).sum();
        Self { buffer, pieces, words }
    }

    /// The pieces, in order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The words of all pieces together.
    pub fn words(&self) -> usize {
        self.words
    }

    /// Whether there is something to send, of at most `gather_max` pieces, and all that is in the region lies in `memory`.
    pub(crate) fn fits(&self, memory: &LocalMemory, gather_max: usize) -> bool {
        let is_there = |piece: &Piece| match piece {
            Piece::Own(_) => true,
            Piece::Region(at, words) => memory.words(*at, *words).is_some(),
        };
        self.words > 0 && self.pieces.len() <= gather_max && self.pieces.iter().all(is_there)
    }

    /// Calls `put` for each word, as it is now. What is not in `memory` is left out.
    pub(crate) fn each_word(&self, memory: &LocalMemory, mut put: impl FnMut(usize, u64)) {
        let mut place = 0;
        for piece in &self.pieces {
            match piece {
                Piece::Own(range) => {
                    self.buffer[range.clone()].iter().enumerate().for_each(|(index, word)| put(place + index, *word));
                }
                Piece::Region(at, words) => {
                    let words = memory.words(*at, *words).unwrap_or_default();
                    for (index, word) in words.iter().enumerate() {
                        put(place + index, word.load(Ordering::Relaxed));
                    }
                }
            }
            place += piece.words();
        }
    }

    /// One word, as it is now.
    pub(crate) fn word(&self, memory: &LocalMemory, mut index: usize) -> Option<u64> {
        for piece in &self.pieces {
            match piece {
                Piece::Own(range) if index < range.len() => return Some(self.buffer[range.start + index]),
                Piece::Region(at, words) if index < *words => {
                    return Some(memory.words(*at, *words)?[index].load(Ordering::Relaxed));
                }
                _ => index -= piece.words(),
            }
        }
        None
    }
}
