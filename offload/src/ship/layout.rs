//! The layouts of requests and replies.
//!
//! ```text
//! request  word 0    kind of structure:32 | operation:16 | 0:8 | level of the start page:8
//!          word 1    the structure's id
//!          word 2    the start page; 0 for the root
//!          ...       with a start page: the region that the sender owns
//!          ...       the operation's parameters
//!
//! reply    word 0    what became of it:8 | 0:24 | pages read:32
//!          done      the pages changed, as a list; the operation's result
//!          declined  which reason
//!          failed    which failure; its words
//! ```

use farlink_runtime::{
    error::Error,
    lock::OwnerId,
    messaging::Kind,
    operation::Code,
    page::{SizeClass, StructureId},
    ptr::{RemotePtr, ServerId},
    wire::{DecodeError, Wire},
};

use super::Decline;

/// The kind of message that carries a shipped operation.
pub const SHIP: Kind = Kind(0x5348_4950);

/// What comes before an operation's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallHeader {
    /// Which operation.
    pub code: Code,
    /// On which structure.
    pub structure: StructureId,
    /// The page where it begins, and its level; none for the root.
    pub start: Option<(RemotePtr, u8)>,
}

impl Wire for CallHeader {
    fn encode(&self, to: &mut Vec<u64>) {
        let level = self.start.map_or(0, |(_, level)| level);
        let code = u64::from(self.code.structure) << 32 | u64::from(self.code.operation) << 16;
        to.extend([code | u64::from(level), self.structure.0.into(), self.start.map_or(0, |(page, _)| page.raw())]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let ([first, structure], start) = ([u64::decode(from)?, u64::decode(from)?], u64::decode(from)?);
        let code = Code { structure: (first >> 32) as u32, operation: (first >> 16) as u16 };
        let structure = u32::try_from(structure).map_err(|_| DecodeError("there is no such structure id"))?;
        let level = first as u8;
        if first >> 8 & 0xff != 0 || start == 0 && level != 0 {
            return Err(DecodeError("the header of a shipped operation has bits that mean nothing"));
        }
        let bad = |_| DecodeError("the start page of a shipped operation is no address");
        let start = if start == 0 { None } else { Some((RemotePtr::from_raw(start).map_err(bad)?, level)) };
        Ok(Self { code, structure: StructureId(structure), start })
    }
}

const DONE: u8 = 0;
const DECLINED: u8 = 1;
const FAILED: u8 = 2;

/// A reply, its result as words.
#[derive(Debug)]
pub(super) enum ReplyHeader {
    Done { changed: Vec<RemotePtr> },
    Declined(Decline),
    Failed(Failure),
}

/// What an operation failed with, where that is known elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    Damaged(RemotePtr, OwnerId),
    Corrupt(RemotePtr),
    OutOfMemory(SizeClass),
    Other(String),
}

impl Failure {
    pub(super) fn of(error: &Error) -> Self {
        match *error {
            Error::PageDamaged { page, owner } => Self::Damaged(page, owner),
            Error::PageCorrupt { page } => Self::Corrupt(page),
            Error::OutOfMemory { class } => Self::OutOfMemory(class),
            ref error => Self::Other(error.to_string()),
        }
    }

    pub(super) fn into_error(self, server: ServerId) -> Error {
        match self {
            Self::Damaged(page, owner) => Error::PageDamaged { page, owner },
            Self::Corrupt(page) => Error::PageCorrupt { page },
            Self::OutOfMemory(class) => Error::OutOfMemory { class },
            Self::Other(why) => Error::OnServer { server, why },
        }
    }
}

