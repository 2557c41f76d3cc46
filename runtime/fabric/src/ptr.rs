//! Remote pointers and the in-page link word.
//!
//! A link is one 64-bit word in one of two states:
//!
//! ```text
//!  63       62            48 47                    6 5           0
//! [swizzled | memory server | offset within its region | size class ]   unswizzled: remote memory, anywhere in the cluster
//! [    1    |            what the cache names a frame by            ]   swizzled: this compute server's cache only
//! ```
//!
//! Pages lie on multiples of 64 bytes, so the low six bits of an offset are free: in a link they hold the size class of the
//! page that it leads to.
//! Zero is the null link: offset 0 of server 0 is a superblock, never a page. Remote memory never holds a swizzled
//! link. The swizzle bit is LeanStore's and DEX's (VLDB 2024, section 5.1); the 15-bit server is wider than the 7 bits
//! of Ziegler et al. (SIGMOD 2019, section 4.1).

use std::{fmt, num::NonZeroU64};

use crate::size_class::SizeClass;

const OFFSET_BITS: u32 = 48;
const SERVER_BITS: u32 = 15;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const SWIZZLED: u64 = 1 << 63;
const CLASS_MASK: u64 = SizeClass::SMALLEST.bytes() as u64 - 1;

/// The highest number of memory servers in a cluster.
pub const SERVERS_MAX: usize = 1 << SERVER_BITS;
/// The size limit of one memory server's region, in bytes. Offsets from here on are those of
/// [connections](crate::connection).
pub const REGION_BYTES_MAX: u64 = (1 << OFFSET_BITS) - FAR_BYTES;
/// How many offsets there are for what one side of a connection opens.
pub const FAR_BYTES: u64 = 1 << 32;

const _: () = assert!(1 + SERVER_BITS + OFFSET_BITS == 64);
const _: () = assert!(size_of::<RemotePtr>() == 8 && size_of::<Option<RemotePtr>>() == 8);
const _: () = assert!(size_of::<Link>() == 8 && align_of::<Link>() == 8);

/// The number of a memory server in its cluster, below [`SERVERS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerId(u16);

impl ServerId {
    /// `None` if the number needs more than 15 bits.
    pub const fn new(number: u16) -> Option<Self> {
        if (number as usize) < SERVERS_MAX { Some(Self(number)) } else { None }
    }

    /// The number, usable as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The number.
    pub const fn number(self) -> u16 {
        self.0
    }
}

impl fmt::Debug for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server {}", self.0)
    }
}

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Why a word is not a remote pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PtrError {
    /// The word is zero.
    #[error("the pointer is null")]
    Null,
    /// The swizzle bit is set: the word is an address in some compute server's cache.
    #[error("the pointer {0:#018x} is swizzled: a local address reached remote memory")]
    Swizzled(u64),
    /// The offset needs more than 48 bits.
    #[error("the offset {0:#x} does not fit into 48 bits")]
    Offset(u64),
}

impl PtrError {
    /// The word, or the offset.
    pub fn word(self) -> u64 {
        match self {
            Self::Null => 0,
            Self::Swizzled(word) | Self::Offset(word) => word,
        }
    }
}

/// The address of a byte in the memory of the cluster: a memory server and an offset in its region. Never null, never
/// swizzled; `Option<RemotePtr>` is one word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct RemotePtr(NonZeroU64);

impl RemotePtr {
    /// The pointer to `offset` (bytes) in the region of `server`.
    ///
    /// # Errors
    /// If the offset needs more than 48 bits, or both are zero.
    pub const fn new(server: ServerId, offset: u64) -> Result<Self, PtrError> {
        if offset > OFFSET_MASK {
            return Err(PtrError::Offset(offset));
        }
        Self::from_raw((server.0 as u64) << OFFSET_BITS | offset)
    }

    /// Reads a pointer from a word of remote memory.
    ///
    /// # Errors
    /// If the word is null or swizzled. Whether it lies inside a region is for the cluster's geometry to say.
    pub const fn from_raw(word: u64) -> Result<Self, PtrError> {
        if word & SWIZZLED != 0 {
            return Err(PtrError::Swizzled(word));
        }
        match NonZeroU64::new(word) {
            Some(word) => Ok(Self(word)),
            None => Err(PtrError::Null),
        }
    }

    /// The word that stands for this pointer in a page.
    pub const fn raw(self) -> u64 {
        self.0.get()
    }

    /// The memory server.
    pub const fn server(self) -> ServerId {
        ServerId((self.0.get() >> OFFSET_BITS) as u16)
    }

