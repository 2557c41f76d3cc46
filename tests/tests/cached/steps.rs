//! Steps on a tree, each compared with a `BTreeMap`.

use farlink_runtime::{error::Error, operation::Run};
use farlink_structures::map::{Map as Ordered, OrderedMap};
use proptest::{prelude::*, sample::Index};

use crate::scene::Map;

/// Keys are below this, or at the upper end.
pub(crate) const KEY_MAX: u64 = 30_000;

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Get(u64),
    Insert(u64, u64),
    Upsert(u64, u64),
    Update(u64, u64),
    Remove(u64),
    /// A key that is there.
    RemovePresent(Index),
    /// Entries between two keys.
    Range(u64, u64, bool, usize),
    /// So many keys in a row.
    InsertRun(u64, u64),
    RemoveRun(u64, u64),
}

fn key() -> impl Strategy<Value = u64> {
    prop_oneof![20 => 0..KEY_MAX, 1 => (0u64..4).prop_map(|below| u64::MAX - below), 1 => 0u64..4]
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => key().prop_map(Step::Get),
        6 => (key(), any::<u64>()).prop_map(|(key, value)| Step::Insert(key, value)),
        3 => (key(), any::<u64>()).prop_map(|(key, value)| Step::Upsert(key, value)),
        3 => (key(), any::<u64>()).prop_map(|(key, value)| Step::Update(key, value)),
        3 => key().prop_map(Step::Remove),
        6 => any::<Index>().prop_map(Step::RemovePresent),
        3 => (key(), key(), any::<bool>(), 0usize..300).prop_map(|(a, b, down, limit)| Step::Range(a.min(b), a.max(b), down, limit)),
        2 => (0..KEY_MAX, 1u64..80).prop_map(|(from, count)| Step::InsertRun(from, count)),
        2 => (0..KEY_MAX, 1u64..800).prop_map(|(from, count)| Step::RemoveRun(from, count)),
    ]
}

/// Whether an operation is refused for good, and without effect.
pub(crate) type Refused<'a> = &'a dyn Fn(&Error) -> bool;

pub(crate) const NEVER: Refused<'static> = &|_| false;

/// Takes a step on both, and says where they differ.
pub(crate) async fn take<S: OrderedMap, A: Run<Plugin = S>>(
    tree: &Ordered<S, A>,
    model: &mut Map,
    step: &Step,
    refused: Refused<'_>,
) -> Result<(), String> {
    let differs = |what: String| Err(format!("{step:?}: {what}"));
    let failed = |error: Error| format!("{step:?}: {error}");
    match *step {
        Step::Get(key) => {
            let found = tree.get(key).await.map_err(failed)?;
            if found != model.get(&key).copied() {
                return differs(format!("{found:?}, not {:?}", model.get(&key)));
            }
        }
        Step::Insert(key, value) => match tree.insert(key, value).await {
            Ok(inserted) if inserted != model.contains_key(&key) => {
                model.entry(key).or_insert(value);
            }
            Err(error) if refused(&error) && !model.contains_key(&key) => {}
            other => return differs(format!("{other:?}, with {:?} there", model.get(&key))),
        },
        Step::Upsert(key, value) => match tree.upsert(key, value).await {
            Ok(before) if before == model.get(&key).copied() => drop(model.insert(key, value)),
            Err(error) if refused(&error) && !model.contains_key(&key) => {}
            other => return differs(format!("{other:?}, with {:?} there", model.get(&key))),
        },
        Step::Update(key, value) => {
            let before = tree.update(key, value).await.map_err(failed)?;
            if before != model.get(&key).copied() {
                return differs(format!("{before:?}, not {:?}", model.get(&key)));
            }
            model.entry(key).and_modify(|entry| *entry = value);
        }
        Step::Remove(key) => remove(tree, model, key).await.map_err(|what| format!("{step:?}: {what}"))?,
        Step::RemovePresent(index) => {
            if !model.is_empty() {
                let key = *model.keys().nth(index.index(model.len())).expect("it is within");
                remove(tree, model, key).await.map_err(|what| format!("{step:?}: {what}"))?;
            }
        }
        Step::Range(low, high, descending, limit) => {
            let range = tree.range(low..=high);
            let range = if descending { range.descending() } else { range };
            let found = range.take(limit).await.map_err(failed)?;
            let expected = model.range(low..=high).map(|(&key, &value)| (key, value));
            let expected: Vec<_> =
                if descending { expected.rev().take(limit).collect() } else { expected.take(limit).collect() };
            if found != expected {
                return differs(format!("{found:?}, not {expected:?}"));
            }
        }
        Step::InsertRun(from, count) => {
            for key in from..from + count {
                Box::pin(take(tree, model, &Step::Insert(key, !key), refused)).await?;
            }
        }
        Step::RemoveRun(from, count) => {
            let keys: Vec<u64> = model.range(from..from.saturating_add(count)).map(|(&key, _)| key).collect();
            for key in keys {
                remove(tree, model, key).await.map_err(|what| format!("{step:?}: {what}"))?;
            }
        }
    }
    Ok(())
}

async fn remove<S: OrderedMap, A: Run<Plugin = S>>(
    tree: &Ordered<S, A>,
    model: &mut Map,
    key: u64,
) -> Result<(), String> {
    let removed = tree.remove(key).await.map_err(|error| error.to_string())?;
    match removed == model.remove(&key) {
        true => Ok(()),
        false => Err(format!("removing {key} gave {removed:?}")),
    }
}
