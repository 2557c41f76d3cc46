//! Ordered maps of u64 keys and values: what a structure has to do to be one, and what its users get.
//!
//! A structure is a [`Plugin`] whose regions are ranges of keys, and implements [`OrderedMap`]: five operations over any
//! [`Access`]. It then has a handle ([`Map`]), operations that can be sent ([`ops`]), and the tests that all ordered maps here have to pass.

mod keys;
pub mod ops;

use std::{
    collections::VecDeque,
    marker::PhantomData,
    ops::{Bound, RangeBounds},
};

use farlink_runtime::{
    access::{Access, Interrupt, Plugin, Start, Structure},
    catalog::{self, CreateOptions},
    error::Error,
    leaks,
    one_sided::{OneSided, Proof},
    operation::{Run, retry},
    page::SizeClass,
    structure::{OPTIONS, StructurePlacement},
    worker::Handle,
};

use self::ops::{ANSWER_ENTRIES_MAX, Count, Get, Put, Remove, Scan};
pub use self::{
    keys::KeyRange,
    ops::{PutMode, ScanPart},
};
pub use farlink_runtime::report::{Problem, Report};

/// Entries that a [`Range`] and [`Map::len`] ask for at a time.
const PART_ENTRIES: u64 = 1024;

/// A structure that is an ordered map of u64 keys and values. Its functions are attempts, as those of
/// [`Operation`](farlink_runtime::access::Operation): they are interrupted only before their first visible effect.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait OrderedMap: Plugin<Region = KeyRange> {
    /// The value of a key.
    ///
    /// # Errors
    /// As [`Operation::run`](farlink_runtime::access::Operation::run). So for all.
    async fn get<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt>;

    /// [`OrderedMap::get`] from the root for those who do not want to wait:
    /// [`Operation::try_sync`](farlink_runtime::access::Operation::try_sync).
    ///
    /// # Errors
    /// Where [`OrderedMap::get`] begins.
    fn try_get<A: Access<Plugin = Self>>(_access: &A, _key: u64) -> Result<Option<u64>, Start> {
        Err(Start::Root)
    }

    /// Stores a value; the value before.
    async fn put<A: Access<Plugin = Self>>(access: &A, from: Start, put: &Put<Self>) -> Result<Option<u64>, Interrupt>;

    /// Removes a key; its value.
    async fn remove<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt>;

    /// A part of a range that is not empty, with a limit of 1 or more: at least an entry, or what is left of the range is less.
    async fn scan<A: Access<Plugin = Self>>(access: &A, from: Start, scan: &Scan<Self>) -> Result<ScanPart, Interrupt>;

    /// The greatest key up to `key` at which its keys can be cut into ranges to own: where a page of level 0 begins.
    async fn cut<A: Access<Plugin = Self>>(_access: &A, _from: Start, key: u64) -> Result<u64, Interrupt> {
        Ok(key)
    }

    /// Counts about as many entries of a range that is not empty as it says, 1 or more; the count, and the key from which the rest continues, if there is a rest.
    async fn count<A: Access<Plugin = Self>>(
        access: &A,
        from: Start,
        count: &Count<Self>,
    ) -> Result<(u64, Option<u64>), Interrupt> {
        let Count { low, high, limit, .. } = *count;
        let scan = Scan { low, high, limit, descending: false, of: PhantomData };
        let part = Self::scan(access, from, &scan).await?;
        Ok((part.entries.len() as u64, part.rest))
    }
}

/// An ordered map. A handle belongs to one worker; any number of handles can be open on one map.
#[derive(Debug, Clone)]
pub struct Map<S, A> {
    access: A,
    of: PhantomData<S>,
}

fn put<S>(key: u64, value: u64, mode: PutMode) -> Put<S> {
    Put { key, value, mode, of: PhantomData }
}

impl<S: OrderedMap> Map<S, OneSided<S>> {
    /// Makes an empty map and enters it into the cluster's catalog.
    ///
    /// # Errors
    /// If the name is taken, empty or longer than 64 bytes, the page size is not possible, or memory or the catalog is
    /// full.
    pub async fn make(worker: &Handle, name: &str, page_bytes: usize, proof: Proof) -> Result<Self, Error> {
        Self::make_at(worker, name, page_bytes, proof, StructurePlacement::default()).await
    }

