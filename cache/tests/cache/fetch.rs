//! Shared fetches, dropped futures, and stores that fail.

use std::{
    cell::Cell,
    pin::Pin,
    rc::Rc,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Wake, Waker},
};

use crate::support::*;
use farlink_cache::{Admission, CacheError, CacheOptions, Change, Misuse, PageCache, PageId, is_swizzled};

const KEYS: u64 = under_miri(20_000, 3000);

fn test_bed(admission: Admission) -> TestBed {
    TestBed::new((0..KEYS).map(|key| (key, key)), class(256), small(256, admission), seed(3))
}

/// Polls a future a few times among the other tasks, and drops it.
async fn abandon<F: Future>(future: F, polls: u64) -> bool {
    let mut future = Box::pin(future);
    for _ in 0..polls {
        if std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await {
            return true;
        }
        pause(1).await;
    }
    false
}

/// Starts `tasks` lookups of one key while reads are held; the first `dropped` of them are dropped before reads go on.
fn lookups(tasks: u64, dropped: u64) -> (u64, u64, u64) {
    let test_bed = test_bed(Admission::Always);
    test_bed.store.world().holds_reads = true;
    let found = Rc::new(Cell::new(0));
    for task in 0..tasks {
        let (tree, found, key) = (test_bed.tree.clone(), Rc::clone(&found), KEYS / 2 + 345);
        test_bed.executor.spawn(async move {
            if task < dropped {
                assert!(!abandon(tree.get(key), 1 + task).await);
            } else {
                assert_eq!(tree.get(key).await.unwrap(), Some(key));
                found.set(found.get() + 1);
            }
        });
        test_bed.executor.run_ready();
    }
    test_bed.store.release();
    test_bed.executor.run();
    let world = test_bed.store.world();
    (found.get(), world.reads, world.reads_dropped)
}

#[test]
fn many_misses_on_one_page_are_one_read() {
    // The root is read to be anchored; two levels are below it.
    let (found, reads, dropped) = lookups(1, 0);
    assert_eq!((found, dropped), (1, 0));
    assert_eq!(lookups(50, 0), (50, reads, 0));
}

#[test]
fn a_dropped_fetch_is_taken_over() {
    let (_, reads, _) = lookups(1, 0);
    // The first one is the one that reads.
    assert_eq!(lookups(5, 1), (4, reads, 1));
    assert_eq!(lookups(5, 4), (1, reads, 4));
    let (found, _, _) = lookups(5, 5);
    assert_eq!(found, 0);
}

#[test]
fn a_failed_read_is_reported_and_leaves_nothing_behind() {
    let test_bed = test_bed(Admission::Always);
    let before = test_bed.cache.len();
    test_bed.store.world().fail_read = Some(1);
    let error = test_bed.run(|tree| async move { tree.get(77).await }).unwrap_err();
    assert!(matches!(error, CacheError::Store { source: Refused("read"), .. }), "{error}");
    assert!(error.to_string().contains("fire"), "{error}");
    assert_eq!(test_bed.cache.len(), before);
    assert_eq!(test_bed.run(|tree| async move { tree.get(77).await }).unwrap(), Some(77));
}

#[test]
fn damaged_pages_are_refused() {
    let test_bed = test_bed(Admission::Always);
    let (root_link, link) = {
        let world = test_bed.store.world();
        let root_link = crate::support::page::image_links(&world.pages[&ROOT])[0];
        (root_link, crate::support::page::image_links(&world.pages[&root_link])[0])
    };
    let intact = test_bed.store.world().pages[&root_link].clone();
    let slot = crate::support::page::value_at(0);
    test_bed.store.world().pages.get_mut(&root_link).unwrap()[slot] |= 1 << 63;
    let error = test_bed.run(|tree| async move { tree.get(0).await }).unwrap_err();
    assert!(matches!(error, CacheError::Swizzled { word, .. } if word == slot), "{error}");
    test_bed.store.world().pages.get_mut(&root_link).unwrap().truncate(8);
    let error = test_bed.run(|tree| async move { tree.get(0).await }).unwrap_err();
    assert!(matches!(error, CacheError::Size { got: 8, asked: 32, .. }), "{error}");
    let mut null = intact.clone();
    null[slot] = 0;
    test_bed.store.world().pages.insert(root_link, null);
    let error = test_bed.run(|tree| async move { tree.get(0).await }).unwrap_err();
    assert!(matches!(error, CacheError::BadLink), "{error}");
    let page = PageId::new(root_link).unwrap();
    assert!(test_bed.run(move |tree| async move { tree.handle.invalidate(page, tree.class).await }).unwrap());
    test_bed.store.world().pages.insert(root_link, intact);
    assert_eq!(test_bed.run(|tree| async move { tree.get(0).await }).unwrap(), Some(0));
    assert!(link != 0 && test_bed.store.world().pages.contains_key(&link));
}

