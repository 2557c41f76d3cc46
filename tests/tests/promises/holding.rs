//! Operations that hold more pages than the cache keeps, or lose them to others again and again, have their answer.

use std::{cell::Cell, rc::Rc, time::Duration};

use farlink_runtime::{access::*, error::Error, operation::Run, wire::wire};
use farlink_structures::{
    btree::{BTree, Tree},
    map::KeyRange,
};
use farlink_tests::{bounded::Watchdog, cluster::FAST};

use crate::{KEYS, Scene};

/// Reads all leaves, and looks at them only once it has them all.
#[derive(Debug, Clone)]
struct Late;

wire!(
    struct Late {}
);

impl Operation for Late {
    type Output = u64;
    type Plugin = Tree;
    const NAME: &'static str = "late";
    const READS_ONLY: bool = true;

    fn scope(&self) -> KeyRange {
        KeyRange::ALL
    }

    async fn run<A: Access<Plugin = Tree>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let mut level = vec![access.open(from).await?];
        while level[0].level() > 0 {
            let mut below = Vec::new();
            for page in level {
                let links: Vec<Link> =
                    page.read(|words| Tree::links(words).map(|index| Link::from_word(words.word(index))).collect())?;
                let page = Rc::new(page);
                for child in access.follow_each(links.iter().map(|&link| (Rc::clone(&page), link))).all().await {
                    below.push(child?);
                }
            }
            level = below;
        }
        let mut count = 0;
        for leaf in level {
            count += leaf.read(|words| words.word(7) & 0xffff)?;
        }
        Ok(count)
    }
}

#[test]
fn an_operation_that_holds_more_pages_than_the_cache_ends_with_its_answer() {
    let _watch = Watchdog::start("held pages", Duration::from_secs(60));
    let scene = Scene::new(FAST);
    // Some 900 leaves, and room for less than a hundred pages.
    let owned = scene.owned(64 << 10, KeyRange::ALL);
    assert_eq!(scene.worker.block_on(owned.execute(&Late)).unwrap(), KEYS);
    assert_eq!(scene.worker.block_on(scene.one_sided().beside_owners().execute(&Late)).unwrap(), KEYS);
}

/// As [`Late`], and goes back to the root's first child while others are on their way.
#[derive(Debug, Clone)]
struct Beside;

wire!(
    struct Beside {}
);

impl Operation for Beside {
    type Output = u64;
    type Plugin = Tree;
    const NAME: &'static str = "beside";
    const READS_ONLY: bool = true;

    fn scope(&self) -> KeyRange {
        KeyRange::ALL
    }

    async fn run<A: Access<Plugin = Tree>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let links = |page: &A::Page<'_>| -> Result<Vec<Link>, Interrupt> {
            page.read(|words| Tree::links(words).map(|index| Link::from_word(words.word(index))).collect())
        };
        let root = Rc::new(access.open(from).await?);
        let of_root = links(&root)?;
        let mut level = Vec::new();
        for child in access.follow_each(of_root.iter().map(|&link| (Rc::clone(&root), link))).all().await {
            level.push(Rc::new(child?));
        }
        while level[0].level() > 0 {
            let mut below = Vec::new();
            for page in &level {
                let mut each = access.follow_each(links(page)?.into_iter().map(|link| (Rc::clone(page), link)));
                while let Some((_, child)) = each.next().await {
                    below.push(Rc::new(child?));
                    access.follow(&root, of_root[0], Hint::DOWN).await?;
                }
            }
            level = below;
        }
        level.iter().try_fold(0, |count, leaf| Ok(count + leaf.read(|words| words.word(7) & 0xffff)?))
    }
}

#[test]
fn an_operation_that_holds_pages_may_follow_a_link_while_others_are_on_their_way() {
    let _watch = Watchdog::start("a link beside others", Duration::from_secs(60));
    let scene = Scene::new(FAST);
    let owned = scene.owned(64 << 10, KeyRange::ALL);
    let counted = scene.worker.block_on(owned.execute(&Beside)).unwrap();
    assert_eq!(counted, KEYS);
}

/// With room for all of them it has only to be faster than others.
#[test]
fn who_loses_to_others_alone_tries_on_beyond_the_limit() {
    let _watch = Watchdog::start("lost to others", Duration::from_secs(60));
    let scene = Scene::new(FAST);
    let tree = BTree::over(scene.one_sided());
    let keys = 6 * KEYS;
    scene
        .worker
        .block_on(async {
            for key in KEYS..keys {
                tree.insert(key, key).await?;
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    let owned = scene.owned(64 << 20, KeyRange::ALL);
    let (worker, is_over) = (&scene.worker, Rc::new(Cell::new(false)));
    let before = worker.counters().restarts;
    let writer = worker.spawn({
        let (tree, handle, is_over) = (BTree::over(owned.clone()), (**worker).clone(), Rc::clone(&is_over));
        async move {
            let mut changes = 0;
            // Eight attempts, one with copies, and some more.
            while !is_over.get() && handle.counters().restarts - before < 20 {
                tree.update(changes % keys, u64::MAX - changes).await.unwrap();
                changes += 1;
                handle.yield_now().await;
            }
            changes
        }
    });
    let counted = worker.block_on(owned.execute(&Late));
    is_over.set(true);
    let changes = worker.block_on(writer);
    assert_eq!(counted.unwrap(), keys, "after {changes} changes");
    let restarts = worker.counters().restarts - before;
    assert!(restarts > 9, "{restarts} restarts: nobody has lost");
}

/// Beyond the limit it is told so.
#[test]
fn an_operation_that_holds_far_too_many_pages_is_told_so() {
    let _watch = Watchdog::start("held pages", Duration::from_secs(60));
    let scene = Scene::new(FAST);
    let tree = BTree::over(scene.one_sided());
    scene
        .worker
        .block_on(async {
            for key in KEYS..6 * KEYS {
                tree.insert(key, key).await?;
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    let owned = scene.owned(64 << 10, KeyRange::ALL);
    let error = scene.worker.block_on(owned.execute(&Late)).unwrap_err();
    assert!(matches!(error, Error::TooManyPages { limit: 4096 }), "{error}");
}
