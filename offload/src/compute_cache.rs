//! The cache of a compute server, and the ways to use it.

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use farlink_cache::{CacheHandle, CacheOptions, Counters, Memory, OptionsError, PageCache};
use farlink_runtime::{
    access::{Plugin, Structure},
    error::Error,
    one_sided::{
        OneSided, Proof,
        ownership::{self, Waits},
    },
    page::StructureId,
    partition::Part,
    versioned::Versioned,
    worker::Handle,
    write_ahead::{Log, Reserve},
};

use crate::{
    cached::{Cached, Moving},
    durability::Durability,
    inner::CachedInner,
    store::{CacheLayout, Known, Owned, Regions, RemoteStore},
};

/// The cache of a compute server for the pages of one structure, shared by its workers. It is for what is
/// [owned](ComputeCache::own) or for what is [shared](ComputeCache::share), never for both.
#[derive(Debug)]
pub struct ComputeCache<P: Plugin> {
    cache: Arc<PageCache<CacheLayout<P>>>,
    known: Known,
    used: Arc<Mutex<Use>>,
    regions: Arc<Versioned<Regions<P::Region>>>,
    durability: Durability,
}

/// What the cache is used for, and of which structure.
#[derive(Debug, Default)]
struct Use {
    /// None as long as it is used for nothing.
    structure: Option<StructureId>,
    claim: Claim,
}

impl Use {
    /// # Errors
    /// [`Error::BadOption`] if it is of another structure: what is known here of what is owned would be of both.
    fn require(&self, structure: &Structure) -> Result<(), Error> {
        if self.structure.is_none_or(|of| of == structure.id) {
            return Ok(());
        }
        let why = format!("{:?}; this cache is for another one, have one for each", structure.name);
        Err(Error::BadOption { option: "structure", why })
    }

    fn begin(&mut self, structure: &Structure, claim: Claim) {
        *self = Self { structure: Some(structure.id), claim };
    }
}

#[derive(Debug, Default)]
enum Claim {
    #[default]
    Nothing,
    /// Others change the structure, too: pages that are cached may be old.
    Shared,
    /// A worker is about to own something.
    Pending,
    /// Its compute server owns something, with this log.
    Made(Log),
}

impl<P: Plugin> Clone for ComputeCache<P> {
    fn clone(&self) -> Self {
        let Self { cache, known, used, regions, durability } = self;
        let (cache, used, regions) = (Arc::clone(cache), Arc::clone(used), Arc::clone(regions));
        Self { cache, known: known.clone(), used, regions, durability: *durability }
    }
}

impl<P: Plugin> ComputeCache<P> {
    /// A cache with these options.
    ///
    /// # Errors
    /// [`Error::BadOption`] if an option cannot work, [`Error::Cache`] if the system refuses the memory.
    pub fn new(options: CacheOptions) -> Result<Self, Error> {
        let cache = PageCache::new(CacheLayout(PhantomData), options).map_err(|error| match error {
            OptionsError::Unusable { option, why } => Error::BadOption { option, why },
            error => Error::Cache(error.to_string()),
        })?;
        let (used, regions) = (Arc::default(), Versioned::new(Regions::default()));
        Ok(Self { cache, known: Known::default(), used, regions, durability: Durability::default() })
    }

    /// The same, where changes of what is owned are safe as this says. For a cache that nothing was made by yet.
    #[must_use]
    pub fn with_durability(self, durability: Durability) -> Self {
        Self { durability, ..self }
    }

    /// Access to a part of `structure` that this compute server owns from now on, and nobody else reads or writes: all its pages
    /// are cached. The structure's partition map says so to all others. Every worker of the compute server names the same region,
    /// cut where pages are cut. The first to do so takes a round trip to read the map and two to change it.
    ///
    /// The part is owned until it is [closed](Cached::close), or the cache and all that was made by it is dropped: what was not
    /// flushed is lost then, and the map follows with the next round of maintenance.
    ///
    /// # Errors
    /// [`Error::Owned`] if somebody owns some of it who lives, by another cache of this compute server, too;
    /// [`Error::HasUser`] if another compute server that lives uses the structure one-sided; [`Error::BadOption`] if the
    /// structure cannot be owned in such parts, or the cache has another one, or was [shared](ComputeCache::share), or is used for another
    /// structure; [`Error::OutOfMemory`] if there is no memory for a log;
    /// [`Error::Cache`] if the cache has no handle left.
    pub async fn own(&self, worker: &Handle, structure: Structure, region: P::Region) -> Result<Cached<P>, Error> {
        let log = self.claim(worker, &structure, &region, Waits::AWhile).await?;
        self.access(worker, structure, log)
    }

