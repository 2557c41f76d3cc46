//! A part of what is owned goes, while operations run: the rest stays cached, and is changed again as soon as it can be.
//!
//! 1. What is changed in the part is written, twice: the second time there is less. The [log](farlink_runtime::write_ahead) is turned
//!    over, so that it is short.
//! 2. The gate is shut: changes that have begun end, and no others begin.
//! 3. The part is cut where pages of level 0 are cut, and so gets smaller, perhaps.
//! 4. What was changed since in its pages is written, and in pages above that lie partly in it.
//! 5. From now on the rest is what is owned. Pages of the part lie outside; pages above that have some of the rest are shared: remote
//!    memory has their newest versions. The gate is opened, and changes of the rest go on.
//! 6. The log is turned over: from now on it says nothing of the part. So who replays it after a death of this compute server does not
//!    touch what is another one's.
//! 7. The partition map says so, too. Until then operations on the part wait.
//! 8. Pages of the part are dropped from the cache, and pages that are shared now are entered as such. So pages in the cache are current
//!    if the part ever comes back.
//!
//! Whoever began to read in the part before step 5 may read on: its pages stay as they were at that moment, which is not before it
//! began. An attempt to change them is refused, for the part is not owned any more.

use std::sync::{Arc, atomic::AtomicBool};

use farlink_cache::PageId;
use farlink_runtime::{
    gate::Gate,
    operation::{persist, retry},
    versioned::Versioned,
    write_ahead::Log,
};

use super::*;
use crate::store::{Regions, identity};

/// Pages that are dropped before others run.
const DROPPED_AT_ONCE: usize = 32;

/// A gate that is shut; open again when this is dropped, unless what is behind it was given up.
pub(super) struct Shut {
    gate: Arc<Gate>,
    log: Log,
}

impl Drop for Shut {
    fn drop(&mut self) {
        if self.log.tenure().is_valid() {
            self.gate.open();
        }
    }
}

/// How often pages of level 0 were used lately, and one more for each.
pub(crate) struct RegionUses<R> {
    pub(crate) region: R,
    /// For what belongs to each page.
    pub(crate) pages: Vec<(R, u64)>,
}

impl<R> RegionUses<R> {
    /// Of all pages.
    pub(crate) fn sum(&self) -> u64 {
        self.pages.iter().map(|(_, uses)| uses).sum()
    }
}

/// Nobody else changes what is owned, until it is dropped.
pub(crate) struct Moving(Arc<AtomicBool>);

