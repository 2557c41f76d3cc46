//! What a caller does wrong is refused with an error that says so, and harms nobody; and looks that are over say why.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{Arc, atomic::AtomicU64, atomic::Ordering::Relaxed},
    task::Poll,
};

use crate::support::{
    page::{HEAD, View, key_at, value_at},
    *,
};
use farlink_cache::{Admission, CacheError, Change, Conflict, Misuse, PageCache, PageError, PageId, is_swizzled};

const KEYS: u64 = under_miri(20_000, 3000);

fn test_bed() -> TestBed {
    TestBed::new((0..KEYS).map(|key| (key * 2, key)), class(256), small(256, Admission::Always), seed(6))
}

fn id(number: u64) -> PageId {
    PageId::new(number).unwrap()
}

fn words(page: &farlink_cache::Page<'_, MapStore, TreeLayout>) -> Vec<u64> {
    page.read(|words| words.iter().map(|word| word.load(Relaxed)).collect()).unwrap()
}

/// A second cache over the same pages.
async fn other_tree(tree: &Tree) -> Tree {
    let cache = PageCache::new(TreeLayout, small(256, Admission::Always)).unwrap();
    let handle = cache.handle(tree.handle.store().clone(), 6).unwrap();
    Tree::open(handle, tree.class, Arc::new(AtomicU64::new(1 << 40))).await.unwrap()
}

#[test]
fn a_link_followed_with_another_size_is_refused_also_if_it_is_swizzled() {
    test_bed().run(|tree| async move {
        for _ in 0..2 {
            let path = tree.path(100).await.unwrap();
            let link = path[0].read(|words| words[value_at(0)].load(Relaxed)).unwrap();
            assert!(is_swizzled(link));
            for bytes in [64, 128, 512, 4096] {
                let followed = tree.handle.follow(&path[0], link, class(bytes)).await;
                assert!(matches!(followed, Err(CacheError::BadLink)), "{bytes}: {followed:?}");
                assert!(tree.handle.try_follow::<0>(&path[0], link, class(bytes), None).is_none());
            }
            assert!(tree.handle.follow(&path[0], link, tree.class).await.is_ok());
            // A link of another page of this cache.
            let above = &path[path.len() - 2];
            let below = above.read(|words| words[value_at(View(words).child(100))].load(Relaxed)).unwrap();
            let followed = tree.handle.follow(&path[0], below, tree.class).await;
            assert!(is_swizzled(below) && matches!(followed, Err(CacheError::BadLink)), "{followed:?}");
        }
    });
}

/// The pages of a change, as it finds and as it has to leave them: what it would have written is refused.
async fn refuse(tree: &Tree, name: &str, f: impl Fn(&mut Change<'_>)) {
    let path = tree.path(100).await.unwrap();
    let [.., above, leaf] = &path[..] else { panic!("a tree of several levels") };
    let before = [words(above), words(leaf)];
    let refused = tree.handle.change(&[above, leaf], Vec::new(), |change| f(change));
    assert!(matches!(refused, Err(PageError::Misuse(Misuse::UnnamedLink { .. }))), "{name}: {refused:?}");
    assert_eq!([words(above), words(leaf)], before, "{name}: the words are put back");
    assert!(
        tree.handle.follow(above, before[0][value_at(View(&atomics(&before[0])).child(100))], tree.class).await.is_ok()
    );
}

fn atomics(words: &[u64]) -> Vec<AtomicU64> {
    words.iter().map(|&word| AtomicU64::new(word)).collect()
}

#[test]
fn a_swizzled_link_where_the_layout_names_none_is_refused() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let link_of = |change: &Change<'_>| change.word(0, value_at(View(change.words(0)).child(100)));
        refuse(&tree, "into a word of the leaf", |change| change.set(1, 31, link_of(change))).await;
        refuse(&tree, "into a key", |change| change.set(0, key_at(1), link_of(change))).await;
        // One that was remembered from a page that is not in the change.
        let root = tree.enter().unwrap();
        let foreign = words(&root)[value_at(0)];
        assert!(is_swizzled(foreign));
        refuse(&tree, "from elsewhere, as a link", |change| change.set(0, value_at(0), foreign)).await;
        refuse(&tree, "from elsewhere, as data", |change| change.set(1, 31, foreign)).await;
        let leaf = tree.path(100).await.unwrap().pop().unwrap();
        let refused = tree.handle.update(&leaf, |change| change.set(0, 31, foreign));
        assert!(matches!(refused, Err(PageError::Misuse(Misuse::UnnamedLink { word: 31, .. }))), "{refused:?}");
        // Data may look like a link.
        for word in [u64::MAX, 1 << 63, 1 << 63 | 1, 1 << 63 | 1 << 32 | 2] {
            tree.handle.update(&leaf, |change| change.set(0, 31, word)).unwrap();
        }
        tree.handle.flush().await.unwrap();
    });
    assert!(test_bed.flushed().into_iter().eq((0..KEYS).map(|key| (key * 2, key))), "nothing is lost");
}

