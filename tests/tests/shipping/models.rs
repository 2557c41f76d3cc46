//! A map against a model.

use std::collections::BTreeMap;

use farlink_runtime::{error::Error, operation::Run};
use farlink_structures::map::Map;
use farlink_tests::{settings, subject::Subject};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// How many random operations.
pub(crate) fn steps() -> u64 {
    settings::from_env("FARLINK_COARSE_STEPS", 1000)
}

/// Random operations on an empty map, one after another; what must be in it then.
pub(crate) async fn random_operations<S: Subject, A: Run<Plugin = S>>(
    map: &Map<S, A>,
) -> Result<BTreeMap<u64, u64>, Error> {
    let mut rng = SmallRng::seed_from_u64(settings::seed("shipping"));
    let mut model = BTreeMap::new();
    for step in 0..steps() {
        // Grows first and shrinks at the end, so that it splits and merges.
        let removes = if step < steps() / 3 * 2 { 2 } else { 7 };
        let key =
            if rng.random_range(0..50) == 0 { u64::MAX - rng.random_range(0..3) } else { rng.random_range(0..450) };
        match rng.random_range(0..10) {
            kind if kind < removes => assert_eq!(map.remove(key).await?, model.remove(&key)),
            8 => {
                let (n, expected) = (rng.random_range(0..100), model.range(key..));
                let expected: Vec<_> = expected.take(n).map(|(&key, &value)| (key, value)).collect();
                assert_eq!(map.scan(key, n).await?, expected);
            }
            9 => {
                let high = key.saturating_add(rng.random_range(0..300));
                let mut expected: Vec<_> = model.range(key..=high).map(|(&key, &value)| (key, value)).collect();
                expected.reverse();
                assert_eq!(map.range(key..=high).descending().take(usize::MAX).await?, expected);
            }
            kind if kind % 3 == 0 => assert_eq!(map.upsert(key, step).await?, model.insert(key, step)),
            kind if kind % 3 == 1 => {
                assert_eq!(map.insert(key, step).await?, !model.contains_key(&key));
                model.entry(key).or_insert(step);
            }
            _ => assert_eq!(map.get(key).await?, model.get(&key).copied()),
        }
    }
    Ok(model)
}

/// That a map has these entries, whatever way they are asked for.
pub(crate) async fn assert_holds<S: Subject, A: Run<Plugin = S>>(map: &Map<S, A>, model: &BTreeMap<u64, u64>) {
    let all: Vec<_> = model.iter().map(|(&key, &value)| (key, value)).collect();
    assert_eq!(map.range(..).take(usize::MAX).await.unwrap(), all);
    let mut descending = map.range(..).descending().take(usize::MAX).await.unwrap();
    descending.reverse();
    assert_eq!(descending, all);
    assert_eq!(map.len().await.unwrap(), all.len() as u64);
}
