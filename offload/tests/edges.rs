//! What one would not think of at once: words beyond a page's entries, more in flight than a cache has room for.

use farlink_offload::{Admission, CacheOptions, ComputeCache};
use farlink_runtime::{
    access::{Link, Plugin},
    compute::{ComputeOptions, ComputeServer},
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    server::in_process,
};
use farlink_structures::btree::{BTree, BTreeOptions, KeyRange, Tree};
use std::sync::Arc;

fn options(page: usize) -> BTreeOptions {
    BTreeOptions { page_bytes: page, ..BTreeOptions::default() }
}

#[test]
fn no_swizzled_word_reaches_remote_memory() {
    let cluster = in_process(2, 64 << 20, MemOptions::default()).unwrap();
    let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default()).unwrap();
    let cache = ComputeCache::<Tree>::new(CacheOptions::new(16 << 20)).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let tree = BTree::create(&worker, "t", options(256)).await.unwrap();
        let cached = BTree::over(cache.own(&worker, tree.structure().clone(), KeyRange::ALL).await.unwrap());
        for k in 0..3000u64 {
            cached.insert(k.wrapping_mul(2654435761) % 1_000_000, k).await.unwrap();
        }
        cached.access().flush().await.unwrap();
        let one = OneSided::<Tree>::new(&worker, tree.structure().clone(), Proof::Checksum);
        let (mut todo, mut inner, mut bad) = (vec![tree.structure().root_link()], 0, 0);
        while let Some(page) = todo.pop() {
            let copy = one.read_page(page).await.unwrap();
            let level = farlink_runtime::access::PageRef::level(&copy);
            let words = copy.into_words();
            if level == 0 {
                continue;
            }
            inner += 1;
            bad += words[8..].iter().filter(|&&w| w >> 63 != 0).count();
            todo.extend(Tree::links(&*words).map(|slot| Link::from_word(words[slot])));
        }
        println!("{inner} inner pages, {bad} swizzled words in remote memory");
        assert_eq!(bad, 0);
    });
}

#[test]
fn scans_in_a_small_cache_do_not_fail() {
    let cluster = in_process(2, 64 << 20, MemOptions::default()).unwrap();
    let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default()).unwrap();
    let mut all_failed = 0;
    for admission in [Admission::Always, Admission::Frequency, Admission::Probability { leaf: 0.1, inner: 1.0 }] {
        let mut o = CacheOptions::new(64 << 10);
        o.admission = admission;
        let cache = ComputeCache::<Tree>::new(o).unwrap();
        let worker = compute.worker().unwrap();
        worker.block_on(async {
            let tree =
                BTree::create(&worker, &format!("s{}", format!("{admission:?}").len()), options(1024)).await.unwrap();
            for k in 0..20000u64 {
                tree.insert(k, k).await.unwrap();
            }
            let cached = BTree::over(cache.own(&worker, tree.structure().clone(), KeyRange::ALL).await.unwrap());
            for k in 0..20000u64 {
                cached.get(k % 1000).await.unwrap();
            }
            let mut tasks = Vec::new();
            for t in 0..64u64 {
                let cached = cached.clone();
                tasks.push(worker.spawn(async move { cached.range(t * 290..).take(1500).await.map(|v| v.len()) }));
            }
            let mut failed = 0;
            for t in tasks {
                match t.await {
                    Ok(n) => assert_eq!(n, 1500),
                    Err(e) => {
                        failed += 1;
                        println!("{e}");
                    }
                }
            }
            println!("{admission:?}: {failed} of 64 failed");
            all_failed += failed;
        });
    }
    assert_eq!(all_failed, 0);
}
