//! Memory servers of this process that take messages, for tests that are both sides: on memory, or on real RDMA.

use std::{fmt, sync::Arc};

use farlink_runtime::{
    error::Error,
    fabric::{
        Fabric,
        listener::{ListenOptions, Listener},
        mem::{MemFabric, MemOptions},
    },
    ptr::ServerId,
    server::{LocalMemory, in_process},
};

use super::{Backend, FabricProfile, Place, verbs};

/// A cluster's memory servers in this process. They are gone with the value.
pub trait Here: fmt::Debug + Send + Sync {
    /// The way to them.
    fn fabric(&self) -> Arc<dyn Fabric>;

    /// A way to them on which nothing fails.
    fn sound_fabric(&self) -> Arc<dyn Fabric> {
        self.fabric()
    }

    /// Where other processes find them, if they can.
    fn place(&self) -> Option<Place>;

    /// Opens one to messages.
    ///
    /// # Errors
    /// If it listens already, or an option cannot work.
    fn listen(&self, server: ServerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error>;

    /// The memory of one.
    ///
    /// # Errors
    /// If there is no such memory server.
    fn memory(&self, server: ServerId) -> Result<LocalMemory, Error>;

    /// Breaks all connections, as if cables had been pulled and put back; nothing on memory, which has none.
    fn break_connections(&self) {}
}

/// Starts `servers` memory servers of `bytes` each, which behave like this.
///
/// # Errors
/// If they cannot be had.
pub fn start_with(servers: usize, bytes: u64, profile: FabricProfile) -> Result<Arc<dyn Here>, Error> {
    let inner = start(servers, bytes, profile.options())?;
    Ok(if profile.faults().is_some() { Arc::new(Faulty { inner, profile }) } else { inner })
}

/// Starts `servers` memory servers of `bytes` each. `options` say how memory behaves; verbs behave as they do.
///
/// # Errors
/// If they cannot be had.
pub fn start(servers: usize, bytes: u64, options: MemOptions) -> Result<Arc<dyn Here>, Error> {
    match Backend::chosen() {
        Backend::Mem | Backend::MemProcesses => Ok(Arc::new(OnMemory(Arc::new(in_process(servers, bytes, options)?)))),
        Backend::Verbs => verbs::start_here(servers, bytes),
    }
}

/// Memory servers that are reached by requests that fail.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Here>,
    profile: FabricProfile,
}

impl Here for Faulty {
    fn fabric(&self) -> Arc<dyn Fabric> {
        self.profile.wrap(self.inner.fabric())
    }

    fn sound_fabric(&self) -> Arc<dyn Fabric> {
        self.inner.fabric()
    }

    fn place(&self) -> Option<Place> {
        self.inner.place()
    }

    fn listen(&self, server: ServerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        Ok(self.profile.wrap_listener(self.inner.listen(server, options)?))
    }

    fn memory(&self, server: ServerId) -> Result<LocalMemory, Error> {
        self.inner.memory(server)
    }

    fn break_connections(&self) {
        self.inner.break_connections();
    }
}

#[derive(Debug)]
struct OnMemory(Arc<MemFabric>);

impl Here for OnMemory {
    fn fabric(&self) -> Arc<dyn Fabric> {
        self.0.clone()
    }

    fn place(&self) -> Option<Place> {
        None
    }

    fn listen(&self, server: ServerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        Ok(self.0.listen(server, options)?)
    }

    fn memory(&self, server: ServerId) -> Result<LocalMemory, Error> {
        Ok(self.0.memory(server)?)
    }
}
