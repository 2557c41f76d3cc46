//! Chains of pages that were merged: what a page had absorbed is not carried on to the page that absorbs it in turn.

use farlink_runtime::error::Error;
use farlink_tests::bounded;

use crate::{ENDLESS, Scene, open};

const CHAIN: u8 = 32;
/// Entries of a page.
const ROOM: u64 = 11;
/// Pages below the root: as many as it has room for.
const PAGES: usize = ROOM as usize;

fn keys_of(page: usize) -> impl Iterator<Item = u64> {
    (0..ROOM).map(move |index| (page as u64 * ROOM + index) * 10)
}

/// From right to left each page gets so many deltas, the last of which empties it. It does not fit the page to its left, which has too
/// many entries, and so absorbs the one to its right.
fn absorb_from_right_to_left(deltas: [u64; PAGES]) {
    let scene = Scene::with_chain(CHAIN);
    let (worker, compute) = scene.join(2);
    let outcome = bounded::run(&worker, ENDLESS, {
        let handle = (*worker).clone();
        async move {
            let tree = open(&handle).await?;
            tree.bulk_load((0..PAGES).flat_map(keys_of).map(|key| (key, key)), 1.0).await?;
            for page in 0..PAGES - 1 {
                let key = keys_of(page).max().unwrap() + 1;
                tree.insert(key, key).await?;
            }
            for page in (0..PAGES).rev() {
                let mut keys: Vec<u64> = keys_of(page).collect();
                let first = keys[0];
                // The last page stays, for the others to absorb.
                let is_last = page == PAGES - 1;
                keys.push(keys[keys.len() - 1] + 1);
                let others = if is_last { 0 } else { 1 + keys.len() as u64 };
                for _ in others..deltas[page] {
                    tree.upsert(first, first).await?;
                }
                if !is_last {
                    for key in keys {
                        assert_eq!(tree.remove(key).await?, Some(key));
                    }
                }
            }
            let merges = handle.counters().merges as usize;
            for key in (0..PAGES).flat_map(keys_of) {
                let there = (key >= keys_of(PAGES - 1).min().unwrap()).then_some(key);
                assert_eq!(tree.get(key).await?, there, "key {key}");
                assert_eq!(tree.upsert(key, 7).await?, there, "key {key}");
            }
            assert_eq!(merges, PAGES, "all pages but one are merged, and that one with the root");
            tree.check().await
        }
    });
    std::mem::forget((worker, compute));
    let report = outcome.unwrap_or_else(|endless| panic!("{endless}")).unwrap_or_else(|error: Error| panic!("{error}"));
    assert!(report.is_clean(), "{report:?}");
}

/// The chains of many pages, one behind another, would be longer than a record can say.
#[test]
fn pages_are_absorbed_one_after_another() {
    absorb_from_right_to_left([31; PAGES]);
}

/// The chains of these would be of just the length that is lost when one more page absorbs them: 254.
#[test]
fn pages_are_absorbed_up_to_the_longest_chain() {
    let mut deltas = [31; PAGES];
    (deltas[3], deltas[2]) = (23, 32);
    absorb_from_right_to_left(deltas);
}
