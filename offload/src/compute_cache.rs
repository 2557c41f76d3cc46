//! The cache of a compute server, and the ways to use it.

use std::{marker::PhantomData, sync::Arc};

use farlink_cache::{CacheHandle, CacheOptions, Counters, Memory, OptionsError, PageCache};
use farlink_runtime::{
    access::{Plugin, Structure},
    error::Error,
    one_sided::{OneSided, Proof},
    worker::Handle,
};

use crate::{
    cached::Cached,
    inner::CachedInner,
    store::{CacheLayout, Freeing, RemoteStore},
};

/// The cache of a compute server for the pages of one structure, shared by its workers.
#[derive(Debug)]
pub struct ComputeCache<P: Plugin> {
    cache: Arc<PageCache<CacheLayout<P>>>,
    freeing: Freeing,
}

impl<P: Plugin> Clone for ComputeCache<P> {
    fn clone(&self) -> Self {
        Self { cache: Arc::clone(&self.cache), freeing: self.freeing.clone() }
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
        Ok(Self { cache, freeing: Freeing::default() })
    }

    /// Access to the part of `structure` that this compute server owns, and nobody else reads or writes: all its pages are
    /// cached. Every worker of the compute server must name the same region, cut where pages are cut.
    ///
    /// # Errors
    /// [`Error::BadOption`] if the structure cannot be owned in such parts; [`Error::Cache`] if the cache has no handle left.
    pub fn own(&self, worker: &Handle, structure: Structure, region: P::Region) -> Result<Cached<P>, Error> {
        if !P::can_own(&region) {
            let why = format!("a {} has one owner, of all of it", P::NAME);
            return Err(Error::BadOption { option: "region", why });
        }
        let one_sided = OneSided::new(worker, structure, Proof::Checksum);
        Ok(Cached::new(self.handle(RemoteStore::new(one_sided, Some(region), self.freeing.clone()))?))
    }

    /// Access to a structure that any number of compute servers change: only its inner pages are cached.
    ///
    /// # Errors
    /// If the cache has no handle left.
    pub fn share(&self, worker: &Handle, structure: Structure, proof: Proof) -> Result<CachedInner<P>, Error> {
        let one_sided = OneSided::new(worker, structure, proof);
        Ok(CachedInner::new(self.handle(RemoteStore::new(one_sided, None, self.freeing.clone()))?))
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
