//! From the root to the page where a key belongs.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    ptr::Link,
};

use super::{
    guess::{Guess, likely},
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
    Down { link: Link, distance: u64 },
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
        let (step, near) = page.read(|words| {
            let node = Node(words);
            let step = match node.side(key) {
                Side::Left => Step::Lost("its keys are all above the key it was to hold"),
                Side::Right => Step::Right(node.right()),
                Side::Here if at_level <= level => Step::Arrived,
                Side::Here => match node.child_for(key) {
                    Some(index) => Step::Down { link: node.child(index), distance: key.wrapping_sub(node.key(index)) },
                    None => Step::Lost("an inner page has no child for a key between its fences"),
                },
            };
            (step, if guess.is_some() { node.near(key) } else { 0 })
        })?;
        let was_right =
            guess.take().is_some_and(|guess| guess.learn(access, near, || page.read(|words| Node(words).density()).ok()));
        match step {
            Step::Arrived => {
                if at_level == 0 && !was_right {
                    access.expect(&page, likely(page_words, near)).await;
                }
                return Ok(Descent { parent, page });
            }
            Step::Lost(why) => return Err(Interrupt::stale(page.at(), why)),
            Step::Right(link) => page = beside(access, &page, link).await?,
            Step::Down { link, distance } => {
                guess = Guess::new(access, at_level - 1, page_words, distance);
                let child = match guess.and_then(|guess| guess.words(page_words)) {
                    Some(words) => access.follow_for(&page, link, words).await?,
                    None => access.follow(&page, link).await?,
                };
                require_level(&child, at_level - 1)?;
                parent = Some(page);
                page = child;
            }
        }
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
        sibling_low if sibling_low > low && Some(sibling_low) <= high => Ok(sibling),
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
