//! The checker: every invariant, on every page, from the root down; then leaked pages.

use std::{collections::HashSet, rc::Rc};

use farlink_runtime::{
    access::{Access, Context, PageRef, Start},
    error::Error,
    operation::retry,
    report::Report,
};

use super::{
    Tree,
    node::{Item, Node, require_page},
    rect::Rect,
};

/// Pages read at once.
const BATCH: usize = 64;

/// Nobody may change the tree meanwhile.
pub(super) async fn check<A: Access<Plugin = Tree<D>>, const D: usize>(access: &A) -> Result<Report, Error> {
    let Context { worker, structure, .. } = access.context();
    let mut report = Report::default();
    let root = Rc::new(retry(worker, async || access.open(Start::Anew).await).await?);
    let (mut reached, mut stamps, height) = (HashSet::from([root.at()]), HashSet::new(), root.level());
    let mut row = inspect(access, &mut report, root, None);
    report.pages_by_level = vec![1];
    for level in (0..height).rev() {
        let mut below = Vec::new();
        for batch in row.chunks(BATCH) {
            let links = batch.iter().map(|(above, item)| (Rc::clone(above), item.link()));
            for ((_, item), page) in batch.iter().zip(access.follow_each(links).all().await) {
                match page {
                    Ok(page) if !reached.insert(page.at()) => report.add(page.at(), "more than one link owns it"),
                    Ok(page) => {
                        if !stamps.insert(item.stamp) {
                            report.add(page.at(), "another page has its stamp, too: searches may miss entries");
                        }
                        below.extend(inspect(access, &mut report, Rc::new(page), Some((level, item))));
                    }
                    Err(interrupt) => {
                        let at = item.link().remote().map_or(structure.root, |(at, _)| at);
                        report.add_unreadable(at, &interrupt);
                    }
                }
            }
        }
        report.pages_by_level.insert(0, row.len() as u64);
        row = below;
    }
    report.bytes = report.pages() * structure.class.bytes() as u64;
    report.audit(worker, structure, &reached).await?;
    Ok(report)
}

/// The children of a page, each with the page, whose link it is.
type Children<P, const D: usize> = Vec<(Rc<P>, Item<D>)>;

/// What is wrong with a page, of which the one above says what it must be; its children.
fn inspect<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    report: &mut Report,
    page: Rc<A::Page<'a>>,
    expected: Option<(u8, &Item<D>)>,
) -> Children<A::Page<'a>, D> {
    let at = page.at();
    if let Err(interrupt) = require_page(access, &page) {
        report.add(at, interrupt.to_string());
        return Vec::new();
    }
    let read = page.read(|words| {
        let node = Node::<_, D>::of(words);
        (node.head(), node.items(), node.stated_count(), node.capacity)
    });
    let Ok((head, items, stated, capacity)) = read else {
        report.add(at, "changed while it was checked");
        return Vec::new();
    };
    if stated > capacity as u64 {
        report.add(at, format!("states {stated} entries; it holds {capacity}"));
    }
    match expected {
        Some((level, item)) => {
            if (head.level, head.stamp) != (level, item.stamp) {
                let (found, expected) = ((head.level, head.stamp), (level, item.stamp));
                report.add(at, format!("has level and stamp {found:?}; the page above says {expected:?}"));
            }
            if head.bounds != item.rect {
                report.add(at, format!("has the box {:?}; the page above says {:?}", head.bounds, item.rect));
            }
        }
        None if head.bounds != Rect::EVERYTHING => report.add(at, "is the root, and its box is not everything"),
        None => {}
    }
    if items.iter().any(|item| item.rect.require_finite().is_err()) {
        report.add(at, "holds a rectangle that is none");
    }
    if !items.iter().all(|item| head.bounds.contains(&item.rect)) {
        report.add(at, "holds an entry that is not within its box");
    }
    if head.level == 0 {
        report.entries += items.len() as u64;
        return Vec::new();
    }
    if items.is_empty() {
        report.add(at, "has no children");
    }
    items.into_iter().map(|item| (Rc::clone(&page), item)).collect()
}
