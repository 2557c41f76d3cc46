//! The accesses over which a structure is tested.

use std::{
    fmt,
    rc::Rc,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use farlink_offload::{
    Adaptive, Admission, CacheOptions, Cached, CachedInner, CachedMapping, ComputeCache, Durability, Engine,
    EngineOptions, Holdings, Hybrid, MappingCache, OwnerServer, Policies, Remote, Router, Routes, Served,
    policy::{Always, Choice, Miss, Never, Policy},
    route::{loads, move_region},
};
use farlink_runtime::{
    access::{Access, Operation, Plugin, Region, Structure},
    compute::ComputeServer,
    error::Error,
    fabric::listener::ListenOptions,
    messaging::{ServeMessages, Wait},
    one_sided::{OneSided, Proof, ownership},
    operation::Run,
    server::LocalMemory,
    structure::PlacementPolicy,
    worker::Handle,
};
use rand::{RngExt, seq::IndexedRandom};

use super::Model;
use crate::{
    cluster::{again, again_async},
    strict::{Rules, Strict},
};

/// Where compute servers own parts, one operation in so many has something moved first.
const MOVES_ONE_IN: u32 = 20;

/// An access with what it is made of: a proof, a policy, [`Strict`] around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessVariant {
    /// One-sided, each page proven by its checksum.
    OneSided,
    /// One-sided, each page read between two reads of its lock word.
    LockBodyLock,
    /// As a thread of a memory server.
    Within,
    /// Inner pages are cached, the structure is everybody's.
    CachedInner,
    /// Mapping words and consolidated pages are cached, if it is latch-free; the structure is everybody's.
    CachedMapping,
    /// One compute server owns all of it and caches it.
    Owned,
    /// An engine over that, which ships nothing.
    NeverShipped,
    /// One that ships what it can.
    Shipped,
    /// One that ships now and then.
    NowAndThen,
    /// Memory servers carry out all operations.
    Coarse,
    /// Memory servers search the inner levels.
    Hybrid,
    /// Memory servers carry out operations now and then; the others are one-sided.
    Adaptive,
    /// [`Strict`] over one-sided access: with old copies, and shipping if nobody else is there.
    Strict,
    /// [`Strict`] over an owner's cache.
    StrictOwned,
    /// Compute servers own a part each, or nothing, and send operations to the owners. Parts go to and fro meanwhile.
    Routed,
}

impl AccessVariant {
    /// All.
    pub const ALL: [Self; 15] = [
        Self::OneSided,
        Self::LockBodyLock,
        Self::Within,
        Self::CachedInner,
        Self::CachedMapping,
        Self::Owned,
        Self::NeverShipped,
        Self::Shipped,
        Self::NowAndThen,
        Self::Coarse,
        Self::Hybrid,
        Self::Adaptive,
        Self::Strict,
        Self::StrictOwned,
        Self::Routed,
    ];

    /// Whether compute servers own the structure.
    pub const fn owns(self) -> bool {
        matches!(
            self,
            Self::Owned | Self::NeverShipped | Self::Shipped | Self::NowAndThen | Self::StrictOwned | Self::Routed
        )
    }

    /// How many compute servers work on the structure: one that owns all of it, or two.
    pub(super) const fn computes(self) -> usize {
        if self.owns() && !matches!(self, Self::Routed) { 1 } else { 2 }
    }

    /// Whether memory servers may carry out operations.
    pub const fn ships(self) -> bool {
        matches!(self, Self::Shipped | Self::NowAndThen | Self::Coarse | Self::Hybrid | Self::Adaptive)
    }

    /// Where the structure's pages are.
    pub(super) const fn policy(self) -> PlacementPolicy {
        match self {
            Self::Coarse | Self::Shipped => PlacementPolicy::OneServer,
            Self::Hybrid => PlacementPolicy::Leaves,
            _ => PlacementPolicy::RoundRobin,
        }
    }
}

/// Ships at random.
#[derive(Debug)]
struct NowAndThen;

impl Policy for NowAndThen {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        if miss.one_in(3) { Choice::SHIP } else { Choice::FETCH }
    }
}