impl Moving {
    /// Waits until nobody else does.
    pub(crate) async fn begin(worker: &Handle, is_moving: &Arc<AtomicBool>) -> Self {
        let mut attempt = 0;
        while is_moving.swap(true, Ordering::Acquire) {
            worker.back_off(attempt).await;
            attempt += 1;
        }
        Self(Arc::clone(is_moving))
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<P: Plugin> Cached<P> {
    /// Shuts the gate, and waits until changes that have begun are done. `None` if what is behind it was given up meanwhile.
    pub(super) async fn shut(&self) -> Option<Shut> {
        let (gate, log) = (&self.cache.store().known().gate, self.cache.store().log()?);
        let mut attempt = 0;
        while !gate.shut() {
            // Somebody else does it.
            if !log.tenure().is_valid() {
                return None;
            }
            self.worker().back_off(attempt).await;
            attempt += 1;
        }
        let shut = Shut { gate: Arc::clone(gate), log: log.clone() };
        while !gate.is_empty() {
            self.worker().back_off(attempt).await;
            attempt += 1;
        }
        Some(shut)
    }

    /// Gives up a part of a region that is owned: operations go on, and other compute servers can claim the part from then on. The
    /// part that it was, cut where leaves are cut; `None` if there is none, or it cannot be cut. The cache is to be
    /// [tidied](Cached::tidy) then. Nobody else changes what is owned.
    ///
    /// # Errors
    /// As [`Cached::close`]; [`Error::BadOption`] if nothing lies in the part.
    pub(crate) async fn part_with(
        &self,
        moving: Moving,
        regions: &Arc<Versioned<Regions<P::Region>>>,
        part: &P::Region,
    ) -> Result<Option<P::Region>, Error> {
        if part.overlap(part) != Overlap::Inside {
            let why = format!("nothing lies in {part:?}; name one in which something does");
            return Err(Error::BadOption { option: "region", why });
        }
        self.tidy(&moving).await;
        let before = regions.copy();
        let Some(region) = before.with(part).cloned() else { return Ok(None) };
        self.flush_region(part).await?;
        self.turn_over().await?;
        self.flush_region(part).await?;
        let Some(shut) = self.shut().await else { return Ok(None) };
        let Some((part, rest)) = self.cut(&region, part).await? else { return Ok(None) };
        // All that will not be inside of what is left, and pages above with it.
        let is_meant = |_, words: &[AtomicU64]| {
            let is_inside = |rest: &P::Region| P::overlap(words, rest) == Overlap::Inside;
            P::overlap(words, &region) != Overlap::Outside && !rest.iter().any(is_inside)
        };
        self.cache.flush_matching(is_meant).await.map_err(failed)?;
        let stays = before.owned.iter().filter(|owned| !is_same(*owned, &region)).cloned();
        let owned: Vec<P::Region> = stays.chain(rest.iter().cloned()).collect();
        self.cache.store().known().has_others.store(true, Ordering::Relaxed);
        regions.update(|regions| {
            *regions = Regions { owned, leaving: Some(part.clone()), were_more: true };
            true
        });
        drop(shut);
        let (handle, regions) = (self.clone(), Arc::clone(regions));
        // To its end, for operations on the part wait.
        let parting = async move {
            let Context { worker, structure, .. } = handle.context();
            let tenure = handle.cache.store().log().map(Log::tenure);
            let (outcome, is_undone) = match (handle.turn_over().await, tenure) {
                (Ok(()), Some(tenure)) => {
                    let outcome = ownership::reduce(worker, structure, tenure, &region, &part, &rest).await;
                    let is_undone = matches!(outcome, Err(Error::PartitionMapFull { .. }));
                    (outcome, is_undone)
                }
                (outcome, _) => (outcome, true),
            };
            regions.update(|regions| {
                if is_undone {
                    // Nobody else has had it.
                    regions.owned = before.owned;
                }
                regions.leaving = None;
                true
            });
            drop(moving);
            outcome.map(|()| Some(part))
        };
        self.worker().spawn_to_end(parting).await
    }

    /// Has the log say nothing of what has been changed so far.
    async fn turn_over(&self) -> Result<(), Error> {
        let Some(log) = self.cache.store().log() else { return Ok(()) };
        let write_back = async |pages: Vec<Link>| {
            let written = self.cache.flush_each(pages.into_iter().map(page_id)).await;
            written.map_err(failed)
        };
        log.turn_over(self.worker(), write_back).await
    }

    /// Where a region is to be cut for a part of it: the part, made smaller by the pages of level 0 that it would cut, and the rest. `None`
    /// if nothing is left of it. Nobody changes anything meanwhile.
    async fn cut(&self, region: &P::Region, part: &P::Region) -> Result<Option<(P::Region, Vec<P::Region>)>, Error> {
        if is_same(region, part) {
            return Ok(Some((part.clone(), Vec::new())));
        }
        let Some(rest) = region.without(part) else { return Ok(None) };
        let Some(cut) = retry(self.worker(), async || self.cut_pages(part, &rest).await).await? else {
            return Ok(None);
        };
        let mut part = part.clone();
        for page in cut {
            match part.without(&page) {
                Some(left) if left.len() == 1 => part = left.into_iter().next().expect("there is one"),
                _ => return Ok(None),
            }
        }
        Ok(region.without(&part).map(|rest| (part, rest)))
    }

    /// What is below the links to pages of level 0 of which some lies in a part and some in the rest. `None` if a page does not tell.
    async fn cut_pages(&self, part: &P::Region, rest: &[P::Region]) -> Result<Option<Vec<P::Region>>, Interrupt> {
        let has_some = |of: &P::Region, other: &P::Region| of.overlap(other) != Overlap::Outside;
        let is_cut = |below: &P::Region| has_some(below, part) && rest.iter().any(|rest| has_some(below, rest));
        let mut cut = Vec::new();
        let mut pages = vec![self.open(Start::Anew).await?];
        while let Some(page) = pages.pop() {
            if page.level() == 0 {
                // All of the structure.
                return Ok(None);
            }
            let below: Option<Vec<(u64, P::Region)>> = page.read(|words| {
                let link = |index: usize| Some((words.get(index)?.load(Ordering::Relaxed), P::below(words, index)?));
                P::links(words).map(link).collect()
            })?;
            let Some(below) = below else { return Ok(None) };
            for (word, below) in below.into_iter().filter(|(_, below)| is_cut(below)) {
                match page.level() {
                    1 => cut.push(below),
                    _ => pages.push(self.follow(&page, Link::from_word(word), Hint::DOWN).await?),
                }
            }
        }
        Ok(Some(cut))
    }

    /// For each of these regions what is below links to pages of level 0, as far as it is inside, and how often those were used. Of
    /// pages above that are cached.
    pub(crate) fn uses_by_region(&self, regions: Vec<P::Region>) -> Vec<RegionUses<P::Region>> {
        let mut all: Vec<_> = regions.into_iter().map(|region| RegionUses { region, pages: Vec::new() }).collect();
        self.cache.for_each_page(|_, _, words| {
            if identity(words).is_none_or(|page| page.level != 1) {
                return;
            }
            for index in P::links(words) {
                let (Some(word), Some(below)) = (words.get(index), P::below(words, index)) else { continue };
                let is_inside = |uses: &&mut RegionUses<P::Region>| below.overlap(&uses.region) == Overlap::Inside;
                // Nothing lies between two keys of different moments.
                if below.overlap(&below) != Overlap::Inside {
                    continue;
                }
                if let Some(RegionUses { pages, .. }) = all.iter_mut().find(is_inside) {
                    let uses = self.cache.uses(word.load(Ordering::Relaxed)).unwrap_or(0);
                    pages.push((below, 1 + uses));
                }
            }
        });
        all
    }

    /// Waits for reads of pages that are under way.
    pub(crate) async fn until_fetched(&self) {
        self.cache.until_fetched().await;
    }

    /// Brings the shared pages in the cache up to date, before more is owned: of those that are inside then, nobody looks any more whether
    /// they are.
    ///
    /// # Errors
    /// If a memory server is lost, say: what is of no use to try again.
    pub(crate) async fn prepare_for_more(&self) -> Result<(), Error> {
        Ok(persist(self.worker(), async || self.renew_shared().await).await?)
    }

    /// Drops pages from the cache that lie outside of what is owned, if some may, and enters those that lie partly in it as shared.
    /// Nobody else changes what is owned.
    pub(crate) async fn tidy(&self, _moving: &Moving) {
        let known = self.cache.store().known();
        if !known.has_others.load(Ordering::Relaxed) {
            return;
        }
        let root = self.context().structure.root_link();
        self.cache.until_fetched().await;
        let mut outside = Vec::new();
        // An anchor keeps it.
        known.shared.insert(root);
        self.cache.for_each_page(|page, class, words| match self.overlap(words) {
            Overlap::Inside => {}
            Overlap::Partly if known.shared.contains(link_of(page)) => {}
            Overlap::Partly => known.shared.insert(link_of(page)),
            Overlap::Outside if link_of(page) == root => {}
            Overlap::Outside => outside.push((page, class)),
        });
        let mut stays = false;
        for pages in outside.chunks(DROPPED_AT_ONCE) {
            for &(page, class) in pages {
                let mut attempt = 0;
                let is_dropped = loop {
                    match self.drop_outside(page, class).await {
                        Ok(is_dropped) => break is_dropped,
                        // It has left the cache, and is not let in again.
                        Err(_) if !self.cache.contains(page) => break true,
                        Err(error) => {
                            tracing::debug!(%error, "a page that is another owner's is still in use");
                            self.worker().back_off(attempt).await;
                            attempt += 1;
                        }
                    }
                };
                // It was changing as it was looked at, and is looked at again the next time.
                stays |= !is_dropped && self.cache.contains(page);
            }
            self.worker().yield_now().await;
        }
        known.has_others.store(stays, Ordering::Relaxed);
    }

    /// Enters pages that lie partly in what is owned as shared, if nobody has [looked](Cached::tidy) since a part of it went: the next attempt
    /// of an operation renews them.
    #[cold]
    pub(super) fn enter_shared(&self) {
        let known = self.cache.store().known();
        if !known.has_others.load(Ordering::Relaxed) {
            return;
        }
        let enter = |page: Link| {
            if !known.shared.contains(page) {
                known.shared.insert(page);
            }
        };
        enter(self.context().structure.root_link());
        self.cache.for_each_page(|page, _, words| {
            if self.overlap(words) == Overlap::Partly {
                enter(link_of(page));
            }
        });
    }

    /// Drops a page from the cache if it lies outside of what is owned, by words that are all of one moment: those of a page that is just
    /// being changed may say so when it does not.
    pub(super) async fn drop_outside(
        &self,
        page: PageId,
        class: farlink_cache::SizeClass,
    ) -> Result<bool, CacheError<Interrupt>> {
        let shared = &self.cache.store().known().shared;
        let is_outside = |words: &[AtomicU64]| match self.overlap(words) {
            Overlap::Inside => false,
            Overlap::Partly => {
                if !shared.contains(link_of(page)) {
                    shared.insert(link_of(page));
                }
                false
            }
            Overlap::Outside => true,
        };
        self.cache.invalidate_if(page, class, is_outside).await
    }
}

pub(crate) fn is_same<R: Region>(a: &R, b: &R) -> bool {
    a.overlap(b) == Overlap::Inside && b.overlap(a) == Overlap::Inside
}
