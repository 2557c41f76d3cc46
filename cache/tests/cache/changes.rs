//! Changes of structure, seen from the store: what moved is where it should be once it was evicted and read again.

use std::sync::atomic::Ordering;

use crate::support::*;
use farlink_cache::{Admission, CacheError, Change, Conflict, PageError, PageId};

const KEYS: u64 = under_miri(20_000, 3000);

fn test_bed(admission: Admission) -> TestBed {
    TestBed::new((0..KEYS).map(|key| (key * 2, key)), class(256), small(256, admission), seed(6))
}

fn id(number: u64) -> PageId {
    PageId::new(number).unwrap()
}

#[test]
fn splits_and_merges_survive_eviction() {
    for admission in ADMISSIONS {
        let test_bed = test_bed(admission);
        // Refused pages are written when their users leave, and so may come before new ones below them.
        test_bed.store.world().checks_order = admission == Admission::Always;
        let before = test_bed.store.world().pages.len();
        test_bed.run(|tree| async move {
            for key in 0..KEYS {
                assert_eq!(tree.update(key * 2 + 1, |_| key).await.unwrap(), None);
            }
            for key in (KEYS / 2..KEYS).rev() {
                assert_eq!(tree.remove(key * 2).await.unwrap(), Some(key));
            }
        });
        let odd = (0..KEYS).map(|key| (key * 2 + 1, key));
        let even = (0..KEYS / 2).map(|key| (key * 2, key));
        let model: std::collections::BTreeMap<u64, u64> = odd.chain(even).collect();
        assert_eq!(test_bed.flushed(), model);
        let after = test_bed.tree.handle.counters();
        assert!(
            test_bed.store.world().pages.len() > before + KEYS as usize / 200
                && after.total().evictions + after.total().refusals > 0
        );
        test_bed.run(move |tree| async move {
            for (key, value) in model {
                assert_eq!(tree.get(key).await.unwrap(), Some(value));
            }
        });
    }
}

#[test]
fn a_failed_change_changes_nothing() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let leaf = path.last().unwrap();
        let other = tree.path(100).await.unwrap();
        tree.handle.change(&[other.last().unwrap()], Vec::new(), |change| change.set(0, 5, 1234)).unwrap();
        let new = tree.handle.reserve(id(900_000), tree.class).await.unwrap();
        let above = &path[path.len() - 2];
        let refused = tree.handle.change(&[above, leaf], vec![new], |_| unreachable!());
        assert!(refused.is_err() && leaf.read(|_| ()).is_err() && above.is_current());
        let word = other.last().unwrap().read(|words| words[5].load(Ordering::Relaxed)).unwrap();
        assert_eq!(word, 1234);
        // As it is now, whatever it was.
        tree.handle.update(leaf, |change| change.set(0, 5, change.word(0, 5) + 1)).unwrap();
        assert_eq!(leaf.read(|words| words[5].load(Ordering::Relaxed)), Ok(1235));
    });
    assert!(!test_bed.flushed().is_empty());
}

/// A page has gone, and another one is in its frame, which is not changed in its place.
#[test]
fn a_page_that_has_gone_is_not_altered() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        let leaf = tree.path(100).await.unwrap().pop().unwrap();
        let frame_of = |page: &farlink_cache::Page<'_, MapStore, TreeLayout>| page.bookmark().unwrap().0[0];
        let words = |words: &[std::sync::atomic::AtomicU64]| -> Vec<u64> {
            words.iter().map(|word| word.load(Ordering::Relaxed)).collect()
        };
        let image = leaf.read(words).unwrap();
        let mut random = Random(1);
        let other = loop {
            let page = tree.path(random.below(KEYS) * 2).await.unwrap().pop().unwrap();
            if page.id() != leaf.id() && frame_of(&page) == frame_of(&leaf) {
                break page;
            }
        };
        let before = other.read(words).unwrap();
        // It was not changed before it went.
        let gone = PageError::Conflict(Conflict::Moved);
        let altered = tree.handle.update(&leaf, |_| unreachable!("another page is there"));
        assert_eq!((altered, tree.handle.refresh(&leaf, &image)), (Err(gone), Err(gone)));
        assert_eq!(other.read(words), Ok(before));
    });
}

#[test]
fn a_refreshed_page_keeps_its_swizzled_links() {
    let test_bed = test_bed(Admission::Always);
    let root = test_bed.store.world().pages[&ROOT].clone();
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let link = path[0].read(|words| words[crate::support::page::value_at(0)].load(Ordering::Relaxed)).unwrap();
        assert!(farlink_cache::is_swizzled(link) && path[1].is_target_of(link));
        let mut newer = root.clone();
        newer[31] = 4711;
        tree.handle.refresh(&path[0], &newer).unwrap();
        let link = path[0].read(|words| words[crate::support::page::value_at(0)].load(Ordering::Relaxed)).unwrap();
        assert!(path[1].is_target_of(link) && farlink_cache::is_swizzled(link));
        // The store has it: nothing is to be written.
        let before = tree.handle.store().world().writes;
        tree.handle.flush().await.unwrap();
        assert_eq!(tree.handle.store().world().writes, before);
        for key in (0..KEYS).step_by(5) {
            assert_eq!(tree.get(key * 2).await.unwrap(), Some(key));
        }
    });
}

