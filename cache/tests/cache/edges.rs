//! What one would not think of at once: splits during a flush, corrupt images, links that a change leaves behind.
use crate::support::*;
use farlink_cache::{Admission, Bookmark, CacheError, PageId};
use std::{
    cell::Cell,
    rc::Rc,
    sync::{atomic::Ordering, mpsc},
    time::Duration,
};

fn id(n: u64) -> PageId {
    PageId::new(n).unwrap()
}

#[test]
fn a_flush_writes_what_a_split_moves_meanwhile() {
    const KEYS: u64 = 600;
    let test_bed = TestBed::new((0..KEYS).map(|k| (k * 2, k)), class(256), small(256, Admission::Always), seed(1));
    test_bed.run(|tree| async move {
        for k in 0..KEYS {
            tree.update(k * 2, |_| k + 1).await.unwrap();
        }
    });
    test_bed.store.world().holds_writes = true;
    let done = Rc::new(Cell::new(false));
    let (tree, flag) = (test_bed.tree.clone(), done.clone());
    test_bed.executor.spawn(async move {
        tree.handle.flush().await.unwrap();
        flag.set(true);
    });
    for _ in 0..1000 {
        test_bed.executor.turn();
    }
    assert!(!done.get());
    let split = Rc::new(Cell::new(false));
    let (tree, flag) = (test_bed.tree.clone(), split.clone());
    test_bed.executor.spawn(async move {
        for k in KEYS - 30..KEYS {
            tree.update(k * 2 + 1, |_| 0).await.unwrap();
        }
        flag.set(true);
    });
    for _ in 0..1000 {
        test_bed.executor.turn();
    }
    assert!(!split.get(), "what a flush is about to write was moved");
    test_bed.store.release();
    test_bed.executor.run();
    assert!(done.get() && split.get());
    let stored = harvest(&test_bed.store.world());
    for k in 0..KEYS {
        assert_eq!(stored.get(&(k * 2)), Some(&(k + 1)), "key {} was changed before the flush", k * 2);
    }
}

/// What was changed before a flush is in the store after it, though others split and merge pages all the time.
#[test]
fn a_flush_ends_while_pages_split_without_end() {
    const KEYS: u64 = under_miri(1200, 60);
    // There is room for all of it: nothing is written but by flushes.
    let mut options = small(256, Admission::Always);
    options.bytes = 1 << 20;
    let test_bed = TestBed::new((0..KEYS).map(|k| (k * 20, k)), class(256), options, seed(1));
    test_bed.store.world().pending_max = 3;
    let done = Rc::new(Cell::new(false));
    for task in 0..4 {
        let (tree, done) = (test_bed.tree.clone(), done.clone());
        test_bed.executor.spawn(async move {
            let mut random = Random(task);
            while !done.get() {
                let from = random.below(KEYS) * 20;
                for key in (from + 1..from + 20).chain(from + 21..from + 40) {
                    match task % 2 {
                        0 => drop(tree.update(key, |_| 0).await.unwrap()),
                        _ => drop(tree.remove(key).await.unwrap()),
                    }
                }
                pause(1).await;
            }
        });
    }
    let before = test_bed.store.world().pages.len();
    test_bed.run(move |tree| async move {
        for round in 1..=under_miri(8, 1) {
            for k in 0..KEYS {
                tree.update(k * 20, |_| k + round).await.unwrap();
            }
            tree.handle.flush().await.unwrap();
            let stored = harvest(&tree.handle.store().world());
            for k in 0..KEYS {
                assert_eq!(stored.get(&(k * 20)), Some(&(k + round)), "key {}, changed before flush {round}", k * 20);
            }
        }
        done.set(true);
    });
    assert!(cfg!(miri) || test_bed.store.world().pages.len() > before + 20, "pages have split");
}

