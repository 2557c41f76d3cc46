//! A loaded tree's answers beside brute force over what was loaded.

use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::rtree::ops::Count;
use farlink_structures::rtree::{Entry, Query, Tree};
use rand::{RngExt as _, SeedableRng, rngs::SmallRng};

use super::{RectData, search};
use crate::subject::Samples;

/// Edges of windows, as shares of the space.
const SHARES: [f64; 4] = [1e-4, 1e-3, 1e-2, 1e-1];
/// Windows of each of them.
const WINDOWS_EACH: usize = 16;

/// Searches windows of all sizes: half of them around loaded rectangles, and half of those for what lies within.
pub(super) async fn compare<R: Run<Plugin = Tree>>(run: &R, data: &RectData, has_more: bool) -> Result<Samples, Error> {
    let mut rng = SmallRng::seed_from_u64(data.setting.seed ^ 0x7769_6e64_6f77);
    let mut samples = Samples { name: "windows", taken: 0, returned: 0, problem: None };
    for (share, number) in SHARES.into_iter().flat_map(|share| (0..WINDOWS_EACH).map(move |number| (share, number))) {
        let around = data.entries.get(rng.random_range(0..data.entries.len().max(1))).filter(|_| number % 2 == 0);
        let window = data.space.around_or_anywhere(&mut rng, share, around.map(|entry| &entry.0));
        let query = if number % 4 < 2 { Query::Intersects(window) } else { Query::Within(window) };
        let expected: Vec<Entry> = data.entries.iter().filter(|(rect, _)| query.matches(rect)).copied().collect();
        let found = search(run, query).await?;
        samples.taken += 1;
        samples.returned += found.len() as u64;
        let counted = run.execute(&Count { query, stamp: 0 }).await?;
        let problem = wrong(&query, &expected, &found, counted, has_more);
        samples.problem = samples.problem.or_else(|| problem.map(|why| format!("{query:?}: {why}")));
    }
    Ok(samples)
}

/// Sorted by what makes two entries equal.
fn sorted(entries: &[Entry]) -> Vec<[u64; 5]> {
    let words = |(rect, id): &Entry| {
        let ([x1, y1], [x2, y2]) = (rect.low(), rect.high());
        [x1.to_bits(), y1.to_bits(), x2.to_bits(), y2.to_bits(), *id]
    };
    let mut all: Vec<_> = entries.iter().map(words).collect();
    all.sort_unstable();
    all
}

/// What is wrong with an answer.
fn wrong(query: &Query, expected: &[Entry], found: &[Entry], counted: u64, has_more: bool) -> Option<String> {
    let (loaded, returned) = (expected.len(), found.len());
    if counted != returned as u64 {
        return Some(format!("{counted} were counted, and {returned} returned"));
    }
    if !has_more && loaded != returned {
        return Some(format!("{loaded} are loaded, and {returned} were returned"));
    }
    if let Some((rect, id)) = found.iter().find(|(rect, _)| !query.matches(rect)) {
        return Some(format!("{rect:?}, {id} was returned, which is elsewhere"));
    }
    // Both sorted: what was returned besides is passed over.
    let returned = sorted(found);
    let mut rest = returned.iter();
    let lost = sorted(expected).into_iter().find(|entry| !rest.any(|other| other == entry));
    lost.map(|[.., id]| format!("a rectangle with payload {id} was not returned"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlink_structures::rtree::Rect;

    #[test]
    fn wrong_answers_are_told_from_right_ones() {
        let entry = |at: f64, id| (Rect::point([at, at]).unwrap(), id);
        let query = Query::Intersects(Rect::new([0.0; 2], [1.0; 2]).unwrap());
        let loaded = [entry(0.5, 1), entry(0.25, 2), entry(0.5, 1)];
        let judge = |found: &[Entry], has_more| wrong(&query, &loaded, found, found.len() as u64, has_more);
        let more = [loaded[2], entry(0.1, 9), loaded[0], loaded[1]];
        assert_eq!(judge(&loaded, false), None);
        assert_eq!(judge(&more, true), None);
        let says = |found: &[Entry], has_more, part: &str| {
            let said = judge(found, has_more);
            assert!(said.as_ref().is_some_and(|said| said.contains(part)), "{said:?}");
        };
        says(&more, false, "3 are loaded, and 4 were returned");
        says(&loaded[..2], false, "3 are loaded, and 2 were returned");
        // One of two equal ones.
        says(&[loaded[0], loaded[1], entry(0.1, 9)], true, "payload 1 was not returned");
        says(&[loaded[0], loaded[1], loaded[2], entry(2.0, 9)], true, "which is elsewhere");
        assert!(wrong(&query, &loaded, &loaded, 4, false).unwrap().contains("4 were counted, and 3 returned"));
    }
}
