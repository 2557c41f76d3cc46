//! What changes which pages there are, and which of two siblings an entry is in. Each is *one* change of a page and of those of
//! its children that it is about:
//!
//! - A *split*: half of a full page goes to a new one to its right. The new one takes over the stamp, the old one gets a new stamp
//!   and a link to it (Kornacker and Banks, VLDB 1995).
//! - A *reinsertion*: before a full leaf is split, those of its entries that lie far out go to siblings that suit them better. All
//!   pages that take part get new stamps, and forget their right links.
//! - *Condensing*: what is left in a page with few entries goes to siblings in the same way, and the page is freed.
//! - *Settling* of a box that is larger than need be.
//!
//! The box of the page above holds all of its children's entries wherever they are, so no box above is ever too small.

use std::{cell::Cell, collections::BTreeMap, rc::Rc};

use farlink_runtime::access::{Access, Hint, Interrupt, Link, PageRef, Pages, PagesMut, Slot};
use rand::RngExt;

use super::{
    Tree,
    change::{Path, enlarge},
    choose,
    node::{self, Head, Item, Node, count_min, require_page},
    rect::Rect,
};

/// Siblings that take entries of a page at a time, at most.
const SIBLINGS_MAX: usize = 4;

/// What a page holds.
type Contents<const D: usize> = (Head<D>, Vec<Item<D>>);

fn contents<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    page: &A::Page<'_>,
) -> Result<Contents<D>, Interrupt> {
    require_page(access, page)?;
    let (head, items) = page.read(|words| {
        let node = Node::<_, D>::of(words);
        (node.head(), node.items())
    })?;
    match head.level == page.level() {
        true => Ok((head, items)),
        false => Err(Interrupt::stale(page.at(), "it is of another level")),
    }
}

fn is_full<const D: usize>(page: &impl PageRef) -> Result<bool, Interrupt> {
    page.read(|words| Node::<_, D>::of(words).is_full())
}

/// One that no other page has. Compute servers of one seed draw the same numbers, so who draws is in it, too.
pub(super) fn fresh_stamp<A: Access>(access: &A) -> u64 {
    let worker = &access.context().worker;
    let who = u64::from(worker.owner().incarnation()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (worker.random(|rng| rng.random_range(1..=u64::MAX)) ^ who).max(1)
}

fn around<const D: usize>(items: &[Item<D>]) -> Rect<D> {
    Rect::around(items.iter().map(|item| &item.rect))
}

/// Which entry of a page leads to a child.
fn index_of<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    items: &[Item<D>],
    above: &A::Page<'_>,
    child: &A::Page<'_>,
) -> Result<usize, Interrupt> {
    let found = items.iter().position(|item| access.leads_to(item.link(), child));
    found.ok_or(Interrupt::stale(above.at(), "it does not lead to the page below it"))
}

/// Makes room in the highest of the full pages at the end of a path. If that is the leaf, the entry to be added is added with the
/// same change: then two pages cannot give the same entries to each other for ever. Whether it was.
pub(super) async fn make_room<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    mut path: Path<'a, A>,
    item: Option<Item<D>>,
) -> Result<bool, Interrupt> {
    let Some(mut full) = path.pop() else { return Err(Interrupt::above()) };
    let mut item = item;
    while let Some(above) = path.pop() {
        if is_full::<D>(&above)? {
            (full, item) = (above, None);
            continue;
        }
        if let Some(Item { rect, .. }) = item
            && !above.read(|words| Node::<_, D>::of(words).bounds())?.contains(&rect)
        {
            path.push(above);
            enlarge(access, path, &rect, |_, _| {}).await?;
            return Ok(false);
        }
        return relieve(access, above, full, item).await.map(|()| item.is_some());
    }
    match full.at() == access.context().structure.root {
        true => raise_root(access, full, item).await.map(|()| item.is_some()),
        false => Err(Interrupt::above()),
    }
}

/// Puts another level below a full root: what it holds goes into two new pages.
async fn raise_root<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    root: A::Page<'a>,
    item: Option<Item<D>>,
) -> Result<(), Interrupt> {
    let (head, mut items) = contents(access, &root)?;
    items.extend(item);
    let (left, right) = choose::divide(&items);
    let (class, near) = (access.context().structure.class, access.context().structure.placement(head.level, root.at()));
    let (mut pages, mut below) = (Pages::new(), Vec::new());
    let root = pages.add(root);
    for half in [left, right] {
        let new = access.allocate(class, near).await?;
        let item = Item { rect: around(&half), word: new.link().word(), stamp: fresh_stamp(access) };
        below.push((pages.add_new(new), item, half));
    }
    let raise = |pages: &mut A::PagesMut<'a>| {
        for (slot, item, half) in &below {
            let Item { rect: bounds, stamp, .. } = *item;
            node::write(pages, *slot, &Head { level: head.level, stamp, right: Link::NULL, bounds }, half);
        }
        let items: Vec<_> = below.iter().map(|&(_, item, _)| item).collect();
        node::write(pages, root, &Head { level: head.level.saturating_add(1), ..head }, &items);
    };
    access.change(pages, raise).await?;
    access.context().worker.count_split();
    Ok(())
}

