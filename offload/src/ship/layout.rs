//! The layouts of requests and replies.
//!
//! ```text
//! request  word 0    the operation's number, made of its name and its plug-in's
//!          word 1    the structure's id:32 | 0:16 | 1 to search only:8 | level of the start page:8
//!          word 2    link to the start page; 0 for the root
//!          ...       with a start page, or if it may change something: the sender's slot:32 | incarnation:32
//!          ...       with a start page: the region that the sender owns
//!          ...       the operation's parameters
//!
//! reply    word 0    what became of it:8 | pages of the path:8 | pages beside it:16 | pages read:32
//!          done      the path; the pages changed, as a list; the operation's result
//!          declined  which reason
//!          go on     the link to the page from which the rest is to be done
//!          failed    which failure; its words
//!          not begun which failure; its words
//!          not owned the epoch of the partition map, as the compute server that was asked knows it
//! ```

use farlink_runtime::{
    error::Error,
    lock::OwnerId,
    messaging::{Kind, REPLY_WORDS_MAX},
    operation::Code,
    page::{SizeClass, StructureId},
    ptr::{Link, RemotePtr, ServerId},
    wire::{DecodeError, Wire},
};

use super::Decline;

/// The kind of message that carries a shipped operation.
pub const SHIP: Kind = Kind(0x5348_4950);

/// Words of an operation's answer, its header included.
pub(crate) const ANSWER_WORDS_MAX: u64 = REPLY_WORDS_MAX as u64;

/// What comes before an operation's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallHeader {
    /// Which operation.
    pub code: Code,
    /// On which structure.
    pub structure: StructureId,
    /// Where it begins.
    pub start: At,
}

/// Where a request says that its operation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// At the root.
    Root,
    /// At the root, to search the inner levels only.
    Above,
    /// At a page of this level.
    Page(Link, u8),
}

impl Wire for CallHeader {
    fn encode(&self, to: &mut Vec<u64>) {
        let (mode, level, page) = match self.start {
            At::Root => (0, 0, Link::NULL),
            At::Above => (1, 0, Link::NULL),
            At::Page(page, level) => (0, level, page),
        };
        let structure = u64::from(self.structure.0) << 32 | mode << 8 | u64::from(level);
        to.extend([self.code.0, structure, page.word()]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (code, structure, start) = <(u64, u64, Link)>::decode(from)?;
        let (mode, level) = ((structure as u32) >> 8, structure as u8);
        let start = match (mode, level, start.is_null()) {
            (0, 0, true) => At::Root,
            (1, 0, true) => At::Above,
            (0, level, false) => At::Page(start, level),
            _ => return Err(DecodeError("the header of a shipped operation has bits that mean nothing")),
        };
        Ok(Self { code: Code(code), structure: StructureId((structure >> 32) as u32), start })
    }
}

const DONE: u8 = 0;
const DECLINED: u8 = 1;
const FAILED: u8 = 2;
const GO_ON: u8 = 3;
const NOT_OWNED: u8 = 4;
const NOT_BEGUN: u8 = 5;

/// A reply, its result as words.
#[derive(Debug)]
pub(crate) enum ReplyHeader {
    Done {
        changed: Vec<Link>,
        /// [`Shipped::path`](super::Shipped::path).
        path: Vec<Link>,
        /// [`Shipped::beside`](super::Shipped::beside).
        beside: u16,
    },
    Declined(Decline),
    GoOn(Link),
    Failed(Failure),
    /// It was not begun.
    NotBegun(Failure),
    /// By a compute server that does not own what it is about; the newest epoch of the partition map that it knows.
    NotOwned(u64),
}

/// What an operation failed with, where that is known elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    Damaged(RemotePtr, OwnerId),
    Corrupt(RemotePtr),
    OutOfMemory(SizeClass),
    /// The message, and whether it may have changed something by then.
    Panicked(String, bool),
    TooLarge(u64),
    InstallUnknown(RemotePtr),
    Other(String),
}

