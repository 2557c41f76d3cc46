//! The cache under a tree against a model: random operations, small caches, every admission policy.

use std::collections::BTreeMap;

use crate::support::*;
use farlink_cache::{CacheError, PageId};
use proptest::prelude::*;

const KEYS: u64 = under_miri(20_000, 3000);

#[derive(Debug, Clone)]
enum Op {
    Get(u64),
    Update(u64, u64),
    Remove(u64),
    /// Looks so many keys up, from this one on: pressure.
    Sweep(u64, u64),
    /// Removes so many keys in a row: merges.
    Mow(u64, u64),
    /// Inserts so many in a row: splits.
    Sow(u64, u64),
    Flush,
    FlushRange(u64, u64),
    /// Flushes, and drops a page.
    Invalidate(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let key = 0..KEYS * 2;
    prop_oneof![
        8 => key.clone().prop_map(Op::Get),
        8 => (key.clone(), any::<u64>()).prop_map(|(key, value)| Op::Update(key, value)),
        4 => key.clone().prop_map(Op::Remove),
        2 => (key.clone(), 1..2000u64).prop_map(|(key, count)| Op::Sweep(key, count)),
        2 => (key.clone(), 1..600u64).prop_map(|(key, count)| Op::Mow(key, count)),
        2 => (key.clone(), 1..600u64).prop_map(|(key, count)| Op::Sow(key, count)),
        1 => Just(Op::Flush),
        1 => (1..2000u64, 1..500u64).prop_map(|(first, count)| Op::FlushRange(first, count)),
        1 => (1..3000u64).prop_map(Op::Invalidate),
    ]
}

async fn apply(tree: &Tree, model: &mut BTreeMap<u64, u64>, op: &Op) -> Result<(), Error> {
    match *op {
        Op::Get(key) => assert_eq!(tree.get(key).await?, model.get(&key).copied()),
        Op::Update(key, value) => assert_eq!(tree.update(key, |_| value).await?, model.insert(key, value)),
        Op::Remove(key) => assert_eq!(tree.remove(key).await?, model.remove(&key)),
        Op::Sweep(from, count) => {
            for key in (0..count).map(|at| (from + at * 13) % (KEYS * 2)) {
                assert_eq!(tree.get(key).await?, model.get(&key).copied());
            }
        }
        Op::Mow(from, count) => {
            for key in from..from + count {
                assert_eq!(tree.remove(key).await?, model.remove(&key));
            }
        }
        Op::Sow(from, count) => {
            for key in from..from + count {
                assert_eq!(tree.update(key, |_| key).await?, model.insert(key, key));
            }
        }
        Op::Flush => tree.handle.flush().await?,
        Op::FlushRange(first, count) => {
            tree.handle.flush_matching(|page, _| (first..=first + count).contains(&page.get())).await?;
        }
        Op::Invalidate(page) => {
            tree.handle.flush().await?;
            match tree.handle.invalidate(PageId::new(page).unwrap(), tree.class).await {
                // The root is anchored, and a page that is gone may be asked for.
                Err(CacheError::NoRoom { .. } | CacheError::Store { .. }) | Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: under_miri(60, 2) as u32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_tree_in_a_small_cache_is_a_map(
        ops in prop::collection::vec(op(), 1..60),
        admission in prop::sample::select(ADMISSIONS.to_vec()),
        sample_size in prop::sample::select(vec![1usize, 5]),
        pending in 0..3u64,
        seed in any::<u64>(),
    ) {
        let mut options = small(256, admission);
        options.sample_size = sample_size;
        let keys = (0..KEYS).map(|key| (key * 2, key));
        let test_bed = TestBed::new(keys.clone(), class(256), options, seed);
        test_bed.store.world().pending_max = pending;
        let model = test_bed.run(move |tree| async move {
            let mut model: BTreeMap<u64, u64> = keys.collect();
            for op in &ops {
                apply(&tree, &mut model, op).await.unwrap();
            }
            model
        });
        prop_assert!(test_bed.cache.memory().used() <= test_bed.cache.memory().limit);
        prop_assert_eq!(test_bed.flushed(), model);
    }
}
