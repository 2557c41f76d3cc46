//! What operations cost in remote operations, through caches that hold all there is to hold.

use farlink_offload::Admission;
use farlink_runtime::{
    access::Access,
    error::Error,
    lock::LockWord,
    one_sided::Proof,
    page::{HEADER_WORDS, LOCK},
    worker::{Counters, Worker},
};
use farlink_structures::btree::{BTree, KeyRange, Tree};
use farlink_tests::{backend::FabricProfile, direct::Direct, raw};

use crate::scene::{CACHE_BYTES_ALL, Member, assert_left_clean, cache, fabric, sparse};

const KEYS: u64 = 2000;

/// Remote operations that `f` takes.
fn count(worker: &Worker, f: impl AsyncFnOnce() -> Result<(), Error>) -> Counters {
    let before = worker.counters();
    worker.block_on(f()).unwrap();
    worker.counters() - before
}

async fn get_all<A: Access<Plugin = Tree>>(tree: &BTree<A>) -> Result<(), Error> {
    for (key, value) in sparse(KEYS) {
        assert_eq!(tree.get(key).await?, Some(value));
        assert_eq!(tree.get(key + 1).await?, None);
    }
    Ok(())
}

async fn update_all<A: Access<Plugin = Tree>>(tree: &BTree<A>, add: u64) -> Result<(), Error> {
    for (key, value) in sparse(KEYS) {
        assert_eq!(tree.update(key, value + add).await?, Some(value + add - 1));
    }
    Ok(())
}

fn remote(counted: Counters) -> (u64, u64, u64, u64) {
    (counted.reads, counted.writes, counted.atomics, counted.two_sided)
}

#[test]
fn what_is_cached_costs_nothing_until_it_is_written() {
    let entries = sparse(KEYS);
    let fabric = fabric(FabricProfile::Fast, 256, &entries, 0.7);
    let member = Member::join(&fabric, 1);
    let pages = member.worker.block_on(member.tree.check()).unwrap().pages_by_level;
    let tree = member.own(&cache(CACHE_BYTES_ALL, Admission::Always), KeyRange::ALL);
    let first = count(&member.worker, async || get_all(&tree).await);
    assert_eq!(remote(first), (pages.iter().sum(), 0, 0, 0), "each page is read once");
    assert_eq!(remote(count(&member.worker, async || get_all(&tree).await)), (0, 0, 0, 0));
    let scan = async || tree.range(..).take(usize::MAX).await.map(drop);
    assert_eq!(remote(count(&member.worker, scan)), (0, 0, 0, 0));
    assert_eq!(remote(count(&member.worker, async || update_all(&tree, 1).await)), (0, 0, 0, 0));
    assert_eq!(member.entries(), entries, "nothing is written before it must be");
    // The log's first segments are made.
    count(&member.worker, async || tree.access().flush().await);
    count(&member.worker, async || update_all(&tree, 2).await);
    let flushed = count(&member.worker, async || tree.access().flush().await);
    let (reads, writes, atomics, two_sided) = remote(flushed);
    assert_eq!((reads, atomics, two_sided), (0, 0, 0));
    // Those of the log go out together: fewer than one for each 32.
    let to_log = pages[0] + 1..pages[0] + pages[0].div_ceil(32);
    assert!(to_log.contains(&writes), "{writes}: each leaf is written once, and once to the log");
    assert_eq!(remote(count(&member.worker, async || tree.access().flush().await)), (0, 0, 0, 0), "it is written");
    assert_eq!(tree.access().counters().total().write_backs, 2 * pages[0]);
    drop((tree, member));
    assert_left_clean(&fabric, &entries.into_iter().map(|(key, value)| (key, value + 2)).collect(), "flushed");
}

#[test]
fn each_page_on_a_way_counts_once_whether_or_not_all_are_cached() {
    let fabric = fabric(FabricProfile::Fast, 256, &sparse(KEYS), 0.7);
    let member = Member::join(&fabric, 1);
    let height = member.worker.block_on(member.tree.check()).unwrap().height();
    let tree = member.own(&cache(64 << 10, Admission::Always), KeyRange::ALL);
    for _ in 0..3 {
        member.worker.block_on(get_all(&tree)).unwrap();
    }
    let counters = tree.access().counters();
    let levels = &counters.levels;
    assert!(levels[0].misses > KEYS / 10 && levels[0].hits > KEYS / 10 && levels[1].misses > 0, "{counters:?}");
    for (level, counts) in levels.iter().enumerate().take(height - 1).skip(1) {
        // Two lookups a key. The first way down begins at a page that is fetched.
        let looked_at = counts.hits + counts.misses;
        assert_eq!(looked_at, 3 * 2 * KEYS, "level {level}: {counters:?}");
    }
    drop((tree, member));
    assert_left_clean(&fabric, &sparse(KEYS).into_iter().collect(), "only read");
}

