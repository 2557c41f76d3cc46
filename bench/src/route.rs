//! How workers reach a structure, in each of the access modes.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use farlink_offload::{
    Adaptive, CacheOptions, Cached, CachedInner, CachedMapping, ComputeCache, Counters, Durability, Engine,
    EngineOptions, Holdings, Hybrid, LEVELS, MappingCache, OffloadCounts, Policies, Remote, Router, Routes, ShardKey,
    Sharded, ShardedRemote, ValueCounters, ship::Shipper,
};
use farlink_runtime::access::{FastPath as _, Region as _};
use farlink_runtime::error::Error;
use farlink_runtime::messaging::ChannelOptions;
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::ptr::ServerId;
use farlink_runtime::structure::Structure;
use farlink_runtime::worker::{Handle, Task, Worker};

use crate::plan::Plan;
use crate::queue::OperationQueue;
use crate::subject::{AccessMode, Answer, Subject};
use crate::tally::{CacheCounts, Levels, Tally};
use crate::task::run_task;

/// More than any shipped operation here has: which messages are better fetched need not be measured.
const EAGER_WORDS: usize = 1024;

/// What the workers of a compute server share.
#[derive(Debug)]
pub(crate) struct Route<S: Subject> {
    mode: AccessMode,
    proof: Proof,
    parts: Vec<Structure>,
    cut: ShardKey<S::Region>,
    /// Of each part, once there are any.
    caches: Vec<ComputeCache<S>>,
    mapping: Option<MappingCache<S>>,
    owned: S::Region,
    policies: Option<fn() -> Policies>,
    owners: Option<Owners<S>>,
}

/// How the structure of a plan is cut into structures of their own.
pub(crate) fn cut<S: Subject>(data: &S::Data, plan: &Plan) -> ShardKey<S::Region> {
    if plan.access.is_divided() {
        return S::divide(data, plan.servers as usize);
    }
    match S::divide_among_owners(data, plan.processes as usize) {
        ShardKey::Regions(regions) if regions.iter().all(S::can_own) => ShardKey::whole(),
        parts if plan.has_owners() => parts,
        _ => ShardKey::whole(),
    }
}

/// What a compute server owns of each part, beside others that own some, and who does.
#[derive(Debug)]
struct Owners<S: Subject>(Vec<(Holdings<S>, KnownRoutes<S>)>);

/// Read once for all workers.
type KnownRoutes<S> = Arc<OnceLock<Routes<S>>>;

impl<S: Subject> Clone for Owners<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Subject> Clone for Route<S> {
    fn clone(&self) -> Self {
        let (parts, cut, owned) = (self.parts.clone(), self.cut.clone(), self.owned.clone());
        let (caches, mapping, owners) = (self.caches.clone(), self.mapping.clone(), self.owners.clone());
        Self { parts, cut, owned, caches, mapping, owners, ..*self }
    }
}

impl<S: Subject> Route<S> {
    /// To a structure, without a cache.
    pub(crate) fn new(mode: AccessMode, structure: Structure, proof: Proof) -> Self {
        let (parts, cut, owned) = (vec![structure], ShardKey::whole(), S::Region::everything());
        Self { mode, proof, parts, cut, caches: Vec::new(), mapping: None, owned, policies: None, owners: None }
    }

    /// To a structure in parts, each a structure of its own.
    pub(crate) fn of_parts(mode: AccessMode, parts: Vec<Structure>, cut: ShardKey<S::Region>) -> anyhow::Result<Self> {
        let first = parts.first().ok_or_else(|| anyhow::anyhow!("a structure has parts"))?.clone();
        Ok(Self { parts, cut, ..Self::new(mode, first, Proof::Checksum) })
    }

    /// The same, where pages are proven in this way.
    pub(crate) fn proven_by(self, proof: Proof) -> Self {
        Self { proof, ..self }
    }

    /// The same through a cache for each part, empty now, which holds all pages of this region or inner ones only.
    pub(crate) fn through(self, cache: CacheOptions, owned: S::Region) -> Result<Self, Error> {
        Ok(match self.mode.is_of_words() {
            true => Self { mapping: Some(MappingCache::new(cache.bytes)), ..self },
            false => {
                let caches = self.parts.iter().map(|_| ComputeCache::new(cache)).collect::<Result<_, _>>()?;
                Self { caches, owned, ..self }
            }
        })
    }

