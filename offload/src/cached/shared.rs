//! Changes that reach pages which other owners share (DEX, VLDB 2024, section 4): those that lie partly in what is owned here, a
//! few on each level above the leaves.
//!
//! A shared page is cached, and never dirty: remote memory has it as it is. Others may have changed it since it was cached. That
//! does no harm to a search, because what is below and inside belongs to nobody else, so links to it stay right; a page that is
//! not what was looked for ends the attempt, and the next one begins with all shared pages [renewed](Cached::renew_shared).
//!
//! A change that alters a shared page, or relies on one:
//!
//! 1. reads each shared page past the cache; if it has changed, the cached copy is renewed, and the attempt ends;
//! 2. locks them in remote memory, at those versions;
//! 3. makes the change in the cache, of private pages and shared ones together, under local locks; all or nothing;
//! 4. has the log written, where all of it is in one batch: from then on a death of this compute server does not undo it;
//! 5. writes new private pages, as any dirty page is written; then new shared pages; then the shared pages that were there, and
//!    behind them the unlocks.
//!
//! From step 2 on nobody else changes the shared pages; what can fail for want of anything but a memory server, fails before
//! step 3. Whoever reads a shared page remotely meanwhile, this compute server included, waits for the lock.
//!
//! A page that others have freed may be anybody's when an old link leads there. So a page that lies outside of what is owned says that
//! the *operation* does only if the shared page with the link is up to date; see [`Cached::strayed`].

use farlink_runtime::{
    buffer::Buffer,
    interrupt::Cause,
    one_sided::{After, PageCopy},
};

use super::{change::until_arrived, *};

/// A page that exists, what is done with it, and where it lies in what is owned.
type Old<'a, P> = (CachedPage<'a, P>, Role, Overlap);

impl<P: Plugin> Cached<P> {
    /// Where a page lies, seen from what is owned. A leaf got into the cache because it is inside, or was.
    pub(super) fn overlap_of(&self, page: &CachedPage<'_, P>) -> Result<Overlap, Interrupt> {
        match page.level() == 0 && !self.cache.store().may_have_others() {
            true => Ok(Overlap::Inside),
            false => page.read(|words| self.overlap(words)),
        }
    }

