//! The checker finds what is wrong: each invariant, broken in a tree of two levels.

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::{Access, Hint, Interrupt, Link, PageRef, Pages, PagesMut, Placement, Start, Words},
    one_sided::OneSidedPages,
    page::{IDENTITY, SizeClass},
};
use farlink_structures::rtree::{Entry, RTree, RTreeOptions, Rect, Tree};

use crate::{
    faults::{BOX, COUNT, STAMP},
    scene::scene,
};

/// Of pages of 1 KiB, and where their columns begin.
const IN_LEAF: usize = 23;
const IN_ROOT: usize = 19;
const COLUMNS: usize = BOX + 4;
const LEAVES: usize = 5;

/// The root's entry of a leaf: its column of that number.
const fn entry(leaf: usize, column: usize) -> usize {
    COLUMNS + column * IN_ROOT + leaf
}

const LINK: usize = 4;
const STAMP_OF: usize = 5;

/// Where its box ends along the first axis, and where the first entry of a leaf does.
const HIGH: usize = BOX + 2;
const ENTRY_LOW: usize = COLUMNS;
const ENTRY_HIGH: usize = COLUMNS + 2 * IN_LEAF;

/// The root, and the leaves of its first two entries.
type Copies = [Vec<u64>; 3];
/// Words to be set: of which page, where, to what.
type Damage = fn(&Copies) -> Vec<(usize, usize, u64)>;

const DAMAGES: [(&str, Damage); 12] = [
    ("more than one link owns it", |of| (0..=STAMP_OF).map(|at| (0, entry(1, at), of[0][entry(0, at)])).collect()),
    ("another page has its stamp, too", |of| vec![(2, STAMP, of[1][STAMP]), (0, entry(1, STAMP_OF), of[1][STAMP])]),
    ("cannot be read", |_| vec![(0, entry(0, LINK), 64)]),
    ("no page of an R-tree", |_| vec![(1, IDENTITY, 0)]),
    ("states 24 entries", |_| vec![(1, COUNT, IN_LEAF as u64 + 1)]),
    ("has level and stamp", |_| vec![(1, STAMP, 77)]),
    ("has the box", |_| vec![(1, HIGH, 1e9f64.to_bits())]),
    ("its box is not everything", |_| vec![(0, HIGH, 1e9f64.to_bits())]),
    ("a rectangle that is none", |of| vec![(1, ENTRY_LOW, of[1][HIGH]), (1, ENTRY_HIGH, of[1][BOX])]),
    ("not within its box", |_| vec![(1, ENTRY_HIGH, 1e9f64.to_bits())]),
    ("has no children", |_| vec![(0, COUNT, 0)]),
    // Of that the audit tells.
    ("", |_| vec![(0, COUNT, LEAVES as u64 - 1)]),
];

#[test]
fn each_damage_is_found_and_nothing_else() {
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        for (number, (what, damage)) in DAMAGES.into_iter().enumerate() {
            let tree = RTree::create(&scene.worker, &format!("{number}"), RTreeOptions::default()).await.unwrap();
            let entries = (0..(LEAVES * IN_LEAF) as u32).map(f64::from);
            let entries = entries.map(|at| -> Entry { (Rect::new([at; 2], [at + 0.5; 2]).unwrap(), at as u64) });
            tree.bulk_load(entries, 1.0).await.unwrap();
            assert_eq!(tree.check().await.unwrap().pages_by_level, [LEAVES as u64, 1]);
            assert!(tree.check().await.unwrap().is_clean());
            let access = tree.access();
            let damaged = async {
                let (mut pages, mut slots, mut copies) = (Pages::new(), Vec::new(), Copies::default());
                let words = |words: &_| (0..Words::count(words)).map(|at| Words::word(words, at)).collect::<Vec<_>>();
                let root = access.open(Start::Root).await?;
                copies[0] = root.read(words)?;
                let mut leaves = Vec::new();
                for leaf in 0..2 {
                    let link = Link::from_word(copies[0][entry(leaf, LINK)]);
                    leaves.push(access.follow(&root, link, Hint::DOWN).await?);
                    copies[leaf + 1] = leaves[leaf].read(words)?;
                }
                for page in std::iter::once(root).chain(leaves) {
                    slots.push(pages.add(page));
                }
                let set = |pages: &mut _| {
                    for (page, at, word) in damage(&copies) {
                        match at {
                            IDENTITY => PagesMut::describe(pages, slots[page], 0, 9),
                            _ => PagesMut::set(pages, slots[page], at, word),
                        }
                    }
                };
                access.change(pages, set).await?;
                Ok::<_, Interrupt>(())
            };
            damaged.await.unwrap();
            let report = tree.check().await.unwrap();
            assert!(!report.is_clean(), "{what}");
            let is_found = report.problems.iter().any(|problem| problem.what.contains(what)) || what.is_empty();
            assert!(is_found && report.problem_count <= 1, "{what}: {report:?}");
            assert!(!what.is_empty() || report.leaked() == Some(1), "{report:?}");
        }
    });
}

/// In the place of a leaf, and with no room for the box that each page has.
#[test]
fn a_page_that_is_too_short_is_met_by_an_owner() {
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        let tree = RTree::create(&scene.worker, "short", RTreeOptions::default()).await.unwrap();
        let entry_at = |at: usize| -> Entry { (Rect::point([at as f64; 2]).unwrap(), at as u64) };
        tree.bulk_load((0..LEAVES * IN_LEAF).map(entry_at), 1.0).await.unwrap();
        let (access, structure) = (tree.access(), tree.access().context().structure.clone());
        let forged = async {
            let root = access.open(Start::Root).await?;
            let new = access.allocate(SizeClass::SMALLEST, Placement::With(root.at())).await?;
            let link = new.link();
            let mut pages = Pages::new();
            let (root, new) = (pages.add(root), pages.add_new(new));
            let lead = |pages: &mut OneSidedPages| {
                pages.describe(new, 0, 1);
                pages.set(root, entry(0, LINK), link.word());
            };
            access.change(pages, lead).await.map(drop)
        };
        let forged: Result<(), Interrupt> = forged.await;
        forged.unwrap();
        let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap();
        let owned = cache.own(&scene.worker, structure, Rect::EVERYTHING.into()).await.unwrap();
        let outcome = RTree::<_, 2>::over(owned).len().await;
        assert!(outcome.is_err(), "{outcome:?}");
    });
}