impl Failure {
    pub(crate) fn of(error: &Error) -> Self {
        match *error {
            Error::PageDamaged { page, owner } => Self::Damaged(page, owner),
            Error::PageCorrupt { page } => Self::Corrupt(page),
            Error::OutOfMemory { class } => Self::OutOfMemory(class),
            Error::Panicked { ref why, may_have_changed, .. } => Self::Panicked(why.clone(), may_have_changed),
            Error::AnswerTooLarge { words, .. } => Self::TooLarge(words),
            Error::InstallUnknown { word } => Self::InstallUnknown(word),
            ref error => Self::Other(error.to_string()),
        }
    }

    /// What it is here; what it failed with there, if nothing else is known of that, is what `other` says.
    pub(crate) fn into_error(self, other: impl FnOnce(String) -> Error) -> Error {
        match self {
            Self::Damaged(page, owner) => Error::PageDamaged { page, owner },
            Self::Corrupt(page) => Error::PageCorrupt { page },
            Self::OutOfMemory(class) => Error::OutOfMemory { class },
            Self::Panicked(why, may_have_changed) => {
                Error::Panicked { what: "a shipped operation", why, may_have_changed }
            }
            Self::TooLarge(words) => Error::AnswerTooLarge { words, limit: ANSWER_WORDS_MAX },
            Self::InstallUnknown(word) => Error::InstallUnknown { word },
            Self::Other(why) => other(why),
        }
    }
}

/// What a memory server says that could not begin an operation.
pub(super) fn not_begun(server: ServerId, failure: Failure) -> Error {
    let why = match failure {
        Failure::Other(why) => why,
        known => known.into_error(|why| Error::OnServer { server, why }).to_string(),
    };
    Error::NotBegun { server, why }
}

fn encode_text(number: u64, text: &str, to: &mut Vec<u64>) {
    to.extend([number, text.len() as u64]);
    to.extend(text.as_bytes().chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }));
}

fn decode_text(from: &mut &[u64]) -> Option<String> {
    let bytes = usize::try_from(u64::decode(from).ok()?).ok()?;
    let words = from.split_off(..bytes.div_ceil(8))?;
    let mut text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    text.truncate(bytes);
    String::from_utf8(text).ok()
}

impl Wire for Failure {
    fn encode(&self, to: &mut Vec<u64>) {
        match self {
            Self::Damaged(page, owner) => to.extend([1, page.raw(), owner.incarnation().into()]),
            Self::Corrupt(page) => to.extend([2, page.raw()]),
            Self::OutOfMemory(class) => to.extend([3, class.index() as u64]),
            Self::Other(why) => encode_text(4, why, to),
            Self::Panicked(why, may_have_changed) => encode_text(if *may_have_changed { 8 } else { 5 }, why, to),
            Self::TooLarge(words) => to.extend([6, *words]),
            Self::InstallUnknown(word) => to.extend([7, word.raw()]),
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let bad = || DecodeError("a failure makes no sense");
        let number = u64::decode(from)?;
        Ok(match number {
            1 => Self::Damaged(RemotePtr::decode(from)?, OwnerId::new(u64::decode(from)?).ok_or_else(bad)?),
            2 => Self::Corrupt(RemotePtr::decode(from)?),
            3 => {
                let index = u8::try_from(u64::decode(from)?).ok();
                Self::OutOfMemory(index.and_then(SizeClass::from_index).ok_or_else(bad)?)
            }
            4 => Self::Other(decode_text(from).ok_or_else(bad)?),
            5 | 8 => Self::Panicked(decode_text(from).ok_or_else(bad)?, number == 8),
            6 => Self::TooLarge(u64::decode(from)?),
            7 => Self::InstallUnknown(RemotePtr::decode(from)?),
            _ => return Err(bad()),
        })
    }
}

impl ReplyHeader {
    /// Done, and there is nothing more to say.
    pub(crate) const DONE: Self = Self::Done { changed: Vec::new(), path: Vec::new(), beside: 0 };