/// A link that was remembered until its page had left the cache. Nothing in the word says that it is no data.
#[test]
fn a_link_that_has_outlived_its_page_is_refused() {
    test_bed().run(|tree| async move {
        let other = tree.path(KEYS).await.unwrap().pop().unwrap();
        let path = tree.path(100).await.unwrap();
        let [.., above, leaf] = &path[..] else { panic!("a tree of several levels") };
        let link = above.read(|words| words[value_at(View(words).child(100))].load(Relaxed)).unwrap();
        assert!(is_swizzled(link) && other.id() != leaf.id());
        assert!(tree.handle.invalidate(leaf.id(), tree.class).await.unwrap());
        let refused = tree.handle.update(&other, |change| change.set(0, 31, link));
        assert!(matches!(refused, Err(PageError::Misuse(Misuse::UnnamedLink { word: 31, .. }))), "{refused:?}");
    });
}

/// Where the layout names fewer links than before, or none.
#[test]
fn swizzled_links_that_are_left_behind_are_unswizzled() {
    for mask in [!0xff, 0x1ff] {
        let test_bed = test_bed();
        test_bed.run(move |tree| async move {
            let path = tree.path(100).await.unwrap();
            let above = &path[path.len() - 2];
            let stored = tree.handle.store().world().pages[&above.id().get()].clone();
            assert!(words(above).iter().any(|&word| is_swizzled(word)));
            tree.handle.update(above, |change| change.set(0, HEAD, change.word(0, HEAD) & mask)).unwrap();
            tree.handle.flush().await.unwrap();
            assert_eq!(tree.handle.store().world().pages[&above.id().get()][1..], stored[1..]);
            tree.handle.update(above, |change| change.set(0, HEAD, stored[HEAD])).unwrap();
            assert_eq!(tree.get(100).await.unwrap(), Some(50));
        });
        assert_eq!(test_bed.flushed().len(), KEYS as usize);
    }
}

#[test]
fn a_page_given_twice_is_refused() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let (leaf, again) = (path.last().unwrap(), tree.path(100).await.unwrap().pop().unwrap());
        let refused = tree.handle.change(&[leaf, &path[0], &again], Vec::new(), |_| unreachable!());
        assert_eq!(refused, Err(PageError::Misuse(Misuse::GivenTwice { page: leaf.id() })));
        assert!(leaf.is_current() && path[0].is_current());
        let new =
            [tree.handle.reserve(id(1 << 40), tree.class).await, tree.handle.reserve(id(1 << 40), tree.class).await];
        let new = new.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
        let refused = tree.handle.change(&[leaf], new, |_| unreachable!());
        assert_eq!(refused, Err(PageError::Misuse(Misuse::GivenTwice { page: id(1 << 40) })));
        tree.handle.change(&[leaf], Vec::new(), |change| change.set(0, value_at(0), 1)).unwrap();
    });
}

#[test]
fn an_anchor_says_that_its_page_was_freed() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let leaf = id(2);
        let anchor = tree.handle.anchor(leaf, tree.class).await.unwrap();
        let page = tree.handle.enter(&anchor).unwrap();
        tree.handle.change(&[&page], Vec::new(), |change| change.free(0)).unwrap();
        let refused = tree.handle.enter(&anchor);
        assert!(matches!(refused, Err(PageError::Misuse(Misuse::Freed { page })) if page == leaf), "{refused:?}");
        // And goes on to do so when others have its frame.
        for number in 3..under_miri(600, 300) {
            drop(tree.handle.load(id(number), tree.class).await.unwrap());
        }
        let refused = tree.handle.enter(&anchor);
        assert!(matches!(refused, Err(PageError::Misuse(Misuse::Freed { .. }))), "{refused:?}");
    });
}