/// Its caller writes it to the store, also where it changes one page alone.
#[test]
fn a_page_that_is_written_through_is_not_dirty() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let before = tree.handle.store().world().writes;
        for (value, is_through) in [(1, true), (2, false)] {
            let change = |change: &mut Change<'_>| {
                change.set(0, crate::support::page::value_at(0), value);
                if is_through {
                    change.write_through(0);
                }
            };
            tree.handle.update(&path[path.len() - 1], change).unwrap();
            tree.handle.flush().await.unwrap();
            assert_eq!(tree.handle.store().world().writes - before, u64::from(!is_through));
        }
    });
}

/// The cache's own write of an older version, which is under way, may end last.
#[test]
fn a_page_that_is_written_through_while_an_older_version_is_on_its_way_is_the_newer_one() {
    let test_bed = test_bed(Admission::Always);
    let leaf = test_bed.run(|tree| async move {
        tree.update(100, |_| 1).await.unwrap();
        tree.path(100).await.unwrap().last().unwrap().id()
    });
    test_bed.store.world().holds_writes = true;
    let tree = test_bed.tree.clone();
    test_bed.executor.spawn(async move { tree.handle.flush().await.unwrap() });
    test_bed.executor.run_ready();
    let (tree, executor) = (test_bed.tree.clone(), &test_bed.executor);
    executor.spawn(async move {
        let page = tree.handle.load(leaf, tree.class).await.unwrap();
        let mut image = vec![0; tree.class.words()];
        tree.handle.snapshot(&page, &mut image).unwrap();
        let entry = Image(&image).entries().position(|entry| entry == (100, 1)).unwrap();
        let through = |change: &mut Change<'_>| {
            change.set(0, crate::support::page::value_at(entry), 2);
            change.write_through(0);
        };
        tree.handle.update(&page, through).unwrap();
        tree.handle.snapshot(&page, &mut image).unwrap();
        tree.handle.store().world().pages.insert(leaf.get(), image);
    });
    executor.run_ready();
    let stored = || Image(&test_bed.store.world().pages[&leaf.get()]).entries().find(|entry| entry.0 == 100).unwrap().1;
    assert_eq!(stored(), 2);
    test_bed.store.release();
    executor.run();
    test_bed.run(|tree| async move { tree.handle.flush().await }).unwrap();
    assert_eq!(stored(), 2, "an older version is in the store, and nobody would write the newer one");
}

#[test]
fn a_flush_of_some_pages_writes_those_and_no_more() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        for key in (0..1000).step_by(2) {
            tree.update(key, |_| 0).await.unwrap();
        }
        let pages = 30..=40;
        let before = tree.handle.store().world().writes;
        tree.handle.flush_matching(|page, _| pages.contains(&page.get())).await.unwrap();
        assert_eq!(tree.handle.store().world().writes - before, 11);
        tree.handle.flush_matching(|page, _| pages.contains(&page.get())).await.unwrap();
        assert_eq!(tree.handle.store().world().writes - before, 11);
        let world = tree.handle.store().world();
        assert!(pages.clone().all(|page| Image(&world.pages[&page]).entries().all(|(_, value)| value == 0)));
        assert!(Image(&world.pages[&29]).entries().any(|(_, value)| value != 0));
    });
}

#[test]
fn each_named_page_is_written_if_it_is_dirty() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        for key in (0..1000).step_by(2) {
            tree.update(key, |_| 0).await.unwrap();
        }
        let before = tree.handle.store().world().writes;
        // The cache does not have the last one.
        let named = || (38..=42).chain([1 << 40]).map(id);
        tree.handle.flush_each(named()).await.unwrap();
        tree.handle.flush_each(named()).await.unwrap();
        assert_eq!(tree.handle.store().world().writes - before, 5);
        let world = tree.handle.store().world();
        assert!((38..=42).all(|page| Image(&world.pages[&page]).entries().all(|(_, value)| value == 0)));
        assert!(Image(&world.pages[&37]).entries().any(|(_, value)| value != 0));
    });
}

#[test]
fn an_invalidated_page_is_read_again() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        let leaf = tree.path(100).await.unwrap().last().unwrap().id();
        tree.update(100, |_| 1).await.unwrap();
        assert!(tree.handle.invalidate(leaf, tree.class).await.unwrap());
        assert!(!tree.handle.invalidate(leaf, tree.class).await.unwrap());
        // Unwritten, as asked.
        assert_eq!(tree.get(100).await.unwrap(), Some(50));
        // Whoever has a page in use keeps it from going.
        let anchor = tree.handle.anchor(leaf, tree.class).await.unwrap();
        let refused = tree.handle.invalidate(leaf, tree.class).await.unwrap_err();
        assert!(matches!(refused, CacheError::NoRoom { .. }), "{refused}");
        drop(anchor);
        assert!(tree.handle.invalidate(leaf, tree.class).await.unwrap());
    });
}

/// Whoever drops pages by their words drops no change that the store does not have.
#[test]
fn a_page_is_dropped_by_its_words_if_the_store_has_it() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        let leaf = tree.path(100).await.unwrap().last().unwrap().id();
        let drop_if = async |is_meant: bool| tree.handle.invalidate_if(leaf, tree.class, |_| is_meant).await.unwrap();
        assert!(!drop_if(false).await && tree.handle.contains(leaf));
        tree.update(100, |_| 1).await.unwrap();
        assert!(!drop_if(true).await && tree.handle.contains(leaf));
        assert_eq!(tree.get(100).await.unwrap(), Some(1));
        tree.handle.flush().await.unwrap();
        assert!(drop_if(true).await && !tree.handle.contains(leaf));
        assert!(!drop_if(true).await);
        assert_eq!(tree.get(100).await.unwrap(), Some(1));
    });
}
