//! The accesses over which a structure is tested.

use std::{fmt, rc::Rc};

use farlink_offload::{
    Adaptive, CacheOptions, Cached, CachedInner, ComputeCache, Engine, EngineOptions, Hybrid, Policies, Remote,
    policy::{Always, Choice, Miss, Never, Policy},
};
use farlink_runtime::{
    access::{Access, Operation, Plugin, Region, Structure},
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    server::LocalMemory,
    structure::PlacementPolicy,
    worker::Handle,
};
use rand::RngExt;

use super::Model;
use crate::strict::{Rules, Strict};

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
}

impl AccessVariant {
    /// All.
    pub const ALL: [Self; 13] = [
        Self::OneSided,
        Self::LockBodyLock,
        Self::Within,
        Self::CachedInner,
        Self::Owned,
        Self::NeverShipped,
        Self::Shipped,
        Self::NowAndThen,
        Self::Coarse,
        Self::Hybrid,
        Self::Adaptive,
        Self::Strict,
        Self::StrictOwned,
    ];

    /// Whether one compute server owns the structure.
    pub const fn owns(self) -> bool {
        matches!(self, Self::Owned | Self::NeverShipped | Self::Shipped | Self::NowAndThen | Self::StrictOwned)
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
    Owned(Cached<P>),
    Engine(Engine<P>),
    Coarse(Remote<P>),
    Hybrid(Hybrid<P>),
    Adaptive(Adaptive<OneSided<P>>),
    Strict(Strict<OneSided<P>>),
    StrictOwned(Strict<Cached<P>>),
}

impl<P: Plugin> Accessed<P> {
    /// Writes what an owner has changed.
    pub(super) async fn flush(&self) -> Result<(), Error> {
        match self {
            Self::Owned(cached) => cached.flush().await,
            Self::Engine(engine) => engine.cached().flush().await,
            Self::StrictOwned(strict) => strict.inner().flush().await,
            _ => Ok(()),
        }
    }
}

impl<P: Plugin> Run for Accessed<P> {
    type Plugin = P;

    async fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        match self {
            Self::OneSided(it) => it.execute(operation).await,
            Self::CachedInner(it) => it.execute(operation).await,
            Self::Owned(it) => it.execute(operation).await,
            Self::Engine(it) => it.execute(operation).await,
            Self::Coarse(it) => it.execute(operation).await,
            Self::Hybrid(it) => it.execute(operation).await,
            Self::Adaptive(it) => it.execute(operation).await,
            Self::Strict(it) => it.execute(operation).await,
            Self::StrictOwned(it) => it.execute(operation).await,
        }
    }
}

/// What the workers of a compute server share.
pub(super) struct Client<M: Model> {
    pub(super) structure: Structure,
    variant: AccessVariant,
    cache: Option<ComputeCache<M::Plugin>>,
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
        let mut options = CacheOptions::new(M::CACHE_BYTES);
        options.excludes_subtrees = variant.owns();
        let cache = has_cache.then(|| ComputeCache::new(options)).transpose()?;
        Ok(Self { structure, variant, cache, memory, seed, is_alone })
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
        let looks = if self.is_alone { M::looks() } else { Vec::new() };
        if looks.is_empty() {
            return strict;
        }
        let looks = Rc::new(looks);
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
