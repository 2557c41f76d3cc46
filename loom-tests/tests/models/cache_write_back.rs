//! Write-back of the cache: snapshots against writers.
//!
//! A dirty page is flushed while another thread changes it. Asserted: after a last flush the store has the last value,
//! whether the page was evicted in between or not; and what is evicted is in the store as it was. The same for a page that was
//! refused admission and is written when its last user leaves, also if a write fails. Whoever finds that a write has ended,
//! and reads the page from the store again, reads what was written, whatever memory the store is in.
//!
//! Broken variants: a look at the flags that does not acquire reads the store as it was before; a page that counts as clean
//! from the end of the write on, not from the snapshot, loses what was changed meanwhile; a last user that looks at *dirty* and
//! *writing* one after the other drops a page whose write has failed.

use std::sync::Arc;

use farlink_cache::{Admission, PageCache, PageId, SizeClass, Store, model, model::Step};
use farlink_loom_tests::{CLASS, Handle, Pages, Seen, Tree, block_on, explore, id, refuse_without, run};
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};

fn set(handle: &Handle, page: u64, value: u64) -> bool {
    let page = block_on(handle.load(id(page), CLASS)).expect("it is there");
    handle.update(&page, |change| change.set(0, 1, value)).is_ok()
}

/// A writer, and one who flushes the page and then evicts it. Returns whether the writer succeeded, and whether the page was
/// evicted.
fn write_and_flush() -> [bool; 2] {
    let store = Pages::new(&[(2, 0, 20)]);
    let cache = store.cache(2);
    let [writer, flusher] = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    assert!(set(&writer, 2, 21), "nobody else is there");
    let frame = cache.places(id(2))[0].frame;
    let writer = run(move || (set(&writer, 2, 22), writer));
    let flusher = run(move || {
        block_on(flusher.flush()).expect("the store takes it");
        (flusher.cool_frame(frame) && flusher.evict_any(), flusher)
    });
    let ((is_written, writer), (is_evicted, _flusher)) = (writer.join(), flusher.join());
    block_on(writer.flush()).expect("the store takes it");
    assert_eq!(store.value(2), if is_written { 22 } else { 21 }, "a change was lost");
    [is_written, is_evicted]
}

/// A store of one page, in memory that is ordered by nothing but the cache.
#[derive(Clone)]
struct Word(Arc<AtomicU64>);

impl Store for Word {
    type Buffer = Vec<u64>;
    type Error = std::convert::Infallible;

    fn buffer(&self, words: usize) -> Result<Vec<u64>, Self::Error> {
        Ok(vec![0; words])
    }

    async fn read(&self, _page: PageId, class: SizeClass) -> Result<Vec<u64>, Self::Error> {
        let mut words = vec![0; class.words()];
        words[1] = self.0.load(Relaxed);
        Ok(words)
    }

    async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<Result<(), Self::Error>> {
        pages.into_iter().map(|(_, words)| self.0.store(words[1], Relaxed)).map(Ok).collect()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        block_on(task);
    }
}

/// One who flushes a page, and one who evicts it and reads it again, or waits for the flush and looks into the store. Returns
/// whether the page was evicted.
fn write_and_read_again(flushes: bool) -> bool {
    let store = Word(Arc::new(AtomicU64::new(20)));
    let cache = PageCache::new(Tree, model::options(2)).expect("a model's options work");
    let [writer, reader] = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    let frame = {
        let page = block_on(writer.load(id(2), CLASS)).expect("it is there");
        writer.update(&page, |change| change.set(0, 1, 21)).expect("nobody else is there");
        page.frame()
    };
    let writer = run(move || {
        block_on(writer.flush()).expect("the store takes it");
        writer
    });
    let reader = run(move || {
        if flushes {
            block_on(reader.flush()).expect("the store takes it");
            assert_eq!(store.0.load(Relaxed), 21, "an old version");
            return (false, reader);
        }
        let is_evicted = reader.cool_frame(frame) && reader.evict_any();
        if is_evicted {
            let page = block_on(reader.load(id(2), CLASS)).expect("it is there");
            assert_eq!(page.read(|words| words[1].load(Relaxed)), Ok(21), "an old version");
        }
        (is_evicted, reader)
    });
    let _writer = writer.join();
    reader.join().0
}

/// A cache of four frames, all in use, that admits no leaves below the root any more.
fn full(store: &Pages) -> Arc<PageCache<Tree>> {
    let mut options = model::options(4);
    options.admission = Admission::Probability { leaf: 0.0, inner: 1.0 };
    let cache = PageCache::new(Tree, options).expect("a model's options work");
    let handle = cache.handle(store.clone(), 1).expect("there are three handles");
    for page in 3..8 {
        block_on(handle.load(id(page), CLASS)).expect("it is there");
    }
    cache
}