    /// [`ComputeCache::own`] for one region more, if the cache has any already. To be run to its end: nobody else moves anything
    /// meanwhile, and what the map says and what is done here may not part.
    ///
    /// # Errors
    /// As there; if pages that others have shared so far cannot be brought up to date. It is not owned then.
    pub(crate) async fn own_more(
        &self,
        moving: Moving,
        worker: &Handle,
        structure: &Structure,
        region: P::Region,
        waits: Waits,
    ) -> Result<(), Error> {
        let owned = match self.owned(worker, structure)? {
            Some(owned) => owned,
            None => match self.claim(worker, structure, &region, waits).await {
                // Another worker has just claimed the first, or nobody can own such a region.
                Err(error @ Error::BadOption { .. }) => match self.log(structure) {
                    Ok(log) => self.access(worker, structure.clone(), log)?,
                    Err(_) => return Err(error),
                },
                claimed => return claimed.map(drop),
            },
        };
        let log = self.log(structure)?;
        owned.tidy(&moving).await;
        ownership::claim_more::<P>(worker, structure, log.tenure(), &region, waits).await?;
        // What was read before is the former owner's, and old, perhaps. It does not get in while it lies outside.
        owned.until_fetched().await;
        if let Err(error) = owned.prepare_for_more().await {
            // A page that others no longer share would be taken for current, and is old, perhaps.
            if let Err(again) = ownership::reduce(worker, structure, log.tenure(), &region, &region, &[]).await {
                tracing::debug!(%again, "the map is brought up to date later");
            }
            return Err(error);
        }
        self.regions.update(|regions| {
            regions.owned.push(region);
            true
        });
        Ok(())
    }

    /// Waits until nobody else changes what is owned.
    pub(crate) async fn begin_moving(&self, worker: &Handle) -> Moving {
        Moving::begin(worker, &self.known.is_moving).await
    }

    fn log(&self, structure: &Structure) -> Result<Log, Error> {
        let using = self.using();
        using.require(structure)?;
        match &using.claim {
            Claim::Made(log) => Ok(log.clone()),
            _ => Err(Error::GivenUp { name: structure.name.clone() }),
        }
    }

    /// What this cache owns, at any time.
    pub(crate) fn regions(&self) -> &Arc<Versioned<Regions<P::Region>>> {
        &self.regions
    }

    /// Access to what this cache owns already, if it owns anything.
    ///
    /// # Errors
    /// [`Error::BadOption`] if it is used for another structure; [`Error::Cache`] if the cache has no handle left.
    pub fn owned(&self, worker: &Handle, structure: &Structure) -> Result<Option<Cached<P>>, Error> {
        let using = self.using();
        using.require(structure)?;
        let log = match &using.claim {
            Claim::Made(log) if log.tenure().is_valid() => log.clone(),
            _ => return Ok(None),
        };
        drop(using);
        self.access(worker, structure.clone(), log).map(Some)
    }

    fn access(&self, worker: &Handle, structure: Structure, log: Log) -> Result<Cached<P>, Error> {
        let one_sided = OneSided::new(worker, structure, Proof::Checksum).unguarded();
        let regions = self.regions.reader();
        let owned = Owned { regions, log, records_all: self.durability == Durability::Logged };
        let store = RemoteStore::new(one_sided, Some(owned), self.known.clone());
        Ok(Cached::new(self.handle(store)?))
    }

    /// How long an owner's log gets. Where all is recorded, half as long as the cache is large: so a page is written back for the
    /// log's sake about as often as one that leaves the cache would be. Else, where only changes of several pages are, less.
    fn log_bytes(&self) -> usize {
        let share = match self.durability {
            Durability::WriteBack => 8,
            Durability::Logged => 2,
        };
        self.cache.memory().limit / share
    }

