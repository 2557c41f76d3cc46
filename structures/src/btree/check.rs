//! The checker: every invariant of the tree, on every page.
//!
//! It goes down level by level with what each page must be, as its parent says it, and compares: level, fences, order of
//! keys, number of entries, right links from one end of a level to the other, no page reached twice. Then it audits the
//! cluster's memory: live pages of the tree that were not reached are leaked. Nobody may change the tree meanwhile.

use std::{collections::HashSet, rc::Rc};

use farlink_runtime::{
    access::{Access, Context, Link, PageRef, RemotePtr, Start},
    error::Error,
    operation::retry,
};

use super::{
    Tree,
    node::{Fences, KIND, Node},
};
use crate::map::Report;

/// Pages read at once.
const BATCH: usize = 64;
/// A page that a parent leads to, and what it must be.
struct Expected {
    link: Link,
    fences: Fences,
}

impl Expected {
    fn at(&self) -> RemotePtr {
        self.link.remote().expect("only links to pages are expected").0
    }
}

pub(super) async fn check<A: Access<Plugin = Tree>>(access: &A) -> Result<Report, Error> {
    let Context { worker, structure, .. } = access.context();
    let mut report = Report::default();
    let root = Rc::new(retry(worker, async || access.open(Start::Anew).await).await?);
    let mut level = root.level();
    let mut row = vec![Expected { link: root.link(), fences: Fences::ALL }];
    let mut reached = HashSet::from([root.at()]);
    let mut by_level = Vec::new();
    loop {
        by_level.push(row.len() as u64);
        let mut below = Vec::new();
        for (batch_index, batch) in row.chunks(BATCH).enumerate() {
            let links = batch.iter().map(|expected| (Rc::clone(&root), expected.link));
            for (index, (expected, page)) in batch.iter().zip(access.follow_each(links).all().await).enumerate() {
                let right = row.get(batch_index * BATCH + index + 1).map_or(Link::NULL, |right| right.link);
                match page {
                    Ok(page) if page.link().remote().is_none_or(|(_, class)| class != structure.class) => {
                        report
                            .add(expected.at(), format!("is not of {} bytes, as all others", structure.class.bytes()));
                    }
                    Ok(page) => inspect(&mut report, &page, level, expected, right, &mut below),
                    Err(interrupt) => report.add_unreadable(expected.at(), &interrupt),
                }
            }
        }
        if level == 0 {
            break;
        }
        below.retain(|expected: &Expected| {
            let is_new = reached.insert(expected.at());
            if !is_new {
                report.add(expected.at(), "more than one link owns it");
            }
            is_new
        });
        row = below;
        level -= 1;
    }
    by_level.reverse();
    report.pages_by_level = by_level;
    report.bytes = report.pages() * structure.class.bytes() as u64;
    report.audit(worker, structure, &reached).await?;
    Ok(report)
}

fn inspect(
    report: &mut Report,
    page: &impl PageRef,
    level: u8,
    expected: &Expected,
    right: Link,
    below: &mut Vec<Expected>,
) {
    let at = page.at();
    if (page.level(), page.kind()) != (level, KIND) {
        report.add(at, format!("is of level {} and kind {}, not {level} and {KIND}", page.level(), page.kind()));
        return;
    }
    let inspected = page.read(|words| {
        let node = Node(words);
        if node.stated_count() > node.capacity() {
            report.add(at, format!("states {} entries; it holds {}", node.stated_count(), node.capacity()));
        }
        let fences = Fences { low: node.low(), high: node.high() };
        if fences != expected.fences {
            report.add(at, format!("has {fences:?}; its parent says {:?}", expected.fences));
        }
        if node.right() != right {
            report.add(at, format!("its right link is {:?}; the next page of its level is {right:?}", node.right()));
        }
        let entries = node.entries();
        if entries.windows(2).any(|pair| pair[0].0 >= pair[1].0) {
            report.add(at, "its keys are not in ascending order");
        }
        let within = |key: u64| key >= fences.low && fences.high.is_none_or(|high| key < high);
        if !entries.iter().all(|&(key, _)| within(key)) {
            report.add(at, "it holds keys outside its fences");
        }
        if level == 0 {
            report.entries += entries.len() as u64;
            return;
        }
        if entries.first().is_none_or(|&(key, _)| key != fences.low) {
            report.add(at, "its first child does not begin at its low fence");
        }
        for (index, &(low, link)) in entries.iter().enumerate() {
            let high = entries.get(index + 1).map_or(fences.high, |&(next, _)| Some(next));
            let link = Link::from_word(link);
            match link.remote() {
                Some(_) => below.push(Expected { link, fences: Fences { low, high } }),
                None => report.add(at, format!("child {index} is {link:?}")),
            }
        }
    });
    if inspected.is_err() {
        report.add(at, "changed while it was checked");
    }
}
