//! The cache of values, where places run out before bytes do.

use std::sync::Arc;

use farlink_cache::ValueCache;

#[test]
fn of_small_values_too_those_that_are_used_stay() {
    for bytes in [100, 500] {
        let cache = ValueCache::new(64 << 10);
        let handle = cache.handle(1);
        let (mut hits, mut gets) = (0, 0);
        for round in 0..200 {
            for key in 1..=16 {
                let is_there = handle.get(key).is_some();
                if !is_there {
                    handle.put(key, (round, 0), Arc::new([key, round]), bytes);
                }
                if round != 0 {
                    (hits, gets) = (hits + u64::from(is_there), gets + 1);
                }
            }
            for key in 0..50 {
                let key = 1000 + round * 50 + key;
                handle.put(key, (round, 0), Arc::new([key, round]), bytes);
                assert!(cache.used() <= cache.limit(), "{} bytes", cache.used());
            }
        }
        println!("values of {bytes} bytes: {hits} hits of {gets}");
        assert!(hits * 100 >= gets * 98, "values of {bytes} bytes: {hits} hits of {gets}");
    }
}