    /// The same, where changes in the cache are safe as this says.
    pub(crate) fn durable(self, durability: Durability) -> Self {
        let caches = self.caches.into_iter().map(|cache| cache.with_durability(durability)).collect();
        Self { caches, ..self }
    }

    /// The same, where a policy says for each miss whether the operation is shipped.
    pub(crate) fn shipping(self, policies: fn() -> Policies) -> Self {
        Self { policies: Some(policies), ..self }
    }

    /// The same, where other compute servers own parts of the structure, too: operations go to the owners.
    pub(crate) fn among_owners(self) -> anyhow::Result<Self> {
        anyhow::ensure!(self.caches.len() == self.parts.len(), "{} has no owner", self.mode);
        let of = |(part, cache): (&Structure, &ComputeCache<S>)| {
            let holdings = Holdings::new(part, cache.clone());
            let holdings = match (self.mode, self.policies) {
                (AccessMode::Engine, policies) => {
                    holdings.shipping(policies.unwrap_or(Policies::default), EngineOptions::default())
                }
                _ => holdings,
            };
            (holdings, KnownRoutes::default())
        };
        let owners = Owners(self.parts.iter().zip(&self.caches).map(of).collect());
        Ok(Self { owners: Some(owners), ..self })
    }

    /// The structures that are its parts.
    pub(crate) fn parts(&self) -> &[Structure] {
        &self.parts
    }

    /// What the compute server owns of each part, beside others.
    pub(crate) fn holdings(&self) -> Vec<Holdings<S>> {
        self.owners.iter().flat_map(|Owners(parts)| parts.iter().map(|(holdings, _)| holdings.clone())).collect()
    }

    /// The structure, as one worker reaches it.
    pub(crate) fn open(&self, worker: &Worker) -> anyhow::Result<Opened<S>> {
        let structure = || self.parts[0].clone();
        let policies = || self.policies.map_or_else(Policies::default, |policies| policies());
        let cache = || self.caches.first().ok_or_else(|| anyhow::anyhow!("{} needs a cache", self.mode));
        let own = |worker: &Worker| -> anyhow::Result<Cached<S>> {
            Ok(worker.block_on(cache()?.own(worker, structure(), self.owned.clone()))?)
        };
        if let Some(Owners(parts)) = &self.owners {
            let router = |(holdings, routes): &(Holdings<S>, KnownRoutes<S>)| -> Result<_, Error> {
                let routes = match routes.get() {
                    Some(known) => known.clone(),
                    None => {
                        let read = worker.block_on(Routes::read(worker, holdings.structure().clone()))?;
                        routes.get_or_init(|| read).clone()
                    }
                };
                Ok(Router::new(worker, &routes, holdings.here(worker)))
            };
            let routers = parts.iter().map(router).collect::<Result<_, _>>()?;
            return Ok(Opened::Routed(Sharded::new(routers, self.cut.clone())?));
        }
        let connect = |shipper: &Shipper<S>| worker.block_on(shipper.connect(shipper.structure().root.server()));
        Ok(match self.mode {
            AccessMode::OneSided => Opened::OneSided(OneSided::new(worker, structure(), self.proof)),
            AccessMode::Cached => Opened::Cached(own(worker)?),
            AccessMode::Engine => {
                if self.policies.is_some() {
                    (0..worker.servers())
                        .filter_map(|index| ServerId::new(index as u16))
                        .try_for_each(|server| open_channel(worker, server))?;
                }
                let cached = own(worker)?;
                Opened::Engine(Engine::new(cached, policies(), EngineOptions::default())?)
            }
            AccessMode::Adaptive => {
                if self.policies.is_some() {
                    open_channel(worker, structure().root.server())?;
                }
                let here = OneSided::new(worker, structure(), self.proof);
                Opened::Adaptive(Adaptive::new(here, worker, structure(), policies()))
            }
            AccessMode::CachedInner => Opened::CachedInner(cache()?.share(worker, structure(), self.proof)?),
            AccessMode::CachedMapping => {
                let mapping = self.mapping.as_ref().ok_or_else(|| anyhow::anyhow!("{} needs a cache", self.mode))?;
                Opened::CachedMapping(mapping.share(worker, structure()))
            }
            AccessMode::Coarse => {
                let parts: Vec<_> = self.parts.iter().map(|part| Remote::new(worker, part.clone())).collect();
                parts.iter().try_for_each(|part| connect(part.shipper()))?;
                Opened::Coarse(Sharded::new(parts, self.cut.clone())?)
            }
            AccessMode::Hybrid => {
                let parts: Vec<_> =
                    self.parts.iter().map(|part| Hybrid::new(worker, part.clone(), self.proof)).collect();
                parts.iter().try_for_each(|part| connect(part.shipper()))?;
                Opened::Hybrid(Sharded::new(parts, self.cut.clone())?)
            }
        })
    }

