//! From the root to the page where a key belongs.

use farlink_runtime::access::{Access, Context, Hint, Interrupt, Link, PageRef, Start, Words};

use super::{
    Tree,
    guess::{Guess, Learned, likely},
    node::{HEAD, KIND, Node, Side},
};

/// How often a search from the root, as it is cached, goes right: more often than splits under way explain.
pub(super) const RIGHTS_MAX: u32 = 8;

/// How a search goes down.
pub(super) trait Down {
    fn down<'a, A: Access>(
        access: &'a A,
        from: &A::Page<'a>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<A::Page<'a>, Interrupt>>;
}

/// All that is left of the operation lies below each page on the way.
pub(super) struct Ships;

impl Down for Ships {
    #[inline(always)]
    fn down<'a, A: Access>(
        access: &'a A,
        from: &A::Page<'a>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<A::Page<'a>, Interrupt>> {
        access.descend(from, link, hint)
    }
}

/// The operation may go on elsewhere.
pub(super) struct Stays;

impl Down for Stays {
    #[inline(always)]
    fn down<'a, A: Access>(
        access: &'a A,
        from: &A::Page<'a>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<A::Page<'a>, Interrupt>> {
        access.follow(from, link, hint)
    }
}

/// A page and the one above it that led there.
pub(super) struct Descent<'a, A: Access<Plugin = Tree> + 'a> {
    /// `None` if `page` is where the descent began.
    pub(super) parent: Option<A::Page<'a>>,
    pub(super) page: A::Page<'a>,
    /// In a leaf: the number of keys up to the key.
    pub(super) upto: usize,
}

/// A way down, as far as it has come.
struct Way<'a, A: Access<Plugin = Tree> + 'a> {
    parent: Option<A::Page<'a>>,
    page: A::Page<'a>,
    /// Where in `page` the key is; of the page below, if the way has ended at a link.
    guess: Option<Guess>,
}

/// What a page says of a key.
enum Step {
    Arrived(usize),
    Down {
        link: Link,
        distance: u64,
        upto: usize,
    },
    /// The key is not where it was guessed to be, but perhaps here.
    Missed(usize),
    Right(Link),
    Lost(&'static str),
}

/// Why a walk over pages at hand has ended.
enum Stop {
    /// At the level, and the number of keys up to the key; whether only the page's keys were expected to be read.
    Arrived(usize, bool),
    /// At a link to a page that has to be waited for.
    Away(Link),
    Missed(usize),
    Right(Link),
}

/// Finds the page at `level` whose fences include `key`; the root, if the tree is not that high. A split that its parent
/// does not know of yet, because the copy of the parent is older, shows as a key beyond the page's high fence: the search
/// moves right.
pub(super) async fn descend<'a, A: Access<Plugin = Tree>, D: Down>(
    access: &'a A,
    start: Start,
    key: u64,
    level: u8,
) -> Result<Descent<'a, A>, Interrupt> {
    let page_words = page_words(access);
    let mut way = Way { parent: None, page: access.open(start).await?, guess: None };
    require_kind(&way.page)?;
    let mut rights = 0;
    loop {
        match walk::<_, true>(access, &mut way, key, level)? {
            Stop::Arrived(upto, expects_value) => {
                if expects_value && upto > 0 {
                    let [_, values] = likely(page_words, upto - 1);
                    access.prefetch(&way.page, [(0, 0), (values.0, values.0 + 1)]).await;
                }
                return Ok(Descent { parent: way.parent, page: way.page, upto });
            }
            Stop::Right(link) => {
                // The pages above are old. Read anew, they lead closer.
                if rights == RIGHTS_MAX && matches!(start, Start::Root) {
                    return Err(Interrupt::stale(way.page.at(), "it is far from where the key belongs"));
                }
                rights += 1;
                way.page = beside(access, &way.page, link).await?;
            }
            Stop::Missed(near) => access.prefetch(&way.page, likely(page_words, near)).await,
            Stop::Away(link) => {
                let hint = wanted(way.guess, page_words);
                let child = D::down(access, &way.page, link, hint).await?;
                require_level(&child, way.page.level() - 1)?;
                way.parent = Some(std::mem::replace(&mut way.page, child));
            }
        }
    }
}

/// [`descend`] from the root, if all pages on the way are at hand; else where it has to wait. Does not keep the page above.
#[inline(always)]
pub(super) fn try_descend<A: Access<Plugin = Tree>>(access: &A, key: u64, level: u8) -> Result<Descent<'_, A>, Start> {
    let page: A::Page<'_> = access.try_open().filter(|page| require_kind(page).is_ok()).ok_or(Start::Root)?;
    let mut way = Way { parent: None, page, guess: None };
    loop {
        match walk::<A, false>(access, &mut way, key, level) {
            Ok(Stop::Arrived(upto, _)) => return Ok(Descent { parent: None, page: way.page, upto }),
            Ok(Stop::Missed(_)) => {}
            Ok(Stop::Away(_) | Stop::Right(_)) => return Err(access.resume_at(&way.page)),
            Err(_) => return Err(Start::Root),
        }
    }
}

/// What is read first of a page: a search begins in the first half, unless more is known.
#[inline(always)]
fn wanted(guess: Option<Guess>, page_words: usize) -> Hint {
    match guess {
        Some(Guess { is_trusted: true, near, .. }) => {
            let [keys, values] = likely(page_words, near);
            Hint::DOWN.reading([(0, HEAD as u16), keys, values])
        }
        _ => Hint::DOWN,
    }
}

