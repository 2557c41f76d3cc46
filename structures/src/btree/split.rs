//! Growth: a full page splits, a full root grows in place.
//!
//! A split is one change of two existing pages and one new one: the left half stays where it is, the right half is new, and
//! the parent gets the separator, all or nothing. So nothing is ever orphaned, and an old copy of the parent is all that
//! can make a reader land too far left, from where the right link leads on. If the parent is full, it splits first, as a
//! change of its own. The root keeps its address for life: when it is full, its entries move into two new pages below it.

use farlink_runtime::{
    access::{Access, Interrupt, Link, NewPage, PageRef, Pages, PagesMut, Slot, Start, Words},
    error::Error,
};

use super::{
    Tree,
    descend::{Descent, Stays, descend, require_level, require_size},
    node::{Fences, Node, NodeMut, Side},
};

/// Splits the full page of `descent`, in which `key` belongs. For a leaf, `value` goes in with the split.
///
/// # Errors
/// [`Interrupt::Restart`] also if the parent had to split first, or is not known.
pub(super) async fn split<'a, A: Access<Plugin = Tree>>(
    access: &'a A,
    Descent { parent, page, .. }: Descent<'a, A>,
    key: u64,
    value: Option<u64>,
) -> Result<(), Interrupt> {
    require_size(access, &page)?;
    let halves = page.read(|words| Halves::of(&Node(words), key, value))?;
    let Some(halves) = halves else { return Err(Interrupt::stale(page.at(), "it is full, yet cannot be split")) };
    if page.at() == access.context().structure.root {
        return grow_root(access, page, &halves).await;
    }
    let Some(parent) = parent else { return Err(Interrupt::above()) };
    let (index, has_room) = parent.read(|words| {
        let node = Node(words);
        let index = node.child_for(key).filter(|&index| access.leads_to(node.child(index), &page));
        (index.filter(|_| node.side(key) == Side::Here), node.count() < node.capacity())
    })?;
    let Some(index) = index else {
        return Err(Interrupt::stale(parent.at(), "it does not lead to the page that is to split"));
    };
    if !has_room {
        Box::pin(make_room(access, key, parent.level())).await?;
        return Err(Interrupt::again());
    }
    let level = page.level();
    let right = allocate(access, level, &page).await?;
    let right_link = right.link();
    let mut pages = Pages::new();
    let (parent, left, right) = (pages.add(parent), pages.add(page), pages.add_new(right));
    let change = |pages: &mut A::PagesMut<'_>| {
        halves.rewrite(pages, left, (right, right_link), level);
        NodeMut::new(pages, parent).insert_at(index + 1, (halves.separator(), right_link.word()));
    };
    access.change(pages, change).await?;
    access.context().worker.count_split();
    Ok(())
}

/// Splits the page at `level` where `key` belongs, if it is full.
async fn make_room<A: Access<Plugin = Tree>>(access: &A, key: u64, level: u8) -> Result<(), Interrupt> {
    let descent = descend::<_, Stays>(access, Start::Anew, key, level).await?;
    require_level(&descent.page, level)?;
    let full = descent.page.read(|words| Node(words).count() == Node(words).capacity())?;
    if full { split(access, descent, key, None).await } else { Ok(()) }
}

async fn allocate<'a, A: Access<Plugin = Tree>>(
    access: &'a A,
    level: u8,
    beside: &A::Page<'a>,
) -> Result<NewPage, Error> {
    let structure = &access.context().structure;
    access.allocate(structure.class, structure.placement(level, beside.at())).await
}

async fn grow_root<'a, A: Access<Plugin = Tree>>(
    access: &'a A,
    root: A::Page<'a>,
    halves: &Halves,
) -> Result<(), Interrupt> {
    let level = root.level();
    let Some(level_above) = level.checked_add(1) else {
        return Err(Interrupt::stale(root.at(), "the tree cannot be that high"));
    };
    let (left, right) = (allocate(access, level, &root).await?, allocate(access, level, &root).await?);
    let (left_link, right_link) = (left.link(), right.link());
    let mut pages = Pages::new();
    let (root, left, right) = (pages.add(root), pages.add_new(left), pages.add_new(right));
    let change = |pages: &mut A::PagesMut<'_>| {
        halves.rewrite(pages, left, (right, right_link), level);
        let children = [(0, left_link.word()), (halves.separator(), right_link.word())];
        NodeMut::new(pages, root).rewrite(level_above, Fences::ALL, Link::NULL, &children);
    };
    access.change(pages, change).await?;
    access.context().worker.count_split();
    Ok(())
}

/// What becomes of a full page's entries.
struct Halves {
    fences: Fences,
    right_link: Link,
    left: Vec<(u64, u64)>,
    right: Vec<(u64, u64)>,
}

impl Halves {
    /// `None` if the page cannot be split: it is not what it was when it was found full.
    fn of(node: &Node<'_, impl Words + ?Sized>, key: u64, value: Option<u64>) -> Option<Self> {
        let mut left = node.entries();
        let at_the_end = node.high().is_none() && left.last().is_some_and(|&(last, _)| last < key);
        if let Some(value) = value {
            let index = node.search(key).err()?;
            left.insert(index, (key, value));
        }
        if left.len() < 2 {
            return None;
        }
        // Ascending inserts never come back to the left half: leave it nearly full.
        let middle = if at_the_end { (left.len() * 9).div_ceil(10).min(left.len() - 1) } else { left.len() / 2 };
        let right = left.split_off(middle);
        let fences = Fences { low: node.low(), high: node.high() };
        Some(Self { fences, right_link: node.right(), left, right })
    }

    /// Makes two pages of a change the two halves.
    fn rewrite(&self, pages: &mut impl PagesMut, left: Slot, (right, right_link): (Slot, Link), level: u8) {
        let fences = Fences { low: self.fences.low, high: Some(self.separator()) };
        NodeMut::new(pages, left).rewrite(level, fences, right_link, &self.left);
        let fences = Fences { low: self.separator(), high: self.fences.high };
        NodeMut::new(pages, right).rewrite(level, fences, self.right_link, &self.right);
    }

    fn separator(&self) -> u64 {
        self.right[0].0
    }
}