#[test]
fn a_failed_write_keeps_the_page() {
    for admission in ADMISSIONS {
        let test_bed = test_bed(admission);
        test_bed.run(|tree| async move { tree.update(5, |_| 500).await }).unwrap();
        test_bed.store.world().fail_write = Some(1);
        // A bypass page may have been written already: change it once more.
        let error = test_bed.run(|tree| async move {
            let _ = tree.update(5, |_| 501).await;
            tree.handle.flush().await
        });
        let is_reported = matches!(error, Err(CacheError::Store { source: Refused("write"), .. }));
        assert!(is_reported || test_bed.tree.handle.counters().write_errors == 1, "{error:?}");
        assert_eq!(test_bed.run(|tree| async move { tree.get(5).await }).unwrap(), Some(501));
        assert_eq!(test_bed.flushed()[&5], 501);
        let counters = test_bed.tree.handle.counters();
        assert_eq!((counters.write_errors, test_bed.store.world().pages.len() > KEYS as usize / 22), (1, true));
    }
}

#[test]
fn a_flush_without_buffers_is_an_error_not_a_hang() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move { tree.update(5, |_| 500).await }).unwrap();
    test_bed.store.world().fails_buffers = true;
    let error = test_bed.run(|tree| async move { tree.handle.flush().await }).unwrap_err();
    assert!(matches!(error, CacheError::Store { source: Refused("no buffer"), .. }), "{error}");
    test_bed.store.world().fails_buffers = false;
    assert_eq!(test_bed.flushed()[&5], 500);
}

/// A cut page must not pass for written, nor one with what was in the buffer before.
#[test]
fn a_buffer_of_another_length_is_not_written() {
    for off in [-1, 1] {
        let test_bed = test_bed(Admission::Always);
        test_bed.run(|tree| async move { tree.update(5, |_| 500).await }).unwrap();
        test_bed.store.world().buffer_words_off = off;
        let flushed = test_bed.run(|tree| async move { tree.handle.flush().await });
        let words = 32usize.checked_add_signed(off).unwrap();
        let is_said = matches!(
            flushed,
            Err(CacheError::Misuse(Misuse::BufferSize { got, words: 32 })) if got == words
        );
        assert!(is_said && test_bed.store.world().writes == 0, "{off} words more: {flushed:?}");
        // Whoever finds no room because of that is told.
        let error = test_bed.run(|tree| async move {
            for key in (0..KEYS).step_by(10) {
                if let Err(error) = tree.update(key, |_| 0).await {
                    return Some(error);
                }
            }
            None
        });
        let error = error.expect("a cache that cannot write fills up").to_string();
        assert!(error.contains("a buffer of"), "{error}");
        test_bed.store.world().buffer_words_off = 0;
        assert_eq!(test_bed.flushed()[&5], 500);
    }
}

/// However long a write takes: it ends.
#[test]
fn a_page_on_its_way_to_the_store_is_dropped_when_it_is_there() {
    let test_bed = test_bed(Admission::Always);
    let leaf = test_bed.run(|tree| async move {
        tree.update(100, |_| 1).await.unwrap();
        tree.path(100).await.unwrap().last().unwrap().id()
    });
    test_bed.store.world().holds_writes = true;
    let tree = test_bed.tree.clone();
    test_bed.executor.spawn(async move { tree.handle.flush().await.unwrap() });
    test_bed.executor.run_ready();
    let (tree, outcome) = (test_bed.tree.clone(), Rc::new(Cell::new(None)));
    let dropped = Rc::clone(&outcome);
    test_bed.executor.spawn(async move {
        let is_dropped = tree.handle.invalidate(leaf, tree.class).await.map_err(|error| error.to_string());
        dropped.set(Some(is_dropped));
    });
    for _ in 0..50_000 {
        test_bed.executor.turn();
    }
    test_bed.store.release();
    test_bed.executor.run();
    assert_eq!(outcome.take(), Some(Ok(true)));
}

