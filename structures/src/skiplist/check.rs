//! The checker: every node of every level, from the top down and from left to right, and leaked pages.

use std::collections::{BTreeMap, HashSet};

use farlink_runtime::{access::*, error::Error, operation::retry, report::Report};

use super::{List, node::*};

/// Nobody may change the list meanwhile.
pub(super) async fn check<A: Access<Plugin = List>>(access: &A) -> Result<Report, Error> {
    let Context { worker, structure, .. } = access.context();
    let (mut report, mut reached) = (Report::default(), HashSet::new());
    // What the nodes of the level above lead to, by key.
    let mut expected = BTreeMap::from([(None, structure.root_link().word())]);
    let mut head = Some(retry(worker, async || Place::open(access, Start::Anew).await).await?);
    while let Some(mut place) = head {
        let (level, mut leads_to) = (place.node.level, BTreeMap::new());
        head = match level {
            0 => None,
            _ => place.below(access, false).await.map_err(|why| report.add_unreadable(place.page.at(), &why)).ok(),
        };
        loop {
            let (at, node) = (place.page.at(), place.node);
            reached.insert(at);
            report.entries += u64::from(node.value().is_some());
            leads_to.insert(node.low, node.below);
            let is_below = expected.remove(&node.low);
            if is_below.is_some_and(|link| link != place.page.link().word()) {
                report.add(at, "the node above it leads to another page");
            }
            if node.low.is_some_and(|key| is_below.is_some() != (height(key) > level)) {
                report.add(at, "its tower is not as high as its key says");
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
            report.add(structure.root, format!("level {level} lacks {:?} of key {key:?}", Link::from_word(page)));
        }
        report.pages_by_level.insert(0, expected.len() as u64);
    }
    report.bytes = report.pages() * CLASS.bytes() as u64;
    report.audit(worker, structure, &reached).await?;
    Ok(report)
}