    /// Bytes from the start of the server's region.
    pub const fn offset(self) -> u64 {
        self.0.get() & OFFSET_MASK
    }

    /// The pointer `bytes` further on in the same region.
    ///
    /// # Errors
    /// If that leaves the 48 bits of an offset.
    pub const fn add(self, bytes: u64) -> Result<Self, PtrError> {
        match self.offset().checked_add(bytes) {
            Some(offset) => Self::new(self.server(), offset),
            None => Err(PtrError::Offset(u64::MAX)),
        }
    }

    /// The pointer to the `index`th word from here. Callers stay inside one page, whose end lies inside a region.
    pub fn word(self, index: usize) -> Self {
        self.add(index as u64 * 8).expect("a word of a page lies inside the page's region")
    }
}

impl fmt::Debug for RemotePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for RemotePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:#x}", self.server(), self.offset())
    }
}

/// What a link leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Nothing.
    Null,
    /// A page in remote memory, and its size.
    Remote(RemotePtr, SizeClass),
    /// A frame in the local cache.
    Local(u64),
    /// No page can be there: the word is damaged.
    Malformed,
}

/// The value of a link word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Link(u64);

impl Link {
    /// The link to nothing.
    pub const NULL: Self = Self(0);

    /// The unswizzled link to a page of this size.
    ///
    /// # Panics
    /// If no page can be at that address: pages lie on multiples of 64 bytes.
    pub const fn to(page: RemotePtr, class: SizeClass) -> Self {
        assert!(page.raw() & CLASS_MASK == 0, "pages lie on multiples of 64 bytes");
        Self(page.raw() | class.index() as u64)
    }

    /// The link that a word of a page stands for. Any word is a link; where it leads is for [`Link::target`] to say.
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The word that stands for this link in a page.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// Whether it leads to nothing.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// Where the link leads.
    pub const fn target(self) -> Target {
        if self.0 & SWIZZLED != 0 {
            return Target::Local(self.0 & !SWIZZLED);
        }
        match (RemotePtr::from_raw(self.0 & !CLASS_MASK), SizeClass::from_index((self.0 & CLASS_MASK) as u8)) {
            (Ok(page), Some(class)) => Target::Remote(page, class),
            _ if self.0 == 0 => Target::Null,
            _ => Target::Malformed,
        }
    }

    /// The page in remote memory that it leads to, and its size; none for all other links.
    pub const fn remote(self) -> Option<(RemotePtr, SizeClass)> {
        match self.target() {
            Target::Remote(page, class) => Some((page, class)),
            _ => None,
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.target() {
            Target::Null => f.write_str("null"),
            Target::Remote(page, class) => write!(f, "{page} ({class:?})"),
            Target::Local(frame) => write!(f, "local {frame:#x}"),
            Target::Malformed => write!(f, "malformed {:#x}", self.0),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pointers_round_trip_and_refuse_what_they_cannot_hold() {
        let server = ServerId::new(0x7fff).unwrap();
        let ptr = RemotePtr::new(server, OFFSET_MASK).unwrap();
        assert_eq!((ptr.server(), ptr.offset()), (server, OFFSET_MASK));
        assert_eq!(RemotePtr::from_raw(ptr.raw()), Ok(ptr));
        assert_eq!(ServerId::new(0x8000), None);
        assert_eq!(RemotePtr::new(server, 1 << 48), Err(PtrError::Offset(1 << 48)));
        assert_eq!(RemotePtr::from_raw(0), Err(PtrError::Null));
        assert_eq!(RemotePtr::from_raw(1 << 63 | 64), Err(PtrError::Swizzled(1 << 63 | 64)));
        assert!(ptr.add(1).is_err() && ptr.add(u64::MAX).is_err());
    }

    #[test]
    fn any_word_is_a_link_and_says_where_it_leads() {
        let page = RemotePtr::new(ServerId::new(3).unwrap(), 1 << 20).unwrap();
        for class in SizeClass::all() {
            let link = Link::from_word(Link::to(page, class).word());
            assert_eq!(link.target(), Target::Remote(page, class));
            assert_eq!(link.remote(), Some((page, class)));
        }
        assert_eq!(Link::from_word(0), Link::NULL);
        assert_eq!(Link::NULL.target(), Target::Null);
        assert_eq!(Link::from_word(SWIZZLED | 0x7f00_0000).target(), Target::Local(0x7f00_0000));
        for malformed in [1, page.raw() | 63, page.raw() | SizeClass::COUNT as u64] {
            assert_eq!(Link::from_word(malformed).target(), Target::Malformed, "{malformed:#x}");
        }
    }
}