/// A bypass page that has one user, who has changed it and is about to leave.
fn changed_bypass(store: &Pages) -> (Handle, Handle, (u32, PageId)) {
    let cache = full(store);
    let [user, other] = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    let anchor = block_on(user.anchor(id(1), CLASS)).expect("the root is there");
    let used = {
        let root = user.enter(&anchor).expect("nobody changes it");
        let word = root.read(|words| words[1].load(Relaxed)).expect("nobody changes it");
        let bypass = block_on(user.follow(&root, word, CLASS)).expect("it is there");
        user.update(&bypass, |change| change.set(0, 1, 21)).expect("it is here");
        bypass.into_use()
    };
    (user, other, used)
}

fn bypass_store() -> Pages {
    Pages::new(&[(1, 1, 2), (2, 0, 20), (3, 0, 30), (4, 0, 40), (5, 0, 50), (6, 0, 60), (7, 0, 70)])
}

/// A bypass page's last user leaves while another thread flushes it with a write that fails. True if that one got the error.
fn leave_and_fail() -> bool {
    let store = bypass_store();
    let (user, flusher, used) = changed_bypass(&store);
    store.fail_next();
    let user = run(move || {
        user.end_use(used);
        user
    });
    let flusher = run(move || (block_on(flusher.flush()).is_err(), flusher));
    let (user, (is_refused, _flusher)) = (user.join(), flusher.join());
    block_on(user.flush()).expect("the store takes it");
    assert_eq!(store.value(2), 21, "a change was lost");
    is_refused
}

/// A bypass page's last user leaves while another comes and goes. True if that one found the bypass page.
fn leave_and_come() -> bool {
    let store = bypass_store();
    let (user, other, used) = changed_bypass(&store);
    let reads = store.reads();
    let user = run(move || {
        user.end_use(used);
        user
    });
    let other = run(move || {
        let word = block_on(other.load(id(2), CLASS)).expect("it is there").read(|words| words[1].load(Relaxed));
        assert_eq!(word.unwrap_or(21), 21, "a change was lost");
        other
    });
    let (user, _other) = (user.join(), other.join());
    assert_eq!(store.value(2), 21, "a change was lost");
    let has_found = store.reads() == reads;
    assert!(!has_found || user.cache().places(id(2)).is_empty(), "a bypass that nobody uses stays");
    has_found
}

#[test]
fn no_change_is_lost_between_snapshot_and_write() {
    let (written, evicted) = (Seen::new(), Seen::new());
    let seen = (written.clone(), evicted.clone());
    explore("cache write-back, write and flush", move || {
        let [is_written, is_evicted] = write_and_flush();
        if is_written && !is_evicted {
            seen.0.mark();
        }
        if is_evicted {
            seen.1.mark();
        }
    });
    written.require("the writer succeeds and the page stays");
    evicted.require("the page is evicted");
}

#[test]
fn who_finds_a_page_written_reads_it_from_the_store() {
    let evicted = Seen::new();
    let seen = evicted.clone();
    explore("cache write-back, write and read again", move || {
        if write_and_read_again(false) {
            seen.mark();
        }
    });
    evicted.require("the page is evicted");
    explore("cache write-back, two flushes", || {
        write_and_read_again(true);
    });
}

#[test]
fn broken_looks_at_the_flags_read_an_old_version() {
    // An eviction has a fence of its own.
    refuse_without(Step::WriteSeen, "cache write-back, ended but not seen", "an old version", || {
        write_and_read_again(true);
    });
}

#[test]
fn a_bypass_page_whose_write_fails_stays() {
    let refused = Seen::new();
    let seen = refused.clone();
    explore("cache write-back, a bypass's write fails", move || {
        if leave_and_fail() {
            seen.mark();
        }
    });
    refused.require("the flush fails");
}

#[test]
fn a_bypass_page_goes_with_its_last_user() {
    let (found, fetched) = (Seen::new(), Seen::new());
    let seen = (found.clone(), fetched.clone());
    explore(
        "cache write-back, users of a bypass",
        move || if leave_and_come() { seen.0.mark() } else { seen.1.mark() },
    );
    found.require("the second user finds the bypass");
    fetched.require("the second user comes too late");
}

#[test]
fn broken_last_users_wait_for_a_bypass_page_that_has_gone() {
    refuse_without(Step::BypassCheck, "cache write-back, bypass not looked at", "maximum number of branches", || {
        leave_and_come();
    });
}

#[test]
fn broken_snapshots_lose_what_comes_after() {
    refuse_without(Step::CleanAtSnapshot, "cache write-back, clean after the write", "a change was lost", || {
        write_and_flush();
    });
}

#[test]
fn broken_last_looks_drop_a_bypass_page_that_is_dirty() {
    refuse_without(Step::FlagsAtOnce, "cache write-back, flags one by one", "a change was lost", || {
        leave_and_fail();
    });
}
