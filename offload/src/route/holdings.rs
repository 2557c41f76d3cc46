//! What a compute server owns of a structure: a set of regions, in one cache, which come and go while operations run.

use std::{cell::OnceCell, cmp::Reverse, fmt, rc::Rc};

use farlink_cache::Counters;
use farlink_runtime::{
    access::{Operation, Overlap, Plugin, Region, Structure},
    error::Error,
    lock::OwnerId,
    one_sided::ownership::Waits,
    operation::Run,
    versioned::VersionedReader,
    worker::Handle,
};

use super::{
    balance::{Load, Loads},
    moves::take_region,
};
use crate::{
    cached::Cached,
    compute_cache::ComputeCache,
    engine::{Engine, EngineOptions},
    policies::{OffloadCounts, Policies},
    store::Regions,
};

/// The regions of a structure that a compute server owns. Cheap to clone; shared by its workers and by those who carry out what
/// others send.
pub struct Holdings<P: Plugin> {
    structure: Structure,
    cache: ComputeCache<P>,
    ships: Option<Ships>,
}

/// Who decides what is shipped to memory servers, and how.
#[derive(Debug, Clone, Copy)]
struct Ships {
    policies: fn() -> Policies,
    options: EngineOptions,
}

impl<P: Plugin> Clone for Holdings<P> {
    fn clone(&self) -> Self {
        Self { structure: self.structure.clone(), cache: self.cache.clone(), ships: self.ships }
    }
}

impl<P: Plugin> fmt::Debug for Holdings<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holdings").field("structure", &self.structure.name).field("regions", &self.regions()).finish()
    }
}

impl<P: Plugin> Holdings<P> {
    /// None yet. The pages of all that will be are in this cache, which nothing was made by.
    pub fn new(structure: &Structure, cache: ComputeCache<P>) -> Self {
        Self { structure: structure.clone(), cache, ships: None }
    }

    /// The same, where each worker has an [`Engine`] with such policies. For a cache that
    /// [excludes subtrees](farlink_cache::CacheOptions::excludes_subtrees), and before a worker is given a way to it.
    #[must_use]
    pub fn shipping(self, policies: fn() -> Policies, options: EngineOptions) -> Self {
        Self { ships: Some(Ships { policies, options }), ..self }
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        &self.structure
    }

    /// The cache.
    pub fn cache(&self) -> &ComputeCache<P> {
        &self.cache
    }

    /// The regions.
    pub fn regions(&self) -> Vec<P::Region> {
        self.cache.regions().copy().owned
    }

    /// Takes one more region. From then on operations on it are done here.
    ///
    /// # Errors
    /// As [`ComputeCache::own`].
    pub async fn take(&self, worker: &Handle, region: P::Region) -> Result<(), Error> {
        self.own_more(worker, region, Waits::AWhile).await
    }

    /// [`Holdings::take`] of what nobody owns who lives, as far as the map says: if somebody else is first, it is refused at once.
    pub(super) async fn take_at_once(&self, worker: &Handle, region: P::Region) -> Result<(), Error> {
        self.own_more(worker, region, Waits::No).await
    }

    async fn own_more(&self, worker: &Handle, region: P::Region, waits: Waits) -> Result<(), Error> {
        // First: so there is one handle for all who want to.
        let moving = self.cache.begin_moving(worker).await;
        let (holdings, handle) = (self.clone(), worker.clone());
        // It may not rest with the caller's future: others wait.
        let owning = async move { holdings.cache.own_more(moving, &handle, &holdings.structure, region, waits).await };
        worker.spawn_to_end(owning).await
    }

    /// Gives up a region, or a piece of one: writes what is changed there while operations on it go on, and lets them wait for the next
    /// owner for as long as the last of it takes. A piece is made smaller so that no page of level 0 is cut; what it was then.
    /// `None` if all of it does not lie in one region of this compute server's, for itself, or nothing of it is left.
    ///
    /// # Errors
    /// [`Error::BadOption`] if nothing lies in the region. If the fabric fails, or the map is full: it still has the region then, unless
    /// the map could not be read any more.
    pub async fn give_up(&self, worker: &Handle, region: &P::Region) -> Result<Option<P::Region>, Error> {
        let given_up = self.hand_over(worker, region).await?;
        self.tidy(worker).await;
        Ok(given_up)
    }