/// Makes room in a full page under one that has room: by a split; or, for an entry to be added to a leaf, by giving entries to
/// siblings, if enough of them lie nearer to those.
async fn relieve<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    above: A::Page<'a>,
    full: A::Page<'a>,
    item: Option<Item<D>>,
) -> Result<(), Interrupt> {
    let (_, siblings) = contents(access, &above)?;
    let (head, mut items) = contents(access, &full)?;
    items.extend(item);
    let own = index_of(access, &siblings, &above, &full)?;
    let enough = (items.len() / 10).max(1);
    let boxes: Vec<_> = siblings.iter().map(|item| item.rect).collect();
    let (staying, leaving) = match item {
        Some(_) => choose::leaving(&items, &boxes, own, SIBLINGS_MAX),
        None => Default::default(),
    };
    if leaving.len() < enough {
        return split(access, (above, siblings), (own, full, head), &items).await;
    }
    let mut family = Family::new(access, above, siblings, (own, full, head));
    let staying = family.give(staying, leaving).await?;
    if items.len() - staying.len() >= enough {
        return family.change(Some(staying)).await.map(drop);
    }
    let Family { above, own, siblings, .. } = family;
    let above = Rc::try_unwrap(above).map_err(|_| Interrupt::conflict())?;
    split(access, (above, siblings), own, &items).await
}

async fn split<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    (above, siblings): (A::Page<'a>, Vec<Item<D>>),
    (own, full, head): (usize, A::Page<'a>, Head<D>),
    items: &[Item<D>],
) -> Result<(), Interrupt> {
    let structure = &access.context().structure;
    let new = access.allocate(structure.class, structure.placement(head.level, full.at())).await?;
    let (left, right) = choose::divide(items);
    let (left_box, right_box, link, stamp) = (around(&left), around(&right), new.link(), fresh_stamp(access));
    let mut pages = Pages::new();
    let (above, full, new) = (pages.add(above), pages.add(full), pages.add_new(new));
    let split = |pages: &mut A::PagesMut<'a>| {
        // Who looks for the page as it was finds its stamp here, at the end of the chain.
        node::write(pages, new, &Head { bounds: right_box, ..head }, &right);
        node::write(pages, full, &Head { stamp, right: link, bounds: left_box, ..head }, &left);
        node::set_item(pages, above, own, &Item { rect: left_box, stamp, ..siblings[own] });
        node::push(pages, above, &Item { rect: right_box, word: link.word(), stamp: head.stamp });
    };
    access.change(pages, split).await?;
    access.context().worker.count_split();
    Ok(())
}

/// A page, the one above, and siblings that take entries of it.
struct Family<'a, A: Access<Plugin = Tree<D>>, const D: usize> {
    access: &'a A,
    above: Rc<A::Page<'a>>,
    /// The entries of the page above.
    siblings: Vec<Item<D>>,
    own: (usize, A::Page<'a>, Head<D>),
    takers: Vec<(usize, A::Page<'a>, Contents<D>)>,
}

impl<'a, A: Access<Plugin = Tree<D>>, const D: usize> Family<'a, A, D> {
    fn new(access: &'a A, above: A::Page<'a>, siblings: Vec<Item<D>>, own: (usize, A::Page<'a>, Head<D>)) -> Self {
        Self { access, above: Rc::new(above), siblings, own, takers: Vec::new() }
    }

    /// Reads the siblings that entries are to go to, and gives them as many as they have room for; what stays.
    async fn give(
        &mut self,
        mut staying: Vec<Item<D>>,
        leaving: Vec<(usize, Item<D>)>,
    ) -> Result<Vec<Item<D>>, Interrupt> {
        let mut groups = BTreeMap::<usize, Vec<Item<D>>>::new();
        leaving.into_iter().for_each(|(to, item)| groups.entry(to).or_default().push(item));
        let links = groups.keys().map(|&to| (Rc::clone(&self.above), self.siblings[to].link()));
        let pages = self.access.follow_each(links).all().await;
        for ((to, mut group), page) in groups.into_iter().zip(pages) {
            let page = page?;
            let (head, mut items) = contents(self.access, &page)?;
            if (head.stamp, head.level) != (self.siblings[to].stamp, self.own.2.level) {
                return Err(Interrupt::stale(page.at(), "it is not the page that its link promised"));
            }
            let room = page.read(|words| Node::<_, D>::of(words).capacity)?.saturating_sub(items.len());
            staying.extend(group.drain(room.min(group.len())..));
            if !group.is_empty() {
                items.extend(group);
                self.takers.push((to, page, (head, items)));
            }
        }
        Ok(staying)
    }

    /// Makes it so. Without what stays, the page is freed. The page above, as it is then.
    async fn change(self, staying: Option<Vec<Item<D>>>) -> Result<Option<A::Page<'a>>, Interrupt> {
        let Self { access, above, mut siblings, own: (own, page, head), takers } = self;
        let above = Rc::try_unwrap(above).map_err(|_| Interrupt::conflict())?;
        let mut pages = Pages::new();
        let (above, page) = (pages.add(above), pages.add(page));
        let mut changed = Vec::new();
        for (to, taker, (head, items)) in takers {
            changed.push((to, pages.add(taker), head, items));
        }
        if let Some(staying) = &staying {
            changed.push((own, page, head, staying.clone()));
        }
        for (index, _, head, items) in &mut changed {
            *head = Head { stamp: fresh_stamp(access), right: Link::NULL, bounds: around(items), ..*head };
            siblings[*index] = Item { rect: head.bounds, stamp: head.stamp, ..siblings[*index] };
        }
        let change = |pages: &mut A::PagesMut<'a>| {
            for (index, slot, head, items) in &changed {
                node::write(pages, *slot, head, items);
                node::set_item(pages, above, *index, &siblings[*index]);
            }
            if staying.is_none() {
                node::remove_at::<D>(pages, above, own);
                pages.free(page);
            }
        };
        let (_, mut after) = access.change(pages, change).await?;
        access.context().worker.count_merge();
        Ok(after.take(above))
    }
}