/// A structure, as one worker reaches it.
#[derive(Debug)]
pub(super) enum Accessed<P: Plugin> {
    OneSided(OneSided<P>),
    CachedInner(CachedInner<P>),
    CachedMapping(CachedMapping<P>),
    Owned(Cached<P>),
    Engine(Engine<P>),
    Coarse(Remote<P>),
    Hybrid(Hybrid<P>),
    Adaptive(Adaptive<OneSided<P>>),
    Strict(Strict<OneSided<P>>),
    StrictOwned(Strict<Cached<P>>),
    Routed(Routed<P>),
}

impl<P: Plugin> Accessed<P> {
    /// Writes what an owner has changed.
    pub(super) async fn flush(&self) -> Result<(), Error> {
        match self {
            Self::Owned(cached) => cached.flush().await,
            Self::Engine(engine) => engine.cached().flush().await,
            Self::StrictOwned(strict) => strict.inner().flush().await,
            Self::Routed(Routed { holdings, worker, .. }) => holdings.flush(worker).await,
            _ => Ok(()),
        }
    }

    /// Has some of what others own moved here, where compute servers own parts.
    pub(super) async fn take_some(&self) -> Result<(), Error> {
        if let Self::Routed(routed) = self { routed.take_some().await } else { Ok(()) }
    }
}

impl<P: Plugin> Run for Accessed<P> {
    type Plugin = P;

    async fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        match self {
            Self::OneSided(it) => it.execute(operation).await,
            Self::CachedInner(it) => it.execute(operation).await,
            Self::CachedMapping(it) => it.execute(operation).await,
            Self::Owned(it) => it.execute(operation).await,
            Self::Engine(it) => it.execute(operation).await,
            Self::Coarse(it) => it.execute(operation).await,
            Self::Hybrid(it) => it.execute(operation).await,
            Self::Adaptive(it) => it.execute(operation).await,
            Self::Strict(it) => it.execute(operation).await,
            Self::StrictOwned(it) => it.execute(operation).await,
            Self::Routed(it) => it.execute(operation).await,
        }
    }
}

/// Has operations done by their owners, and now and then has some of what others own moved here first.
#[derive(Debug)]
pub(super) struct Routed<P: Plugin> {
    router: Router<P>,
    holdings: Holdings<P>,
    worker: Handle,
    moves: Arc<AtomicU64>,
}

impl<P: Plugin> Routed<P> {
    /// Half of the time all of a region, and else a piece of it. What is being moved by somebody else stays where it is.
    async fn take_some(&self) -> Result<(), Error> {
        let (worker, structure) = (&self.worker, self.router.structure());
        let here = worker.owner();
        let map = ownership::read(worker, structure).await?;
        let others: Vec<_> = map.owners().filter(|&(owner, _)| owner != here).collect();
        let Some((owner, part)) = worker.random(|rng| others.choose(rng).copied()) else { return Ok(()) };
        let piece = match worker.random(|rng| rng.random()) {
            true => loads(worker, structure, owner, 1).await?.piece.map(|load| load.region),
            false => part.to_region::<P::Region>()?,
        };
        let Some(piece) = piece else { return Ok(()) };
        if move_region(worker, structure, &piece, owner, here).await?.is_some() {
            self.moves.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Whether something cannot be moved because its owner is about to leave, or has left.
fn is_leaving(error: &Error) -> bool {
    matches!(error, Error::OwnerMissing { .. } | Error::OwnerLost { .. })
}

impl<P: Plugin> Run for Routed<P> {
    type Plugin = P;

    async fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        if self.worker.random(|rng| rng.random_ratio(1, MOVES_ONE_IN)) {
            match self.take_some().await {
                Err(error) if !is_leaving(&error) => return Err(error),
                _ => {}
            }
        }
        self.router.execute(operation).await
    }
}

/// Whether a run is one in which the structure is [large](Model::fill) from the beginning.
fn is_large(seed: u64) -> bool {
    seed % 2 == 1
}

/// What comes first in a run.
pub(super) fn first<M: Model>(seed: u64) -> Vec<M::Op> {
    if is_large(seed) { M::fill() } else { Vec::new() }
}

/// Whether a run is one with [few cached pages](Model::CACHED_PAGES), or with a [small mapping cache](Model::SMALL_MAPPING_BYTES). Not with
/// [`Strict`]: it looks at all while an operation holds pages.
pub(super) fn caches_little<M: Model>(variant: AccessVariant, seed: u64) -> bool {
    let is_told = match variant {
        AccessVariant::StrictOwned => false,
        AccessVariant::CachedMapping => M::SMALL_MAPPING_BYTES > 0,
        _ => M::CACHED_PAGES > 0 && (variant.owns() || variant == AccessVariant::CachedInner),
    };
    is_told && is_large(seed)
}

/// Whether owners log what they change before they answer: whatever else goes by the seed goes by other divisors.
pub(super) const fn logs(variant: AccessVariant, seed: u64) -> bool {
    variant.owns() && seed % 11 < 5
}

/// What the workers of a compute server share.
pub(super) struct Client<M: Model> {
    pub(super) structure: Structure,
    variant: AccessVariant,
    cache: Option<ComputeCache<M::Plugin>>,
    mapping: MappingCache<M::Plugin>,
    holdings: Option<Holdings<M::Plugin>>,
    /// How often something was moved here.
    moves: Arc<AtomicU64>,
    routes: OnceLock<Routes<M::Plugin>>,
    memory: Option<LocalMemory>,
    seed: u64,
    is_alone: bool,
}

impl<M: Model> fmt::Debug for Client<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({:?}, seed {})", self.variant, self.seed)
    }
}

