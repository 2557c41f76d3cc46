//! The memory servers of a run: real child processes of this same program, ready before the run begins and waited for
//! after it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use farlink_children::{Child, Scratch};
use farlink_runtime::layout::Records;

use crate::{protocol::Processes, serve::ready_line, signals};

/// A server only maps memory before it is ready; one that takes longer than this is stuck.
const READY_LIMIT: Duration = Duration::from_secs(60);
const SERVER_BYTES_MIN: u64 = 256 << 20;
/// What the 48 bits of an offset can name.
const SERVER_BYTES_MAX: u64 = (1 << 48) - (1 << 32);
/// Loaded pages are partly empty, mixes insert, chunks are leased whole: room for this many times the raw entries.
const ROOM_FACTOR: u64 = 8;
/// What the pages alone need: a bulk load takes 1.2 times the raw entries.
const PAGES_FACTOR: u64 = 3;
const ENTRY_BYTES: u64 = 16;

/// Memory servers that this program started.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Before the folder, so that a cluster that is dropped ends its servers before their memory goes.
    servers: Vec<Child>,
    scratch: Scratch,
    server_bytes: u64,
    records: Records,
    /// How long operations that the servers carry out wait for somebody who does not go on.
    lock_wait: Option<Duration>,
}

/// What becomes of a server's memory when it stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Ephemeral,
    Lasting,
}

/// How much memory each server gives unless the user says; so many of them have pages. All of it is taken at once, also of those
/// that have none.
pub(crate) fn default_server_bytes(keys: u64, servers: u32, with_pages: u32) -> u64 {
    let share = |factor, of: u32| keys.saturating_mul(ENTRY_BYTES * factor) / u64::from(of.max(1));
    share(ROOM_FACTOR, servers)
        .max(share(PAGES_FACTOR, with_pages))
        .clamp(SERVER_BYTES_MIN, SERVER_BYTES_MAX)
        .next_multiple_of(1 << 20)
}

impl Cluster {
    /// Starts the servers and waits until all are ready. Call this from the main thread: servers end with the thread
    /// that started them.
    pub(crate) fn start(
        servers: u32,
        server_bytes: u64,
        threads: u32,
        records: Records,
        lock_wait: Option<Duration>,
    ) -> anyhow::Result<Self> {
        let mut cluster = Self { servers: Vec::new(), scratch: signals::scratch()?, server_bytes, records, lock_wait };
        cluster.servers = cluster.launch(servers, threads, Memory::Ephemeral)?;
        Ok(cluster)
    }

    /// Servers whose memory outlives them until the cluster ends, as [`Cluster::start`] starts them.
    pub(crate) fn start_lasting(servers: u32, server_bytes: u64, threads: u32) -> anyhow::Result<Self> {
        let records = Records::default();
        let lock_wait = None;
        let mut cluster = Self { servers: Vec::new(), scratch: signals::scratch()?, server_bytes, records, lock_wait };
        cluster.servers = cluster.launch(servers, threads, Memory::Lasting)?;
        Ok(cluster)
    }

    /// Stops the servers, which gives back the pages that their threads had in hand, and starts them again with the memory that they
    /// had, and so many threads. Of lasting ones, from the main thread.
    pub(crate) fn restart(&mut self, threads: u32) -> anyhow::Result<()> {
        let count = self.servers.len() as u32;
        self.servers.drain(..).try_for_each(Child::stop)?;
        self.servers = self.launch(count, threads, Memory::Lasting)?;
        Ok(())
    }

    fn launch(&self, servers: u32, threads: u32, memory: Memory) -> anyhow::Result<Vec<Child>> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut children = Vec::new();
        // All are started before any is waited for: they get ready side by side.
        for server in 0..servers {
            let mut command = Command::new(&program);
            command.args(["serve", "--dir"]).arg(self.dir());
            command.args((memory == Memory::Ephemeral).then_some("--ephemeral"));
            command.args([
                format!("--server={server}"),
                format!("--servers={servers}"),
                format!("--bytes={}", self.server_bytes),
                format!("--threads={threads}"),
                format!("--records={}", self.records),
            ]);
            let lock_wait = self.lock_wait.filter(|_| threads > 0);
            command.args(lock_wait.map(|wait| format!("--lock-wait={}ms", wait.as_millis().max(1))));
            children.push(Child::start(&format!("memory server {server}"), command)?);
        }
        for (server, child) in (0u32..).zip(&mut children) {
            let line = child.receive(Some(READY_LIMIT))?;
            let expected = ready_line(server);
            ensure!(line == expected, "{} said `{line}` instead of `{expected}`", child.name());
        }
        Ok(children)
    }

    /// The cluster's folder.
    pub(crate) fn dir(&self) -> &Path {
        self.scratch.path()
    }

    /// Stops every server and waits for it, then removes the folder. The first error is reported, after all have ended.
    pub(crate) fn stop(self) -> anyhow::Result<()> {
        let Self { servers, scratch, .. } = self;
        let results: Vec<anyhow::Result<()>> = servers.into_iter().map(Child::stop).collect();
        drop(scratch);
        results.into_iter().collect()
    }
}

/// Starts the compute processes of a run; they wait for their orders (`protocol.rs`). From the main thread only.
pub(crate) fn start_compute(processes: u32) -> anyhow::Result<Processes> {
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let start = |process| {
        let mut command = Command::new(&program);
        command.arg("compute");
        Child::start(&format!("compute process {process}"), command)
    };
    (0..processes).map(start).collect::<anyhow::Result<_>>().map(Processes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_grows_with_the_keys() {
        assert_eq!(default_server_bytes(1, 2, 2), SERVER_BYTES_MIN);
        assert_eq!(default_server_bytes(100_000_000, 2, 2) % (1 << 20), 0);
        assert!(default_server_bytes(100_000_000, 2, 2) > 6_000_000_000);
        assert!(default_server_bytes(u64::MAX, 1, 1) > 0);
    }

    /// All servers give as much: more than the one with pages needs would be taken of each of the others, too.
    #[test]
    fn a_server_that_has_all_pages_asks_no_more_of_the_others_than_it_needs() {
        assert_eq!(default_server_bytes(120_000_000, 2, 1), default_server_bytes(120_000_000, 2, 2));
        let one_of_eight = default_server_bytes(20_000_000, 8, 1);
        assert_eq!(one_of_eight, (20_000_000 * ENTRY_BYTES * PAGES_FACTOR).next_multiple_of(1 << 20));
    }
}