#[test]
fn what_belongs_to_another_cache_is_refused() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let other = other_tree(&tree).await;
        let misuse = |error: PageError| assert_eq!(error, PageError::Misuse(Misuse::OtherCache));
        let (path, foreign) = (tree.path(100).await.unwrap(), other.path(100).await.unwrap());
        let (root, leaf) = (&foreign[0], foreign.last().unwrap());
        let anchor = other.handle.anchor(id(2), tree.class).await.unwrap();
        misuse(tree.handle.enter(&anchor).unwrap_err());
        misuse(tree.handle.change(&[&path[0], leaf], Vec::new(), |_| unreachable!()).unwrap_err());
        misuse(tree.handle.update(leaf, |_| unreachable!()).unwrap_err());
        misuse(tree.handle.refresh(leaf, &[0; 32]).unwrap_err());
        misuse(tree.handle.snapshot(leaf, &mut [0; 32]).unwrap_err());
        let new = other.handle.reserve(id(1 << 41), tree.class).await.unwrap();
        misuse(tree.handle.change(&[&path[0]], vec![new], |_| unreachable!()).unwrap_err());
        assert!(tree.handle.back_to(leaf.bookmark().unwrap()).is_none(), "a bookmark of another cache");
        let (link, foreign_link) = (words(&path[0])[value_at(0)], words(root)[value_at(0)]);
        assert!(is_swizzled(link) && is_swizzled(foreign_link));
        for word in [link, foreign_link, 17] {
            let followed = tree.handle.follow(root, word, tree.class).await;
            assert!(matches!(followed, Err(CacheError::Misuse(Misuse::OtherCache))), "{followed:?}");
        }
        let followed = tree.handle.follow(&path[0], foreign_link, tree.class).await;
        assert!(matches!(followed, Err(CacheError::BadLink)), "{followed:?}");
        // Another handle of the same cache is no other cache.
        let clone = tree.handle.clone();
        assert!(clone.follow(&path[0], link, tree.class).await.is_ok());
    });
}

#[test]
fn a_panic_within_a_change_harms_nobody() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let [.., above, leaf] = &path[..] else { panic!("a tree of several levels") };
        let before = [words(above), words(leaf)];
        let panics = |f: &dyn Fn()| assert!(catch_unwind(AssertUnwindSafe(f)).is_err());
        let mess = |change: &mut Change<'_>| {
            for word in 0..32 {
                change.set(0, word, !0);
                change.set(0, word, !1);
            }
            change.free(0);
        };
        let new = tree.handle.reserve(id(1 << 40), tree.class).await.unwrap();
        let new = std::cell::RefCell::new(vec![new]);
        panics(&|| {
            let _ = tree.handle.change(&[above, leaf], new.take(), |change| {
                mess(change);
                change.set(2, 7, 1);
                change.set(1, 99, 0);
            });
        });
        panics(&|| tree.handle.update(leaf, |change| change.set(0, 32, 0)).unwrap_or_default());
        panics(&|| tree.handle.update(leaf, |change| change.free(0)).unwrap_or_default());
        // Who has read what was set then does not take it for the page.
        let (seen, torn) = (tree.path(100).await.unwrap().pop().unwrap(), std::cell::RefCell::default());
        let read = seen.read(|words| {
            panics(&|| {
                let _ = tree.handle.change(&[leaf], Vec::new(), |change| {
                    change.set(0, 9, !0);
                    *torn.borrow_mut() = words[9].load(Relaxed);
                    panic!("on purpose");
                });
            });
            torn.take()
        });
        assert_eq!(read, Err(Conflict::Moved));
        // Whoever takes the change away has it end as well.
        panics(&|| {
            let _ = tree.handle.change(&[leaf], Vec::new(), |change| mess(&mut std::mem::take(change)));
        });
        assert_eq!([words(above), words(leaf)], before);
        assert!(!tree.handle.contains(id(1 << 40)), "the new page is gone");
        let writes = tree.handle.store().world().writes;
        tree.handle.flush().await.unwrap();
        assert_eq!(tree.handle.store().world().writes, writes, "nothing has changed");
        assert_eq!(tree.update(100, |_| 1).await.unwrap(), Some(50));
    });
    assert_eq!(test_bed.flushed()[&100], 1);
}

#[test]
fn a_page_that_moved_is_told_from_one_that_changed() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let leaf = path.last().unwrap();
        let seen = tree.path(100).await.unwrap().pop().unwrap();
        tree.handle.update(leaf, |change| change.set(0, value_at(0), 1)).unwrap();
        assert_eq!(seen.read(|_| ()), Err(Conflict::Changed));
        let refused = tree.handle.change(&[&seen], Vec::new(), |_| unreachable!());
        assert_eq!(refused, Err(PageError::Conflict(Conflict::Changed)));
        // A link in it was swizzled, for somebody else.
        let root = tree.enter().unwrap();
        let again = tree.enter().unwrap();
        let cold = tree.handle.follow(&root, words(&root)[value_at(3)], tree.class).await.unwrap();
        let link = cold.read(|words| View(words).value(0)).unwrap();
        let at_cold = tree.handle.load(cold.id(), tree.class).await.unwrap();
        drop(tree.handle.follow(&cold, link, tree.class).await.unwrap());
        assert!(cold.is_current() && !at_cold.is_current());
        assert_eq!(at_cold.read(|_| ()), Err(Conflict::Moved));
        let _ = again;
        // Evicted, and another page in its place.
        let held = tree.path(4000).await.unwrap().pop().unwrap();
        for key in (0..KEYS).step_by(7) {
            tree.get(key * 2).await.unwrap();
        }
        assert!(!tree.handle.contains(held.id()));
        assert_eq!(held.read(|_| ()), Err(Conflict::Moved));
        // Freed, or dropped because the store has a newer one.
        let dropped = tree.path(2000).await.unwrap().pop().unwrap();
        assert!(tree.handle.invalidate(dropped.id(), tree.class).await.unwrap());
        assert_eq!(dropped.read(|_| ()), Err(Conflict::Changed));
    });
}