    async fn claim(
        &self,
        worker: &Handle,
        structure: &Structure,
        region: &P::Region,
        waits: Waits,
    ) -> Result<Log, Error> {
        let mut attempt = 0;
        let pending = loop {
            if let Some(pending) = self.begin_claim(worker, structure, region)? {
                match pending {
                    Begun::Made(log) => return Ok(log),
                    Begun::Pending(pending) => break pending,
                }
            }
            worker.back_off(attempt).await;
            attempt += 1;
        };
        // First: whoever owns something can write it back.
        let reserve = Reserve::make(worker).await?;
        let tenure = ownership::claim::<P>(worker, structure, region, waits).await?;
        let log = Log::new(worker, structure.id, tenure, self.log_bytes(), reserve);
        self.regions.update(|regions| {
            regions.owned = vec![region.clone()];
            true
        });
        std::mem::forget(pending);
        self.using().claim = Claim::Made(log.clone());
        Ok(log)
    }

    /// Whether the cache owns the region already, or whoever asks is to claim it; `None` while somebody else does.
    fn begin_claim(
        &self,
        worker: &Handle,
        structure: &Structure,
        region: &P::Region,
    ) -> Result<Option<Begun<'_, P>>, Error> {
        let mut using = self.using();
        using.require(structure)?;
        match &using.claim {
            Claim::Made(log) if !log.tenure().is_valid() => {
                worker.check_standing()?;
                Err(Error::GivenUp { name: structure.name.clone() })
            }
            Claim::Made(log) => {
                let owned = self.regions.copy().owned;
                if owned.iter().any(|owned| Part::region(owned) == Part::region(region)) {
                    return Ok(Some(Begun::Made(log.clone())));
                }
                let why = format!("{region:?}; this cache is for {owned:?}, have another one");
                Err(Error::BadOption { option: "region", why })
            }
            // An owner takes what is cached for current, and what others have changed since is not.
            Claim::Shared => {
                let why = "its pages are shared with others and may be old; own with another one".into();
                Err(Error::BadOption { option: "cache", why })
            }
            Claim::Pending => Ok(None),
            Claim::Nothing => {
                using.begin(structure, Claim::Pending);
                Ok(Some(Begun::Pending(Pending(self))))
            }
        }
    }

    fn using(&self) -> MutexGuard<'_, Use> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Access to a structure that any number of compute servers change: only its inner pages are cached.
    ///
    /// # Errors
    /// [`Error::BadOption`] if this compute server owns something with the cache, or did, or it is used for another structure; [`Error::Cache`] if the cache has no
    /// handle left.
    pub fn share(&self, worker: &Handle, structure: Structure, proof: Proof) -> Result<CachedInner<P>, Error> {
        let mut using = self.using();
        using.require(&structure)?;
        match using.claim {
            Claim::Nothing => using.begin(&structure, Claim::Shared),
            Claim::Shared => {}
            // What is cached may be newer than remote memory.
            Claim::Pending | Claim::Made(_) => {
                let why = "it is for what its compute server owns; share with another one".into();
                return Err(Error::BadOption { option: "cache", why });
            }
        }
        drop(using);
        let one_sided = OneSided::new(worker, structure, proof);
        Ok(CachedInner::new(self.handle(RemoteStore::new(one_sided, None, self.known.clone()))?))
    }

    fn handle(&self, store: RemoteStore<P>) -> Result<CacheHandle<RemoteStore<P>, CacheLayout<P>>, Error> {
        let seed = store.context().worker.random(rand::RngExt::random);
        self.cache.handle(store, seed).map_err(|error| Error::Cache(error.to_string()))
    }

    /// What the memory is used for.
    pub fn memory(&self) -> Memory {
        self.cache.memory()
    }

    /// The counts of all accesses, also of those that have ended.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }
}

/// How a claim begins.
enum Begun<'a, P: Plugin> {
    Made(Log),
    Pending(Pending<'a, P>),
}

/// A claim that has not come to an end.
struct Pending<'a, P: Plugin>(&'a ComputeCache<P>);

impl<P: Plugin> Drop for Pending<'_, P> {
    fn drop(&mut self) {
        *self.0.using() = Use::default();
    }
}