impl Wire for Failure {
    fn encode(&self, to: &mut Vec<u64>) {
        match self {
            Self::Damaged(page, owner) => to.extend([1, page.raw(), owner.incarnation().into()]),
            Self::Corrupt(page) => to.extend([2, page.raw()]),
            Self::OutOfMemory(class) => to.extend([3, class.index() as u64]),
            Self::Other(why) => {
                to.extend([4, why.len() as u64]);
                to.extend(why.as_bytes().chunks(8).map(|bytes| {
                    let mut word = [0; 8];
                    word[..bytes.len()].copy_from_slice(bytes);
                    u64::from_le_bytes(word)
                }));
            }
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let bad = || DecodeError("a failure makes no sense");
        Ok(match u64::decode(from)? {
            1 => Self::Damaged(RemotePtr::decode(from)?, OwnerId::new(u64::decode(from)?).ok_or_else(bad)?),
            2 => Self::Corrupt(RemotePtr::decode(from)?),
            3 => {
                let index = u8::try_from(u64::decode(from)?).ok();
                Self::OutOfMemory(index.and_then(SizeClass::from_index).ok_or_else(bad)?)
            }
            4 => {
                let bytes = usize::try_from(u64::decode(from)?).map_err(|_| bad())?;
                let words = from.split_off(..bytes.div_ceil(8)).ok_or_else(bad)?;
                let mut text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                text.truncate(bytes);
                Self::Other(String::from_utf8(text).map_err(|_| bad())?)
            }
            _ => return Err(bad()),
        })
    }
}

impl ReplyHeader {
    pub(super) fn encode(&self, pages_read: u32, to: &mut Vec<u64>) {
        let first = |what: u8| u64::from(what) << 56 | u64::from(pages_read);
        match self {
            Self::Done { changed } => {
                to.push(first(DONE));
                changed.encode(to);
            }
            Self::Declined(why) => to.extend([first(DECLINED), *why as u64]),
            Self::Failed(failure) => {
                to.push(first(FAILED));
                failure.encode(to);
            }
        }
    }

    /// Reads it, and how many pages were read.
    pub(super) fn decode(from: &mut &[u64]) -> Result<(Self, u32), DecodeError> {
        let first = u64::decode(from)?;
        let header = match (first >> 56) as u8 {
            DONE => Self::Done { changed: Vec::decode(from)? },
            DECLINED => {
                let why = usize::try_from(u64::decode(from)?).ok().and_then(|why| Decline::ALL.get(why).copied());
                Self::Declined(why.ok_or(DecodeError("an operation was declined for no known reason"))?)
            }
            FAILED => Self::Failed(Failure::decode(from)?),
            _ => return Err(DecodeError("nobody knows what became of a shipped operation")),
        };
        Ok((header, first as u32))
    }
}

/// Reads a reply up to the operation's result: for those who try to break it. How many words that leaves.
#[doc(hidden)]
pub fn read_reply(mut words: &[u64]) -> Result<usize, DecodeError> {
    ReplyHeader::decode(&mut words).map(|_| words.len())
}

#[cfg(test)]
mod tests {
    use farlink_runtime::wire::decode_all;

    use super::*;

    #[test]
    fn headers_and_failures_come_back_as_they_were() {
        let page = RemotePtr::from_raw(3 << 48 | 4096).unwrap();
        for start in [None, Some((page, 0)), Some((page, 255))] {
            let header =
                CallHeader { code: Code { structure: 7, operation: 9 }, structure: StructureId(u32::MAX), start };
            let mut words = Vec::new();
            header.encode(&mut words);
            assert_eq!(decode_all::<CallHeader>(&words).unwrap(), header);
        }
        let failures = [
            Failure::Damaged(page, OwnerId::new(5).unwrap()),
            Failure::Corrupt(page),
            Failure::OutOfMemory(SizeClass::LARGEST),
            Failure::Other("eleven byte".into()),
            Failure::Other(String::new()),
        ];
        for failure in failures {
            let mut words = Vec::new();
            failure.encode(&mut words);
            assert_eq!(decode_all::<Failure>(&words).unwrap(), failure);
            assert!(decode_all::<Failure>(&words[..words.len() - 1]).is_err());
        }
        for (index, why) in Decline::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, index);
        }
    }
}