    /// Loads the empty structure, or its parts, with that share of each page filled; how many entries.
    pub(crate) async fn bulk_load(
        &self,
        access: &Opened<S>,
        worker: &Handle,
        data: &S::Data,
        fill: f64,
    ) -> Result<u64, Error> {
        let whole = (&self.cut, 0);
        match access {
            Opened::OneSided(access) => S::bulk_load(access, data, whole, fill).await,
            Opened::Cached(access) => S::bulk_load(access, data, whole, fill).await,
            Opened::Routed(routers) => {
                let mut loaded = 0;
                for (part, router) in routers.parts().iter().enumerate() {
                    let all = router.here().map(|here| here.with(&S::Region::everything())).transpose()?.flatten();
                    let all = all.ok_or_else(|| Error::GivenUp { name: router.structure().name.clone() })?;
                    loaded += S::bulk_load(all, data, (&self.cut, part), fill).await?;
                }
                Ok(loaded)
            }
            Opened::CachedInner(access) => S::bulk_load(access, data, whole, fill).await,
            Opened::CachedMapping(access) => S::bulk_load(access, data, whole, fill).await,
            Opened::Engine(engine) => S::bulk_load(engine.cached(), data, whole, fill).await,
            Opened::Adaptive(adaptive) => S::bulk_load(adaptive.here(), data, whole, fill).await,
            Opened::Coarse(_) | Opened::Hybrid(_) => {
                let mut loaded = 0;
                for (part, structure) in self.parts.iter().enumerate() {
                    let access = OneSided::new(worker, structure.clone(), self.proof);
                    loaded += S::bulk_load(&access, data, (&self.cut, part), fill).await?;
                }
                Ok(loaded)
            }
        }
    }
}

fn open_channel(worker: &Worker, server: ServerId) -> Result<(), Error> {
    let options = ChannelOptions { eager_words: Some(EAGER_WORDS), ..ChannelOptions::default() };
    worker.block_on(worker.channel_with(server, options)).map(drop)
}

/// A structure, as one worker reaches it.
#[derive(Debug)]
pub(crate) enum Opened<S: Subject> {
    OneSided(OneSided<S>),
    Cached(Cached<S>),
    Routed(Sharded<Router<S>>),
    CachedInner(CachedInner<S>),
    CachedMapping(CachedMapping<S>),
    Engine(Engine<S>),
    Adaptive(Adaptive<OneSided<S>>),
    Coarse(ShardedRemote<S>),
    Hybrid(Sharded<Hybrid<S>>),
}

/// Whatever it is, as one that runs operations.
macro_rules! on {
    ($opened:expr, $run:ident => $body:expr) => {
        match $opened {
            Opened::OneSided($run) => $body,
            Opened::Cached($run) => $body,
            Opened::Routed($run) => $body,
            Opened::CachedInner($run) => $body,
            Opened::CachedMapping($run) => $body,
            Opened::Engine($run) => $body,
            Opened::Adaptive($run) => $body,
            Opened::Coarse($run) => $body,
            Opened::Hybrid($run) => $body,
        }
    };
}