#[test]
fn with_inner_pages_cached_only_the_leaf_is_read() {
    for proof in [Proof::Checksum, Proof::LockBodyLock] {
        let fabric = fabric(FabricProfile::Fast, 256, &sparse(KEYS), 0.7);
        let member = Member::join(&fabric, 1);
        let height = member.worker.block_on(member.tree.check()).unwrap().height() as u64;
        assert!(height >= 4, "a tree of height {height}");
        let bare = BTree::over(farlink_runtime::one_sided::OneSided::new(
            &member.worker,
            member.tree.structure().clone(),
            proof,
        ));
        let tree = member.share(&cache(CACHE_BYTES_ALL, Admission::Always), proof);
        member.worker.block_on(get_all(&tree)).unwrap();
        let (reads, ..) = remote(count(&member.worker, async || get_all(&tree).await));
        let (bare_reads, ..) = remote(count(&member.worker, async || get_all(&bare).await));
        // A READ with one proof, three with the other.
        let page = bare_reads / (2 * KEYS * height);
        assert_eq!(page, if proof == Proof::Checksum { 1 } else { 3 });
        assert_eq!((reads, bare_reads), (2 * KEYS * page, 2 * KEYS * page * height), "{proof:?}");
        // The first changes have the compute server entered as a user, for all handles, and make rings for records.
        member.worker.block_on(async {
            for value in [1, 0] {
                tree.update(0, value).await.unwrap();
            }
        });
        count(&member.worker, async || update_all(&bare, 1).await);
        let cached = remote(count(&member.worker, async || update_all(&tree, 2).await));
        let bare = remote(count(&member.worker, async || update_all(&bare, 3).await));
        assert_eq!(bare.0 - cached.0, KEYS * page * (height - 1), "{proof:?}: {cached:?}, one-sided {bare:?}");
        assert_eq!((cached.1, cached.2, cached.3), (bare.1, bare.2, bare.3), "{proof:?}");
        assert!(cached.2 > 0);
    }
}

/// What is old costs more once: then it is new, whoever changed it.
#[test]
fn an_old_page_is_met_once() {
    let fabric = fabric(FabricProfile::Fast, 256, &sparse(KEYS), 0.9);
    let (me, other) = (Member::join(&fabric, 1), Member::join(&fabric, 2));
    let tree = me.share(&cache(CACHE_BYTES_ALL, Admission::Always), Proof::Checksum);
    let look = async || {
        for key in 0..KEYS * 10 {
            tree.get(key).await?;
        }
        Ok(())
    };
    me.worker.block_on(look()).unwrap();
    let change = async |tree: &BTree<farlink_runtime::one_sided::OneSided<Tree>>, from: u64| {
        for key in from..from + 900 {
            tree.upsert(key, key).await?;
        }
        for key in from + 3000..from + 5000 {
            tree.remove(key).await?;
        }
        Ok::<_, Error>(())
    };
    other.worker.block_on(change(&other.tree, 3000)).unwrap();
    let all = KEYS * 10;
    let (old, ..) = remote(count(&me.worker, look));
    let (new, ..) = remote(count(&me.worker, look));
    assert!(old > all && old < all + all / 4, "{old} READs for {all} keys");
    assert_eq!(new, all, "what was old is still old");
    // Of its own changes nothing is old at all.
    me.worker
        .block_on(async {
            for key in 12_000..12_900 {
                tree.upsert(key, key).await?;
            }
            for key in 15_000..17_000 {
                tree.remove(key).await?;
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    assert!(me.worker.counters().splits > 10 && me.worker.counters().merges > 10);
    assert_eq!(remote(count(&me.worker, look)).0, all, "its own changes made its cache old");
}

/// Who holds a copy from before must see that it is one.
#[test]
fn a_page_that_is_written_has_a_new_version() {
    let entries = sparse(KEYS);
    let fabric = fabric(FabricProfile::Fast, 256, &entries, 0.7);
    let member = Member::join(&fabric, 1);
    let tree = member.own(&cache(CACHE_BYTES_ALL, Admission::Always), KeyRange::ALL);
    let structure = tree.structure().clone();
    let pages = raw::pages_of(&fabric, structure.id, structure.class);
    let direct = Direct::new(&fabric, 0).unwrap();
    let version = |at| LockWord::from_word(direct.read(at, 1).unwrap()[LOCK]).version();
    let body = |at| direct.read(at, structure.class.words()).unwrap()[HEADER_WORDS..].to_vec();
    let before: Vec<_> = pages.iter().map(|&at| (version(at), body(at))).collect();
    member
        .worker
        .block_on(async {
            for &key in entries.keys().step_by(50) {
                tree.update(key, !key).await?;
            }
            tree.access().flush().await
        })
        .unwrap();
    let mut changed = 0;
    for (&at, (old, words)) in pages.iter().zip(before) {
        changed += usize::from(body(at) != words);
        assert_eq!(body(at) != words, version(at) != old, "page {at}");
    }
    assert!(changed > 30, "only {changed} pages have changed");
}
