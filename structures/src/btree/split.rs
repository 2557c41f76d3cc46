//! Growth: a full page splits, a full root grows in place.
//!
//! A split is one change of two existing pages and one new one: the left half stays where it is, the right half is new, and
//! the parent gets the separator, all or nothing. So nothing is ever orphaned, and an old copy of the parent is all that
//! can make a reader land too far left, from where the right link leads on. If the parent is full, it splits first, as a
//! change of its own. The root keeps its address for life: when it is full, its entries move into two new pages below it.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    ptr::{RemotePtr, Target},
    words::Words,
};

use super::{
    descend::{Descent, descend, require_level},
    install::Install,
    node::{Fences, Node, NodeMut, Side},
};

/// Splits the full page of `descent`, in which `key` belongs. For a leaf, `value` goes in with the split.
///
/// # Errors
/// [`Interrupt::Restart`] also if the parent had to split first.
pub(super) async fn split<'a, A: Access>(
    access: &'a A,
    descent: Descent<'a, A>,
    key: u64,
    value: Option<u64>,
) -> Result<(), Interrupt> {
    let Descent { parent, page, .. } = descent;
    let halves = page.read(|words| Halves::of(&Node(words), key, value))?;
    let Some(halves) = halves else { return Err(Interrupt::stale(page.at(), "it is full, yet cannot be split")) };
    if page.at() == access.structure().root {
        return grow_root(access, page, &halves).await;
    }
    if A::IS_BELOW && parent.is_none() {
        return split_alone(access, page, halves).await;
    }
    // A descent that moved right from where it began knows no parent.
    let Some(parent) = parent else { return Err(Interrupt::stale(page.at(), "its parent is not known")) };
    let room = parent.read(|words| {
        let node = Node(words);
        let index = node.child_for(key).filter(|&index| access.leads_to(node.child(index), &page));
        (index.filter(|_| node.side(key) == Side::Here), node.count() < node.capacity())
    })?;
    match room {
        (None, _) => Err(Interrupt::stale(parent.at(), "it does not lead to the page that is to split")),
        (Some(_), false) => {
            Box::pin(make_room(access, key, parent.level())).await?;
            Err(Interrupt::stale(parent.at(), "it had to split first"))
        }
        (Some(index), true) => {
            let level = page.level();
            let right =
                access.allocate(access.structure().class, access.structure().placement(level, page.at())).await?;
            let right_at = right.at();
            let change = |views: &mut A::Views<'_>| {
                halves.rewrite(views, 1, 2, right_at, level);
                NodeMut::new(views, 0).insert_at(index + 1, (halves.separator(), right_at.raw()));
            };
            access.change(vec![parent, page], vec![right], change).await?;
            access.worker().count_split();
            Ok(())
        }
    }
}

/// Splits a leaf without the page above, which is told afterwards. Until then the right half is found through the left one.
async fn split_alone<'a, A: Access>(access: &'a A, leaf: A::Page<'a>, halves: Halves) -> Result<(), Interrupt> {
    if leaf.level() != 0 {
        return Err(Interrupt::stale(leaf.at(), "it is no leaf, and its parent is not known"));
    }
    let right = access.allocate(access.structure().class, access.structure().placement(0, leaf.at())).await?;
    let (right_at, separator) = (right.at(), halves.separator());
    let change = |views: &mut A::Views<'_>| halves.rewrite(views, 0, 1, right_at, 0);
    access.change_below(vec![leaf], vec![right], change, Install { separator, page: right_at }).await?;
    access.worker().count_split();
    Ok(())
}

/// Splits the page at `level` where `key` belongs, if it is full.
pub(super) async fn make_room<A: Access>(access: &A, key: u64, level: u8) -> Result<(), Interrupt> {
    let descent = descend(access, Start::Anew, key, level).await?;
    require_level(&descent.page, level)?;
    let full = descent.page.read(|words| Node(words).count() == Node(words).capacity())?;
    if full { split(access, descent, key, None).await } else { Ok(()) }
}

async fn grow_root<'a, A: Access>(access: &'a A, root: A::Page<'a>, halves: &Halves) -> Result<(), Interrupt> {
    let level = root.level();
    let Some(level_above) = level.checked_add(1) else {
        return Err(Interrupt::stale(root.at(), "the tree cannot be that high"));
    };
    let class = access.structure().class;
    let placement = access.structure().placement(level, root.at());
    let left = access.allocate(class, placement).await?;
    let right = access.allocate(class, placement).await?;
    let (left_at, right_at) = (left.at(), right.at());
    let separator = halves.separator();
    let change = |views: &mut A::Views<'_>| {
        let fences = Fences { low: 0, high: Some(separator) };
        NodeMut::new(views, 1).rewrite(level, fences, Some(right_at), &halves.left);
        let fences = Fences { low: separator, high: None };
        NodeMut::new(views, 2).rewrite(level, fences, None, &halves.right);
        let children = [(0, left_at.raw()), (separator, right_at.raw())];
        NodeMut::new(views, 0).rewrite(level_above, Fences::ALL, None, &children);
    };
    access.change(vec![root], vec![left, right], change).await?;
    access.worker().count_split();
    Ok(())
}

/// What becomes of a full page's entries.
struct Halves {
    fences: Fences,
    right_link: Option<RemotePtr>,
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
        let right_link = match node.right().target() {
            Target::Remote(page) => Some(page),
            _ => None,
        };
        Some(Self { fences: Fences { low: node.low(), high: node.high() }, right_link, left, right })
    }

    /// Makes two pages of a change, the second of which is at `right_at`, the two halves.
    fn rewrite(&self, views: &mut impl Views, left: usize, right: usize, right_at: RemotePtr, level: u8) {
        let fences = Fences { low: self.fences.low, high: Some(self.separator()) };
        NodeMut::new(views, left).rewrite(level, fences, Some(right_at), &self.left);
        let fences = Fences { low: self.separator(), high: self.fences.high };
        NodeMut::new(views, right).rewrite(level, fences, self.right_link, &self.right);
    }

    fn separator(&self) -> u64 {
        self.right[0].0
    }
}
