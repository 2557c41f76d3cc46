//! Changes: of a value, of a tower, of the root's level. Each is one change of all the pages that it is about.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    operation::tidy,
    ptr::Link,
};

use super::node::{CLASS, Found, Node, Place};

/// Attempts to lower the root behind one removal. The next removal tries again.
const LOWER_MAX: u32 = 16;

/// Changes what stands under a key that has a node; returns what stood there.
pub(super) async fn set_value<'a, A: Access>(
    access: &'a A,
    page: A::Page<'a>,
    key: u64,
    value: impl FnOnce(Option<u64>) -> Option<u64>,
) -> Result<Option<u64>, Interrupt> {
    let set = |views: &mut A::Views<'a>| {
        let node = Node::in_change(views, 0).filter(|node| node.level == 0 && node.low == key)?;
        let (before, after) = (node.value(), value(node.value()));
        if before != after {
            Node { present: after.is_some(), below: after.unwrap_or(0), ..node }.write(views, 0);
        }
        Some(before)
    };
    access.alter(page, set).await?.ok_or(Interrupt::conflict())
}

/// Adds the tower of a key, as high as nodes to its left were kept.
pub(super) async fn add_tower<'a, A: Access>(
    access: &'a A,
    found: Found<'a, A>,
    (key, value): (u64, u64),
) -> Result<(), Interrupt> {
    let left: Vec<_> = found.kept.into_iter().chain([found.last]).map(|place| place.page).rev().collect();
    let height = left.len();
    let (mut tower, mut at) = (Vec::with_capacity(height), Vec::with_capacity(height));
    for (level, left) in left.iter().enumerate() {
        let page = access.allocate(CLASS, access.structure().placement(level as u8, left.at())).await?;
        at.push(Link::remote(page.at()));
        tower.push(page);
    }
    let link = |views: &mut A::Views<'a>| {
        for level in 0..height {
            let Some(before) = Node::in_change(views, level) else { continue };
            let below = level.checked_sub(1).map_or(value, |below| at[below].word());
            Node { low: key, present: level == 0, below, ..before }.write(views, height + level);
            let owns_right = level + 1 == height;
            Node { high: Some(key), right: at[level], owns_right, ..before }.write(views, level);
        }
    };
    access.change(left, tower, link).await?;
    access.worker().count_split();
    Ok(())
}

/// Removes the tower of a key, to the left of which `found` are all nodes; returns the value.
pub(super) async fn remove_tower<'a, A: Access>(access: &'a A, found: Found<'a, A>) -> Result<Option<u64>, Interrupt> {
    let Found { last, kept, first } = found;
    let left: Vec<_> = kept.into_iter().chain([last]).collect();
    let height = left.len();
    // The tower may have come into being meanwhile, behind the search on its upper levels.
    if !left[0].node.owns_right || usize::from(left[0].node.level) + 1 != height {
        return Err(Interrupt::stale(left[0].page.at(), "it does not tell how high the tower to its right is"));
    }
    let (mut tower, mut value, mut is_alone) = (Vec::with_capacity(height), None, first.high.is_none());
    for place in &left {
        let right = place.right(access).await?;
        value = right.node.value();
        is_alone |= right.node.level == first.level && right.node.high.is_none();
        tower.push(right.page);
    }
    let unlink = |views: &mut A::Views<'a>| {
        for left in 0..height {
            let pair = Node::in_change(views, left).zip(Node::in_change(views, height + left));
            let Some((before, Node { high, right, owns_right, .. })) = pair else { continue };
            Node { high, right, owns_right, ..before }.write(views, left);
            views.free(height + left);
        }
    };
    access.change(left.into_iter().map(|place| place.page).chain(tower).collect(), vec![], unlink).await?;
    access.worker().count_merge();
    // The key is gone: from here on nothing may restart the operation.
    if first.level > 0 && is_alone {
        tidy(access.worker(), LOWER_MAX, async || lower_root(access).await).await;
    }
    Ok(value)
}

/// Puts another level on top, up to `level`: what the root holds goes into a new page below it.
pub(super) async fn raise_root<A: Access>(access: &A, level: u8) -> Result<(), Interrupt> {
    let root = Place::enter(access, Start::Anew).await?;
    if root.node.level + 1 != level {
        return Ok(());
    }
    let placement = access.structure().placement(root.node.level, root.page.at());
    let below = access.allocate(CLASS, placement).await?;
    let at = below.at().raw();
    let raise = |views: &mut A::Views<'_>| {
        root.node.write(views, 1);
        Node { level, below: at, ..Node::EMPTY }.write(views, 0);
    };
    access.change(vec![root.page], vec![below], raise).await
}

/// Takes levels off the top on which the root is alone.
async fn lower_root<A: Access>(access: &A) -> Result<(), Interrupt> {
    loop {
        let root = Place::enter(access, Start::Anew).await?;
        if root.node.level == 0 || root.node.high.is_some() {
            return Ok(());
        }
        let below = root.below(access).await?;
        let lower = |views: &mut A::Views<'_>| {
            below.node.write(views, 0);
            views.free(1);
        };
        access.change(vec![root.page, below.page], vec![], lower).await?;
    }
}
