//! `farlink serve`: how a memory server says that it is ready, and how it waits for its end.
//!
//! The server writes one line to standard output once clients may connect, and nothing else there. Whoever started it
//! reads that line instead of sleeping and hoping.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::args::ServeArgs;
use crate::signals;
use anyhow::Context as _;
use farlink_offload::ship::{Registry, ShipOptions, ShipServer};
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error;
use farlink_runtime::fabric::Fabric;
use farlink_runtime::fabric::listener::{ListenOptions, Listener};
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::server::{LocalMemory, MemoryServer};
use signal_hook::iterator::Signals;

/// How often a server looks whether its memory is what it was.
const CHECK_EVERY: Duration = Duration::from_millis(250);

/// Signals that end a server. Made before the server is announced, so that a stop that comes at once is not lost.
#[derive(Debug)]
pub(crate) struct StopSignals(Signals);

impl StopSignals {
    /// From now on the signals that [end the program](signals::ending) are held for [`StopSignals::wait`].
    pub(crate) fn watch() -> anyhow::Result<Self> {
        Signals::new(signals::ending()).map(Self).context("cannot watch for signals")
    }

    /// Sleeps until a signal asks to stop, or a `check` that is made now and then fails.
    pub(crate) fn wait(mut self, check: impl Fn() -> Result<(), Error> + Send) -> Result<(), Error> {
        let handle = self.0.handle();
        let (stop, stopped) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let checks = scope.spawn(move || {
                while stopped.recv_timeout(CHECK_EVERY) == Err(RecvTimeoutError::Timeout) {
                    check().inspect_err(|_| handle.close())?;
                }
                Ok(())
            });
            let _ = self.0.forever().next();
            drop(stop);
            checks.join().unwrap_or(Ok(()))
        })
    }
}

/// How a server listens whose `threads` carry out operations.
pub(crate) fn listen_options(threads: u32) -> ListenOptions {
    ListenOptions { endpoints: threads as usize, ..ListenOptions::default() }
}

/// Starts threads that carry out these operations.
pub(crate) fn ship(
    server: &MemoryServer,
    dir: &Path,
    args: &ServeArgs,
    registry: Registry,
) -> Result<ShipServer, Error> {
    let listener = server.listen(&listen_options(args.threads), MemOptions::default())?;
    let dir = dir.to_path_buf();
    ship_at(listener, server.memory(), registry, args.lock_wait, move || {
        Ok(Arc::new(MemFabric::open(&dir, MemOptions::default())?))
    })
}

/// [`ship`], on whatever fabric. The threads join the cluster, which `open` leads to, with the first operation.
pub(crate) fn ship_at(
    listener: Box<dyn Listener>,
    memory: LocalMemory,
    registry: Registry,
    lock_wait: Option<Duration>,
    open: impl Fn() -> Result<Arc<dyn Fabric>, Error> + Send + Sync + 'static,
) -> Result<ShipServer, Error> {
    let options = ComputeOptions { lock_wait, ..ComputeOptions::default() };
    let join = move || Ok(Arc::new(ComputeServer::join(open()?, options)?));
    ShipServer::start(listener, memory, registry, &ShipOptions::default(), join)
}

/// The line that announces a server.
pub(crate) fn ready_line(server: u32) -> String {
    format!("farlink server {server} ready")
}

/// Announces that clients may connect.
pub(crate) fn announce_ready(out: &mut impl Write, server: u32) -> io::Result<()> {
    writeln!(out, "{}", ready_line(server))?;
    out.flush()
}
