//! A compute process that is one of several owners of a structure.
//!
//! The first process owns all at first, and loads it. Before the first workload each of the others takes its share from it, which goes to
//! and fro as regions always do; so no page of level 0 is cut. Operations of all workers go to the owners of what they are about. A
//! phase is over once all processes have done with it: then each flushes, and counts what it has done for others.

use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use farlink_offload::route::move_region;
use farlink_offload::{Holdings, OwnerServer, ShardKey};
use farlink_runtime::access::{Overlap, Region as _};
use farlink_runtime::compute::ComputeServer;
use farlink_runtime::fabric::listener::ListenOptions;
use farlink_runtime::messaging::{ServeMessages, Wait};
use farlink_runtime::one_sided::ownership;
use farlink_runtime::worker::Worker;

use crate::plan::Plan;
use crate::route::{Route, counts};
use crate::subject::Subject;
use crate::tally::{CacheCounts, Counters, Tally};

/// Tries of a process to get its share from whoever has it.
const TAKES_MAX: u32 = 100;

/// What a process owns, whatever structure it is.
pub(crate) trait Owner {
    /// Before a phase: has its share from the first workload on.
    fn prepare(&mut self, is_load: bool) -> anyhow::Result<()>;

    /// After a phase that all processes have done with: writes what only the cache holds. What the cache has counted in the phase, and
    /// what was done for others.
    fn flush(&mut self) -> anyhow::Result<Tally>;
}

/// A share of a structure, and what its owner needs.
pub(crate) struct Share<S: Subject> {
    // In this order: threads that use the cache and the compute server go first.
    server: OwnerServer,
    holdings: Holdings<S>,
    /// `None` once it is had, or if there is none.
    wanted: Option<S::Region>,
    before: (Counters, CacheCounts),
    worker: Worker,
}

impl<S: Subject> Share<S> {
    /// Begins to listen. The first process owns everything.
    pub(crate) fn start(
        plan: &Plan,
        process: u32,
        route: &Route<S>,
        data: &S::Data,
        compute: &Arc<ComputeServer>,
    ) -> anyhow::Result<Self> {
        let holdings = route.holdings().context("owners have caches")?.clone();
        let ShardKey::Regions(regions) = S::divide(data, plan.processes as usize) else {
            bail!("a {} is not divided by regions, so it has one owner", S::NAME);
        };
        ensure!(
            regions.iter().all(S::can_own),
            "a {} has one owner, of all of it: use --processes 1, or --access cached-inner",
            S::NAME
        );
        let worker = compute.worker()?;
        if process == 0 {
            worker.block_on(holdings.take(&worker, S::Region::everything()))?;
        }
        let messages = ServeMessages { wait: Wait::Auto, ..ServeMessages::default() };
        let served = vec![farlink_offload::Served::new(&holdings)];
        let server = OwnerServer::start(compute.listen(&ListenOptions::default())?, compute, served, &messages)?;
        let wanted = regions.into_iter().nth(process as usize).filter(|_| process > 0);
        Ok(Self { server, holdings, wanted, before: Default::default(), worker })
    }

    fn take_share(&mut self) -> anyhow::Result<()> {
        let Some(region) = self.wanted.take() else { return Ok(()) };
        let (worker, structure) = (&self.worker, self.holdings.structure());
        for _ in 0..TAKES_MAX {
            let map = worker.block_on(ownership::read(worker, structure))?;
            let mut owner = None;
            for (by, part) in map.owners() {
                let owned = part.to_region::<S::Region>()?;
                if owned.is_some_and(|owned| region.overlap(&owned) == Overlap::Inside) {
                    owner = Some(by);
                }
            }
            let owner = owner.with_context(|| format!("nobody owns all of {region:?}"))?;
            if worker.block_on(move_region(worker, structure, &region, owner, worker.owner()))?.is_some() {
                return Ok(());
            }
        }
        bail!("{region:?} is too small to be owned by itself: load more keys, or use fewer --processes")
    }

    fn counted(&self) -> (Counters, CacheCounts) {
        (self.server.counters().into(), counts(&self.holdings.counters()))
    }
}

impl<S: Subject> Drop for Share<S> {
    fn drop(&mut self) {
        if let Err(error) = self.worker.block_on(self.holdings.give_up_all(&self.worker)) {
            tracing::warn!(%error, "a share was not given up in order: its log is replayed");
        }
    }
}

impl<S: Subject> Owner for Share<S> {
    fn prepare(&mut self, is_load: bool) -> anyhow::Result<()> {
        if !is_load {
            self.take_share()?;
        }
        self.before = self.counted();
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<Tally> {
        let (counters, cache) = self.counted();
        let mut tally = Tally { counters: counters - self.before.0, cache: cache - self.before.1, ..Tally::default() };
        self.worker.block_on(self.holdings.flush(&self.worker))?;
        tally.cache.flushed = self.counted().1.write_backs - cache.write_backs;
        Ok(tally)
    }
}
