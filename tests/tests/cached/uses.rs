//! A cache is either for what is owned or for what is shared: pages of the one kind are no good to the other.

use farlink_offload::Admission;
use farlink_runtime::{error::Error, one_sided::Proof};
use farlink_structures::btree::{BTree, KeyRange};
use farlink_tests::backend::FabricProfile;

use crate::scene::{CACHE_BYTES_ALL, Map, Member, assert_left_clean, cache, fabric, settle, sparse};

fn is_refused<T>(outcome: &Result<T, Error>, because_of: &str) -> bool {
    matches!(outcome, Err(Error::BadOption { option, .. }) if *option == because_of)
}

/// What was cached while others changed the structure is old by now: an owner would take it for current.
#[test]
fn what_was_shared_is_not_owned_with_the_same_cache() {
    let mut model = sparse(2000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 1.0);
    let [me, other] = [1, 2].map(|seed| Member::join(&fabric, seed));
    let shared_cache = cache(CACHE_BYTES_ALL, Admission::Always);
    let shared = me.share(&shared_cache, Proof::Checksum);
    me.worker.block_on(async {
        for &key in model.keys() {
            shared.get(key).await.unwrap();
        }
    });
    // Pages are full: leaves split, and the pages above.
    let between: Map = (5..20_000).step_by(10).map(|key| (key, key)).collect();
    other.worker.block_on(async {
        for (&key, &value) in &between {
            other.tree.insert(key, value).await.unwrap();
        }
    });
    model.extend(&between);
    drop((shared, other));
    let structure = me.tree.structure().clone();
    let owned = me.worker.block_on(shared_cache.own(&me.worker, structure.clone(), KeyRange::ALL));
    let was_refused = is_refused(&owned, "cache");
    let another = cache(CACHE_BYTES_ALL, Admission::Always);
    let owned = match owned {
        Ok(owned) => owned,
        Err(_) => me.worker.block_on(another.own(&me.worker, structure, KeyRange::ALL)).unwrap(),
    };
    let owned = BTree::over(owned);
    me.worker.block_on(async {
        for key in (1..20_000).step_by(7).filter(|key| key % 5 != 0) {
            owned.insert(key, key).await.unwrap();
            model.insert(key, key);
        }
        owned.access().close().await.unwrap();
    });
    settle([&me]);
    drop((owned, me));
    assert_left_clean(&fabric, &model, "owned behind what was shared");
    assert!(was_refused, "owned with pages that others have changed");
}

/// What an owner has cached may be newer than remote memory; and once it has given up, older.
#[test]
fn what_was_owned_is_not_shared_with_the_same_cache() {
    let model = sparse(200);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 1.0);
    let me = Member::join(&fabric, 1);
    let cache = cache(CACHE_BYTES_ALL, Admission::Always);
    let owned = me.own(&cache, KeyRange::ALL);
    let share = || cache.share(&me.worker, me.tree.structure().clone(), Proof::Checksum);
    assert!(is_refused(&share(), "cache"), "{:?}", share());
    me.worker.block_on(owned.access().close()).unwrap();
    assert!(is_refused(&share(), "cache"), "{:?}", share());
}
