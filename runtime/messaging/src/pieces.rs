//! Replies of which parts stay in the memory server's region until they are sent: pieces, which no processor copies.
//!
//! Kesavan et al., "To Copy or Not to Copy" (2016), section 3: the card gathers a reply from where its parts lie. What it takes in
//! exchange is that those stay what they are until the transfer has completed (section 5.5). So a reply of pieces comes with a
//! guard, which the session holds until then, for a bounded time.

use std::{any::Any, fmt, ops::Range};

use farlink_fabric::{memory::LocalMemory, ptr::RemotePtr, sync::Ordering};

/// The words of a reply, in order: its own, and pieces of the region between them. Whoever gets it sees words only.
#[derive(Debug, Default)]
pub struct Pieces {
    words: Vec<u64>,
    placed: Vec<Placed>,
    total: usize,
}

/// When the pieces of a reply are gathered by the card; else the processor copies them. A rule by the number and the size of
/// records, because a card takes a time for each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatherRule {
    /// Bytes of the region in the reply, at least.
    pub bytes_min: usize,
    /// Bytes of a piece, at least, on the average.
    pub piece_bytes_min: usize,
}

impl GatherRule {
    /// Whenever it can be done.
    pub const ALWAYS: Self = Self { bytes_min: 0, piece_bytes_min: 0 };
    /// Copy-out.
    pub const NEVER: Self = Self { bytes_min: usize::MAX, piece_bytes_min: 0 };

    /// Whether a reply with so many pieces is gathered, which have so many bytes together.
    pub fn gathers(&self, pieces: usize, bytes: usize) -> bool {
        bytes >= self.bytes_min && bytes >= pieces.saturating_mul(self.piece_bytes_min)
    }
}

impl Default for GatherRule {
    /// What Kesavan et al. found: gathering saturates the network from 6 records of 1 KiB on (section 5.1), copying is ahead, by
    /// up to 53%, where records have a few hundred bytes or less (sections 5.2 and 6); and some of those do not matter beside a
    /// large page (section 5.3).
    fn default() -> Self {
        Self { bytes_min: 6 << 10, piece_bytes_min: 512 }
    }
}

/// A piece, and before which of the reply's own words it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    before: usize,
    at: RemotePtr,
    words: usize,
}

impl Pieces {
    /// These words first.
    pub(crate) fn after(words: Vec<u64>) -> Self {
        Self { total: words.len(), words, placed: Vec::new() }
    }

    /// Appends words of the reply's own: those that `encode` appends.
    pub fn own(&mut self, encode: impl FnOnce(&mut Vec<u64>)) {
        let before = self.words.len();
        encode(&mut self.words);
        debug_assert!(self.words.len() >= before, "words are appended");
        self.total = self.total + self.words.len() - before;
    }

    /// Appends so many words of the region, from an address on.
    pub fn push(&mut self, at: RemotePtr, words: usize) {
        if words > 0 {
            self.placed.push(Placed { before: self.words.len(), at, words });
            self.total += words;
        }
    }

    /// Words of its own and of all pieces.
    pub fn words(&self) -> usize {
        self.total
    }

    /// Appends all of another's.
    pub fn append(&mut self, other: Self) {
        let Self { words, placed, total } = other;
        let before = self.words.len();
        self.placed.extend(placed.into_iter().map(|piece| Placed { before: before + piece.before, ..piece }));
        self.words.extend(words);
        self.total += total;
    }

    /// How many pieces of the region there are.
    pub fn count(&self) -> usize {
        self.placed.len()
    }

    /// Words of the region's pieces together.
    pub fn region_words(&self) -> usize {
        self.total - self.words.len()
    }

    /// All words, copied; none if a piece is not in this memory.
    pub fn copy(&self, memory: &LocalMemory) -> Option<Vec<u64>> {
        copy(self.outbound(), memory)
    }

    pub(crate) fn outbound(&self) -> Outbound<'_> {
        Outbound { words: &self.words, placed: &self.placed, total: self.total }
    }

    /// The reply's own words; and the pieces, if there are any, with what keeps them.
    pub(crate) fn split(self, guard: Box<dyn Any>) -> (Vec<u64>, Option<Box<Held>>) {
        let bytes = self.region_words() * 8;
        let Self { words, placed, total } = self;
        let held = (!placed.is_empty()).then(|| Box::new(Held { placed, total, bytes, since_ns: None, guard }));
        (words, held)
    }
}

/// The pieces of a reply that is not sent yet.
pub(crate) struct Held {
    placed: Vec<Placed>,
    /// The reply's words, its own among them.
    pub(crate) total: usize,
    /// Bytes of its pieces.
    pub(crate) bytes: usize,
    /// When it was first looked at.
    pub(crate) since_ns: Option<u64>,
    #[expect(dead_code, reason = "it is held")]
    guard: Box<dyn Any>,
}

