//! From the root to the page where a key belongs.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    ptr::{Link, RemotePtr, Target},
};

use super::{
    guess::{Guess, likely},
    install::Install,
    node::{HEAD, KIND, Node, Side},
};

/// A page and the one above it that led there.
pub(super) struct Descent<'a, A: Access + 'a> {
    /// `None` if `page` is where the descent began.
    pub(super) parent: Option<A::Page<'a>>,
    pub(super) page: A::Page<'a>,
    /// In a leaf: the number of keys below the key.
    pub(super) index: usize,
}

enum Step {
    Arrived(usize),
    Down {
        link: Link,
        distance: u64,
        index: usize,
    },
    /// The key is not where it was guessed to be, but perhaps here.
    Missed(usize),
    Right(Link),
    Lost(&'static str),
}

/// Finds the page at `level` whose fences include `key`; the root, if the tree is not that high. A split that its parent
/// does not know of yet, because the copy of the parent is older, shows as a key beyond the page's high fence: the search
/// moves right.
pub(super) async fn descend<'a, A: Access>(
    access: &'a A,
    start: Start,
    key: u64,
    level: u8,
) -> Result<Descent<'a, A>, Interrupt> {
    let page_words = access.structure().class.bytes() / 8;
    let (mut parent, mut guess) = (None, None::<Guess>);
    let mut page = access.enter(start).await?;
    loop {
        let at_level = page.level();
        let near = guess.and_then(|guess| guess.is_trusted.then_some(guess.near));
        let step = page.read(|words| {
            let node = Node(words);
            match node.side(key) {
                Side::Left => return Step::Lost("its keys are all above the key it was to hold"),
                Side::Right => return Step::Right(node.right()),
                Side::Here if at_level <= level && level != 0 => return Step::Arrived(0),
                Side::Here => {}
            }
            let index = match near.map(|near| node.lower_bound_near(key, near)) {
                Some(Some(index)) => index,
                Some(None) if at_level == 0 => return Step::Missed(node.near(key)),
                _ => node.lower_bound(key),
            };
            if at_level <= level {
                return Step::Arrived(index);
            }
            match node.child_before(index, key) {
                Some(child) => {
                    let distance = key.wrapping_sub(node.key(child));
                    Step::Down { link: node.child(child), distance, index }
                }
                None => Step::Lost("an inner page has no child for a key between its fences"),
            }
        })?;
        if let Some(guess) = guess.take() {
            let index = match step {
                Step::Arrived(index) | Step::Down { index, .. } => Some(index),
                _ => None,
            };
            guess.learn(access.notes(), index, || page.read(|words| Node(words).density()).ok());
        }
        match step {
            Step::Arrived(index) => {
                // All keys were at hand, and no values.
                if near.is_none() && at_level == 0 {
                    let [_, values] = likely(page_words, index);
                    access.expect(&page, [0..0, values.start..values.start + 1]).await;
                }
                return Ok(Descent { parent, page, index });
            }
            Step::Lost(why) => return Err(Interrupt::stale(page.at(), why)),
            Step::Right(link) => page = beside(access, &page, link).await?,
            Step::Missed(near) => access.expect(&page, likely(page_words, near)).await,
            Step::Down { link, distance, .. } => {
                guess = Guess::new(access.notes(), at_level - 1, page_words, distance);
                let child = match guess {
                    Some(Guess { is_trusted: true, near, .. }) => {
                        let [keys, values] = likely(page_words, near);
                        access.follow_for(&page, link, [0..HEAD, keys, values]).await?
                    }
                    _ => access.follow(&page, link).await?,
                };
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
