//! From the root to the page where a key belongs.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    ptr::{Link, RemotePtr, Target},
};

use super::{
    install::Install,
    node::{KIND, Node, Side},
};

/// A page and the one above it that led there.
pub(super) struct Descent<'a, A: Access + 'a> {
    /// `None` if `page` is where the descent began.
    pub(super) parent: Option<A::Page<'a>>,
    pub(super) page: A::Page<'a>,
}

enum Step {
    Arrived,
    Down(Link),
    Right(Link),
    Lost(&'static str),
}

/// Finds the page at `level` whose fences include `key`; the root, if the tree is not that high. A split that its parent does not know of yet, because the copy of
/// the parent is older, shows as a key beyond the page's high fence: the search moves right.
pub(super) async fn descend<'a, A: Access>(
    access: &'a A,
    start: Start,
    key: u64,
    level: u8,
) -> Result<Descent<'a, A>, Interrupt> {
    let mut parent = None;
    let mut page = access.enter(start).await?;
    loop {
        let at_level = page.level();
        let step = page.read(|words| {
            let node = Node(words);
            match node.side(key) {
                Side::Left => Step::Lost("its keys are all above the key it was to hold"),
                Side::Right => Step::Right(node.right()),
                Side::Here if at_level <= level => Step::Arrived,
                Side::Here => match node.child_for(key) {
                    Some(index) => Step::Down(node.child(index)),
                    None => Step::Lost("an inner page has no child for a key between its fences"),
                },
            }
        })?;
        match step {
            Step::Arrived => return Ok(Descent { parent, page }),
            Step::Lost(why) => return Err(Interrupt::stale(page.at(), why)),
            Step::Right(link) => page = beside(access, &page, link).await?,
            Step::Down(link) => {
                let child = access.follow(&page, link).await?;
                require_level(&child, at_level - 1)?;
                parent = Some(page);
                page = child;
            }
        }
    }
}

/// Where the page at `level` is whose fences include `key`, as the page above says; that one alone is read. The root, if the
/// tree is not that high.
pub(super) async fn locate<A: Access>(access: &A, start: Start, key: u64, level: u8) -> Result<RemotePtr, Interrupt> {
    let above = descend(access, start, key, level.saturating_add(1)).await?.page;
    if above.level() <= level {
        return Ok(above.at());
    }
    let link = above.read(|words| Node(words).child_for(key).map(|index| Node(words).child(index)))?;
    match link.map(Link::target) {
        Some(Target::Remote(page)) => Ok(page),
        _ => Err(Interrupt::stale(above.at(), "an inner page has no child for a key between its fences")),
    }
}

/// The right sibling of a page.
pub(super) async fn beside<'a, A: Access>(
    access: &'a A,
    page: &A::Page<'a>,
    right: Link,
) -> Result<A::Page<'a>, Interrupt> {
    if right == Link::NULL {
        return Err(Interrupt::stale(page.at(), "it has a high fence and no right sibling"));
    }
    let (low, high) = page.read(|words| (Node(words).low(), Node(words).high()))?;
    let sibling = access.sibling(page, right).await?;
    require_level(&sibling, page.level())?;
    // Going right must make progress, whatever the pages say.
    match sibling.read(|words| Node(words).low())? {
        sibling_low if sibling_low > low && Some(sibling_low) <= high => {
            if A::IS_BELOW && page.level() == 0 {
                access.send_above(Install { separator: sibling_low, page: sibling.at() });
            }
            Ok(sibling)
        }
        _ => Err(Interrupt::stale(sibling.at(), "it does not lie to the right of the page that links to it")),
    }
}

pub(super) fn require_level(page: &impl PageRef, level: u8) -> Result<(), Interrupt> {
    let kind = page.kind();
    if page.level() == level && kind == KIND {
        return Ok(());
    }
    Err(Interrupt::stale(page.at(), "it is not of the level or the kind that the link promised"))
}
