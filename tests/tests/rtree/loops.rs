//! Pages that lead to the same page below again and again: going by all of them would take for ever.

use std::time::Duration;

use farlink_offload::{Remote, ship::Registry};
use farlink_runtime::{
    access::{Access, Interrupt, Link, PageRef, Pages, PagesMut, Placement, Slot, Start},
    error::Error,
    page::HEADER_WORDS,
};
use farlink_structures::rtree::{Query, RTree, Rect, Tree};
use farlink_tests::{backend::FabricProfile, bounded::Watchdog, cluster, fleet::Fleet};

use crate::{
    faults::{COUNT, STAMP},
    scene::create,
};

/// Of a page of 1 KiB above level 0.
const CHILDREN: u64 = 19;
const HEIGHT: u8 = 5;
/// The structure's own mark.
const KIND: u8 = 1;

/// Has all entries of a page lead to one below it, or makes it an empty leaf.
fn lead(pages: &mut impl PagesMut, slot: Slot, level: u8, below: Link) {
    pages.describe(slot, level, KIND);
    pages.set(slot, STAMP, 100 + u64::from(level));
    let (low, high) = (f64::NEG_INFINITY.to_bits(), f64::INFINITY.to_bits());
    pages.fill(slot, HEADER_WORDS + 3, &[low, low, high, high]);
    if level == 0 {
        return pages.set(slot, COUNT, 0);
    }
    let columns = [low, low, high, high, below.word(), 100 + u64::from(level) - 1];
    for (number, word) in columns.into_iter().enumerate() {
        pages.fill(slot, HEADER_WORDS + 7 + number * CHILDREN as usize, &[word; CHILDREN as usize]);
    }
    pages.set(slot, COUNT, CHILDREN);
}

/// An error, and not after 19 to the power of the height; at a memory server, too, which then answers the next request.
#[test]
fn pages_that_lead_to_one_page_many_times_end_an_operation() {
    let _watch = Watchdog::start("pages that lead to one page", Duration::from_secs(20));
    let fleet = Fleet::start_of(2, 16 << 20, 1, FabricProfile::Fast, &Registry::new().with::<Tree>()).unwrap();
    let compute = cluster::join(&fleet.fabric(), 0).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let tree = create::<2>(&worker).await.unwrap();
        let access = tree.access();
        let made = async {
            let (mut pages, mut links) = (Pages::new(), Vec::new());
            for _ in 0..HEIGHT - 1 {
                let new = access.allocate(access.context().structure.class, Placement::RoundRobin).await?;
                links.push(new.link());
                pages.add_new(new);
            }
            let root = access.open(Start::Root).await?;
            links.push(root.link());
            let root = pages.add(root);
            let write = |pages: &mut _| {
                for level in 0..HEIGHT {
                    let slot = if level == HEIGHT - 1 { root } else { Slot::new_page(level.into()) };
                    lead(pages, slot, level, links[usize::from(level).saturating_sub(1)]);
                }
            };
            access.change(pages, write).await?;
            Ok::<_, Interrupt>(())
        };
        made.await.unwrap();
        let before = worker.counters();
        let somewhere = Rect::new([0.0; 2], [1.0; 2]).unwrap();
        let refused = |error: Error| assert!(matches!(error, Error::Inconsistent { .. }), "{error}");
        refused(tree.len().await.unwrap_err());
        refused(tree.search(Query::Intersects(somewhere)).all().await.unwrap_err());
        refused(tree.search(Query::Nearest([0.0; 2])).next().await.unwrap_err());
        refused(tree.delete(somewhere, 1).await.unwrap_err());
        refused(tree.update(somewhere, 1, somewhere).await.unwrap_err());
        let reads = (worker.counters() - before).reads;
        assert!(reads < 1_000_000, "{reads} reads");
        let tree = RTree::<_, 2>::over(Remote::new(&worker, access.context().structure.clone()));
        let refused = |error: Error| {
            let is_told = matches!(&error, Error::OnServer { why, .. } if why.contains("inconsistent"));
            assert!(is_told, "{error}");
        };
        refused(tree.len().await.unwrap_err());
        refused(tree.search(Query::Intersects(somewhere)).all().await.unwrap_err());
        refused(tree.search(Query::Nearest([0.0; 2])).next().await.unwrap_err());
        refused(tree.delete(somewhere, 1).await.unwrap_err());
        refused(tree.update(somewhere, 1, somewhere).await.unwrap_err());
        assert_eq!(fleet.counts().failed, 5);
    });
}
