//! A compute process that is one of several owners of a structure.
//!
//! The first process owns all at first, and loads it. Before the first workload each of the others takes its share from it, which goes to
//! and fro as regions always do; so no page of level 0 is cut. A share is a region, or one of several structures, where a structure is
//! owned as a whole. Operations of all workers go to the owners of what they are about. A
//! phase is over once all processes have done with it: then each flushes, and counts what it has done for others. Where owners of another
//! run are there already, all processes own nothing, until regions are moved to them.

use std::sync::Arc;

use anyhow::{Context as _, bail};
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
    /// Of each part.
    holdings: Vec<Holdings<S>>,
    /// Of a part with this number; `None` once it is had, or if there is none.
    wanted: Option<(usize, S::Region)>,
    before: (Counters, CacheCounts),
    worker: Worker,
}

impl<S: Subject> Share<S> {
    /// Begins to listen, and owns nothing yet.
    pub(crate) fn start(
        plan: &Plan,
        process: u32,
        route: &Route<S>,
        data: &S::Data,
        compute: &Arc<ComputeServer>,
    ) -> anyhow::Result<Self> {
        let holdings = route.holdings();
        let shares: Vec<(usize, S::Region)> = match S::divide_among_owners(data, plan.processes as usize) {
            ShardKey::Regions(regions) if holdings.len() == 1 => {
                regions.into_iter().map(|region| (0, region)).collect()
            }
            _ => (0..holdings.len()).map(|part| (part, S::Region::everything())).collect(),
        };
        let worker = compute.worker()?;
        let messages = ServeMessages { wait: Wait::Auto, ..ServeMessages::default() };
        let served = holdings.iter().map(farlink_offload::Served::new).collect();
        let server = OwnerServer::start(compute.listen(&ListenOptions::default())?, compute, served, &messages)?;
        let wanted = shares.into_iter().nth(process as usize).filter(|_| !plan.joins_owners);
        Ok(Self { server, holdings, wanted, before: Default::default(), worker })
    }

    /// Owns everything from now on: what nobody owns who lives.
    pub(crate) fn take_all(&self) -> anyhow::Result<()> {
        let take = |part: &Holdings<S>| self.worker.block_on(part.take(&self.worker, S::Region::everything()));
        Ok(self.holdings.iter().try_for_each(take)?)
    }

    /// Has its share, or some of it, from whoever owns it, if it owns nothing: now and then, for it may be too small to be owned by itself
    /// yet, and owners may die meanwhile.
    pub(crate) fn seek(&self) -> anyhow::Result<()> {
        let Some((part, wanted)) = &self.wanted else { return Ok(()) };
        if self.holdings.iter().any(|part| !part.regions().is_empty()) {
            return Ok(());
        }
        let (worker, structure) = (&self.worker, self.holdings[*part].structure());
        for (owner, owned) in worker.block_on(ownership::read(worker, structure))?.owners() {
            let Some(owned) = owned.to_region::<S::Region>()? else { continue };
            let piece = match (wanted.overlap(&owned), owned.overlap(wanted)) {
                (Overlap::Inside, _) => wanted,
                (_, Overlap::Inside) => &owned,
                _ => continue,
            };
            match worker.block_on(move_region(worker, structure, piece, owner, worker.owner())) {
                Ok(Some(_)) => break,
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, "got no share"),
            }
        }
        Ok(())
    }

    fn take_share(&mut self) -> anyhow::Result<()> {
        let Some((part, region)) = self.wanted.take() else { return Ok(()) };
        let (worker, structure) = (&self.worker, self.holdings[part].structure());
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
            if owner == worker.owner() {
                return Ok(());
            }
            if worker.block_on(move_region(worker, structure, &region, owner, worker.owner()))?.is_some() {
                return Ok(());
            }
        }
        bail!("{region:?} is too small to be owned by itself: load more keys, or use fewer --processes")
    }

    /// What the caches of all parts have counted.
    pub(crate) fn cache_counts(&self) -> CacheCounts {
        self.holdings.iter().map(|part| counts(&part.counters())).sum()
    }

    fn counted(&self) -> (Counters, CacheCounts) {
        (self.server.counters().into(), self.cache_counts())
    }
}

impl<S: Subject> Drop for Share<S> {
    fn drop(&mut self) {
        for part in &self.holdings {
            if let Err(error) = self.worker.block_on(part.give_up_all(&self.worker)) {
                tracing::warn!(%error, "a share was not given up in order: its log is replayed");
            }
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
        let mut tally =
            Tally { counters: counters - self.before.0.clone(), cache: cache - self.before.1, ..Tally::default() };
        for part in &self.holdings {
            self.worker.block_on(part.flush(&self.worker))?;
        }
        tally.cache.flushed = self.counted().1.write_backs - cache.write_backs;
        Ok(tally)
    }
}