/// Sees to it that the pages of a path have enough entries, and boxes that are no larger than need be, from its end upwards.
/// `at` is where that was not done yet.
pub(super) async fn settle<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    mut path: Path<'a, A>,
    at: &Cell<(Link, u8)>,
) -> Result<(), Interrupt> {
    while let Some(page) = path.pop() {
        at.set((page.link(), page.level()));
        let Some(above) = path.pop() else { return lower_root(access, page).await };
        let (head, items) = contents(access, &page)?;
        let (_, siblings) = contents(access, &above)?;
        let own = index_of(access, &siblings, &above, &page)?;
        let capacity = page.read(|words| Node::<_, D>::of(words).capacity)?;
        let bounds = around(&items);
        if items.len() < count_min(capacity) && siblings.len() > 1 {
            let leaving = scatter(&items, &siblings, own);
            let mut family = Family::new(access, above, siblings, (own, page, head));
            let staying = family.give(Vec::new(), leaving).await?;
            if staying.is_empty() {
                path.extend(family.change(None).await?);
            } else {
                let Family { above, .. } = family;
                path.extend(Rc::try_unwrap(above).ok());
            }
        } else if bounds != head.bounds && !items.is_empty() {
            let mut pages = Pages::new();
            let (above, page) = (pages.add(above), pages.add(page));
            let shrink = |pages: &mut A::PagesMut<'a>| {
                node::set_bounds(pages, page, &bounds);
                node::set_item(pages, above, own, &Item { rect: bounds, ..siblings[own] });
            };
            let (_, mut after) = access.change(pages, shrink).await?;
            path.extend(after.take(above));
        } else {
            path.push(above);
        }
    }
    Ok(())
}

/// Siblings for all entries of a page.
fn scatter<const D: usize>(items: &[Item<D>], siblings: &[Item<D>], own: usize) -> Vec<(usize, Item<D>)> {
    let others: Vec<usize> = (0..siblings.len()).filter(|&index| index != own).collect();
    let mut boxes: Vec<Rect<D>> = others.iter().map(|&index| siblings[index].rect).collect();
    let mut leaving = Vec::with_capacity(items.len());
    for item in items {
        let Some(chosen) = choose::choose(&boxes, &item.rect, false) else { continue };
        boxes[chosen] = boxes[chosen].union(&item.rect);
        leaving.push((others[chosen], *item));
    }
    leaving
}

/// A root with one child takes over what that holds.
async fn lower_root<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    mut root: A::Page<'a>,
) -> Result<(), Interrupt> {
    while root.at() == access.context().structure.root && root.level() > 0 {
        let (head, children) = contents(access, &root)?;
        let [only] = *children else { return Ok(()) };
        let child = access.follow(&root, only.link(), Hint::DOWN).await?;
        let (below, items) = contents(access, &child)?;
        if below.stamp != only.stamp || below.level.checked_add(1) != Some(head.level) {
            return Err(Interrupt::stale(child.at(), "it is not the page that its link promised"));
        }
        let mut pages = Pages::new();
        let (root_slot, child): (Slot, Slot) = (pages.add(root), pages.add(child));
        let lower = |pages: &mut A::PagesMut<'a>| {
            node::write(pages, root_slot, &Head { level: below.level, ..head }, &items);
            pages.free(child);
        };
        let (_, mut after) = access.change(pages, lower).await?;
        access.context().worker.count_merge();
        let Some(next) = after.take(root_slot) else { return Ok(()) };
        root = next;
    }
    Ok(())
}
