//! Write-back: snapshots of dirty pages on their way to the store.
//!
//! A snapshot is taken under the page's lock, with page ids in place of swizzled links; the page is clean and *writing* from
//! then on, and dirty again if somebody changes it meanwhile. While it is writing it keeps its frame and its entry, and no
//! second write of it begins. Writes run as tasks of the store, so nobody's dropped future cuts them off.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::poll_fn,
    rc::Rc,
    task::{Poll, Waker},
};

use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::{
    error::{CacheError, Misuse},
    fetch::yield_once,
    frame::State,
    handle::CacheHandle,
    id::{PageId, SizeClass},
    sync::{AtomicU64, Ordering, Spin, Step, fence, is_left_out},
    table::Found,
    traits::{Layout, Store},
};

/// Pages that a flush gives to the store together.
const FLUSHED_TOGETHER: usize = 32;
/// Bytes that a flush has on their way at a time, about: by many small writes, so that a round trip costs little beside them, and
/// few enough for what others ask of the store meanwhile.
const FLUSHED_BYTES: usize = 256 << 10;

/// Pages whose first words are asked for while others are looked at: they are in no cache of the processor, most of them.
const LOOKED_AHEAD: u32 = 8;
/// What is looked at first of a page.
const FIRST_WORDS: usize = 16;

/// A page to be written. Whoever has one writes it: its frame waits.
pub(crate) struct Snapshot<B> {
    index: u32,
    page: PageId,
    image: B,
}

/// A snapshot, or why there is none.
type Snapped<S> = Result<Snapshot<<S as Store>::Buffer>, CacheError<<S as Store>::Error>>;

/// Frames that the store has been asked to write, in order, and has not answered for. Dropped, they are dirty again: the
/// task was cut off, or the store gave too few answers. Whoever waits is told then, so that nobody waits for a task that is gone.
struct Unanswered<S: Store, L: Layout> {
    handle: CacheHandle<S, L>,
    frames: VecDeque<u32>,
    answers: Vec<Result<(), CacheError<S::Error>>>,
    outcomes: Outcomes<S::Error>,
}

impl<S: Store, L: Layout> Unanswered<S, L> {
    async fn write_out(mut self, snapshots: Vec<Snapshot<S::Buffer>>, cools: bool) {
        let ids: Vec<PageId> = snapshots.iter().map(|snapshot| snapshot.page).collect();
        let pages = snapshots.into_iter().map(|snapshot| (snapshot.page, snapshot.image)).collect();
        let results = self.handle.store().write(pages).await;
        for (page, result) in ids.into_iter().zip(results) {
            if let Some(index) = self.frames.pop_front() {
                let answer = self.handle.written(index, page, result, cools);
                self.answers.push(answer);
            }
        }
    }
}

