//! A loaded tree's answers beside brute force over what was loaded.

use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::rtree::ops::Count;
use farlink_structures::rtree::{Entry, Query, Tree};
use rand::{RngExt as _, SeedableRng, rngs::SmallRng};

use super::{NEAREST, RectData, nearest, search};
use crate::subject::Samples;

/// Edges of windows, as shares of the space.
const SHARES: [f64; 4] = [1e-4, 1e-3, 1e-2, 1e-1];
/// Windows of each of them.
const WINDOWS_EACH: usize = 16;
/// Points whose nearest rectangles are looked for.
const POINTS: usize = 16;

/// Searches windows of all sizes: half of them around loaded rectangles, and half of those for what lies within. Then it looks for what
/// is nearest to points.
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
    for _ in 0..POINTS {
        let to = data.space.point(&mut rng);
        let found = nearest(run, to, NEAREST).await?;
        samples.taken += 1;
        samples.returned += found.len() as u64;
        let problem = not_nearest(&to, &data.entries, &found, has_more);
        samples.problem = samples.problem.or_else(|| problem.map(|why| format!("nearest to {to:?}: {why}")));
    }
    Ok(samples)
}

/// What is wrong with the nearest that were found, as distances tell: of what is equally far, any will do.
fn not_nearest(to: &[f64; 2], loaded: &[Entry], found: &[Entry], has_more: bool) -> Option<String> {
    let (expected, found): (Vec<f64>, Vec<f64>) =
        (least_distances(to, loaded), found.iter().map(|entry| entry.0.distance_squared(to)).collect());
    let is_so = match has_more {
        // What was added may be nearer.
        true => found.len() >= expected.len() && found.iter().zip(&expected).all(|(found, loaded)| found <= loaded),
        false => found == expected,
    };
    (!is_so).then(|| format!("squares of distances are {found:?}, and of what is loaded {expected:?}"))
}

/// Squares of those of the nearest.
fn least_distances(to: &[f64; 2], entries: &[Entry]) -> Vec<f64> {
    let mut least: Vec<f64> = Vec::new();
    for at in entries.iter().map(|entry| entry.0.distance_squared(to)) {
        if least.len() < NEAREST || least.last().is_some_and(|last| at < *last) {
            least.insert(least.partition_point(|other| *other <= at), at);
            least.truncate(NEAREST);
        }
    }
    least
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

    #[test]
    fn what_is_not_nearest_is_seen() {
        let entry = |at: f64, id| (Rect::point([at, 0.0]).unwrap(), id);
        let loaded: Vec<Entry> = (0..20u32).map(|id| entry(f64::from(id % 10), id.into())).collect();
        let nearest = [0, 10, 1, 11, 12].map(|id| loaded[id]);
        let is_right = |found: &[Entry], has_more| not_nearest(&[0.0; 2], &loaded, found, has_more).is_none();
        assert!(is_right(&nearest, false) && is_right(&nearest, true));
        let with = |place: usize, other| {
            let mut found = nearest;
            found[place] = other;
            found
        };
        assert!(is_right(&with(4, loaded[2]), false), "it is as far");
        assert!(!is_right(&with(4, loaded[3]), false) && !is_right(&with(4, loaded[3]), true));
        assert!(!is_right(&nearest[..4], false) && !is_right(&nearest[..4], true));
        assert!(!is_right(&with(4, entry(0.5, 30)), false) && is_right(&with(4, entry(1.5, 30)), true));
    }
}