    /// Gives a region up, as [`Holdings::give_up`], and has another compute server take it, which listens. Takes it again if that one cannot,
    /// or has died meanwhile. `None` also if a third one was faster than both, for nobody had it for a moment.
    /// The cache is to be [tidied](Holdings::tidy) then; the other one need not wait for that.
    ///
    /// # Errors
    /// As [`Holdings::give_up`], and what the other one failed with.
    pub(super) async fn hand_on(
        &self,
        worker: &Handle,
        region: &P::Region,
        to: OwnerId,
    ) -> Result<Option<P::Region>, Error> {
        let Some(region) = self.hand_over(worker, region).await? else { return Ok(None) };
        if let Err(error) = take_region(worker, &self.structure, &region, to).await {
            match self.take_at_once(worker, region.clone()).await {
                Ok(()) => {}
                // It has taken it, and could not say so.
                Err(Error::Owned { owner, .. }) if owner == to => return Ok(Some(region)),
                Err(Error::Owned { owner, .. }) => {
                    tracing::debug!(structure = self.structure.name, %owner, %error, "what was handed on, another one has taken");
                    return Ok(None);
                }
                Err(again) => {
                    tracing::warn!(structure = self.structure.name, %again, "a region was handed on in vain, and not taken back");
                }
            }
            return Err(error);
        }
        Ok(Some(region))
    }

    async fn hand_over(&self, worker: &Handle, region: &P::Region) -> Result<Option<P::Region>, Error> {
        let moving = self.cache.begin_moving(worker).await;
        let given_up = match self.cache.owned(worker, &self.structure)? {
            Some(owned) => owned.part_with(moving, self.cache.regions(), region).await?,
            None => None,
        };
        if given_up.is_none() {
            // Others may have it, without what was not written.
            worker.check_standing()?;
        }
        Ok(given_up)
    }

    /// Drops from the cache what is not owned any more. If the cache has no handle left for that, the next one does it who gives up or
    /// takes a region.
    pub(super) async fn tidy(&self, worker: &Handle) {
        let moving = self.cache.begin_moving(worker).await;
        match self.cache.owned(worker, &self.structure) {
            Ok(Some(owned)) => owned.tidy(&moving).await,
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "pages of others stay cached"),
        }
    }

    /// Writes every page that is changed here to its memory server.
    ///
    /// # Errors
    /// As [`Cached::flush`]; if this compute server was taken for dead.
    pub async fn flush(&self, worker: &Handle) -> Result<(), Error> {
        match self.cache.owned(worker, &self.structure)? {
            Some(owned) => owned.flush().await,
            // Others have what it had, without what was not written.
            None => worker.check_standing(),
        }
    }

    /// How much there is to do, and a piece that has about `wanted` uses of that.
    ///
    /// # Errors
    /// [`Error::Cache`] if the cache has no handle left.
    pub fn loads(&self, worker: &Handle, wanted: u64) -> Result<Loads<P::Region>, Error> {
        let Some(owned) = self.cache.owned(worker, &self.structure)? else {
            return Ok(Loads { regions: Vec::new(), piece: None });
        };
        let all = owned.uses_by_region(self.regions());
        let mut by_uses: Vec<_> = all.iter().collect();
        by_uses.sort_by_key(|region| Reverse(region.sum()));
        let pieces: Vec<_> = by_uses.iter().filter_map(|region| P::Region::piece(&region.pages, wanted)).collect();
        // Of the hottest region that has none too hot by far.
        let fits = pieces.iter().position(|(_, uses)| *uses <= wanted.saturating_mul(2)).unwrap_or(0);
        let piece = pieces.into_iter().nth(fits).map(|(region, uses)| Load { region, uses });
        let regions = all.into_iter().map(|of| Load { uses: of.sum(), region: of.region }).collect();
        Ok(Loads { regions, piece })
    }

    /// Gives up all regions.
    ///
    /// # Errors
    /// As [`Holdings::give_up`].
    pub async fn give_up_all(&self, worker: &Handle) -> Result<(), Error> {
        for region in self.regions() {
            self.give_up(worker, &region).await?;
        }
        Ok(())
    }

    /// A worker's access to all of them.
    pub fn here(&self, worker: &Handle) -> Here<P> {
        let (holdings, worker, regions) = (self.clone(), worker.clone(), self.cache.regions().reader());
        Here { holdings, worker, regions, way: OnceCell::new() }
    }

    /// What the cache has counted.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }
}