#[test]
fn a_snapshot_is_what_the_store_would_have() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        for page in &path {
            let mut copy = [0; 32];
            tree.handle.snapshot(page, &mut copy).unwrap();
            assert_eq!(copy[..], tree.handle.store().world().pages[&page.id().get()][..]);
        }
        assert!(words(&path[0]).iter().any(|&word| is_swizzled(word)));
        let refused = tree.handle.snapshot(&path[0], &mut [0; 31]);
        assert_eq!(refused, Err(PageError::Misuse(Misuse::BufferSize { got: 31, words: 32 })));
        for length in [31, 33] {
            let refused = tree.handle.refresh(&path[0], &vec![0; length]);
            assert_eq!(refused, Err(PageError::Misuse(Misuse::BufferSize { got: length, words: 32 })));
        }
        tree.update(100, |_| 7).await.unwrap();
        let over = tree.handle.snapshot(path.last().unwrap(), &mut [0; 32]);
        assert_eq!(over, Err(PageError::Conflict(Conflict::Changed)));
    });
}

#[test]
fn a_panic_while_a_page_is_judged_harms_nobody() {
    for admission in [Admission::Always, Admission::Probability { leaf: 0.0, inner: 1.0 }] {
        let test_bed = TestBed::new((0..KEYS).map(|key| (key * 2, key)), class(256), small(256, admission), seed(6));
        test_bed.run(|tree| async move {
            let held = tree.path(100).await.unwrap().pop().unwrap();
            let mut judged = pin!(tree.handle.invalidate_if(held.id(), tree.class, |_| panic!("on purpose")));
            let has_panicked = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| judged.as_mut().poll(cx))) {
                Ok(polled) => polled.map(|_| false),
                Err(_) => Poll::Ready(true),
            });
            assert!(has_panicked.await);
            assert_ne!(held.read(|_| ()), Err(Conflict::Changed), "the page is locked");
            drop(held);
            assert_eq!(tree.update(100, |_| 1).await.unwrap(), Some(50));
        });
        assert_eq!(test_bed.flushed()[&100], 1);
    }
}

#[test]
fn a_swizzled_link_is_moved_and_not_copied() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let slots = |change: &Change<'_>| {
            let at = View(change.words(0)).child(100);
            (value_at(at), value_at(if at == 0 { 1 } else { 0 }))
        };
        refuse(&tree, "within a page", |change| {
            let (from, to) = slots(change);
            change.set(0, to, change.word(0, from));
        })
        .await;
        // Out of a page that stays as it is.
        let path = tree.path(100).await.unwrap();
        let (root, above) = (&path[0], &path[path.len() - 2]);
        let before = words(above);
        let refused = tree.handle.change(&[root, above], Vec::new(), |change| {
            change.set(1, value_at(0), change.word(0, value_at(View(change.words(0)).child(100))));
        });
        assert!(matches!(refused, Err(PageError::Misuse(Misuse::UnnamedLink { .. }))), "{refused:?}");
        assert_eq!(words(above), before);
    });
    assert!(test_bed.flushed().into_iter().eq((0..KEYS).map(|key| (key * 2, key))), "nothing is lost");
}

#[test]
fn an_image_that_names_a_page_twice_has_one_link_swizzled() {
    let test_bed = test_bed();
    test_bed.run(|tree| async move {
        let path = tree.path(100).await.unwrap();
        let (above, leaf) = (&path[path.len() - 2], path.last().unwrap().id());
        let at = above.read(|words| View(words).child(100)).unwrap();
        let mut image = tree.handle.store().world().pages[&above.id().get()].clone();
        let slots = [value_at(at), value_at(if at == 0 { 1 } else { 0 })];
        image[slots[1]] = image[slots[0]];
        tree.handle.refresh(above, &image).unwrap();
        let anchor = tree.handle.anchor(above.id(), tree.class).await.unwrap();
        for key in (0..KEYS).step_by(7).filter(|&key| key > KEYS / 2) {
            tree.get(key * 2).await.unwrap();
        }
        assert!(!tree.handle.contains(leaf), "the cache is too small to keep it");
        for slot in slots {
            let above = tree.handle.enter(&anchor).unwrap();
            let followed = tree.handle.follow(&above, words(&above)[slot], tree.class).await;
            assert_eq!(followed.unwrap().id(), leaf);
        }
    });
}
