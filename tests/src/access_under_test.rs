//! The ways by which the workers of a run reach the tree: one-sided, through a compute server's cache, or by operations that
//! memory servers carry out.

use std::{
    io::Write,
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, ensure};
use farlink_offload::{
    Adaptive, Admission, CacheOptions, Cached, CachedInner, CachedMapping, ComputeCache, Counters, Durability, Engine,
    EngineOptions, Holdings, Hybrid, MappingCache, OffloadCounts, OwnerServer, Policies, Remote, Router, Routes,
    Served,
    policy::{Always, CostAware, CostOptions, Never},
};
use farlink_runtime::{
    compute::ComputeServer,
    error::Error,
    fabric::listener::ListenOptions,
    messaging::{ServeMessages, Wait},
    one_sided::{OneSided, Proof},
    structure::Structure,
    worker::{Handle, Worker},
};
use farlink_structures::{
    btree::KeyRange,
    map::{Map, OrderedMap},
};
use serde::{Deserialize, Serialize};

pub use crate::workload::Part;
use crate::{
    cluster::{again, again_async},
    drive::{Plan, Tally, drive},
    history::{Recorder, mix},
    workload::Workload,
};

/// What a part is to a tree.
pub fn key_range(part: Part) -> KeyRange {
    KeyRange { low: part.low, high: part.high.checked_add(1) }
}

/// How a compute server reaches the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccessUnderTest {
    /// Without a cache.
    OneSided,
    /// It owns the keys of a part, and caches all pages.
    Cached {
        /// What it owns.
        part: Part,
        /// Its cache.
        cache: CacheSpec,
        /// Who decides what is shipped; nobody if nothing is.
        ship: Option<ShipChoice>,
        /// Whether operations on others' keys are sent to their owners, and it carries out those that others send.
        routed: bool,
    },
    /// It caches inner pages of a tree that others change, too.
    CachedInner {
        /// Its cache.
        cache: CacheSpec,
    },
    /// It caches mapping words and consolidated pages of a latch-free tree that others change, too.
    CachedMapping {
        /// Bytes of its cache.
        bytes: usize,
    },
    /// It sends all operations to the memory server that has the tree.
    Coarse,
    /// It sends searches of inner levels to the memory server that has them.
    Hybrid,
    /// It sends an operation, or does it one-sided.
    Adaptive {
        /// Who decides.
        ship: ShipChoice,
    },
}

/// Who decides on a miss whether an operation is shipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShipChoice {
    /// [`Never`].
    Never,
    /// [`Always`].
    Always,
    /// [`CostAware`], with many contrary choices.
    Cost,
}

impl ShipChoice {
    fn policies(self) -> Policies {
        match self {
            Self::Never => Policies::new(Never),
            Self::Always => Policies::new(Always),
            Self::Cost => {
                Policies::for_each_kind(CostAware::new(CostOptions { contrary_one_in: 5, ..CostOptions::default() }))
            }
        }
    }
}

impl std::str::FromStr for ShipChoice {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "never" => Ok(Self::Never),
            "always" => Ok(Self::Always),
            "cost" => Ok(Self::Cost),
            _ => anyhow::bail!("it is never, always or cost"),
        }
    }
}

/// Which pages get into a full cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Admit {
    /// Those used more than what would go for them.
    Frequency,
    /// All.
    Always,
    /// A tenth of the leaves, and all inner pages; the victim is drawn at random.
    Dex,
}

impl std::str::FromStr for Admit {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "frequency" => Ok(Self::Frequency),
            "always" => Ok(Self::Always),
            "dex" => Ok(Self::Dex),
            _ => anyhow::bail!("it is frequency, always or dex"),
        }
    }
}

/// A cache to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSpec {
    /// All its memory.
    pub bytes: usize,
    /// Bytes of the tree's pages.
    pub page_bytes: usize,
    /// Which pages get in once it is full.
    pub admit: Admit,
    /// Whether an owner logs what it changes before it answers.
    pub logs: bool,
}