/// Who waits for room is woken when the frame can be had, and finds it.
#[test]
#[cfg_attr(miri, ignore = "no other code than elsewhere, many operations")]
fn the_frame_of_a_dropped_fetch_goes_to_who_waits_for_room() {
    let (executor, class) = (Executor::alone(seed(8)), class(64));
    let world = Arc::<std::sync::Mutex<World>>::default();
    let id = |page| PageId::new(page).unwrap();
    lock(&world).pages.insert(1, page::image(1, 0, 0, 0, &[], class.words()));
    let mut options = CacheOptions::new(1 << 20);
    (options.page_bytes, options.admission) = (64, Admission::Always);
    let cache = PageCache::new(TreeLayout, options).unwrap();
    let [a, b] = [1, 2].map(|seed| cache.handle(MapStore::new(&world, &executor), seed).unwrap());
    lock(&world).holds_reads = true;
    executor.block_on(async move {
        let mut reserved = Vec::new();
        for page in 1000.. {
            match a.reserve(id(page), class).await {
                Ok(page) => reserved.push(page),
                Err(_) => break,
            }
        }
        // The last frame is held by a fetch that takes long.
        drop(reserved.pop());
        let mut fetch = Box::pin(a.load(id(1), class));
        assert!(poll_now(&mut fetch).is_none());
        let mut waiting = Box::pin(b.reserve(id(2), class));
        for _ in 0..10 {
            assert!(poll_now(&mut waiting).is_none(), "all frames are held");
        }
        drop(fetch);
        let found = (0..3).find_map(|_| poll_now(&mut waiting)).map(|found| found.map(drop));
        assert!(matches!(found, Some(Ok(()))), "{} frames, and the free one is not found: {found:?}", reserved.len());
    });
}

#[test]
fn a_store_that_takes_nothing_leads_to_an_error_in_bounded_time() {
    for admission in ADMISSIONS {
        let test_bed = test_bed(admission);
        test_bed.store.world().fails_all_writes = true;
        let (written, error) = test_bed.run(|tree| async move {
            for key in (0..KEYS).map(|at| at * 10 % KEYS) {
                if let Err(error) = tree.update(key, |old| old.unwrap() + KEYS).await {
                    return (key, Some(error));
                }
            }
            (KEYS, None)
        });
        let error = error.expect("a cache that cannot write fills up");
        assert!(matches!(&error, CacheError::NoRoom { last_write_error: Some(said), .. } if said.contains("fire")));
        assert!(error.to_string().contains("fire") && test_bed.executor.polls() < 500_000, "{error}");
        // Nothing is lost, and all goes on as soon as the store takes pages again.
        test_bed.store.world().fails_all_writes = false;
        test_bed.run(move |tree| async move {
            for key in (0..KEYS).step_by(10) {
                let is_new = key < written;
                assert_eq!(tree.get(key).await.unwrap(), Some(if is_new { key + KEYS } else { key }));
            }
        });
        let store = test_bed.flushed();
        assert_eq!(store.values().filter(|&&value| value >= KEYS).count() as u64, written / 10);
    }
}

/// A probability of 0 is never, also while there is room.
#[test]
fn what_has_no_chance_is_not_kept() {
    let test_bed = test_bed(Admission::Probability { leaf: 0.0, inner: 1.0 });
    let before = test_bed.tree.handle.counters().levels[0];
    test_bed.run(|tree| async move {
        for key in (0..KEYS).step_by(3).chain((0..KEYS).step_by(3)) {
            assert_eq!(tree.get(key).await.unwrap(), Some(key));
        }
    });
    let after = test_bed.tree.handle.counters().levels[0];
    assert_eq!((after.hits - before.hits, after.misses - before.misses), (0, 2 * KEYS.div_ceil(3)));
}

