//! Runs compute servers on a test bed: warms up, then measures. Each compute server is a thread of its own, on which its
//! workers take turns. Every answer is checked. Operations are drawn in parts with the clock stopped, so that a run of any
//! length needs no memory for them and throughput is without drawing. The latencies of those that are under way then have it.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use farlink_runtime::compute::ComputeServer;
use farlink_structures::btree::Tree;

use super::test_bed::{TestBed, stay_on_core};
use crate::driver::{self, Client};
use crate::maps::MapRequest;
use crate::queue::{End, OperationQueue};
use crate::report::Row;
use crate::route::Route;
use crate::tally::Tally;

/// Operations drawn at a time.
const PART: usize = 4096;

/// What a worker does, without an end or with one.
pub(crate) type Operations = Box<dyn Iterator<Item = MapRequest>>;

/// Which operations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lot {
    pub(crate) server: usize,
    pub(crate) worker: usize,
    pub(crate) is_warm_up: bool,
}

/// A load on a test bed.
pub(crate) struct Load<'a> {
    pub(crate) compute_servers: usize,
    /// Of each compute server.
    pub(crate) workers: usize,
    /// Of each worker.
    pub(crate) in_flight: u32,
    /// How a compute server reaches the tree.
    pub(crate) route: &'a (dyn Fn(usize) -> anyhow::Result<Route<Tree>> + Sync),
    pub(crate) operations: &'a (dyn Fn(Lot) -> Operations + Sync),
    /// How long the warm-up lasts, and what is measured; `None` as long as there are operations.
    pub(crate) limits: [Option<Duration>; 2],
    /// Whether compute servers share a core, beside memory servers that carry out operations on another.
    pub(crate) on_one_core: bool,
    pub(crate) seed: u64,
}

impl Load<'_> {
    /// The row of what all compute servers did together, in the time of the one that took longest.
    pub(crate) fn run(&self, bed: &TestBed, name: &str) -> anyhow::Result<(Row, Tally)> {
        let (barrier, failed) = (&Barrier::new(self.compute_servers), &AtomicBool::new(false));
        let run = |server| -> anyhow::Result<(Duration, Tally)> {
            if self.on_one_core {
                stay_on_core(0);
            }
            // Others wait for this one, however it ends.
            let warm = panic::catch_unwind(AssertUnwindSafe(|| self.warm_up(bed, server)));
            failed.fetch_or(!matches!(warm, Ok(Ok(_))), Ordering::Relaxed);
            barrier.wait();
            let (_compute, clients) = warm.unwrap_or_else(|panic| panic::resume_unwind(panic))?;
            if failed.load(Ordering::Relaxed) {
                return Ok(Default::default());
            }
            let (time, mut tally) = self.phase(&clients, server, false)?;
            let flushed = driver::counted(&clients, || {
                driver::block_on(&clients, clients[0].access.flush())??;
                Ok(Tally::default())
            })?;
            tally.cache.flushed = flushed.cache.write_backs;
            Ok((time, tally))
        };
        let run = &run;
        let all = thread::scope(|scope| {
            let threads: Vec<_> = (0..self.compute_servers).map(|server| scope.spawn(move || run(server))).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect::<Vec<_>>()
        });
        let (mut longest, mut tally) = (Duration::ZERO, Tally::default());
        for measured in all {
            let (time, measured) = measured?;
            longest = longest.max(time);
            tally += &measured;
        }
        let mut row = Row::measured(name, longest.as_secs_f64(), &tally, tally.cache.lookups > 0);
        // Those that are under way wait for a draw.
        row.p999_ns = None;
        row.p99_ns = row.p99_ns.filter(|_| self.workers * self.in_flight as usize * 100 <= PART);
        Ok((row, tally))
    }

    fn warm_up(&self, bed: &TestBed, server: usize) -> anyhow::Result<(ComputeServer, Vec<Client<Tree>>)> {
        let compute = bed.join(self.seed.wrapping_add(server as u64))?;
        let route = (self.route)(server)?;
        let client = |_| {
            let worker = compute.worker()?;
            Ok(Client { access: route.open(&worker)?, worker })
        };
        let clients: Vec<Client<Tree>> = (0..self.workers).map(client).collect::<anyhow::Result<_>>()?;
        self.phase(&clients, server, true)?;
        Ok((compute, clients))
    }

    fn phase(&self, clients: &[Client<Tree>], server: usize, is_warm_up: bool) -> anyhow::Result<(Duration, Tally)> {
        let start = Instant::now();
        let end = self.limits[usize::from(!is_warm_up)].map_or(End::Source, |limit| End::At(start + limit));
        let queue = |worker| {
            let source = (self.operations)(Lot { server, worker, is_warm_up });
            OperationQueue::new(InParts { source, part: Vec::new().into_iter(), drawing: Duration::ZERO }, end)
        };
        let queues = (0..clients.len()).map(queue).collect();
        let (tally, sources) = driver::run(clients, queues, self.in_flight)?;
        let drawing: Duration = sources.iter().map(|source| source.drawing).sum();
        let seen = &tally.outcomes;
        ensure!(
            seen.missing + seen.wrong_values + seen.wrong_scans == 0,
            "answers were wrong: {} loaded keys missing, {} foreign values, {} ranges not whole",
            seen.missing,
            seen.wrong_values,
            seen.wrong_scans
        );
        Ok((start.elapsed().saturating_sub(drawing), tally))
    }
}

/// Operations that are drawn many at a time, and how long that took.
struct InParts {
    source: Operations,
    part: std::vec::IntoIter<MapRequest>,
    drawing: Duration,
}

impl Iterator for InParts {
    type Item = MapRequest;

    fn next(&mut self) -> Option<MapRequest> {
        self.part.next().or_else(|| {
            let start = Instant::now();
            self.part = self.source.by_ref().take(PART).collect::<Vec<_>>().into_iter();
            self.drawing += start.elapsed();
            self.part.next()
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use farlink_runtime::{fabric::mem::MemOptions, one_sided::Proof};
    use farlink_structures::btree::BTreeOptions;

    use super::*;
    use crate::figure::key_set::{FILL, KeySet, READ_ONLY};
    use crate::subject::AccessMode;

    #[test]
    fn a_panic_of_one_compute_server_ends_the_others() {
        let key_set = Arc::new(KeySet::new(1000, 0.0, 2, 1).unwrap());
        let (told, over) = mpsc::channel();
        thread::spawn(move || {
            let bed = TestBed::start(1, 1 << 20, MemOptions::default()).unwrap();
            let tree = bed.load("figure", BTreeOptions::default(), key_set.entries(), FILL).unwrap();
            let load = Load {
                compute_servers: 2,
                workers: 1,
                in_flight: 1,
                route: &|_| Ok(Route::new(AccessMode::OneSided, tree.clone(), Proof::Checksum)),
                operations: &|Lot { server, .. }| {
                    assert!(server == 0, "the warm-up of the second one");
                    Box::new(key_set.operations(server, 10, READ_ONLY, 1, 0))
                },
                limits: [None; 2],
                on_one_core: false,
                seed: 1,
            };
            let ended = panic::catch_unwind(AssertUnwindSafe(|| load.run(&bed, "figure")));
            told.send(ended.is_err()).unwrap();
        });
        assert_eq!(over.recv_timeout(Duration::from_secs(60)), Ok(true));
    }
}
