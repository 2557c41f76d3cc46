//! Changes: of a value, of a tower, of the root's level. Each is one change of all the pages that it is about.

use farlink_runtime::{access::*, operation::tidy};

use super::{List, node::*};

const ONLY: Slot = Pages::<()>::ONLY;

/// Attempts to lower the root behind one removal. The next removal tries again.
const LOWER_MAX: u32 = 16;

/// Changes what stands under a key that has a node; returns what stood there.
pub(super) async fn set_value<'a, A: Access<Plugin = List>>(
    access: &'a A,
    page: A::Page<'a>,
    key: u64,
    value: impl FnOnce(Option<u64>) -> Option<u64>,
) -> Result<Option<u64>, Interrupt> {
    let set = |pages: &mut A::PagesMut<'a>| {
        let node = Node::of(&pages.page(ONLY)).filter(|node| node.level == 0 && node.low == key)?;
        let (before, after) = (node.value(), value(node.value()));
        if before != after {
            Node { present: after.is_some(), below: after.unwrap_or(0), ..node }.write(pages, ONLY);
        }
        Some(before)
    };
    access.change(Pages::current(page), set).await?.0.ok_or(Interrupt::conflict())
}

/// Adds the tower of a key, as high as nodes to its left were kept.
pub(super) async fn add_tower<'a, A: Access<Plugin = List>>(
    access: &'a A,
    found: Found<'a, A>,
    (key, value): (u64, u64),
) -> Result<(), Interrupt> {
    let left = found.kept.into_iter().chain([found.last]).rev();
    let (mut pages, mut tower, mut below) = (Pages::new(), Vec::new(), value);
    for Place { page, node } in left {
        let new = access.allocate(CLASS, access.context().structure.placement(node.level, page.at())).await?;
        let link = new.link();
        tower.push((pages.add(page), pages.add_new(new), node, link, below));
        below = link.word();
    }
    let link = |pages: &mut A::PagesMut<'a>| {
        for (level, &(left, new, before, link, below)) in tower.iter().enumerate() {
            Node { low: key, present: level == 0, below, ..before }.write(pages, new);
            let owns_right = level + 1 == tower.len();
            Node { high: Some(key), right: link, owns_right, ..before }.write(pages, left);
        }
    };
    access.change(pages, link).await?;
    access.context().worker.count_split();
    Ok(())
}

/// Removes the tower of a key, to the left of which `found` are all nodes; returns the value.
pub(super) async fn remove_tower<'a, A: Access<Plugin = List>>(
    access: &'a A,
    found: Found<'a, A>,
) -> Result<Option<u64>, Interrupt> {
    let Found { last, kept, first } = found;
    let left: Vec<_> = kept.into_iter().chain([last]).collect();
    // The tower may have come into being meanwhile, behind the search on its upper levels.
    if !left[0].node.owns_right || usize::from(left[0].node.level) + 1 != left.len() {
        return Err(Interrupt::stale(left[0].page.at(), "it does not tell how high the tower to its right is"));
    }
    let (mut pages, mut pairs, mut value, mut is_alone) = (Pages::new(), Vec::new(), None, first.high.is_none());
    for place in left {
        let gone = place.right(access).await?;
        value = gone.node.value();
        is_alone |= gone.node.level == first.level && gone.node.high.is_none();
        let Node { high, right, owns_right, .. } = gone.node;
        let after = Node { high, right, owns_right, ..place.node };
        pairs.push((pages.add(place.page), pages.add(gone.page), after));
    }
    let unlink = |pages: &mut A::PagesMut<'a>| {
        for (left, gone, after) in pairs {
            after.write(pages, left);
            pages.free(gone);
        }
    };
    access.change(pages, unlink).await?;
    access.context().worker.count_merge();
    // The key is gone: from here on nothing may restart the operation.
    if first.level > 0 && is_alone {
        tidy(&access.context().worker, LOWER_MAX, async || lower_root(access).await).await;
    }
    Ok(value)
}

/// Puts another level on top: what the root holds goes into a new page below it.
pub(super) async fn raise_root<A: Access<Plugin = List>>(access: &A) -> Result<(), Interrupt> {
    let Place { page, node } = Place::open(access, Start::Anew).await?;
    let new = access.allocate(CLASS, access.context().structure.placement(node.level, page.at())).await?;
    let (link, mut pages) = (new.link().word(), Pages::new());
    let (root, new) = (pages.add(page), pages.add_new(new));
    let raise = |pages: &mut A::PagesMut<'_>| {
        node.write(pages, new);
        Node { level: node.level.saturating_add(1), below: link, ..Node::EMPTY }.write(pages, root);
    };
    access.change(pages, raise).await.map(drop)
}

/// Takes levels off the top on which the root is alone.
async fn lower_root<A: Access<Plugin = List>>(access: &A) -> Result<(), Interrupt> {
    loop {
        let root = Place::open(access, Start::Anew).await?;
        if root.node.level == 0 || root.node.high.is_some() {
            return Ok(());
        }
        let Place { page, node } = root.below(access, false).await?;
        let mut pages = Pages::new();
        let (root, below) = (pages.add(root.page), pages.add(page));
        let lower = |pages: &mut A::PagesMut<'_>| {
            node.write(pages, root);
            pages.free(below);
        };
        access.change(pages, lower).await?;
    }
}
