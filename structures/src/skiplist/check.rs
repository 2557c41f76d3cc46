//! The checker: every node of every level, from the top down and from left to right, and leaked pages.

use std::collections::{BTreeMap, HashSet};

use farlink_runtime::{access::*, error::Error, operation::retry, report::Report};

use super::{List, node::*};

/// Nobody may change the list meanwhile.
pub(super) async fn check<A: Access<Plugin = List>>(access: &A) -> Result<Report, Error> {
    let Context { worker, structure, .. } = access.context();
    let mut report = Report::default();
    let mut reached = HashSet::new();
    // What the nodes of the level above lead to, by key.
    let mut expected = BTreeMap::from([(0, structure.root_link().word())]);
    let mut next = Ok(Some(retry(worker, async || Place::open(access, Start::Root).await).await?));
    while let Some(mut place) = next.unwrap_or_default() {
        let (level, mut count, mut leads_to) = (place.node.level, 0, BTreeMap::new());
        next = if level > 0 { place.below(access, false).await.map(Some) } else { Ok(None) };
        loop {
            let (at, node) = (place.page.at(), place.node);
            reached.insert(at);
            count += 1;
            report.entries += u64::from(node.present);
            leads_to.insert(node.low, node.below);
            if expected.remove(&node.low).is_some_and(|link| link != place.page.link().word()) {
                report.add(at, "the node above it leads to another page");
            }
            if node.owns_right != node.high.is_some_and(|high| !expected.contains_key(&high)) {
                report.add(at, "its flag does not tell whether a node is above the one to its right");
            }
            if node.present != (level == 0) && node.low != 0 {
                report.add(at, "its flag does not tell whether it has a value");
            }
            if node.high.is_none() {
                break;
            }
            match place.right(access).await {
                Ok(right) => place = right,
                Err(interrupt) => break report.add_unreadable(at, &interrupt),
            }
        }
        for (key, page) in std::mem::replace(&mut expected, leads_to) {
            report.add(structure.root, format!("level {level} lacks {:?} of key {key}", Link::from_word(page)));
        }
        if let Err(interrupt) = &next {
            report.add_unreadable(structure.root, interrupt);
        }
        report.pages_by_level.insert(0, count);
    }
    report.bytes = report.pages() * CLASS.bytes() as u64;
    report.audit(worker, structure, &reached).await?;
    Ok(report)
}
