//! What one would not think of at once: words beyond a page's entries, more in flight than a cache has room for.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
};

use farlink_offload::Admission;
use farlink_runtime::{
    access::{Link, PageRef, Plugin},
    error::Error,
    lock::LockWord,
    one_sided::Proof,
    page::{self, CHECKSUM, HEADER_WORDS, IDENTITY, LOCK},
};
use farlink_structures::{
    btree::{KeyRange, Tree},
    skiplist::List,
};
use farlink_tests::{
    backend::FabricProfile,
    bounded::{self, Bound},
    direct::Direct,
    subject::Subject,
    test_every_structure,
};

use crate::scene::{
    CACHE_BYTES_ALL, CACHE_BYTES_MIN, Map, Member, MemberOf, cache, cache_of, fabric, fabric_of, sparse,
};

/// Also words behind a page's last entry, where links of entries stood that have moved.
#[test]
fn no_swizzled_word_reaches_remote_memory() {
    let fabric = fabric(FabricProfile::Fast, 256, &Map::new(), 1.0);
    let member = Member::join(&fabric, 1);
    let owned = member.own(&cache(CACHE_BYTES_ALL, Admission::Always), KeyRange::ALL);
    member.worker.block_on(async {
        for key in 0..3000u64 {
            owned.insert(key.wrapping_mul(2_654_435_761) % 1_000_000, key).await.unwrap();
        }
        owned.access().flush().await.unwrap();
        let (mut to_visit, mut inner) = (vec![member.tree.structure().root_link()], 0);
        while let Some(link) = to_visit.pop() {
            let page = member.tree.access().read_page(link).await.unwrap();
            if page.level() == 0 {
                continue;
            }
            inner += 1;
            let words = page.into_words();
            assert!(words[HEADER_WORDS..].iter().all(|word| word >> 63 == 0), "{link:?} holds a swizzled word");
            to_visit.extend(Tree::links(&*words).map(|slot| Link::from_word(words[slot])));
        }
        assert!(inner > 20, "{inner} inner pages");
    });
}

#[test]
fn scans_in_a_small_cache_do_not_fail() {
    const ENTRIES: u64 = 20_000;
    for admission in [Admission::Always, Admission::Frequency, Admission::Probability { leaf: 0.1, inner: 1.0 }] {
        let fabric = fabric(FabricProfile::Fast, 256, &sparse(ENTRIES), 0.8);
        let member = Member::join(&fabric, 1);
        let owned = member.own(&cache(CACHE_BYTES_MIN, admission), KeyRange::ALL);
        member.worker.block_on(async {
            for key in 0..5000 {
                owned.get(key % 1000 * 10).await.unwrap();
            }
            let scans: Vec<_> = (0..64)
                .map(|scan| {
                    let owned = owned.clone();
                    member.worker.spawn(async move { owned.range(scan * 2900..).take(1500).await })
                })
                .collect();
            for scan in scans {
                assert_eq!(scan.await.unwrap().len(), 1500, "{admission:?}");
            }
        });
    }
}

/// Whoever checks a structure over a cache looks at it as it is, whatever the cache has.
fn a_checker_trusts_no_old_copy<S: Subject>() {
    let fabric = fabric_of::<S>(FabricProfile::Fast, 256, &sparse(500), 0.8);
    let [reader, writer] = [1, 2].map(|seed| MemberOf::<S>::join(&fabric, seed));
    let shared = reader.share(&cache_of::<S>(CACHE_BYTES_ALL, Admission::Always), Proof::Checksum);
    for key in 0..5000 {
        reader.worker.block_on(shared.get(key)).unwrap();
    }
    for key in 0..5000 {
        writer.worker.block_on(writer.tree.upsert(key, key)).unwrap();
    }
    let report = reader.worker.block_on(S::check(shared.access())).unwrap();
    let problems = &report.problems[..report.problems.len().min(3)];
    assert!(report.is_clean() && report.entries == 5000, "{} entries: {problems:?}", report.entries);
}