/// A bypass page that was freed keeps its words for as long as it has users: what a link in it led to may have been freed, too.
#[test]
fn a_link_of_a_freed_bypass_page_is_not_followed() {
    let test_bed = test_bed(Admission::Probability { leaf: 0.0, inner: 0.0 });
    test_bed.run(|tree| async move {
        // The cache is full then, and keeps nothing new.
        for key in 0..KEYS {
            assert_eq!(tree.get(key).await.unwrap(), Some(key));
        }
        let mut random = Random(seed(5));
        let inner = loop {
            let mut path = tree.path(random.below(KEYS)).await.unwrap();
            let above_leaf = path.swap_remove(path.len() - 2);
            if above_leaf.bookmark().is_none() {
                break above_leaf;
            }
        };
        let link = inner.read(|words| words[page::value_at(0)].load(Ordering::Relaxed)).unwrap();
        tree.handle.store().world().holds_reads = true;
        let mut first = Box::pin(tree.handle.follow(&inner, link, tree.class));
        let mut second = Box::pin(tree.handle.follow(&inner, link, tree.class));
        assert!(poll_now(&mut first).is_none());
        assert!(poll_now(&mut second).is_none());
        tree.handle.store().release();
        let leaf = first.await.unwrap();
        assert!(leaf.bookmark().is_none(), "only bypass_frames have no bookmark");
        let free_both = |change: &mut Change<'_>| (0..2).for_each(|page| change.free(page));
        tree.handle.change(&[&inner, &leaf], Vec::new(), free_both).unwrap();
        drop(leaf);
        let found = second.await.map(|page| page.id());
        assert!(matches!(found, Err(CacheError::Conflict(_))), "{found:?}");
    });
}

fn poll_now<F: Future>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// The links of the page above the leaf of a key, with the size of their pages.
async fn links_above(tree: &Tree, key: u64) -> (Vec<(u64, farlink_cache::SizeClass)>, PageId) {
    let path = tree.path(key).await.unwrap();
    let above = &path[path.len() - 2];
    let links = above.read(|words| {
        let view = crate::support::page::View(words);
        (0..view.count()).map(|entry| (view.value(entry), tree.class)).collect()
    });
    (links.unwrap(), above.id())
}

#[test]
fn links_followed_together_are_read_together() {
    for admission in ADMISSIONS {
        let test_bed = test_bed(admission);
        test_bed.run(|tree| async move {
            let (mut links, above) = links_above(&tree, 100).await;
            let wanted: Vec<u64> = crate::support::page::image_links(&tree.handle.store().world().pages[&above.get()]);
            // A link that is null, one that is given twice, and one that others are fetching.
            links.extend([(0, tree.class), links[2]]);
            let path = tree.path(100).await.unwrap();
            let from = path.iter().find(|page| page.id() == above).unwrap();
            let (reads, batches) = {
                let world = tree.handle.store().world();
                (world.reads, world.batches.len())
            };
            let pages = tree.handle.follow_many(from, &links).await;
            assert_eq!(pages.len(), links.len());
            for (page, wanted) in pages.iter().zip(&wanted) {
                assert_eq!(page.as_ref().unwrap().id().get(), *wanted);
            }
            assert!(matches!(pages[wanted.len()], Err(CacheError::BadLink)));
            assert_eq!(pages[wanted.len() + 1].as_ref().unwrap().id().get(), wanted[2]);
            let world = tree.handle.store().world();
            let asked: u64 = world.batches[batches..].iter().map(|&batch| batch as u64).sum();
            assert_eq!(world.batches.len(), batches + 1, "asked for at once");
            // The first one was cached, or is a bypass page that has users.
            assert_eq!((asked, world.reads - reads), (wanted.len() as u64 - 1, asked), "{admission:?}");
        });
    }
}