impl<M: Model> Client<M> {
    /// A compute server's way to a structure. `is_alone` says that one operation after another is all that happens to it.
    pub(super) fn new(
        structure: Structure,
        variant: AccessVariant,
        memory: Option<LocalMemory>,
        seed: u64,
        is_alone: bool,
    ) -> Result<Self, Error> {
        let has_cache = variant.owns() || variant == AccessVariant::CachedInner;
        let is_routed = variant == AccessVariant::Routed;
        let mut options = CacheOptions::new(M::CACHE_BYTES);
        options.excludes_subtrees = variant.owns() && !is_routed;
        let has_little = caches_little::<M>(variant, seed);
        if has_little {
            (options.page_bytes, options.pages_max) = (structure.class.bytes(), M::CACHED_PAGES);
            options.admission = if seed % 4 == 1 { Admission::Always } else { Admission::Frequency };
        }
        let durability = if logs(variant, seed) { Durability::Logged } else { Durability::WriteBack };
        let mut cache = has_cache.then(|| ComputeCache::new(options)).transpose()?;
        cache = cache.map(|cache| cache.with_durability(durability));
        let holdings = cache.take_if(|_| is_routed).map(|cache| Holdings::new(&structure, cache));
        let mapping_bytes = if has_little { M::SMALL_MAPPING_BYTES } else { M::CACHE_BYTES };
        let (mapping, routes) = (MappingCache::new(mapping_bytes), OnceLock::new());
        let moves = Arc::default();
        Ok(Self { structure, variant, cache, mapping, holdings, moves, routes, memory, seed, is_alone })
    }

    /// How much has left its cache: pages, or what was remembered by workers that are gone.
    pub(super) fn evictions(&self) -> u64 {
        if self.variant == AccessVariant::CachedMapping {
            return self.mapping.counters().evictions;
        }
        let counters =
            self.holdings.as_ref().map(Holdings::counters).or(self.cache.as_ref().map(ComputeCache::counters));
        counters.map_or(0, |counters| counters.total().evictions)
    }

    /// How often something was moved here.
    pub(super) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// Carries out what other compute servers send to this one, if they do, until it is dropped. `owns_all` has it own all at first.
    pub(super) fn serve(&self, compute: &Arc<ComputeServer>, owns_all: bool) -> Result<Option<OwnerServer>, Error> {
        let Some(holdings) = &self.holdings else { return Ok(None) };
        if owns_all {
            let worker = again(|| compute.worker())?;
            worker.block_on(again_async(async || holdings.take(&worker, Region::everything()).await))?;
        }
        again(|| {
            let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
            let listener = compute.listen(&ListenOptions::default())?;
            OwnerServer::start(listener, compute, vec![Served::new(holdings)], &messages).map(Some)
        })
    }

    /// Writes what its compute server has changed, and gives up what it owns.
    pub(super) fn leave(&self, compute: &ComputeServer) -> Result<(), Error> {
        let worker = again(|| compute.worker())?;
        let reached = again(|| worker.block_on(self.reach(&worker)))?;
        worker.block_on(again_async(async || reached.flush().await))?;
        match &self.holdings {
            Some(holdings) => worker.block_on(again_async(async || holdings.give_up_all(&worker).await)),
            None => Ok(()),
        }
    }