impl CacheSpec {
    /// Makes it; one whose pages can be kept out for an engine if `keeps_out`.
    ///
    /// # Errors
    /// As [`ComputeCache::new`].
    pub fn build<S: OrderedMap>(self, keeps_out: bool) -> Result<ComputeCache<S>, Error> {
        let mut options = match self.admit {
            Admit::Dex => CacheOptions::dex(self.bytes),
            _ => CacheOptions::new(self.bytes),
        };
        if self.admit == Admit::Always {
            options.admission = Admission::Always;
        }
        options.page_bytes = self.page_bytes;
        options.excludes_subtrees = keeps_out;
        let durability = if self.logs { Durability::Logged } else { Durability::WriteBack };
        Ok(ComputeCache::<S>::new(options)?.with_durability(durability))
    }
}

/// What a compute server's workers share.
#[derive(Debug, Clone)]
pub struct Client<S: OrderedMap> {
    structure: Structure,
    proof: Proof,
    reach: AccessUnderTest,
    cache: Option<ComputeCache<S>>,
    /// What it owns, if operations go to the owners.
    holdings: Option<Holdings<S>>,
    mapping: Option<MappingCache<S>>,
    /// Who owns which keys, if operations go to them.
    routes: Arc<Mutex<Option<Routes<S>>>>,
    /// What the engines of workers that have ended have counted.
    engines: Arc<Mutex<OffloadCounts>>,
}

/// The tree, as one worker reaches it.
#[derive(Debug)]
pub enum Tree<S: OrderedMap> {
    /// Without a cache.
    OneSided(Map<S, OneSided<S>>),
    /// Through a cache of all pages.
    Cached(Map<S, Cached<S>>),
    /// Through such a cache, and what is not cached is shipped if that is cheaper.
    Shipping(Map<S, Engine<S>>),
    /// Through such a cache, and by messages to other owners.
    Routed(Map<S, Router<S>>),
    /// Through a cache of inner pages.
    CachedInner(Map<S, CachedInner<S>>),
    /// Through a cache of mapping words and consolidated pages.
    CachedMapping(Map<S, CachedMapping<S>>),
    /// By operations that are sent.
    Coarse(Map<S, Remote<S>>),
    /// By searches that are sent.
    Hybrid(Map<S, Hybrid<S>>),
    /// By operations that are sent, and others that are one-sided.
    Adaptive(Map<S, Adaptive<OneSided<S>>>),
}

impl<S: OrderedMap> Tree<S> {
    /// Opens the ways to memory servers that operations take.
    ///
    /// # Errors
    /// If a memory server takes no messages.
    pub async fn connect(&self) -> Result<(), Error> {
        let shipper = match self {
            Self::Coarse(tree) => tree.access().shipper(),
            Self::Hybrid(tree) => tree.access().shipper(),
            Self::Adaptive(tree) => tree.access().shipper(),
            _ => return Ok(()),
        };
        shipper.connect(shipper.structure().root.server()).await
    }

