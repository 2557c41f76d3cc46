//! Bulk load: sort-tile-recursive. The tree is planned in memory, level by level from the leaves, each with entries spread evenly
//! over its pages; then it is written from the leaves up, and last the root, which makes it visible.

use farlink_runtime::{
    access::{self, Access, Interrupt, Link, PageRef, Pages, PagesMut, Placement, Slot, Start},
    error::Error,
    operation::retry,
    ptr::ServerId,
    structure::PlacementPolicy,
};

use super::{
    Tree,
    node::{self, Head, Item, Node, capacity},
    rect::{Entry, Rect},
    shape::fresh_stamp,
};

/// Pages written at once, and bytes: the smallest cache has room for that.
const BATCH: usize = 32;
const BATCH_BYTES: usize = 32 << 10;

/// A level of the tree to be: its entries in the order of its pages, and where each page ends.
struct Level<const D: usize> {
    entries: Vec<Entry<D>>,
    ends: Vec<usize>,
}

/// Brings the entries of some of the pages of a level in order: slices along one dimension, each then cut along the next.
fn tile<const D: usize>(entries: &mut [Entry<D>], ends: &[usize], dimension: usize) {
    let (pages, before) = (ends.len() - 1, ends[0]);
    if pages <= 1 {
        return;
    }
    entries.sort_unstable_by(|a, b| a.0.center(dimension).total_cmp(&b.0.center(dimension)));
    let slices = match D - dimension {
        1 => return,
        left => ((pages as f64).powf(1.0 / left as f64).ceil() as usize).min(pages),
    };
    for slice in 0..slices {
        let ends = &ends[pages * slice / slices..=pages * (slice + 1) / slices];
        tile(&mut entries[ends[0] - before..ends[ends.len() - 1] - before], ends, dimension + 1);
    }
}

impl<const D: usize> Level<D> {
    /// Entries spread evenly over as few pages as have room for them.
    fn new(mut entries: Vec<Entry<D>>, room: usize) -> Self {
        let (count, pages) = (entries.len(), entries.len().div_ceil(room));
        let ends: Vec<usize> = (0..=pages).map(|page| count * page / pages.max(1)).collect();
        tile(&mut entries, &ends, 0);
        Self { entries, ends }
    }

    fn count(&self) -> usize {
        self.ends.len() - 1
    }

    fn pages(&self) -> impl Iterator<Item = &[Entry<D>]> {
        self.ends.windows(2).map(|ends| &self.entries[ends[0]..ends[1]])
    }
}

/// The levels of a tree, the leaves first. The entries of the last one are for the root. Above the leaves an entry says which page
/// of the level below it leads to.
fn plan<const D: usize>(entries: Vec<Entry<D>>, room: impl Fn(u8) -> (usize, usize)) -> Vec<Level<D>> {
    let (mut levels, mut entries) = (Vec::<Level<D>>::new(), entries);
    while entries.len() > room(levels.len() as u8).1 {
        let level = Level::new(entries, room(levels.len() as u8).0);
        let boxes = level.pages().map(|page| Rect::around(page.iter().map(|(rect, _)| rect)));
        entries = boxes.zip(0..).collect();
        levels.push(level);
    }
    levels.push(Level { ends: vec![0, entries.len()], entries });
    levels
}

pub(super) async fn load<A: Access<Plugin = Tree<D>> + Clone + 'static, const D: usize>(
    access: &A,
    entries: Vec<Entry<D>>,
    fill: f64,
) -> Result<u64, Error> {
    if !(0.1..=1.0).contains(&fill) {
        return Err(Error::BadOption { option: "fill", why: format!("{fill}; a page is filled from 0.1 to 1.0") });
    }
    entries.iter().try_for_each(|(rect, _)| rect.require_finite())?;
    let (count, words) = (entries.len() as u64, access.context().structure.class.words());
    let room = |level| {
        let most = capacity::<D>(words, level);
        (((most as f64 * fill) as usize).clamp(2, most), most)
    };
    let levels = plan(entries, room);
    let access = access.clone();
    let worker = access.context().worker.clone();
    let whole = async move {
        let mut written = Vec::new();
        let outcome = write(&access, levels, &mut written).await;
        if outcome.is_err() {
            for page in written {
                let freed = retry(&access.context().worker, async || access::free(&access, page).await).await;
                if let Err(error) = freed {
                    tracing::warn!(?page, %error, "a page of a failed bulk load was not freed");
                }
            }
        }
        outcome?;
        access.settle().await
    };
    worker.spawn_to_end(whole).await.map(|()| count)
}

