//! What a compute server owns of a structure: a set of regions, each with a cache of its own, which come and go while operations run.

use std::{
    cell::RefCell,
    fmt,
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
};

use farlink_cache::Counters;
use farlink_runtime::{
    access::{Operation, Overlap, Plugin, Region, Structure},
    error::Error,
    operation::Run,
    versioned::{Versioned, VersionedReader},
    worker::Handle,
};

use crate::{cached::Cached, compute_cache::ComputeCache};

/// A region and its cache.
#[derive(Debug)]
struct Held<P: Plugin> {
    region: P::Region,
    cache: ComputeCache<P>,
}

impl<P: Plugin> Clone for Held<P> {
    fn clone(&self) -> Self {
        Self { region: self.region.clone(), cache: self.cache.clone() }
    }
}

type Make<P> = dyn Fn() -> Result<ComputeCache<P>, Error> + Send + Sync;

/// The regions of a structure that a compute server owns. Cheap to clone; shared by its workers and by those who carry out what
/// others send.
pub struct Holdings<P: Plugin>(Arc<Shared<P>>);

struct Shared<P: Plugin> {
    structure: Structure,
    make: Box<Make<P>>,
    held: Arc<Versioned<Vec<Held<P>>>>,
    /// What the caches of regions that were given up have counted.
    past: Mutex<Counters>,
}

impl<P: Plugin> Clone for Holdings<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<P: Plugin> fmt::Debug for Holdings<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holdings").field("structure", &self.0.structure.name).field("regions", &self.regions()).finish()
    }
}

impl<P: Plugin> Holdings<P> {
    /// None yet. `make` makes the cache of each region that is taken.
    pub fn new(
        structure: &Structure,
        make: impl Fn() -> Result<ComputeCache<P>, Error> + Send + Sync + 'static,
    ) -> Self {
        let (structure, held) = (structure.clone(), Versioned::new(Vec::new()));
        Self(Arc::new(Shared { structure, make: Box::new(make), held, past: Mutex::default() }))
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        &self.0.structure
    }

    /// The regions.
    pub fn regions(&self) -> Vec<P::Region> {
        self.0.held.copy().into_iter().map(|held| held.region).collect()
    }

    /// Takes one more region. From then on operations on it are done here.
    ///
    /// # Errors
    /// As [`ComputeCache::own`].
    pub async fn take(&self, worker: &Handle, region: P::Region) -> Result<(), Error> {
        let cache = (self.0.make)()?;
        cache.own(worker, self.0.structure.clone(), region.clone()).await?;
        self.0.held.update(|held| {
            held.push(Held { region, cache });
            true
        });
        Ok(())
    }

    /// Gives up a region: writes what is changed there while operations on it go on, and lets them wait for the next owner for as long
    /// as the last of it takes. False if this compute server does not have this region, as a whole and for itself.
    ///
    /// # Errors
    /// As [`Cached::close`]: then it still has the region.
    pub async fn give_up(&self, worker: &Handle, region: &P::Region) -> Result<bool, Error> {
        let is_it = |held: &Held<P>| is_same(&held.region, region);
        let Some(found) = self.0.held.copy().into_iter().find(is_it) else { return Ok(false) };
        if let Some(owned) = found.cache.owned(worker, &self.0.structure)? {
            owned.close().await?;
        }
        self.0.held.update(|held| {
            let before = held.len();
            held.retain(|held| !is_it(held));
            held.len() < before
        });
        *self.past() += found.cache.counters();
        Ok(true)
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
        let reader = self.0.held.reader();
        Here { holdings: self.clone(), worker: worker.clone(), reader, opened: RefCell::default() }
    }

    /// The counts of all caches, also of those that are gone.
    pub fn counters(&self) -> Counters {
        let mut all = *self.past();
        self.0.held.copy().iter().for_each(|held| all += held.cache.counters());
        all
    }

    fn past(&self) -> std::sync::MutexGuard<'_, Counters> {
        self.0.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the `attempt`th time (from 0) for what takes others a while: longer and longer, up to about a millisecond.
pub(super) async fn rest(worker: &Handle, attempt: u32) {
    let until_ns = worker.clock().now_ns() + (4000 << attempt.min(8));
    worker.sleep_until(until_ns).await;
}

fn is_same<R: Region>(a: &R, b: &R) -> bool {
    a.overlap(b) == Overlap::Inside && b.overlap(a) == Overlap::Inside
}

/// A worker's access to the regions that its compute server owns, whichever these are. An operation on others fails with
/// [`Error::GivenUp`].
pub struct Here<P: Plugin> {
    holdings: Holdings<P>,
    worker: Handle,
    reader: VersionedReader<Vec<Held<P>>>,
    opened: RefCell<Opened<P>>,
}

/// The access to each region of one version of the set.
struct Opened<P: Plugin> {
    of: Option<Rc<Vec<Held<P>>>>,
    parts: Vec<Rc<Cached<P>>>,
}

impl<P: Plugin> Default for Opened<P> {
    fn default() -> Self {
        Self { of: None, parts: Vec::new() }
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

    /// The access to the region in which all of another one lies, if this compute server has it.
    ///
    /// # Errors
    /// [`Error::Cache`] if a cache has no handle left.
    pub fn with(&self, region: &P::Region) -> Result<Option<Rc<Cached<P>>>, Error> {
        let held = self.reader.get();
        let mut opened = self.opened.borrow_mut();
        if opened.of.as_ref().is_none_or(|of| !Rc::ptr_eq(of, &held)) {
            let Opened { parts, .. } = std::mem::take(&mut *opened);
            let mut kept: Vec<Rc<Cached<P>>> = parts.into_iter().filter(|part| part.is_held()).collect();
            for Held { region, cache } in &*held {
                if !kept.iter().any(|part| is_same(part.region(), region)) {
                    kept.extend(cache.owned(&self.worker, self.holdings.structure())?.map(Rc::new));
                }
            }
            *opened = Opened { of: Some(held), parts: kept };
        }
        let has_it = |part: &&Rc<Cached<P>>| part.is_held() && region.overlap(part.region()) == Overlap::Inside;
        Ok(opened.parts.iter().find(has_it).cloned())
    }
}

impl<P: Plugin> Run for Here<P> {
    type Plugin = P;

    async fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        loop {
            let Some(part) = self.with(&operation.scope())? else {
                return Err(Error::GivenUp { name: self.holdings.structure().name.clone() });
            };
            match part.execute(operation).await {
                // Somebody is about to give it up: until that is done, or has failed, nobody else can do this.
                Err(Error::GivenUp { .. }) if part.is_held() => {
                    let mut waited = 0;
                    while part.is_held() && part.is_being_given_up() {
                        rest(&self.worker, waited).await;
                        waited += 1;
                    }
                }
                outcome => return outcome,
            }
        }
    }
}