    /// [`Map::make`], with a say in where its pages are.
    ///
    /// # Errors
    /// As [`Map::make`]; and if there is no such memory server.
    pub async fn make_at(
        worker: &Handle,
        name: &str,
        page_bytes: usize,
        proof: Proof,
        placement: StructurePlacement,
    ) -> Result<Self, Error> {
        let Some(class) = SizeClass::of_bytes(page_bytes) else {
            let (least, most) = (S::ROOT_BYTES.start(), S::ROOT_BYTES.end());
            let why = format!("{page_bytes}; a page of a {} has a power of two from {least} to {most} bytes", S::NAME);
            return Err(Error::BadOption { option: "page-bytes", why });
        };
        let options = CreateOptions { class, placement, options: [0; OPTIONS] };
        Ok(Self::over(catalog::create(worker, name, &options, proof).await?))
    }

    /// Opens a map by its name.
    ///
    /// # Errors
    /// If there is none of that name, or it is another kind of structure.
    pub async fn open(worker: &Handle, name: &str, proof: Proof) -> Result<Self, Error> {
        Ok(Self::over(OneSided::new(worker, catalog::open::<S>(worker, name).await?, proof)))
    }

    /// The same; reading asks for no right, and beside an owner answers what that one has written back:
    /// [`OneSided::beside_owners`].
    pub fn beside_owners(self) -> Self {
        Self::over(self.access.beside_owners())
    }

    /// Checks every invariant of the map, and looks for leaked pages. Reads the whole map, and the header of every page
    /// of the cluster. Nobody may change the map meanwhile.
    ///
    /// # Errors
    /// If the root cannot be read, or the fabric fails. What is wrong with the map is in the report.
    pub async fn check(&self) -> Result<Report, Error> {
        S::check(&self.access).await
    }

    /// [`leaks::free`]: frees the map's pages that are nobody's, because compute servers have died. Others may use the map meanwhile.
    ///
    /// # Errors
    /// If the fabric fails, or a damaged page is in the way.
    pub async fn free_leaked(&self) -> Result<Option<u64>, Error> {
        leaks::free(&self.access).await
    }
}

impl<S: OrderedMap, A: Access<Plugin = S>> Map<S, A> {
    /// The map as the catalog knows it: to open it through another access.
    pub fn structure(&self) -> &Structure {
        &self.access.context().structure
    }

    /// The least key that belongs to the page of level 0 where `key` does: a place to cut the map into ranges of keys. Looks at pages as they are,
    /// whoever owns them.
    ///
    /// # Errors
    /// If a page is damaged, or the fabric fails.
    pub async fn leaf_low(&self, key: u64) -> Result<u64, Error> {
        retry(&self.access.context().worker, async || S::cut(&self.access, Start::Anew, key).await).await
    }
}

impl<S: OrderedMap, A: Run<Plugin = S>> Map<S, A> {
    /// The map that `access` leads to.
    pub fn over(access: A) -> Self {
        Self { access, of: PhantomData }
    }

    /// How its pages are reached, or who runs its operations.
    pub fn access(&self) -> &A {
        &self.access
    }

    /// The value of a key.
    ///
    /// # Errors
    /// If a page on the way is damaged or corrupt, or the fabric fails. So for all operations.
    pub async fn get(&self, key: u64) -> Result<Option<u64>, Error> {
        self.access.execute(&Get::<S> { key, of: PhantomData }).await
    }

    /// Stores a value under a key that is absent. False if the key is there, and nothing is changed.
    ///
    /// # Errors
    /// As [`Map::get`]; and if remote memory is full.
    pub async fn insert(&self, key: u64, value: u64) -> Result<bool, Error> {
        Ok(self.access.execute(&put::<S>(key, value, PutMode::Insert)).await?.is_none())
    }

    /// Stores a value under a key, whether or not it is there; returns the value before.
    ///
    /// # Errors
    /// As [`Map::insert`].
    pub async fn upsert(&self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        self.access.execute(&put::<S>(key, value, PutMode::Upsert)).await
    }

    /// Stores a value under a key that is there; returns the value before, or `None` if the key is absent and nothing is
    /// changed.
    ///
    /// # Errors
    /// As [`Map::get`].
    pub async fn update(&self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        self.access.execute(&put::<S>(key, value, PutMode::Update)).await
    }

    /// Removes a key; returns its value.
    ///
    /// # Errors
    /// As [`Map::get`].
    pub async fn remove(&self, key: u64) -> Result<Option<u64>, Error> {
        self.access.execute(&Remove::<S> { key, of: PhantomData }).await
    }

