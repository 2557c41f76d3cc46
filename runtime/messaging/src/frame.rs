//! Frames: what stands in a ring. A message is one frame or several in a row; each carries a part of it, or says where a
//! part can be fetched.
//!
//! ```text
//!  63                32 31      26  25     24  23      16 15        0
//! [ position, low half |    0     | last first|   form   |   words   ]   words of the body behind it
//! body of an inline frame:     the part itself
//! body of an rendezvous frame: [ words:32 | first word in the pool:32 ]
//! ```
//!
//! The position is where in the ring's history the frame begins. A frame that an earlier lap has left, which a reader
//! would see if a head came before its words, does not fit it.

use crate::ring::ProtocolError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Inline,
    Rendezvous,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) form: Form,
    pub(crate) body_words: usize,
    pub(crate) first: bool,
    pub(crate) last: bool,
}

const INLINE: u64 = 1;
const RENDEZVOUS: u64 = 2;

impl Frame {
    pub(crate) fn word(&self, position: u64) -> u64 {
        let form = match self.form {
            Form::Inline => INLINE,
            Form::Rendezvous => RENDEZVOUS,
        };
        debug_assert!(self.body_words < 1 << 16);
        position << 32 | u64::from(self.last) << 25 | u64::from(self.first) << 24 | form << 16 | self.body_words as u64
    }

    pub(crate) fn read(word: u64, position: u64) -> Result<Self, ProtocolError> {
        if word >> 32 != position & 0xffff_ffff || word >> 26 & 0x3f != 0 {
            return Err(ProtocolError::Frame);
        }
        let body_words = (word & 0xffff) as usize;
        let form = match word >> 16 & 0xff {
            INLINE => Form::Inline,
            RENDEZVOUS if body_words == 1 => Form::Rendezvous,
            _ => return Err(ProtocolError::Frame),
        };
        Ok(Self { form, body_words, first: word >> 24 & 1 == 1, last: word >> 25 & 1 == 1 })
    }
}

/// A part of a message that waits in the sender's pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rendezvous {
    pub(crate) first: usize,
    pub(crate) words: usize,
}

impl Rendezvous {
    pub(crate) fn word(&self) -> u64 {
        (self.words as u64) << 32 | self.first as u64
    }

    /// What `word` describes, if it lies in a pool of `pool_words` and has at most `words_max`.
    pub(crate) fn read(word: u64, pool_words: usize, words_max: usize) -> Result<Self, ProtocolError> {
        let (first, words) = ((word & 0xffff_ffff) as usize, (word >> 32) as usize);
        let inside = first.checked_add(words).is_some_and(|end| end <= pool_words);
        if !inside || words == 0 || words > words_max {
            return Err(ProtocolError::Rendezvous);
        }
        Ok(Self { first, words })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_round_trip_and_fit_their_position_alone(
            rendezvous: bool, first: bool, last: bool, words in 0usize..1 << 16, position: u64, other: u32
        ) {
            let form = if rendezvous { Form::Rendezvous } else { Form::Inline };
            let body_words = if rendezvous { 1 } else { words };
            let frame = Frame { form, body_words, first, last };
            prop_assert_eq!(Frame::read(frame.word(position), position), Ok(frame));
            if other != position as u32 {
                prop_assert_eq!(Frame::read(frame.word(position), u64::from(other)), Err(ProtocolError::Frame));
            }
        }

        #[test]
        fn random_words_are_frames_or_refused(word: u64, position: u64, pool in 0usize..1 << 20) {
            if let Ok(frame) = Frame::read(word, position) {
                prop_assert_eq!(frame.word(position), word);
            }
            if let Ok(rendezvous) = Rendezvous::read(word, pool, 4096) {
                prop_assert!(rendezvous.words <= 4096 && rendezvous.first + rendezvous.words <= pool);
            }
        }
    }
}