    async fn routes(&self, worker: &Handle) -> Result<Routes<M::Plugin>, Error> {
        if let Some(routes) = self.routes.get() {
            return Ok(routes.clone());
        }
        let read = Routes::read(worker, self.structure.clone()).await?;
        Ok(self.routes.get_or_init(|| read).clone())
    }

    /// The structure as a worker reaches it.
    pub(super) async fn reach(&self, worker: &Handle) -> Result<Accessed<M::Plugin>, Error> {
        let structure = self.structure.clone();
        let one_sided = |proof| OneSided::new(worker, structure.clone(), proof);
        let cache = || self.cache.as_ref().ok_or(Error::Malformed("there is no cache"));
        let own = async || cache()?.own(worker, structure.clone(), Region::everything()).await;
        let share = || cache()?.share(worker, structure.clone(), Proof::Checksum);
        let engine = async |policies| {
            // Subtrees of two levels are often on one server; those that are not come back.
            Engine::new(own().await?, policies, EngineOptions { level_max: Some(1) }).map(Accessed::Engine)
        };
        Ok(match self.variant {
            AccessVariant::OneSided => Accessed::OneSided(one_sided(Proof::Checksum)),
            AccessVariant::LockBodyLock => Accessed::OneSided(one_sided(Proof::LockBodyLock)),
            AccessVariant::Within => Accessed::OneSided(match &self.memory {
                Some(memory) => OneSided::within(worker, structure.clone(), memory.clone()),
                None => one_sided(Proof::Checksum),
            }),
            AccessVariant::CachedInner => Accessed::CachedInner(share()?),
            AccessVariant::CachedMapping => Accessed::CachedMapping(self.mapping.share(worker, structure.clone())),
            AccessVariant::Owned => Accessed::Owned(own().await?),
            AccessVariant::NeverShipped => engine(Policies::new(Never)).await?,
            AccessVariant::Shipped => engine(Policies::new(Always)).await?,
            AccessVariant::NowAndThen => engine(Policies::new(NowAndThen)).await?,
            AccessVariant::Coarse => Accessed::Coarse(Remote::new(worker, structure.clone())),
            AccessVariant::Hybrid => Accessed::Hybrid(Hybrid::new(worker, structure.clone(), Proof::Checksum)),
            AccessVariant::Adaptive => {
                let (here, policies) = (one_sided(Proof::Checksum), Policies::new(NowAndThen));
                Accessed::Adaptive(Adaptive::new(here, worker, structure.clone(), policies))
            }
            AccessVariant::Strict => {
                Accessed::Strict(self.strict(worker, one_sided(Proof::Checksum), true, Accessed::OneSided))
            }
            AccessVariant::StrictOwned => {
                Accessed::StrictOwned(self.strict(worker, own().await?, false, Accessed::Owned))
            }
            AccessVariant::Routed => {
                let holdings = self.holdings.clone().ok_or(Error::Malformed("there is no cache"))?;
                let router = Router::new(worker, &self.routes(worker).await?, holdings.here(worker));
                Accessed::Routed(Routed { router, holdings, worker: worker.clone(), moves: Arc::clone(&self.moves) })
            }
        })
    }

    fn strict<A: Access<Plugin = M::Plugin> + Clone + 'static>(
        &self,
        worker: &Handle,
        inner: A,
        old_copies: bool,
        reached: fn(A) -> Accessed<M::Plugin>,
    ) -> Strict<A> {
        let seed = self.seed ^ worker.random(|rng| rng.random::<u64>());
        let plain = Rc::new(reached(inner.clone()));
        let strict = Strict::new(inner, Rules { old_copies, ships: self.is_alone, ..Rules::alone(seed) });
        if !self.is_alone {
            return strict;
        }
        let looks = Rc::new(M::looks());
        strict.looking(move || {
            let (looks, plain) = (Rc::clone(&looks), Rc::clone(&plain));
            Box::pin(async move {
                let mut seen = String::new();
                for look in &*looks {
                    seen.push_str(&format!("{:?};", M::run(look, &*plain).await?));
                }
                Ok(seen.bytes().fold(0, |hash, byte| crate::history::mix(hash ^ u64::from(byte))))
            })
        })
    }
}