    /// A change of pages some of which are shared.
    pub(super) async fn change_shared<'a>(
        &'a self,
        old: Vec<Old<'a, P>>,
        new: Vec<NewPage>,
        f: &mut dyn FnMut(&mut CachedPages<'a>),
    ) -> Result<Pages<CachedPage<'a, P>>, Interrupt> {
        let (structure, store) = (self.context().structure.id, self.cache.store());
        let mut reserved = Vec::with_capacity(new.len());
        let mut images: Vec<Buffer> = Vec::with_capacity(new.len());
        for page in &new {
            reserved.push(self.reserve(page).await?);
            images.push(self.worker().buffer(page.class().words())?);
        }
        let mut copies = Vec::new();
        for (page, _, overlap) in &old {
            match overlap {
                Overlap::Inside => {}
                Overlap::Outside => return Err(Error::OutsidePartition { page: page.at() }.into()),
                Overlap::Partly => copies.push(self.current(page).await?),
            }
        }
        // Locks may not land once a part is given up: there they would be another owner's pages.
        let enter = {
            let here = self.clone();
            move |mut pages: &mut dyn Iterator<Item = &[u64]>| {
                let store = here.cache.store();
                let passage = store.begin_change()?;
                match Iterator::all(&mut pages, |words| store.overlap(words) == Overlap::Partly) {
                    true => Ok(passage),
                    false => Err(Interrupt::conflict()),
                }
            }
        };
        let Some(locked) = self.one_sided().lock(copies, enter).await? else {
            return Err(Interrupt::conflict());
        };
        let passage = locked.guard().clone();
        for (page, _, overlap) in &old {
            if self.overlap_of(page)? != *overlap {
                return Err(Interrupt::conflict());
            }
        }
        let held: SmallVec<[_; 4]> = old.iter().map(|(page, ..)| &page.0).collect();
        let (mut after, mut freeing) = (Vec::new(), SmallVec::<[Link; 2]>::new());
        let mut unlocking: Vec<Link> = Vec::new();
        let mut private = vec![false; new.len()];
        let is_shared = |page: usize| old.get(page).is_some_and(|(.., overlap)| *overlap == Overlap::Partly);
        let changed = self.cache.change(&held, reserved, |change| {
            let mut pages = CachedPages::open(change, structure, old.iter().map(|&(_, role, _)| role), &new);
            f(&mut pages);
            let closed = pages.close(change, |page, words| match page.checked_sub(old.len()) {
                // What is private stays so: remote memory may have an old copy.
                None => is_shared(page) || self.overlap(words) == Overlap::Inside,
                Some(new) => {
                    private[new] = self.overlap(words) == Overlap::Inside;
                    true
                }
            });
            for (page, (.., overlap)) in old.iter().enumerate() {
                if *overlap == Overlap::Partly {
                    change.write_through(page);
                    after.push(match closed.fate(page) {
                        Fate::Freed => After::Freed,
                        Fate::Changed => {
                            let mut words = vec![0; change.count(page)].into_boxed_slice();
                            self.cache.unswizzled(change.words(page), &mut words);
                            After::Changed(words)
                        }
                        _ => After::Kept,
                    });
                }
            }
            for (index, image) in images.iter_mut().enumerate().filter(|&(index, _)| !private[index]) {
                change.write_through(old.len() + index);
                self.cache.unswizzled(change.words(old.len() + index), image);
            }
            // Before anybody can see the change, and read from remote memory what it has freed, or write what it has unlocked.
            freeing.extend(closed.freed().map(|(page, _)| old[page].0.link()));
            freeing.iter().for_each(|&page| store.known().freeing.insert(page));
            let there = (0..old.len()).filter(|&page| is_shared(page)).map(|page| old[page].0.link());
            unlocking
                .extend(there.chain(new.iter().zip(&private).filter(|(_, is)| !**is).map(|(page, _)| page.link())));
            unlocking.iter().for_each(|&page| store.known().unlocking.insert(page));
            closed
        });
        let closed = match changed {
            Ok(closed) => closed,
            Err(error) => {
                // None, if the function was not called.
                freeing.iter().for_each(|&page| store.known().freeing.remove(page));
                unlocking.iter().for_each(|&page| store.known().unlocking.remove(page));
                return Err(
                    self.refused(error, old.first().map_or(self.context().structure.root, |(page, ..)| page.at()))
                );
            }
        };
        drop(held);
        let batch = store.latest_batch();
        let freed: Vec<(usize, LockWord)> = closed.freed().collect();
        let changed = |page: &usize| matches!(closed.fate(*page), Fate::Changed | Fate::Freed | Fate::New);
        let recorded: Vec<(Link, u64)> = (0..old.len())
            .filter(|page| is_shared(*page) && changed(page))
            .map(|page| (old[page].0.link(), closed.lock(page).next_version()))
            .chain(
                new.iter()
                    .zip(&private)
                    .filter(|(_, is)| !**is)
                    .map(|(page, _)| (page.link(), page.first_lock().version())),
            )
            .collect();
        let mut private_freed = Vec::new();
        for &(page, lock) in freed.iter().filter(|&&(page, _)| !is_shared(page)) {
            private_freed.extend(old[page].0.link().remote().map(|(at, class)| (at, class, lock)));
        }
        let (mut written_back, mut shared_new) = (Vec::new(), Vec::new());
        for ((page, image), is_private) in new.into_iter().zip(images).zip(private) {
            if is_private {
                written_back.push(page_id(page.link()));
                page.publish();
            } else {
                store.known().shared.insert(page.link());
                shared_new.push((page, image));
            }
        }
        let handle = self.clone();
        let finish = async move {
            let _passage = passage;
            let store = handle.cache.store();
            // If a memory server is lost, what is on the others is finished all the same.
            let arrived = until_arrived(store, batch).await;
            if let (Err(error), Some(log)) = (&arrived, store.log()) {
                log.is_stuck(error);
            }
            let mut attempt = 0;
            for page in written_back {
                while let Err(error) = handle.cache.flush_each([page]).await {
                    if attempt >= WRITES_MAX {
                        tracing::warn!(%error, "a new page was not written before a page that leads to it");
                        break;
                    }
                    handle.worker().back_off(attempt).await;
                    attempt += 1;
                }
            }
            let written = locked.finish(after, shared_new).await;
            match (&written, store.log()) {
                (Ok(()), Some(log)) => recorded.iter().for_each(|&(page, version)| log.is_written(page, version)),
                (Err(error), Some(log)) => log.is_stuck(error),
                (_, None) => {}
            }
            unlocking.iter().for_each(|&page| store.known().unlocking.remove(page));
            for (at, class, lock) in private_freed {
                match allocation::free_owned(handle.worker().clone(), at, class, lock).await {
                    Ok(()) => {
                        store.log().iter().for_each(|log| log.is_written(Link::to(at, class), lock.next_version()))
                    }
                    Err(error) => {
                        tracing::warn!(page = %at, %error, "a page was not freed");
                        store.log().iter().for_each(|log| log.is_stuck(&error));
                    }
                }
            }
            freeing.iter().for_each(|&page| store.known().freeing.remove(page));
            arrived.and(written)
        };
        self.worker().spawn_to_end(finish).await?;
        self.tend_log();
        let is_freed = |page: usize| freed.iter().any(|&(freed, _)| freed == page);
        let left = old.into_iter().enumerate().map(|(at, (page, ..))| (!is_freed(at)).then_some(page));
        Ok(Pages::after(left))
    }

    /// What it means that the page behind a link of `from` could not be had: if it lies outside of what is owned, the operation does,
    /// or `from` is old. So it is, too, if that page is none any more, and `from` lies outside; and where nothing is owned any more, the
    /// operation does in any case.
    #[cold]
    pub(super) async fn strayed(&self, from: &CachedPage<'_, P>, error: Interrupt) -> Interrupt {
        let is_stale = matches!(error, Interrupt::Restart(Cause::Stale { .. }));
        let is_outside =
            matches!(&error, Interrupt::Failed(cause) if matches!(**cause, Error::OutsidePartition { .. }));
        if !(is_outside || is_stale && self.cache.store().may_have_others()) {
            return error;
        }
        if self.cache.store().owns_nothing() {
            return Error::OutsidePartition { page: from.at() }.into();
        }
        if is_stale {
            self.enter_shared();
        }
        let there = async || {
            let cached = page_lock(from)?;
            match self.overlap_of(from)? {
                // It was shared, and became somebody else's alone: whoever comes there again is to be told by the page above.
                Overlap::Outside => {
                    let class = from.link().remote().map_or(SizeClass::SMALLEST, |(_, class)| class);
                    if let Err(error) = self.drop_outside(from.0.id(), to_cache(class)).await {
                        tracing::debug!(%error, "a page of others stays cached");
                    }
                    return Ok(false);
                }
                Overlap::Partly if !is_stale => {}
                _ => return Ok(true),
            }
            self.worker().count_round_trip();
            let word = self.worker().read(from.at(), LOCK + 1).await.map_err(Interrupt::from)?[LOCK];
            if word == cached.word() {
                return Ok(true);
            }
            // Here, for a page that became shared by a move is not among those that the next attempt renews, before it is entered.
            match self.current(from).await {
                Ok(_) => Ok(true),
                Err(Interrupt::Restart(_)) => Ok(false),
                Err(failed) => Err(failed),
            }
        };
        match there().await {
            Ok(true) => error,
            Ok(false) => Interrupt::stale(from.at(), "another owner has changed it"),
            Err(interrupt) => interrupt,
        }
    }

    /// Waits until this compute server has ended its changes of shared pages, as far as they are about these.
    pub(super) async fn until_unlocked(&self, pages: impl Iterator<Item = Link> + Clone) {
        while pages.clone().any(|page| self.cache.store().known().unlocking.contains(page)) {
            self.worker().yield_now().await;
        }
    }

    /// A shared page as it is in remote memory, if the cached one is the same.
    async fn current(&self, page: &CachedPage<'_, P>) -> Result<PageCopy, Interrupt> {
        let copy = match self.one_sided().read_page(page.link()).await {
            // Freed by another owner: what led here is old.
            Err(gone @ Interrupt::Restart(_)) => {
                self.enter_shared();
                return Err(gone);
            }
            copy => copy?,
        };
        let cached = page_lock(page)?;
        let (is_same, is_newer) = copy.read(|words| (words[LOCK] == cached.word(), is_newer(words, cached)))?;
        if is_newer {
            self.renew(page, &copy)?;
        }
        if is_same { Ok(copy) } else { Err(Interrupt::conflict()) }
    }

    fn renew(&self, page: &CachedPage<'_, P>, copy: &PageCopy) -> Result<(), Interrupt> {
        let refreshed = copy.read(|words| self.cache.refresh_if(&page.0, words, |is| is_newer(words, lock_of(is))))?;
        refreshed.or_else(|error| match refused(error) {
            Interrupt::Failed(error) => Err(error.into()),
            // It has left the cache.
            _ => Ok(()),
        })
    }

    /// Brings all cached pages that others share up to date. A READ of each one's lock word, in one round trip; one more for those
    /// that have changed.
    pub(super) async fn renew_shared(&self) -> Result<(), Interrupt> {
        let shared = &self.cache.store().known().shared;
        let cached = shared.all().into_iter().filter(|&page| {
            if self.contains(page) {
                return true;
            }
            shared.forget(page);
            // Whoever has it come back meanwhile has found it among them, perhaps.
            let is_back = self.contains(page);
            if is_back {
                shared.insert(page);
            }
            is_back
        });
        let posted: Vec<_> =
            cached.filter_map(|page| Some((page, self.worker().read(page.remote()?.0, LOCK + 1)))).collect();
        if !posted.is_empty() {
            self.worker().count_round_trip();
        }
        for (link, posted) in posted {
            let lock = LockWord::from_word(posted.await.map_err(Interrupt::from)?[LOCK]);
            let Some((_, class)) = link.remote() else { continue };
            let found = loop {
                match self.cache.load(page_id(link), to_cache(class)).await.map(CachedPage) {
                    // Else it was changing.
                    Ok(page) if let Ok(cached) = page_lock(&page) => break Some((page, cached)),
                    Ok(_) => {}
                    // Not there any more, nor in remote memory.
                    Err(_) => break None,
                }
            };
            let Some((page, cached)) = found else { continue };
            if lock == cached {
                continue;
            }
            match self.one_sided().read_page(link).await {
                Ok(copy) => self.renew(&page, &copy)?,
                // Freed: nothing that is up to date leads there.
                Err(Interrupt::Restart(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Room in the cache for a new page. An old copy of what it was when others shared it goes.
    pub(super) async fn reserve(
        &self,
        page: &NewPage,
    ) -> Result<farlink_cache::NewPage<'_, RemoteStore<P>, CacheLayout<P>>, Interrupt> {
        let (id, class) = (page_id(page.link()), to_cache(page.class()));
        let failed = |error| self.cache.store().interrupt(error);
        loop {
            match self.cache.reserve(id, class).await {
                Err(CacheError::NotNew { .. }) => drop(self.cache.invalidate(id, class).await.map_err(failed)?),
                reserved => return reserved.map_err(failed),
            }
        }
    }
}

/// Tries of a write that a page has to wait for.
const WRITES_MAX: u32 = 1000;

fn page_lock<P: Plugin>(page: &CachedPage<'_, P>) -> Result<LockWord, Interrupt> {
    page.read(lock_of)
}

fn lock_of(words: &[AtomicU64]) -> LockWord {
    LockWord::from_word(words.get(LOCK).map_or(0, |word| word.load(Ordering::Relaxed)))
}

/// Whether a page is newer than one with this lock word.
fn is_newer(words: &[u64], than: LockWord) -> bool {
    LockWord::from_word(words[LOCK]).version() > than.version()
}