#[test]
fn refresh_refuses_swizzled_links() {
    const KEYS: u64 = under_miri(20_000, 3000);
    let test_bed = TestBed::new((0..KEYS).map(|k| (k * 2, k)), class(256), small(256, Admission::Always), seed(2));
    let root = test_bed.store.world().pages[&ROOT].clone();
    test_bed.run(move |tree| async move {
        let path = tree.path(100).await.unwrap();
        let n = path.len();
        let leaf = path[n - 1].id();
        // The word by which the leaf's true parent leads to it.
        let word = path[n - 2]
            .read(|words| {
                words
                    .iter()
                    .map(|w| w.load(Ordering::Relaxed))
                    .find(|&w| farlink_cache::is_swizzled(w) && path[n - 1].is_target_of(w))
            })
            .unwrap()
            .unwrap();
        let mut hostile = root.clone();
        let slot = crate::support::page::value_at(1);
        hostile[slot] = word;
        println!("refresh: {:?}", tree.handle.refresh(&path[0], &hostile));
        let parent = path[n - 2].id();
        drop(path);
        for k in KEYS / 2..KEYS {
            let _ = tree.handle.load(id(2 + k % 2000), tree.class).await;
        }
        // the parent, wherever it is now
        let parent = tree.handle.load(parent, tree.class).await.unwrap();
        let links: Vec<u64> = parent.read(|words| words.iter().map(|w| w.load(Ordering::Relaxed)).collect()).unwrap();
        if links.contains(&word) {
            let got = tree.handle.follow(&parent, word, tree.class).await;
            match got {
                Ok(page) => assert_eq!(page.id(), leaf, "a link of a current page leads to another page's frame"),
                Err(e) => println!("follow: {e}"),
            }
        } else {
            println!("the parent's link is gone");
        }
    });
}

#[test]
fn freeing_a_page_whose_link_stays_ends() {
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        let test_bed = TestBed::new((0..2000).map(|k| (k * 2, k)), class(256), small(256, Admission::Always), seed(3));
        test_bed.run(|tree| async move {
            let path = tree.path(100).await.unwrap();
            let n = path.len();
            let _ = tree.handle.change(&[&path[n - 1], &path[n - 2]], Vec::new(), |change| change.free(0));
        });
        tx.send(()).unwrap();
    });
    rx.recv_timeout(Duration::from_secs(60)).expect("change() never returns");
}

#[test]
fn any_options_that_are_accepted_work() {
    for halving_period in [1, 1 << 63, u64::MAX] {
        let mut options = small(256, Admission::Frequency);
        options.halving_period = halving_period;
        let test_bed = TestBed::new((0..2000).map(|key| (key, key)), class(256), options, seed(3));
        test_bed.run(|tree| async move {
            for key in (0..2000).chain(0..2000) {
                assert_eq!(tree.get(key).await.unwrap(), Some(key));
            }
        });
    }
}

/// Such a word can stand where the layout says that no link is: the store is not asked for what it holds there.
#[test]
fn a_word_that_only_looks_like_a_swizzled_link_leads_nowhere() {
    let test_bed = TestBed::new((0..2000).map(|k| (k * 2, k)), class(256), small(256, Admission::Always), seed(3));
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        // Frame 0, which is never used, and two that there are not.
        for word in [1 << 63, u64::MAX, 1 << 63 | 0x7fff_ffff] {
            let followed = tree.handle.follow(&path[0], word, class(256)).await;
            assert!(matches!(followed, Err(CacheError::BadLink)), "{word:#x}: {followed:?}");
        }
    });
}

#[test]
fn a_bookmark_leads_back_to_its_page_and_to_no_other() {
    const KEYS: u64 = under_miri(20_000, 3000);
    let test_bed = TestBed::new((0..KEYS).map(|k| (k * 2, k)), class(256), small(256, Admission::Always), seed(3));
    test_bed.run(|tree| async move {
        let (leaf, bookmark, hits) = {
            let path = tree.path(100).await.unwrap();
            let leaf = path.last().unwrap();
            let bookmark = leaf.bookmark().expect("an admitted page can be come back to");
            let hits = tree.handle.counters();
            let again = tree.handle.back_to(bookmark).unwrap();
            assert_eq!((again.id(), again.level()), (leaf.id(), 0));
            assert_eq!(
                again.read(|words| words[0].load(Ordering::Relaxed)).ok(),
                leaf.read(|words| words[0].load(Ordering::Relaxed)).ok()
            );
            (leaf.id(), bookmark, hits)
        };
        assert_eq!(tree.handle.counters(), hits, "coming back counts as nothing");
        // Others take its frame.
        for key in (0..KEYS).step_by(7) {
            tree.get(key * 2).await.unwrap();
        }
        assert!(!tree.handle.contains(leaf), "the cache is too small to keep it");
        if let Some(page) = tree.handle.back_to(bookmark) {
            assert!(page.read(|_| ()).is_err(), "another page was shown for it");
        }
        // Words that nobody has left.
        let [frame, version, page] = bookmark.0;
        for words in [[u64::MAX, version, page], [u64::from(u32::MAX), version, page], [frame, version, 0], [0; 3]] {
            if let Some(page) = tree.handle.back_to(Bookmark(words)) {
                assert!(page.read(|_| ()).is_err());
            }
        }
    });
}