    /// The first `limit` entries from `from` on, in ascending order.
    ///
    /// # Errors
    /// As [`Map::get`].
    pub async fn scan(&self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, Error> {
        self.range(from..).take(limit).await
    }

    /// The entries whose keys are in `bounds`, in ascending order; [`Range::descending`] turns it round.
    pub fn range(&self, bounds: impl RangeBounds<u64>) -> Range<'_, S, A> {
        let low = match bounds.start_bound() {
            Bound::Included(&key) => Some(key),
            Bound::Excluded(&key) => key.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let high = match bounds.end_bound() {
            Bound::Included(&key) => Some(key),
            Bound::Excluded(&key) => key.checked_sub(1),
            Bound::Unbounded => Some(u64::MAX),
        };
        let rest = low.zip(high).filter(|(low, high)| low <= high);
        Range { map: self, by: Copied, rest, descending: false, fetched: VecDeque::new() }
    }

    /// Counts the entries: reads all of level 0. Entries that come or go meanwhile may be counted or not.
    ///
    /// # Errors
    /// As [`Map::get`].
    pub async fn len(&self) -> Result<u64, Error> {
        let (mut total, mut next) = (0, Some(0));
        while let Some(low) = next {
            let count = Count::<S> { low, high: u64::MAX, limit: PART_ENTRIES, of: PhantomData };
            let (count, rest) = self.access.execute(&count).await?;
            total += count;
            next = rest;
        }
        Ok(total)
    }

    /// Whether there is no entry.
    ///
    /// # Errors
    /// As [`Map::get`].
    pub async fn is_empty(&self) -> Result<bool, Error> {
        Ok(self.scan(0, 1).await?.is_empty())
    }
}

/// How a [`Range`] has its parts fetched: one of the ways here.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Fetch<S, A> {
    /// Has one fetched.
    ///
    /// # Errors
    /// As [`Map::get`].
    async fn fetch(&self, access: &A, scan: &Scan<S>) -> Result<ScanPart, Error>;
}

/// As any other operation is run; a memory server copies its answer.
#[derive(Debug, Clone, Copy)]
pub struct Copied;

impl<S: OrderedMap, A: Run<Plugin = S>> Fetch<S, A> for Copied {
    async fn fetch(&self, access: &A, scan: &Scan<S>) -> Result<ScanPart, Error> {
        access.execute(scan).await
    }
}

/// Entries in key order, fetched in parts. Each part holds what [`Scan`] promises; changes between two parts may show or
/// not.
#[derive(Debug)]
#[must_use = "a range fetches nothing until it is asked for entries"]
pub struct Range<'a, S, A, F = Copied> {
    map: &'a Map<S, A>,
    by: F,
    /// The keys not fetched yet, both ends included.
    rest: Option<(u64, u64)>,
    descending: bool,
    fetched: VecDeque<(u64, u64)>,
}

impl<'a, S, A> Range<'a, S, A> {
    /// The same, fetched otherwise.
    pub(crate) fn fetched_by<F>(self, by: F) -> Range<'a, S, A, F> {
        let Self { map, rest, descending, fetched, .. } = self;
        Range { map, by, rest, descending, fetched }
    }
}

impl<S: OrderedMap, A: Run<Plugin = S>, F: Fetch<S, A>> Range<'_, S, A, F> {
    /// What is left of it from the greatest key to the least.
    pub fn descending(mut self) -> Self {
        if let (false, Some(&(low, _)), Some(&(last, _))) = (self.descending, self.fetched.front(), self.fetched.back())
        {
            // Fetched in the other order.
            self.rest = Some((low, self.rest.map_or(last, |(_, high)| high)));
            self.fetched.clear();
        }
        self.descending = true;
        self
    }

    /// The next entry, or `None` at the end. Suspends when the entries fetched so far are used up.
    ///
    /// # Errors
    /// As [`Map::get`]. The range can be asked again: nothing is lost.
    pub async fn next(&mut self) -> Result<Option<(u64, u64)>, Error> {
        while self.fetched.is_empty() && self.rest.is_some() {
            self.fetch(PART_ENTRIES).await?;
        }
        Ok(self.fetched.pop_front())
    }

    /// The next `limit` entries, or all there are if they are fewer.
    ///
    /// # Errors
    /// As [`Map::get`].
    pub async fn take(mut self, limit: usize) -> Result<Vec<(u64, u64)>, Error> {
        while self.fetched.len() < limit && self.rest.is_some() {
            // In parts: one operation keeps all pages of the cluster from reuse that are freed meanwhile.
            self.fetch(((limit - self.fetched.len()) as u64).min(ANSWER_ENTRIES_MAX)).await?;
        }
        self.fetched.truncate(limit);
        Ok(self.fetched.into())
    }

    async fn fetch(&mut self, limit: u64) -> Result<(), Error> {
        let Some((low, high)) = self.rest else { return Ok(()) };
        let scan = Scan::<S> { low, high, limit, descending: self.descending, of: PhantomData };
        let ScanPart { entries, rest, .. } = self.by.fetch(&self.map.access, &scan).await?;
        self.fetched.extend(entries);
        self.rest = rest.map(|next| if self.descending { (low, next) } else { (next, high) });
        Ok(())
    }
}
