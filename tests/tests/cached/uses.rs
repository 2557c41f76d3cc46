//! A cache is for one structure, and either for what is owned or for what is shared: pages of the one kind are no good to the other.

use farlink_offload::{Admission, Holdings};
use farlink_runtime::{
    error::Error,
    one_sided::{OneSided, Proof, ownership},
};
use farlink_structures::{
    btree::{BTree, KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::{backend::FabricProfile, cluster};

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

/// A second structure would not be entered in its own map: whoever has it there would not know.
#[test]
fn a_cache_owns_of_one_structure() {
    let model = sparse(200);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 1.0);
    cluster::create::<Tree>(&fabric, "second", 256, Proof::Checksum).unwrap();
    let [me, other] = [1, 2].map(|seed| Member::join(&fabric, seed));
    let open = |of: &Member| -> Ordered<Tree, OneSided<Tree>> {
        of.worker.block_on(Ordered::open(&of.worker, "second", Proof::Checksum)).unwrap()
    };
    let second = open(&me).structure().clone();
    let only = cache(CACHE_BYTES_ALL, Admission::Always);
    let first = me.own(&only, KeyRange::ALL);
    let own = |range| me.worker.block_on(only.own(&me.worker, second.clone(), range));
    assert!(is_refused(&own(KeyRange::ALL), "structure"), "{:?}", own(KeyRange::ALL));
    let below = KeyRange { low: 0, high: Some(100) };
    assert!(is_refused(&own(below), "structure"), "{:?}", own(below));
    let found = only.owned(&me.worker, &second);
    assert!(is_refused(&found, "structure"), "{found:?}");
    let holdings = Holdings::new(&second, only.clone());
    let taken = me.worker.block_on(holdings.take(&me.worker, below));
    assert!(is_refused(&taken, "structure"), "{taken:?}");
    let map = me.worker.block_on(ownership::read(&me.worker, &second)).unwrap();
    assert!(map.entries.is_empty(), "{map:?}");
    // Others have it, and the first is as it was.
    other.worker.block_on(open(&other).insert(1, 1)).unwrap();
    me.worker.block_on(async {
        first.update(10, 7).await.unwrap();
        first.access().close().await.unwrap();
    });
    assert!(is_refused(&own(KeyRange::ALL), "structure"), "given up, and for another one at once");
    let shared = cache(CACHE_BYTES_ALL, Admission::Always);
    drop(me.share(&shared, Proof::Checksum));
    assert!(is_refused(&shared.share(&me.worker, second.clone(), Proof::Checksum), "structure"));
}