/// [`wanted`] for a search that has the processor to itself: it is sooner done with all keys, whose lines are in a row, than
/// with the likely ones alone (by a tenth and more; several searches in flight lose a fifth by it).
#[inline(always)]
fn wanted_alone(guess: Option<Guess>, page_words: usize) -> Hint {
    match guess {
        Some(Guess { is_trusted: true, near, .. }) => {
            let [_, values] = likely(page_words, near);
            Hint::DOWN.reading([(0, (page_words / 2) as u16), values, (0, 0)])
        }
        _ => Hint::DOWN,
    }
}

/// Goes down for as long as the pages are at hand. Not async, so that on cached pages a search is an ordinary loop: as part
/// of the future, each variable of it would be a place in memory.
#[inline(always)]
fn walk<'a, A: Access<Plugin = Tree>, const KEEPS_PARENT: bool>(
    access: &'a A,
    way: &mut Way<'a, A>,
    key: u64,
    level: u8,
) -> Result<Stop, Interrupt> {
    let page_words = page_words(access);
    let learned = learned(access);
    loop {
        let at_level = way.page.level();
        let near = way.guess.and_then(|guess| guess.is_trusted.then_some(guess.near));
        let step = way.page.read(|words| step(&Node(words), key, at_level, level, near))?;
        if let Some(guess) = way.guess.take() {
            let index = match step {
                Step::Arrived(upto) | Step::Down { upto, .. } => upto.wrapping_sub(1),
                _ => usize::MAX,
            };
            guess.learn(learned, index, || way.page.read(|words| Node(words).density()).ok());
        }
        match step {
            // All keys were at hand, and no values.
            Step::Arrived(upto) => return Ok(Stop::Arrived(upto, near.is_none() && at_level == 0)),
            Step::Missed(near) => return Ok(Stop::Missed(near)),
            Step::Right(link) => return Ok(Stop::Right(link)),
            Step::Lost(why) => return Err(Interrupt::stale(way.page.at(), why)),
            Step::Down { link, distance, .. } => {
                let guess = Guess::new(learned, at_level - 1, page_words, distance);
                way.guess = guess;
                let Some(child) = access.try_follow(&way.page, link, wanted_alone(guess, page_words)) else {
                    return Ok(Stop::Away(link));
                };
                require_level(&child, at_level - 1)?;
                let parent = std::mem::replace(&mut way.page, child);
                if KEEPS_PARENT {
                    way.parent = Some(parent);
                }
            }
        }
    }
}

/// What a page at `at_level` says of a key that is looked for at `level`, and perhaps near the entry `near`.
#[inline(always)]
fn step(node: &Node<'_, impl Words + ?Sized>, key: u64, at_level: u8, level: u8, near: Option<usize>) -> Step {
    match node.side(key) {
        Side::Left => return Step::Lost("its keys are all above the key it was to hold"),
        Side::Right => return Step::Right(node.right()),
        Side::Here if at_level <= level && level != 0 => return Step::Arrived(0),
        Side::Here => {}
    }
    let upto = match near.map(|near| node.upper_bound_near(key, near)) {
        Some(Some(upto)) => upto,
        Some(None) if at_level == 0 => return Step::Missed(node.near(key)),
        _ => node.upper_bound(key),
    };
    if at_level <= level {
        return Step::Arrived(upto);
    }
    match upto.checked_sub(1) {
        Some(child) => Step::Down { link: node.child(child), distance: key.wrapping_sub(node.key(child)), upto },
        None => Step::Lost("an inner page has no child for a key between its fences"),
    }
}

/// The right sibling of a page.
pub(super) async fn beside<'a, A: Access<Plugin = Tree>>(
    access: &'a A,
    page: &A::Page<'a>,
    right: Link,
) -> Result<A::Page<'a>, Interrupt> {
    if right.is_null() {
        return Err(Interrupt::stale(page.at(), "it has a high fence and no right sibling"));
    }
    let (low, high) = page.read(|words| (Node(words).low(), Node(words).high()))?;
    let sibling = access.follow(page, right, Hint::MOVED).await?;
    require_level(&sibling, page.level())?;
    // Going right must make progress, whatever the pages say.
    match sibling.read(|words| Node(words).low())? {
        sibling_low if sibling_low > low && Some(sibling_low) <= high => Ok(sibling),
        _ => Err(Interrupt::stale(sibling.at(), "it does not lie to the right of the page that links to it")),
    }
}

fn require_kind(page: &impl PageRef) -> Result<(), Interrupt> {
    match page.kind() == KIND {
        true => Ok(()),
        false => Err(Interrupt::stale(page.at(), "it is no page of a B+-tree")),
    }
}

pub(super) fn require_level(page: &impl PageRef, level: u8) -> Result<(), Interrupt> {
    let kind = page.kind();
    if page.level() == level && kind == KIND {
        return Ok(());
    }
    Err(Interrupt::stale(page.at(), "it is not of the level or the kind that the link promised"))
}

/// That a page which is to be rewritten is as large as the tree's are: others may be read, but their entries have no room elsewhere.
pub(super) fn require_size<A: Access<Plugin = Tree>>(access: &A, page: &A::Page<'_>) -> Result<(), Interrupt> {
    match page.read(Words::count)? == page_words(access) {
        true => Ok(()),
        false => Err(Interrupt::stale(page.at(), "it has another size than the tree's pages")),
    }
}

#[inline(always)]
fn page_words<A: Access<Plugin = Tree>>(access: &A) -> usize {
    access.context().structure.class.words()
}

/// What is known of where keys are, if this access has a use for it.
#[inline(always)]
fn learned<A: Access<Plugin = Tree>>(access: &A) -> Option<&Learned> {
    let Context { local, .. } = access.context();
    A::PREFETCHES.then_some(local)
}