impl<S: Subject> Opened<S> {
    /// Starts a task that runs operations from `queue` until it ends.
    pub(crate) fn spawn<I: Iterator<Item = S::Request> + 'static>(
        &self,
        worker: &Worker,
        queue: &Rc<OperationQueue<I>>,
        tally: &Rc<RefCell<Tally>>,
    ) -> Task<Result<(), Error>> {
        let (queue, tally) = (Rc::clone(queue), Rc::clone(tally));
        on!(self, run => {
            let run = run.clone();
            worker.spawn(async move { run_task::<S, _, _>(&run, &queue, &tally).await })
        })
    }

    /// Runs one operation of a trace.
    pub(crate) async fn answer(&self, request: S::Request) -> Result<Answer, Error> {
        on!(self, run => S::answer(run, request).await)
    }

    /// What the cache did so far for this worker.
    pub(crate) fn cache_counts(&self) -> CacheCounts {
        match self {
            Self::OneSided(_) | Self::Coarse(_) | Self::Hybrid(_) => CacheCounts::default(),
            // What the cache of an owner has counted, its process says.
            Self::Routed(routers) => {
                let here = routers.parts().iter().filter_map(Router::here);
                here.map(|here| offloaded(CacheCounts::default(), here.offload_counts())).sum()
            }
            Self::Cached(access) => counts(&access.counters()),
            Self::CachedInner(access) => with_past(counts(&access.counters()), access.reads_past_cache()),
            Self::CachedMapping(access) => {
                let ValueCounters { hits, misses, .. } = access.counters();
                // Not told apart by level: rows leave the levels out.
                let mut levels = Levels::default();
                levels.0[0] = misses;
                CacheCounts { lookups: hits + misses, misses: levels, ..CacheCounts::default() }
            }
            Self::Engine(engine) => offloaded(counts(&engine.cached().counters()), engine.counts()),
            Self::Adaptive(adaptive) => offloaded(CacheCounts::default(), adaptive.counts()),
        }
    }

    /// Takes the right to use the structure, which the first operation would take otherwise, and cost more than others.
    pub(crate) async fn enter(&self) -> Result<(), Error> {
        match self {
            // An owner has it, or asks one.
            Self::Cached(_) | Self::Routed(_) | Self::Engine(_) => Ok(()),
            Self::OneSided(access) => access.enter().await,
            Self::CachedInner(access) => access.enter().await,
            Self::CachedMapping(access) => access.enter().await,
            Self::Adaptive(access) => {
                access.here().enter().await?;
                access.shipper().enter().await
            }
            Self::Coarse(parts) => {
                for part in parts.parts() {
                    part.shipper().enter().await?;
                }
                Ok(())
            }
            Self::Hybrid(parts) => {
                for part in parts.parts() {
                    part.leaves().enter().await?;
                }
                Ok(())
            }
        }
    }

    /// Makes all that the compute server has changed visible to others.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        match self {
            Self::Cached(access) => access.flush().await,
            Self::Engine(engine) => engine.cached().flush().await,
            _ => Ok(()),
        }
    }
}

pub(crate) fn counts(counters: &Counters) -> CacheCounts {
    let total = counters.total();
    CacheCounts {
        // Who waits for a read that another operation has begun costs no read of its own.
        lookups: total.hits + total.misses + total.shared_fetches,
        misses: Levels(counters.levels.map(|level| level.misses)),
        evictions: total.evictions,
        write_backs: total.write_backs,
        ..CacheCounts::default()
    }
}

fn offloaded(counts: CacheCounts, OffloadCounts { shipped, came_back, contrary, .. }: OffloadCounts) -> CacheCounts {
    CacheCounts { shipped, came_back, contrary, ..counts }
}

/// Counts where pages are read past the cache, so many of each level: each is a miss.
fn with_past(mut counts: CacheCounts, past: [u64; LEVELS]) -> CacheCounts {
    let past = Levels(past);
    counts.lookups += past.total();
    counts.misses += past;
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_fetch_is_no_miss_and_a_read_past_the_cache_is_one() {
        let mut counters = Counters::default();
        (counters.levels[1].hits, counters.levels[1].misses, counters.levels[1].shared_fetches) = (85, 10, 5);
        (counters.levels[2].hits, counters.levels[2].write_backs) = (100, 4);
        let counted = counts(&counters);
        assert_eq!((counted.lookups, counted.misses.0[..3].to_vec(), counted.write_backs), (200, vec![0, 10, 0], 4));
        let mut past = [0; LEVELS];
        past[0] = 100;
        let counted = with_past(counted, past);
        assert_eq!((counted.lookups, counted.misses.0[..3].to_vec()), (300, vec![100, 10, 0]));
    }
}