impl<S: Store, L: Layout> Drop for Unanswered<S, L> {
    fn drop(&mut self) {
        let cache = self.handle.cache();
        for &index in &self.frames {
            cache.frame(index).end_write(false);
        }
        cache.end_transfer();
        let waker = {
            let mut outcomes = self.outcomes.borrow_mut();
            outcomes.0 = Some(std::mem::take(&mut self.answers));
            outcomes.1.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

/// The store's answers, as many as it gave, once there will be no more; and who waits for them.
pub(crate) type Outcomes<E> = Rc<RefCell<(Option<Vec<Result<(), CacheError<E>>>>, Option<Waker>)>>;

/// What [`Store::read`] decides by whether a page may be let in, looked at once the page has been read. Whoever changes it and then waits in
/// [`CacheHandle::until_fetched`] waits for that page, or the change is seen here.
pub fn look_again<T>(look: impl FnOnce() -> T) -> T {
    if !is_left_out(Step::LookFence) {
        fence(Ordering::SeqCst);
    }
    look()
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
    /// A snapshot of a dirty page, whose lock the caller holds. An error if the store has no buffer for it or one of another length, or
    /// a link in it leads to no page: it was not written by anybody who knows the layout.
    pub(crate) fn image(&self, index: u32, page: PageId) -> Snapped<S> {
        let cache = self.cache();
        let frame = cache.frame(index);
        let body = cache.arena.body(frame);
        let refuse = |error: CacheError<S::Error>| {
            cache.note_write_error(&error);
            Err(error)
        };
        let mut image = match self.store().buffer(body.len()) {
            Ok(image) => image,
            Err(source) => {
                cache.note_write_error(&source);
                return Err(CacheError::Store { page, source });
            }
        };
        if image.len() != body.len() {
            return refuse(Misuse::BufferSize { got: image.len(), words: body.len() }.into());
        }
        if !self.copy_unswizzled(body, &mut image) {
            return refuse(CacheError::BadLink);
        }
        frame.begin_write(cache.flushes());
        Ok(Snapshot { index, page, image })
    }

    /// Writes pages as a task of the store; those that are still clean then cool.
    pub(crate) fn write_behind(&self, snapshots: Vec<Snapshot<S::Buffer>>) {
        if !snapshots.is_empty() {
            drop(self.begin_writes(snapshots, true));
        }
    }

    pub(crate) fn begin_writes(&self, snapshots: Vec<Snapshot<S::Buffer>>, cools: bool) -> Outcomes<S::Error> {
        let outcomes: Outcomes<S::Error> = Rc::default();
        self.cache().begin_transfer();
        let frames = snapshots.iter().map(|snapshot| snapshot.index).collect();
        let answers = Vec::with_capacity(snapshots.len());
        let unanswered = Unanswered { handle: self.clone(), frames, answers, outcomes: Rc::clone(&outcomes) };
        self.store().spawn(unanswered.write_out(snapshots, cools));
        outcomes
    }

    /// A write has ended.
    fn written(
        &self,
        index: u32,
        page: PageId,
        result: Result<(), S::Error>,
        cools: bool,
    ) -> Result<(), CacheError<S::Error>> {
        let cache = self.cache();
        let frame = cache.frame(index);
        let is_written = result.is_ok();
        let level = frame.level();
        frame.end_write(is_written);
        match &result {
            Ok(()) => {
                self.0.counters.count(level, |level| level.write_backs += 1);
                cache.forget_write_error();
            }
            Err(error) => {
                self.0.counters.write_error();
                cache.note_write_error(error);
            }
        }
        match frame.state() {
            State::Bypass if is_written => {
                // As a user that comes and goes: the last one finds out what is to be done.
                let mut spin = Spin::default();
                loop {
                    match cache.table.find(&cache.arena, page, None) {
                        Found::Busy => spin.turn(),
                        Found::Here { frame, state: State::Bypass, .. } => {
                            self.leave(frame, page);
                            break;
                        }
                        _ => break,
                    }
                }
            }
            State::Resident if cools && is_written => {
                if let Some(version) = frame.lock.read()
                    && frame.page() == Some(page)
                {
                    // Dirty again: its next turn will come.
                    if !frame.is_dirty() {
                        self.cool_or_write(index, version);
                    }
                }
            }
            _ => {}
        }
        result.map_err(|source| CacheError::Store { page, source })
    }

    /// The last user of a dirty bypass page has gone.
    pub(crate) fn write_bypass(&self, index: u32) {
        let frame = self.cache().frame(index);
        let mut spin = Spin::default();
        while frame.lock.try_lock().is_none() {
            // Another user came, and had it written and taken off: a free frame stays locked.
            if frame.state() != State::Bypass && !is_left_out(Step::BypassCheck) {
                return;
            }
            spin.turn();
        }
        if let Some(Ok(snapshot)) = self.snapshot_if(index, frame.is_dirty()) {
            drop(self.begin_writes(vec![snapshot], false));
        }
    }

    /// A snapshot of a bypass page that has no users and is dirty all the same: its write failed.
    pub(crate) fn bypass_left_dirty(&self, index: u32) -> Option<Snapshot<S::Buffer>> {
        let frame = self.cache().frame(index);
        let is_left = frame.state() == State::Bypass && frame.users() == 0 && frame.is_dirty() && !frame.is_writing();
        if is_left && frame.lock.try_lock().is_some() { self.snapshot_if(index, frame.is_dirty())?.ok() } else { None }
    }

    /// A snapshot of a page if it is due, and not being written; gives the lock back, which the caller holds.
    fn snapshot_if(&self, index: u32, is_due: bool) -> Option<Snapped<S>> {
        let frame = self.cache().frame(index);
        let is_due = is_due && matches!(frame.state(), State::Resident | State::Bypass) && !frame.is_writing();
        let snapshot = match (is_due, frame.page()) {
            (true, Some(page)) => Some(self.image(index, page)),
            _ => None,
        };
        frame.lock.unlock_unchanged();
        snapshot
    }

    /// Writes every page that is dirty now, those below before those above, and waits until all are written. Changes of several
    /// pages that come meanwhile wait for those that they would take something from, so none of what was changed before is left
    /// out. What the store then has is whole, unless such changes come and some of their pages are evicted.
    ///
    /// # Errors
    /// The first that the store refused. The others were tried; those refused stay cached and dirty.
    pub async fn flush(&self) -> Result<(), CacheError<S::Error>> {
        self.flush_matching(|_, _| true).await
    }

    /// [`CacheHandle::flush`] for pages that a function chooses by their id and words. The words may be of different
    /// moments: the function copes with any, and chooses a page that is changing if it might be meant.
    ///
    /// # Errors
    /// As [`CacheHandle::flush`].
    pub async fn flush_matching(
        &self,
        mut is_meant: impl FnMut(PageId, &[AtomicU64]) -> bool,
    ) -> Result<(), CacheError<S::Error>> {
        let cache = self.cache();
        let (_flushing, flushes) = cache.begin_flush();
        // From here on, changes have what they move written first; those that have begun are waited for.
        for index in cache.frame_numbers().filter(|_| !is_left_out(Step::ChangesEnd)) {
            let lock = &cache.frame(index).lock;
            let is_here = || matches!(cache.frame(index).state(), State::Resident | State::Cooling | State::Bypass);
            if lock.read().is_none() && lock.lock_if(&cache.waiters, self.0.number, is_here) {
                lock.unlock_unchanged();
            }
        }
        let mut dirty: Vec<(u8, u32, PageId)> = Vec::new();
        for index in cache.frame_numbers() {
            let frame = cache.frame(index);
            if cache.arena.get(index + LOOKED_AHEAD).is_some_and(|next| next.is_due(flushes)) {
                cache.arena.prefetch_body(index + LOOKED_AHEAD, FIRST_WORDS);
            }
            if let Some(page) = frame.page()
                && frame.is_due(flushes)
                && is_meant(page, cache.arena.body(frame))
            {
                dirty.push((frame.level(), index, page));
            }
        }
        self.flush_by_level(dirty, flushes).await
    }

    /// Calls a function with each page that is cached: its id, its size, and its words, which may be of different moments. Pages that
    /// come or go meanwhile may be left out, and the words may be those of the page that came.
    pub fn for_each_page(&self, mut f: impl FnMut(PageId, SizeClass, &[AtomicU64])) {
        let cache = self.cache();
        for index in cache.frame_numbers() {
            let frame = cache.frame(index);
            if !matches!(frame.state(), State::Resident | State::Cooling | State::Bypass) {
                continue;
            }
            // Its words are at least those that it had when it came.
            fence(Ordering::Acquire);
            if let Some(page) = frame.page() {
                f(page, frame.class(), cache.arena.body(frame));
            }
        }
    }

    /// Waits until every page is here that is on its way from the store, and for those that are excluded until they are no more. If the caller has just changed what [`Store::read`] goes by,
    /// which that looks at in [`look_again`], then pages that it has let in by what was before are all here.
    pub async fn until_fetched(&self) {
        let cache = self.cache();
        if !is_left_out(Step::FetchedFence) {
            fence(Ordering::SeqCst);
        }
        for index in cache.frame_numbers() {
            let frame = cache.frame(index);
            if frame.state() != State::Loading {
                continue;
            }
            fence(Ordering::Acquire);
            let page = frame.page();
            while frame.state() == State::Loading && frame.page() == page {
                yield_once().await;
            }
        }
        // What the threads wrote that have fetched is seen by whoever looks now.
        fence(Ordering::Acquire);
    }

    /// Writes those of these pages that are cached and dirty, those below before those above, and waits until that is done. Unlike
    /// [`flush`](CacheHandle::flush) it looks at these pages only, and does not wait for changes that have begun.
    ///
    /// # Errors
    /// The first that the store refused. The others were tried; those refused stay cached and dirty.
    pub async fn flush_each(&self, pages: impl IntoIterator<Item = PageId>) -> Result<(), CacheError<S::Error>> {
        let cache = self.cache();
        let (mut users, mut dirty) = (Vec::new(), Vec::new());
        for page in pages {
            loop {
                match cache.table.find(&cache.arena, page, None) {
                    Found::Here { frame, version, state } => {
                        dirty.push((cache.frame(frame).level(), frame, page));
                        // Counts as a user, if the page is there for its users.
                        users.push(self.found(frame, version, page, state == State::Bypass));
                    }
                    Found::Busy => {
                        yield_once().await;
                        continue;
                    }
                    // It has left the cache, written; or is on its way back.
                    _ => {}
                }
                break;
            }
        }
        self.flush_by_level(dirty, cache.flushes().wrapping_add(1)).await
    }

    /// Writes pages, those below before those above.
    async fn flush_by_level(
        &self,
        mut dirty: Vec<(u8, u32, PageId)>,
        flushes: u32,
    ) -> Result<(), CacheError<S::Error>> {
        dirty.sort_unstable();
        let mut refused = None;
        for level in dirty.chunk_by(|a, b| a.0 == b.0) {
            let mut left = level.chunks(FLUSHED_TOGETHER);
            let (mut under_way, mut bytes_under_way) = (FuturesUnordered::new(), 0);
            loop {
                while bytes_under_way < FLUSHED_BYTES
                    && let Some(pages) = left.next()
                {
                    let sizes = pages.iter().map(|&(_, index, _)| self.cache().frame(index).class().bytes());
                    let bytes: usize = sizes.sum();
                    bytes_under_way += bytes;
                    under_way.push(async move { (bytes, self.flush_pages(pages, flushes).await) });
                }
                let Some((bytes, written)) = under_way.next().await else { break };
                bytes_under_way -= bytes;
                if let Err(error) = written {
                    refused.get_or_insert(error);
                }
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Writes pages for the latest of so many flushes, and waits for those that are being written.
    async fn flush_pages(&self, pages: &[(u8, u32, PageId)], flushes: u32) -> Result<(), CacheError<S::Error>> {
        let cache = self.cache();
        let mut left = pages.to_vec();
        let mut refused = None;
        loop {
            let mut snapshots = Vec::new();
            let mut following = pages.iter().skip(1);
            left.retain(|&(_, index, page)| {
                let frame = cache.frame(index);
                if let Some(&(_, next, _)) = following.next() {
                    cache.arena.prefetch_body(next, frame.class().words());
                }
                if frame.page() != Some(page) || !frame.is_due(flushes) {
                    return false;
                }
                match frame.lock.try_lock().and_then(|_| self.snapshot_if(index, frame.is_due(flushes))) {
                    Some(Ok(snapshot)) => {
                        snapshots.push(snapshot);
                        false
                    }
                    Some(Err(error)) => {
                        refused.get_or_insert(error);
                        false
                    }
                    None => true,
                }
            });
            if !snapshots.is_empty() {
                let asked = snapshots.len();
                let outcomes = self.begin_writes(snapshots, false);
                let results = poll_fn(|cx| {
                    let mut outcomes = outcomes.borrow_mut();
                    match outcomes.0.take() {
                        Some(results) => Poll::Ready(results),
                        None => {
                            outcomes.1 = Some(cx.waker().clone());
                            Poll::Pending
                        }
                    }
                })
                .await;
                let pages = asked - results.len();
                refused = refused.or(results.into_iter().find_map(Result::err));
                if pages != 0 {
                    refused.get_or_insert(CacheError::Unanswered { pages });
                }
            }
            if left.is_empty() {
                return refused.map_or(Ok(()), Err);
            }
            // Being written by somebody else, or locked for a moment.
            yield_once().await;
        }
    }
}
