//! What one would not think of at once: words beyond a page's entries, more in flight than a cache has room for.

use farlink_offload::Admission;
use farlink_runtime::{
    access::{Link, PageRef, Plugin},
    one_sided::Proof,
    page::HEADER_WORDS,
};
use farlink_structures::btree::{KeyRange, Tree};
use farlink_tests::{backend::FabricProfile, subject::Subject, test_every_structure};

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

test_every_structure!(a_checker_trusts_no_old_copy; bwtree: a_checker_trusts_no_old_copy);