/// Waits for the `attempt`th time (from 0) for what takes others a while: longer and longer, up to about a millisecond.
pub(super) async fn rest(worker: &Handle, attempt: u32) {
    let until_ns = worker.clock().now_ns() + (4000 << attempt.min(8));
    worker.sleep_until(until_ns).await;
}

/// A worker's access to the regions that its compute server owns, whichever these are. An operation on others fails with
/// [`Error::GivenUp`].
pub struct Here<P: Plugin> {
    holdings: Holdings<P>,
    worker: Handle,
    regions: VersionedReader<Regions<P::Region>>,
    /// Made once there are any.
    way: OnceCell<Way<P>>,
}

/// How a worker does operations on what is owned.
enum Way<P: Plugin> {
    Cached(Cached<P>),
    Shipping(Engine<P>),
}

impl<P: Plugin> Way<P> {
    #[inline]
    fn cached(&self) -> &Cached<P> {
        match self {
            Self::Cached(cached) => cached,
            Self::Shipping(engine) => engine.cached(),
        }
    }
}

impl<P: Plugin> Clone for Here<P> {
    fn clone(&self) -> Self {
        self.holdings.here(&self.worker)
    }
}

impl<P: Plugin> fmt::Debug for Here<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Here").field(&self.holdings).finish()
    }
}

impl<P: Plugin> Here<P> {
    /// All that its compute server owns.
    pub fn holdings(&self) -> &Holdings<P> {
        &self.holdings
    }

    /// The access to a region that all of another one lies in, if this compute server has it.
    ///
    /// # Errors
    /// [`Error::Cache`] if the cache has no handle left.
    pub fn with(&self, region: &P::Region) -> Result<Option<&Cached<P>>, Error> {
        Ok(self.way_to(region)?.map(Way::cached))
    }

    #[inline]
    fn way_to(&self, region: &P::Region) -> Result<Option<&Way<P>>, Error> {
        if self.regions.with(|regions| regions.with(region).is_none()) {
            return Ok(None);
        }
        match self.way.get() {
            Some(way) => Ok(way.cached().is_held().then_some(way)),
            None => self.open(),
        }
    }

    #[cold]
    fn open(&self) -> Result<Option<&Way<P>>, Error> {
        let Holdings { structure, cache, ships } = &self.holdings;
        let Some(owned) = cache.owned(&self.worker, structure)? else { return Ok(None) };
        let way = match ships {
            Some(Ships { policies, options }) => Way::Shipping(Engine::new(owned, policies(), *options)?),
            None => Way::Cached(owned),
        };
        Ok(Some(self.way.get_or_init(|| way)))
    }

    /// What the engine did, if there is one.
    pub fn offload_counts(&self) -> OffloadCounts {
        match self.way.get() {
            Some(Way::Shipping(engine)) => engine.counts(),
            _ => OffloadCounts::default(),
        }
    }

    /// Whether operations on a region wait: some of it has just been given up, and the map does not say so yet.
    fn is_leaving(&self, region: &P::Region) -> bool {
        let is_it = |leaving: &P::Region| region.overlap(leaving) != Overlap::Outside;
        self.regions.with(|regions| regions.leaving.as_ref().is_some_and(is_it))
    }
}

impl<P: Plugin> Run for Here<P> {
    type Plugin = P;

    async fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        let mut waited = 0;
        loop {
            let scope = operation.scope();
            let regions = self.regions.get();
            let Some(way) = self.way_to(&scope)? else {
                if self.is_leaving(&scope) {
                    rest(&self.worker, waited).await;
                    waited += 1;
                    continue;
                }
                return Err(Error::GivenUp { name: self.holdings.structure().name.clone() });
            };
            let owned = way.cached();
            let outcome = match way {
                Way::Cached(cached) => cached.execute(operation).await,
                Way::Shipping(engine) => engine.execute(operation).await,
            };
            match outcome {
                // Changes wait: somebody is about to give up a part of what is owned, perhaps this one.
                Err(Error::GivenUp { .. }) if owned.is_held() => {
                    let mut waited = 0;
                    while owned.is_held() && owned.is_being_given_up() {
                        rest(&self.worker, waited).await;
                        waited += 1;
                    }
                }
                // It was given up meanwhile, and perhaps taken again.
                Err(Error::OutsidePartition { .. } | Error::SharedPage { .. })
                    if !Rc::ptr_eq(&regions, &self.regions.get()) => {}
                outcome => return outcome,
            }
        }
    }
}