/// However much others have appended since the upper pages were cached: what lies far from where they lead is found from above.
fn old_upper_pages_cost_few_reads<S: Subject>() {
    const FROM: u64 = 100_000;
    const COUNT: u64 = 4000;
    let fabric = fabric_of::<S>(FabricProfile::Fast, 256, &sparse(500), 0.8);
    let [reader, writer] = [1, 2].map(|seed| MemberOf::<S>::join(&fabric, seed));
    let caches = [(); 3].map(|()| cache_of::<S>(CACHE_BYTES_ALL, Admission::Always));
    let shared = caches.each_ref().map(|cache| reader.share(cache, Proof::Checksum));
    for tree in &shared {
        for key in 0..5000 {
            reader.worker.block_on(tree.get(key)).unwrap();
        }
    }
    for key in FROM..FROM + COUNT {
        writer.worker.block_on(writer.tree.insert(key, key)).unwrap();
    }
    let last = FROM + COUNT - 1;
    let reads = || reader.worker.counters().reads;
    let mut before = reads();
    let mut took = |what: &str, most: u64| {
        let took = reads() - before;
        assert!(took <= most, "{what} took {took} READs");
        before += took;
    };
    assert_eq!(reader.worker.block_on(shared[0].get(last)).unwrap(), Some(last));
    took("a lookup", 150);
    let down = reader.worker.block_on(shared[1].range(..).descending().take(1)).unwrap();
    assert_eq!(down, [(last, last)]);
    took("the last entry", 700);
    assert_eq!(reader.worker.block_on(shared[2].update(last, 1)).unwrap(), Some(last));
    took("an update", 150);
}

test_every_structure!(a_checker_trusts_no_old_copy, old_upper_pages_cost_few_reads; bwtree: a_checker_trusts_no_old_copy);

/// A page that is sound, and of another kind: an operation that begins there ends.
#[test]
fn a_root_of_another_kind_is_named() {
    let fabric = fabric(FabricProfile::Fast, 256, &sparse(5), 0.8);
    let member = Member::join(&fabric, 1);
    let root = member.tree.structure().root;
    let direct = Direct::new(&fabric, 7).unwrap();
    let mut words = direct.read(root, member.tree.structure().class.words()).unwrap();
    words[IDENTITY] ^= 0x100;
    words[CHECKSUM] = page::checksum(&words, LockWord::from_word(words[LOCK]).version());
    direct.write(root, &words).unwrap();
    let tree = member.tree.clone();
    let bound = Bound { reads_max: 100_000, turns_max: 1_000_000 };
    let found = bounded::run(&member.worker, bound, async move {
        [tree.get(10).await.map(drop), tree.insert(11, 1).await.map(drop), tree.remove(10).await.map(drop)]
    });
    for outcome in found.unwrap() {
        assert!(matches!(outcome, Err(Error::Inconsistent { page, .. }) if page == root), "{outcome:?}");
    }
}

/// Many who raise a skip list at once raise it as high as one alone does.
#[test]
fn a_skip_list_is_as_high_as_its_keys_need() {
    let levels = |at_once: usize| {
        let fabric = fabric_of::<List>(FabricProfile::Fast, 256, &Map::new(), 0.8);
        let members: Vec<_> = (1..9).map(|seed| MemberOf::<List>::join(&fabric, seed)).collect();
        let keys: Vec<u64> = (0..400).collect();
        for keys in keys.chunks(at_once) {
            let mut inserting: Vec<_> = keys
                .iter()
                .zip(members.iter().cycle())
                .map(|(&key, member)| {
                    let tree = member.tree.clone();
                    Some(member.worker.spawn(async move { assert!(tree.insert(key, key).await.unwrap()) }))
                })
                .collect();
            let mut turns = 0;
            while inserting.iter().any(Option::is_some) {
                turns += 1;
                // Some are faster than others.
                for (_, member) in members.iter().enumerate().filter(|(number, _)| turns % (number + 1) == 0) {
                    member.worker.turn();
                }
                for slot in &mut inserting {
                    slot.take_if(|task| pin!(task).poll(&mut Context::from_waker(Waker::noop())).is_ready());
                }
            }
        }
        let report = members[0].worker.block_on(members[0].tree.check()).unwrap();
        assert_eq!(report.entries, 400);
        report.pages_by_level.len()
    };
    assert_eq!(levels(1), levels(400));
}