/// The root, if it is an empty leaf.
async fn empty_root<A: Access<Plugin = Tree<D>>, const D: usize>(access: &A) -> Result<A::Page<'_>, Interrupt> {
    let root = access.open(Start::Anew).await?;
    match root.read(|words| root.level() == 0 && Node::<_, D>::of(words).count == 0)? {
        true => Ok(root),
        false => Err(Error::NotEmpty.into()),
    }
}

/// For each page of each level the number of its ancestor at level `top`: its subtree.
fn subtrees<const D: usize>(levels: &[Level<D>], top: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = levels.iter().map(|level| (0..level.count()).collect()).collect();
    for level in (1..levels.len()).rev().filter(|&level| level <= top) {
        for (number, page) in levels[level].pages().enumerate() {
            for &(_, child) in page {
                all[level - 1][child as usize] = all[level][number];
            }
        }
    }
    all
}

async fn write<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    mut levels: Vec<Level<D>>,
    written: &mut Vec<Link>,
) -> Result<(), Error> {
    let context = access.context();
    let is_empty = async || empty_root(access).await.map(drop);
    retry(&context.worker, is_empty).await?;
    let (structure, servers) = (&context.structure, context.worker.servers());
    let top = match structure.policy {
        PlacementPolicy::Subtrees { level } => Some(usize::from(level)),
        _ => None,
    };
    let subtrees = top.map(|top| subtrees(&levels[..levels.len() - 1], top));
    let Some(root) = levels.pop() else { return Ok(()) };
    let mut below = Vec::<Item<D>>::new();
    let item = |below: &[Item<D>], level: usize, &(rect, word): &Entry<D>| match level {
        0 => Item { rect, word, stamp: 0 },
        _ => below[word as usize],
    };
    let height = levels.len();
    for (level, planned) in levels.into_iter().enumerate() {
        let mut here = Vec::with_capacity(planned.count());
        let all: Vec<Vec<Item<D>>> =
            planned.pages().map(|page| page.iter().map(|entry| item(&below, level, entry)).collect()).collect();
        for batch in all.chunks((BATCH_BYTES / structure.class.bytes()).clamp(1, BATCH)) {
            let (mut pages, mut heads) = (Pages::new(), Vec::new());
            for items in batch {
                let number = here.len();
                let placement = match &subtrees {
                    Some(subtrees) if Some(level) <= top => {
                        let server = (structure.root.server().index() + subtrees[level][number]) % servers;
                        ServerId::new(server as u16).map_or(Placement::RoundRobin, Placement::Server)
                    }
                    _ => structure.placement(level as u8, structure.root),
                };
                let new = access.allocate(structure.class, placement).await?;
                let stamp = fresh_stamp(access);
                let bounds = Rect::around(items.iter().map(|item| &item.rect));
                heads.push((new.link(), Head { level: level as u8, stamp, right: Link::NULL, bounds }));
                here.push(Item { rect: bounds, word: new.link().word(), stamp });
                pages.add_new(new);
            }
            let mut is_made = false;
            let fill = |pages: &mut A::PagesMut<'_>| {
                is_made = true;
                for (index, ((_, head), items)) in heads.iter().zip(batch).enumerate() {
                    node::write(pages, Slot::new_page(index), head, items);
                }
            };
            let changed = access.change(pages, fill).await.map(drop);
            // What lacks nothing but its record is made, and cached.
            if is_made && changed.as_ref().err().is_none_or(Interrupt::lacks_record) {
                written.extend(heads.iter().map(|&(link, _)| link));
            }
            match changed {
                Ok(()) => {}
                Err(Interrupt::Failed(error)) => return Err(*error),
                Err(_) => {
                    let why = format!("it has no room for {} new pages at once; give it more", batch.len());
                    return Err(Error::BadOption { option: "cache", why });
                }
            }
        }
        below = here;
    }
    let items: Vec<_> = root.entries.iter().map(|entry| item(&below, height, entry)).collect();
    retry(&context.worker, async || {
        let mut pages = Pages::new();
        let page = pages.add(empty_root(access).await?);
        // With another page it is a change of several: an owner records it, as it has those that it leads to.
        if let Some(below) = items.first().filter(|_| height > 0) {
            pages.add_relied_on(access.open(Start::Page(Link::from_word(below.word))).await?);
        }
        let lead = |pages: &mut A::PagesMut<'_>| {
            let head = Node::<_, D>::of(&pages.page(page)).head();
            node::write(pages, page, &Head { level: height as u8, ..head }, &items);
        };
        let led = access.change(pages, lead).await.map(drop);
        // It may have been made, and fail for want of a record: then the pages are the tree's, unless its root shows that it was not.
        if matches!(led, Err(Interrupt::Failed(_))) && retry(&context.worker, is_empty).await.is_err() {
            written.clear();
        }
        led
    })
    .await
}