    pub(crate) fn encode(&self, pages_read: u32, to: &mut Vec<u64>) {
        let first = |what: u8| u64::from(what) << 56 | u64::from(pages_read);
        match self {
            Self::Done { changed, path, beside } => {
                debug_assert!(path.len() <= usize::from(u8::MAX), "a path is as long as its start page is high");
                to.push(first(DONE) | (path.len() as u64) << 48 | u64::from(*beside) << 32);
                path.iter().for_each(|page| page.encode(to));
                changed.encode(to);
            }
            Self::Declined(why) => to.extend([first(DECLINED), *why as u64]),
            Self::GoOn(page) => to.extend([first(GO_ON), page.word()]),
            Self::NotOwned(epoch) => to.extend([first(NOT_OWNED), *epoch]),
            Self::Failed(failure) => {
                to.push(first(FAILED));
                failure.encode(to);
            }
            Self::NotBegun(failure) => {
                to.push(first(NOT_BEGUN));
                failure.encode(to);
            }
        }
    }

    /// Reads it, and how many pages were read.
    pub(crate) fn decode(from: &mut &[u64]) -> Result<(Self, u32), DecodeError> {
        let first = u64::decode(from)?;
        let header = match (first >> 56) as u8 {
            DONE => {
                let path: Result<_, _> = (0..(first >> 48) as u8).map(|_| Link::decode(from)).collect();
                Self::Done { path: path?, changed: Vec::decode(from)?, beside: (first >> 32) as u16 }
            }
            DECLINED => {
                let why = usize::try_from(u64::decode(from)?).ok().and_then(|why| Decline::ALL.get(why).copied());
                Self::Declined(why.ok_or(DecodeError("an operation was declined for no known reason"))?)
            }
            GO_ON => Self::GoOn(Link::decode(from)?),
            FAILED => Self::Failed(Failure::decode(from)?),
            NOT_BEGUN => Self::NotBegun(Failure::decode(from)?),
            NOT_OWNED => Self::NotOwned(u64::decode(from)?),
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

    /// Of a reply that it is done: the pages changed, the path, the pages beside it, and those read.
    #[derive(Debug, PartialEq)]
    struct Header(Vec<Link>, Vec<Link>, u16, u32);

    impl Wire for Header {
        fn encode(&self, _: &mut Vec<u64>) {}

        fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
            match ReplyHeader::decode(from)? {
                (ReplyHeader::Done { changed, path, beside }, pages) => Ok(Self(changed, path, beside, pages)),
                _ => Err(DecodeError("it is not done")),
            }
        }
    }

    #[test]
    fn headers_and_failures_come_back_as_they_were() {
        let page = RemotePtr::from_raw(3 << 48 | 4096).unwrap();
        let link = Link::to(page, SizeClass::LARGEST);
        for start in [At::Root, At::Above, At::Page(link, 0), At::Page(link, 255)] {
            let header = CallHeader { code: Code(u64::MAX), structure: StructureId(u32::MAX), start };
            let mut words = Vec::new();
            header.encode(&mut words);
            assert_eq!(decode_all::<CallHeader>(&words).unwrap(), header);
        }
        let failures = [
            Failure::Damaged(page, OwnerId::new(5).unwrap()),
            Failure::Corrupt(page),
            Failure::OutOfMemory(SizeClass::LARGEST),
            Failure::Panicked("index out of bounds".into(), false),
            Failure::Panicked("index out of bounds".into(), true),
            Failure::TooLarge(u64::MAX),
            Failure::InstallUnknown(RemotePtr::decode(&mut &[1u64 << 20][..]).unwrap()),
            Failure::Other("eleven byte".into()),
            Failure::Other(String::new()),
        ];
        for failure in failures {
            let mut words = Vec::new();
            failure.encode(&mut words);
            assert_eq!(decode_all::<Failure>(&words).unwrap(), failure);
            assert!(decode_all::<Failure>(&words[..words.len() - 1]).is_err());
        }
        for path in [vec![], vec![link; 3], vec![link; 255]] {
            let mut words = Vec::new();
            ReplyHeader::Done { changed: vec![link], path: path.clone(), beside: 500 }.encode(7, &mut words);
            let decoded = decode_all::<Header>(&words).unwrap();
            assert_eq!(decoded, Header(vec![link], path.clone(), 500, 7));
            assert!(path.is_empty() || decode_all::<Header>(&words[..words.len() - 2]).is_err());
        }
        for (index, why) in Decline::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, index);
        }
    }
}
