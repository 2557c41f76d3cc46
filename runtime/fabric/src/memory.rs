//! A memory server's own memory, for its threads.

use std::fmt;

use crate::{
    error::Error,
    ptr::{RemotePtr, ServerId},
    region::Region,
    sync::{Arc, AtomicU64},
};

/// The region of a memory server of this process. Others read and write it at the same time.
#[derive(Clone)]
pub struct LocalMemory {
    regions: Arc<Vec<Region>>,
    index: usize,
    server: ServerId,
}

impl fmt::Debug for LocalMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalMemory(memory server {})", self.server)
    }
}

impl LocalMemory {
    /// The region at `index`, which is that of `server`.
    pub(crate) fn new(regions: &Arc<Vec<Region>>, index: usize, server: ServerId) -> Self {
        assert!(index < regions.len(), "there is no region {index}");
        Self { regions: Arc::clone(regions), index, server }
    }

    /// That of somebody who has none.
    pub(crate) fn none() -> Self {
        Self { regions: Arc::default(), index: 0, server: ServerId::new(0).expect("0 is a server id") }
    }

    /// The memory server.
    pub fn server(&self) -> ServerId {
        self.server
    }

    /// Where its words are, for a device; and how many there are.
    #[cfg(feature = "verbs")]
    pub(crate) fn base(&self) -> (std::ptr::NonNull<u64>, usize) {
        let words = self.regions.get(self.index).map_or(&[][..], Region::words);
        (std::ptr::NonNull::from(words).cast(), words.len())
    }

    /// So many words from an address on, if they are this server's, and it is not lost.
    #[inline]
    pub fn words(&self, at: RemotePtr, count: usize) -> Option<&[AtomicU64]> {
        if at.server() != self.server || !at.offset().is_multiple_of(8) {
            return None;
        }
        let first = usize::try_from(at.offset() / 8).ok()?;
        let region = self.regions.get(self.index)?;
        if region.is_lost() {
            return None;
        }
        region.words().get(first..first.checked_add(count)?)
    }
    /// The error of whoever has used it, if it is lost: to be asked for after an access, which means nothing then.
    #[inline]
    pub fn lost(&self) -> Option<Box<Error>> {
        let region = self.regions.get(self.index).filter(|region| region.is_lost())?;
        Some(Box::new(region.lost(self.server)))
    }
}