#[test]
fn a_dropped_batch_is_taken_over_and_one_that_fails_says_so() {
    let test_bed = test_bed(Admission::Always);
    let (tree, executor) = (test_bed.tree.clone(), test_bed.executor.clone());
    test_bed.run(|_| async move {
        let (links, above) = links_above(&tree, 100).await;
        tree.handle.store().world().holds_reads = true;
        let found = Rc::new(Cell::new(0));
        let (waiting, count) = (tree.clone(), Rc::clone(&found));
        {
            let path = tree.handle.load(above, tree.class).await.unwrap();
            let mut batch = Box::pin(tree.handle.follow_many(&path, &links));
            assert!(std::future::poll_fn(|cx| Poll::Ready(batch.as_mut().poll(cx).is_pending())).await);
            executor.spawn(async move {
                for key in 0..80 {
                    assert_eq!(waiting.get(key).await.unwrap(), Some(key));
                    count.set(count.get() + 1);
                }
            });
            pause(10).await;
            assert!(tree.handle.contains(PageId::new(above.get()).unwrap()));
        }
        tree.handle.store().release();
        while found.get() < 80 {
            pause(1).await;
        }
        // The store says no to all of them.
        for (link, _) in &links {
            if let Some(page) = PageId::new(*link) {
                let _ = tree.handle.invalidate(page, tree.class).await;
            }
        }
        tree.handle.store().world().fails_all_reads = true;
        let from = tree.handle.load(above, tree.class).await.unwrap();
        let pages = tree.handle.follow_many(&from, &links).await;
        let failed = pages.iter().filter(|page| matches!(page, Err(CacheError::Store { .. }))).count();
        assert!(failed >= links.len() - 2, "{failed} of {}", links.len());
        drop(pages);
        tree.handle.store().world().fails_all_reads = false;
        assert_eq!(tree.get(200).await.unwrap(), Some(200));
    });
}

/// What is rescued through a page gets its link back there: for whoever looks at the page that is no change.
#[test]
fn several_cooling_pages_are_followed_from_one_page() {
    let mut options = small(256, Admission::Always);
    options.cooling_share = 0.5;
    let test_bed = TestBed::new((0..KEYS).map(|key| (key, key)), class(256), options, seed(3));
    test_bed.run(|tree| async move {
        let mut random = Random(seed(7));
        for _ in 0..100_000 {
            let key = random.below(2500);
            let path = tree.path(key).await.unwrap();
            let above = &path[path.len() - 2];
            let Ok(links) = above.read(|words| {
                let view = page::View(words);
                (0..view.count()).map(|entry| (view.value(entry), tree.class)).collect::<Vec<_>>()
            }) else {
                continue;
            };
            let is_cooling = |word| !is_swizzled(word) && tree.handle.contains(PageId::new(word).unwrap());
            let cooling: Vec<_> = links.into_iter().filter(|&(word, _)| is_cooling(word)).collect();
            if cooling.len() >= 3 {
                let before = tree.handle.counters().total().rescues;
                let (word, class) = cooling[0];
                assert!(tree.handle.try_follow::<0>(above, word, class, None).is_some());
                assert_eq!(tree.handle.counters().total().rescues, before + 1);
                assert!(above.is_current(), "only its link to the rescued page is another one");
                for page in tree.handle.follow_many(above, &cooling[1..]).await {
                    page.unwrap();
                }
                assert_eq!(tree.handle.counters().total().rescues, before + cooling.len() as u64);
                return;
            }
        }
        panic!("never do three pages below one cool");
    });
}

/// A task that is polled again and again.
struct Polled;

impl Wake for Polled {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn who_waits_for_a_fetch_is_noted_once() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        let page = tree.path(KEYS / 2).await.unwrap().pop().unwrap().id();
        assert!(tree.handle.invalidate(page, tree.class).await.unwrap());
        tree.handle.store().world().holds_reads = true;
        let mut first = Box::pin(tree.handle.load(page, tree.class));
        assert!(poll_now(&mut first).is_none());
        let polled = Arc::new(Polled);
        let waker = Waker::from(Arc::clone(&polled));
        let mut second = Box::pin(tree.handle.load(page, tree.class));
        for _ in 0..100 {
            assert!(second.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        // This one, the waker's, and the waiter's.
        assert_eq!(Arc::strong_count(&polled), 3);
        tree.handle.store().release();
        first.await.unwrap();
        second.await.unwrap();
    });
}

#[test]
fn a_flush_whose_writes_are_cut_off_is_an_error_not_a_hang() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move { tree.update(5, |_| 500).await }).unwrap();
    test_bed.store.world().drops_tasks = true;
    let error = test_bed.run(|tree| async move { tree.handle.flush().await }).unwrap_err();
    assert!(matches!(error, CacheError::Unanswered { pages: 1 }), "{error}");
    test_bed.store.world().drops_tasks = false;
    assert_eq!(test_bed.flushed()[&5], 500);
}