impl Held {
    /// How many pieces there are.
    pub(crate) fn count(&self) -> usize {
        self.placed.len()
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Held({} pieces)", self.placed.len())
    }
}

/// All words of a message, copied; none if a piece is not in this memory.
pub(crate) fn copy(message: Outbound<'_>, memory: &LocalMemory) -> Option<Vec<u64>> {
    let mut words = Vec::with_capacity(message.len());
    for part in message.parts(0..message.len()) {
        match part {
            Part::Own(own) => words.extend_from_slice(own),
            Part::Region(at, count) => {
                words.extend(memory.words(at, count)?.iter().map(|word| word.load(Ordering::Relaxed)));
            }
        }
    }
    Some(words)
}

/// A message that is to be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outbound<'a> {
    pub(crate) words: &'a [u64],
    placed: &'a [Placed],
    total: usize,
}

/// A part of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    Own(&'a [u64]),
    Region(RemotePtr, usize),
}

impl<'a> Outbound<'a> {
    /// A message without pieces.
    #[inline]
    pub(crate) fn of(words: &'a [u64]) -> Self {
        Self { words, placed: &[], total: words.len() }
    }

    /// A message whose pieces are held.
    pub(crate) fn with(words: &'a [u64], held: &'a Held) -> Self {
        Self { words, placed: &held.placed, total: held.total }
    }

    #[inline]
    pub(crate) fn has_pieces(&self) -> bool {
        !self.placed.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.total
    }

    /// Whether all pieces lie in this memory.
    pub(crate) fn is_in(&self, memory: &LocalMemory) -> bool {
        self.placed.iter().all(|piece| memory.words(piece.at, piece.words).is_some())
    }

    /// The parts that make up these words of the message.
    pub(crate) fn parts(self, range: Range<usize>) -> impl Iterator<Item = Part<'a>> {
        let mut own = 0;
        let pieces = self.placed.iter().flat_map(move |piece| {
            let before = &self.words[own..piece.before];
            own = piece.before;
            [Part::Own(before), Part::Region(piece.at, piece.words)]
        });
        let behind = self.placed.last().map_or(0, |piece| piece.before);
        let mut position = 0;
        pieces.chain([Part::Own(&self.words[behind..])]).filter_map(move |part| {
            let first = position;
            position += part.len();
            let cut = range.start.max(first)..range.end.min(position);
            (cut.start < cut.end).then(|| part.cut(cut.start - first..cut.end - first))
        })
    }
}

impl Part<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Own(words) => words.len(),
            Self::Region(_, words) => *words,
        }
    }

    /// Some of its words.
    pub(crate) fn cut(self, range: Range<usize>) -> Self {
        match self {
            Self::Own(words) => Self::Own(&words[range]),
            Self::Region(at, _) => {
                let first = at.add(range.start as u64 * 8).expect("a piece lies in the region");
                Self::Region(first, range.len())
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// From 6 records of 1 KiB on; small ones are copied, unless they are few beside a large page.
    #[test]
    fn what_is_gathered_by_default_is_what_the_paper_found_to_pay() {
        let gathers = |pieces, bytes| GatherRule::default().gathers(pieces, bytes);
        assert!(gathers(6, 6 << 10) && !gathers(5, 5 << 10));
        assert!(!gathers(128, 16 << 10) && gathers(32, 16 << 10) && gathers(5, (16 << 10) + 4 * 128));
    }

    proptest! {
        /// However a message is cut, its parts are its words in order.
        #[test]
        fn parts_are_the_words_in_order(
            steps in prop::collection::vec((any::<bool>(), 0usize..9), 0..20), cuts in prop::collection::vec(1usize..12, 1..40)
        ) {
            // A word of the region is its offset in words, one of the message's own a million more than its index.
            let (mut pieces, mut expected) = (Pieces::default(), Vec::new());
            for (index, &(own, words)) in steps.iter().enumerate() {
                if own {
                    let next: Vec<u64> = (0..words as u64).map(|word| 1_000_000 + pieces.words.len() as u64 + word).collect();
                    expected.extend(&next);
                    pieces.own(|to| to.extend(next));
                } else {
                    let first = 100 * (1 + index as u64);
                    expected.extend(first..first + words as u64);
                    pieces.push(RemotePtr::from_raw(first * 8).unwrap(), words);
                }
            }
            prop_assert_eq!(pieces.words(), expected.len());
            let (mut at, mut found) = (0, Vec::new());
            for cut in cuts.into_iter().cycle() {
                if at >= expected.len() {
                    break;
                }
                for part in pieces.outbound().parts(at..at + cut) {
                    match part {
                        Part::Own(words) => found.extend_from_slice(words),
                        Part::Region(at, words) => found.extend(at.offset() / 8..at.offset() / 8 + words as u64),
                    }
                }
                at += cut;
            }
            prop_assert_eq!(found, expected);
        }
    }
}