    /// Runs operations on it: see [`drive`].
    ///
    /// # Errors
    /// As [`drive`].
    pub fn drive<W: Write + 'static>(
        &self,
        worker: &Worker,
        workload: Workload,
        recorder: &Rc<Recorder<W>>,
        plan: Plan,
        stop: impl Fn(Tally) -> bool + 'static,
    ) -> anyhow::Result<Tally> {
        match self {
            Self::OneSided(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::Cached(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::Shipping(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::Routed(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::CachedInner(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::CachedMapping(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::Coarse(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::Hybrid(tree) => drive(worker, tree, workload, recorder, plan, stop),
            Self::Adaptive(tree) => drive(worker, tree, workload, recorder, plan, stop),
        }
    }
}

impl<S: OrderedMap> Client<S> {
    /// A compute server's way to the tree.
    ///
    /// # Errors
    /// If its cache cannot be made.
    pub fn new(structure: Structure, proof: Proof, reach: AccessUnderTest) -> Result<Self, Error> {
        let cache = match reach {
            AccessUnderTest::OneSided
            | AccessUnderTest::CachedMapping { .. }
            | AccessUnderTest::Coarse
            | AccessUnderTest::Hybrid
            | AccessUnderTest::Adaptive { .. } => None,
            AccessUnderTest::Cached { routed: true, .. } => None,
            AccessUnderTest::Cached { cache, ship, .. } => Some(cache.build::<S>(ship.is_some())?),
            AccessUnderTest::CachedInner { cache } => Some(cache.build::<S>(false)?),
        };
        let mapping = match reach {
            AccessUnderTest::CachedMapping { bytes } => Some(MappingCache::new(bytes)),
            _ => None,
        };
        let holdings = match reach {
            AccessUnderTest::Cached { routed: true, cache, .. } => {
                Some(Holdings::new(&structure, cache.build::<S>(false)?))
            }
            _ => None,
        };
        let (routes, engines) = (Arc::default(), Arc::default());
        Ok(Self { structure, proof, reach, cache, holdings, mapping, routes, engines })
    }

    /// The keys whose operations are for this compute server.
    pub fn part(&self) -> Part {
        match self.reach {
            AccessUnderTest::Cached { part, .. } => part,
            _ => Part::ALL,
        }
    }

    /// The tree as `worker` reaches it.
    ///
    /// # Errors
    /// If the cache has no handle left.
    pub async fn tree(&self, worker: &Handle) -> Result<Tree<S>, Error> {
        let structure = self.structure.clone();
        Ok(match (self.reach, &self.cache) {
            (AccessUnderTest::Cached { routed: true, .. }, _) => {
                let routes = self.routes(worker).await?;
                let here = self.holdings.as_ref().expect("it was made with them").here(worker);
                Tree::Routed(Map::over(Router::new(worker, &routes, here)))
            }
            (AccessUnderTest::Cached { part, ship, .. }, Some(cache)) => {
                let owned = cache.own(worker, structure.clone(), key_range(part)).await?;
                match ship {
                    None => Tree::Cached(Map::over(owned)),
                    Some(ship) => {
                        // Subtrees of two levels are often on one server; those that are not come back.
                        let options = EngineOptions { level_max: Some(1) };
                        Tree::Shipping(Map::over(Engine::new(owned, ship.policies(), options)?))
                    }
                }
            }
            (AccessUnderTest::CachedInner { .. }, Some(cache)) => {
                Tree::CachedInner(Map::over(cache.share(worker, structure, self.proof)?))
            }
            (AccessUnderTest::CachedMapping { bytes }, _) => {
                let own = || MappingCache::new(bytes);
                Tree::CachedMapping(Map::over(self.mapping.clone().unwrap_or_else(own).share(worker, structure)))
            }
            (AccessUnderTest::Coarse, _) => Tree::Coarse(Map::over(Remote::new(worker, structure))),
            (AccessUnderTest::Adaptive { ship }, _) => {
                let here = OneSided::new(worker, structure.clone(), self.proof);
                Tree::Adaptive(Map::over(Adaptive::new(here, worker, structure, ship.policies())))
            }
            (AccessUnderTest::Hybrid, _) => Tree::Hybrid(Map::over(Hybrid::new(worker, structure, self.proof))),
            _ => Tree::OneSided(Map::over(OneSided::new(worker, structure, self.proof))),
        })
    }

    async fn routes(&self, worker: &Handle) -> Result<Routes<S>, Error> {
        let known = || self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(routes) = &*known() {
            return Ok(routes.clone());
        }
        let read = Routes::read(worker, self.structure.clone()).await?;
        Ok(known().get_or_insert(read).clone())
    }

    /// Owns its part, and carries out what other compute servers send to this one, if they do.
    ///
    /// # Errors
    /// If it cannot listen, or have a thread.
    pub fn serve(&self, compute: &Arc<ComputeServer>) -> Result<Option<OwnerServer>, Error> {
        let (AccessUnderTest::Cached { routed: true, part, .. }, Some(holdings)) = (self.reach, &self.holdings) else {
            return Ok(None);
        };
        if part != Part::NONE {
            let worker = again(|| compute.worker())?;
            worker.block_on(again_async(async || holdings.take(&worker, key_range(part)).await))?;
        }
        again(|| {
            let served = vec![Served::new(holdings)];
            // There are more threads than cores.
            let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
            OwnerServer::start(compute.listen(&ListenOptions::default())?, compute, served, &messages).map(Some)
        })
    }

    /// What an owner sees of its part once its other workers have left, which it then writes.
    ///
    /// # Errors
    /// If it cannot be read or written, differs after it was written, or the cache has used more memory than it was given.
    pub async fn close(&self, worker: &Handle) -> anyhow::Result<Vec<Seen>> {
        let part = self.part();
        let parts = match again_async(async || self.tree(worker).await).await? {
            Tree::Cached(tree) => vec![(part, tree)],
            Tree::Shipping(tree) => vec![(part, Map::over(tree.access().cached().clone()))],
            Tree::Routed(tree) => {
                let here = tree.access().here().context("it has what it owns")?;
                let mut parts = Vec::new();
                for range in here.holdings().regions() {
                    let part = Part { low: range.low, high: range.high.map_or(u64::MAX, |high| high - 1) };
                    let owned = here.with(&range)?.context("it owns this part")?;
                    parts.push((part, Map::over(owned.clone())));
                }
                parts
            }
            _ => return Ok(Vec::new()),
        };
        let mut all = Vec::new();
        for (part, tree) in parts {
            all.push(self.close_part(part, &tree).await?);
        }
        Ok(all)
    }

    async fn close_part(&self, part: Part, tree: &Map<S, Cached<S>>) -> anyhow::Result<Seen> {
        let entries = || again_async(async || tree.range(part.low..=part.high).take(usize::MAX).await);
        let seen = Seen::of(part, &entries().await.context("what the owner sees")?);
        again_async(async || tree.access().flush().await).await.context("the last flush")?;
        let again = Seen::of(part, &entries().await.context("what the owner sees after the last flush")?);
        ensure!(seen == again, "a flush has changed what is seen: {seen:?} before, {again:?} after");
        if let Some(cache) = &self.cache {
            let memory = cache.memory();
            ensure!(memory.used() <= memory.limit, "the cache uses more than it was given: {memory:?}");
        }
        Ok(seen)
    }

    /// What the cache did, by name. Accesses count once they have ended.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let counters = self.cache.as_ref().map(ComputeCache::counters);
        let counters = counters.or_else(|| self.holdings.as_ref().map(Holdings::counters));
        let mut counts = counters.map(|counters| named(&counters)).unwrap_or_default();
        if let Some(mapping) = &self.mapping {
            let counters = mapping.counters();
            counts.extend([("cache_hits", counters.hits), ("cache_misses", counters.misses)]);
        }
        let engines = *self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        counts.extend([("shipped", engines.shipped), ("came_back", engines.came_back)]);
        counts.extend([("contrary", engines.contrary), ("cached_below", engines.cached_below)]);
        counts
    }

    /// Adds what an engine has counted.
    pub fn add(&self, counts: OffloadCounts) {
        *self.engines.lock().unwrap_or_else(PoisonError::into_inner) += counts;
    }
}

/// The counters of a cache, by name.
pub fn named(counters: &Counters) -> Vec<(&'static str, u64)> {
    let total = counters.total();
    vec![
        ("cache_hits", total.hits),
        ("cache_misses", total.misses),
        ("cache_evictions", total.evictions),
        ("cache_write_backs", total.write_backs),
        ("cache_rescues", total.rescues),
        ("cache_refusals", total.refusals),
        ("cache_shared_fetches", total.shared_fetches),
        ("cache_failed_upgrades", total.failed_upgrades),
        ("cache_write_errors", counters.write_errors),
    ]
}

/// The entries of a part, in short.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The part.
    pub part: Part,
    /// How many entries.
    pub entries: u64,
    /// A digest of keys and values in their order.
    pub digest: u64,
}

impl Seen {
    /// In short.
    pub fn of(part: Part, entries: &[(u64, u64)]) -> Self {
        let digest = entries.iter().fold(0, |digest, &(key, value)| mix(mix(digest ^ key) ^ value));
        Self { part, entries: entries.len() as u64, digest }
    }
}
