//! Memory that one side of a message connection opens to the other.

use std::ptr::NonNull;

use super::{
    control::Opened,
    ib::{Access, Domain, Registered, Remote},
    queue::Target,
};
use crate::{connection::OpenMemory, error::Error, ptr::REGION_BYTES_MAX, region::Region, sync::Arc};

/// Zeroed words of this side's, registered for the other side.
#[derive(Debug)]
pub(super) struct Opening {
    // Before the region: the memory goes after its registration.
    registered: Registered,
    region: Arc<Region>,
}

impl Opening {
    pub(super) fn new(domain: &Arc<Domain>, bytes: usize) -> Result<Self, Error> {
        let region = Arc::new(Region::anonymous(bytes)?);
        let base = NonNull::from(region.words()).cast::<u64>();
        // SAFETY: the region lives as long as the registration (in this order they are dropped), and this process reaches
        // it only as atomic words.
        let registered = unsafe { domain.register(base, region.words().len(), Access::Attach) }?;
        Ok(Self { registered, region })
    }

    /// What the other side must know.
    pub(super) fn describe(&self) -> Opened {
        Opened { address: self.registered.address(), key: self.registered.remote_key() }
    }

    /// The words. They outlive this, when nobody else reaches them any more.
    pub(super) fn memory(&self) -> OpenMemory {
        OpenMemory::new(Arc::clone(&self.region), 0..self.region.words().len())
    }
}

impl Opened {
    /// What the other side has opened, of which so many bytes, as a queue reaches it at [`far`](crate::connection::far)
    /// addresses.
    pub(super) fn target(self, bytes: u64) -> Target {
        let remote = Remote { address: self.address, key: self.key };
        Target { first: REGION_BYTES_MAX, bytes, remote }
    }
}
