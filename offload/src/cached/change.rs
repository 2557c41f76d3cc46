//! A change through the cache.

use farlink_cache::Store as _;
use farlink_runtime::{
    chunk_classes,
    redo::RING_CLASS,
    write_ahead::{Admitted, Log},
};

use super::*;

/// How often the older half of a log is written back in vain for a change, where memory is full.
const SHORTENED_MAX: u32 = 16;
/// The same while others are admitted, whose changes end, unless nobody polls them.
const WAITS_MAX: u32 = 10_000;

impl<P: Plugin> Cached<P> {
    /// [`Access::change`], which is called with many functions, and is long: compiled once.
    pub(super) async fn change_by<'a>(
        &'a self,
        pages: Pages<CachedPage<'a, P>>,
        f: &mut dyn FnMut(&mut CachedPages<'a>),
    ) -> Result<Pages<CachedPage<'a, P>>, Interrupt> {
        let (old, new) = pages.into_parts();
        let mut old: SmallVec<[_; 2]> = old.collect();
        // Before it is admitted: meanwhile others are.
        let is_known =
            |page: Link| page.remote().is_some_and(|(at, class)| chunk_classes::is_known(self.worker(), at, class));
        if old.iter().any(|(page, role)| *role == Role::AsRead && !is_known(page.link())) {
            // Rare, and long.
            Box::pin(self.require_pages(&old)).await?;
        }
        let mut _admitted = None;
        if let Some(log) = self.cache.store().log()
            && (self.cache.store().records(old.len(), new.len()) || !log.has_room())
        {
            let links = old.iter().map(|(page, _)| page.link()).chain(new.iter().map(NewPage::link));
            let words = links.filter_map(|link| Some(link.remote()?.1.words())).sum();
            _admitted = log.try_admit(words);
            if _admitted.is_none() {
                _admitted = Some(Box::pin(self.make_room(log, words)).await?);
            }
        }
        // Until all of it is done, also by tasks that go on when this is dropped. Not while this waits for others: whoever gives up what is
        // owned waits for it, and this may not be polled again.
        let mut passage = self.cache.store().begin_change()?;
        let structure = self.context().structure.id;
        if let ([(page, Role::Current)], true) = (&*old, new.is_empty())
            && self.overlap_of(page)? == Overlap::Inside
            && let Some((page, _)) = old.pop()
        {
            if page.level() > 0 {
                drop(passage);
                self.until_unlocked(std::iter::once(page.link())).await;
                passage = self.cache.store().begin_change()?;
                self.require_inside(&page)?;
            }
            let altered = self.cache.update(&page.0, |change| {
                let mut pages = CachedPages::open(change, structure, [Role::Current].into_iter(), &[]);
                f(&mut pages);
                pages.close(change, |_, words| self.overlap(words) == Overlap::Inside);
            });
            drop(passage);
            altered.map_err(|error| self.refused(error, page.at()))?;
            if self.cache.store().records_all() {
                self.tend_log();
            }
            return Ok(Pages::after([Some(page)]));
        }
        let mut is_shared = false;
        let mut overlaps: SmallVec<[Overlap; 4]> = SmallVec::new();
        for (index, (page, _)) in old.iter().enumerate() {
            let overlap = self.overlap_of(page)?;
            is_shared |= overlap != Overlap::Inside;
            overlaps.push(overlap);
            if old[..index].iter().any(|(other, _)| other.0.id() == page.0.id()) {
                return Err(Error::PageTwice { page: page.at() }.into());
            }
        }
        if is_shared {
            let old = old.into_iter().zip(overlaps).map(|((page, role), overlap)| (page, role, overlap)).collect();
            drop(passage);
            return Box::pin(self.change_shared(old, new, f)).await;
        }
        drop(passage);
        self.until_unlocked(old.iter().map(|(page, _)| page).filter(|page| page.level() > 0).map(PageRef::link)).await;
        let mut reserved = Vec::with_capacity(new.len());
        for page in &new {
            reserved.push(self.reserve(page).await?);
        }
        passage = self.cache.store().begin_change()?;
        old.iter().try_for_each(|(page, _)| self.require_inside(page))?;
        let held: SmallVec<[_; 4]> = old.iter().map(|(page, _)| &page.0).collect();
        let mut begun: SmallVec<[Link; 2]> = SmallVec::new();
        let changed = self.cache.change(&held, reserved, |change| {
            let mut pages = CachedPages::open(change, structure, old.iter().map(|&(_, role)| role), &new);
            f(&mut pages);
            let closed = pages.close(change, |_, words| self.overlap(words) == Overlap::Inside);
            // Before anybody can see the change, and read from remote memory what it has freed.
            begun.extend(closed.freed().map(|(page, _)| old[page].0.link()));
            begun.iter().for_each(|&page| self.cache.store().known().freeing.insert(page));
            closed
        });
        drop(held);
        let closed = match changed {
            Ok(closed) => closed,
            Err(error) => {
                begun.iter().for_each(|&page| self.cache.store().known().freeing.remove(page));
                return Err(
                    self.refused(error, old.first().map_or(self.context().structure.root, |(page, _)| page.at()))
                );
            }
        };
        for page in new {
            chunk_classes::note(self.worker(), &page);
            page.publish();
        }
        let mut after: SmallVec<[_; 4]> = old.into_iter().map(|(page, _)| Some(page)).collect();
        for (page, lock) in closed.freed() {
            let Some(link) = after[page].take().map(|page| page.link()) else { continue };
            let Some((at, class)) = link.remote() else { continue };
            let free = allocation::free_owned(self.worker().clone(), at, class, lock);
            let (store, version) = (self.cache.store().clone(), lock.next_version());
            let batch = store.latest_batch();
            // Nobody waits for it: the page is out of use already.
            let passage = passage.clone();
            let task = async move {
                let _passage = passage;
                let Some(log) = store.log() else { return };
                match log_and_free(&store, batch, free).await {
                    Ok(()) => {
                        log.is_written(link, version);
                        store.known().freeing.remove(link);
                    }
                    Err(error) => {
                        tracing::warn!(page = %at, %error, "a page was not freed");
                        log.is_stuck(&error);
                    }
                }
            };
            drop(self.worker().spawn_to_end(task));
        }
        self.tend_log();
        Ok(Pages::after(after))
    }

    /// That each page that a change may free is one of its chunk: before anything is changed, for a log that frees what is no page is of
    /// no use.
    #[cold]
    async fn require_pages(&self, old: &[(CachedPage<'_, P>, Role)]) -> Result<(), Interrupt> {
        for (at, class) in
            old.iter().filter(|(_, role)| *role == Role::AsRead).filter_map(|(page, _)| page.link().remote())
        {
            chunk_classes::require(self.worker(), at, class).await?;
        }
        Ok(())
    }

    /// That a page still lies inside of what is owned, of which a part may have been given up.
    fn require_inside(&self, page: &CachedPage<'_, P>) -> Result<(), Interrupt> {
        match self.overlap_of(page)? {
            Overlap::Inside => Ok(()),
            _ => Err(Interrupt::conflict()),
        }
    }

    /// Has the log admit a change. Where memory is full, writes back pages that its oldest records are about, or waits for who does.
    #[cold]
    async fn make_room<'l>(&self, log: &'l Log, words: usize) -> Result<Admitted<'l>, Interrupt> {
        let (mut attempt, mut in_vain) = (0, 0);
        loop {
            if let Some(admitted) = log.admit(self.worker(), words).await? {
                return Ok(admitted);
            }
            // A log that is given up has no room any more.
            drop(self.cache.store().begin_change()?);
            match log.shorten() {
                Some(_) if in_vain >= if log.has_admitted() { WAITS_MAX } else { SHORTENED_MAX } => {
                    return Err(Error::OutOfMemory { class: RING_CLASS }.into());
                }
                Some(shortening) => {
                    let oldest = log.oldest_batch();
                    let (cache, shortened) = (self.cache.clone(), log.clone());
                    let writing = async move {
                        // One at a time: there is room for few images.
                        let is_written = |page: &Link| !cache.store().known().unlocking.contains(*page);
                        for page in shortened.oldest_pages().into_iter().filter(is_written) {
                            if let Err(error) = cache.flush_each([page_id(page)]).await {
                                tracing::debug!(%error, "a page in an owner's log was not written back");
                            }
                        }
                        drop(shortening);
                    };
                    self.worker().spawn_to_end(writing).await;
                    if log.oldest_batch() != oldest {
                        // Others may have had what it made.
                        in_vain = 0;
                        continue;
                    }
                    self.worker().back_off(in_vain).await;
                    in_vain += 1;
                }
                None => {
                    self.worker().back_off(attempt).await;
                    attempt += 1;
                }
            }
        }
    }

    /// After a change of several pages: has the log written if much is pending, and pages that its oldest records are about.
    pub(super) fn tend_log(&self) {
        let store = self.cache.store();
        let Some(log) = store.log() else { return };
        let chores = log.chores();
        if chores.is_due {
            let (store, batch) = (store.clone(), store.latest_batch());
            drop(self.worker().spawn_to_end(async move {
                if let Some(log) = store.log()
                    && let Err(error) = log.arrival(&store.context().worker, batch).await
                {
                    tracing::debug!(%error, "an owner's log waits");
                }
            }));
        }
        if chores.shorten
            && let Some(shortening) = log.shorten()
        {
            let (cache, store) = (self.cache.clone(), store.clone());
            drop(self.worker().spawn_to_end(async move {
                let Some(log) = store.log() else { return };
                if let Err(error) = cache.flush_each(log.oldest_pages().into_iter().map(page_id)).await {
                    tracing::debug!(%error, "pages in an owner's log were not written back");
                }
                drop(shortening);
            }));
        }
    }
}

/// Frees a page in remote memory once the log says so.
async fn log_and_free<P: Plugin>(
    store: &RemoteStore<P>,
    batch: u64,
    free: impl Future<Output = Result<(), Error>>,
) -> Result<(), Error> {
    until_arrived(store, batch).await?;
    free.await
}

/// Waits until a batch of the log has arrived, however long there is no memory for it.
///
/// # Errors
/// If a memory server is lost.
pub(super) async fn until_arrived<P: Plugin>(store: &RemoteStore<P>, batch: u64) -> Result<(), Error> {
    let (worker, Some(log)) = (&store.context().worker, store.log()) else { return Ok(()) };
    let mut attempt = 0;
    while let Err(error) = log.arrival(worker, batch).await {
        if !matches!(error, Error::NotRecorded { .. }) {
            return Err(error);
        }
        worker.back_off(attempt).await;
        attempt += 1;
    }
    Ok(())
}
