//! Insert, delete and update. What makes room for an entry before it comes, or tidies up behind one that has gone, is in `shape`.

use std::cell::Cell;

use farlink_runtime::{
    access::{
        Access, Cause, FastPath, Forked, Hint, Interrupt, Link, PageRef, Pages, PagesMut, RemotePtr, Slot, Start, Words,
    },
    error::Error,
    operation::clean_up,
    page::{IDENTITY, Identity},
};
use smallvec::SmallVec;

use super::{
    Tree, choose,
    node::{self, Item, KIND, Node, count_min, require_page},
    ops::{Delete, Insert, Update},
    rect::{Query, Rect},
    shape,
    visits::require_different,
};

/// Attempts to clean up behind a delete.
const CLEAN_UP_MAX: u32 = 8;

/// Levels of a tree, as a rule.
const HEIGHT_USUAL: usize = 8;

/// Pages from where an operation began down to one that it is about.
pub(super) type Path<'a, A> = Vec<<A as FastPath>::Page<'a>>;

/// The leaf page of a change as it is now, if it is one.
fn leaf_of<W: Words, const D: usize>(words: &W) -> Option<Node<'_, W, D>> {
    let node = Node::of(words);
    (node.level == 0 && Identity::kind_in(words.word(IDENTITY)) == KIND).then_some(node)
}

/// The way down to the leaf that takes an entry. `is_all`: nothing else is left to be done.
async fn choose_path<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    from: Start,
    rect: &Rect<D>,
    is_all: bool,
) -> Result<Path<'a, A>, Interrupt> {
    let mut path = Vec::with_capacity(HEIGHT_USUAL);
    path.push(access.open(from).await?);
    loop {
        let page = &path[path.len() - 1];
        require_page(access, page)?;
        let Some(level) = page.level().checked_sub(1) else { return Ok(path) };
        let chosen = page.read(|words| {
            let (node, mut least) = (Node::<_, D>::of(words), None);
            node.find(&Query::Contains(*rect), |index, child| {
                if least.is_none_or(|(_, of): (_, Rect<D>)| child.compare_sizes(&of).is_lt()) {
                    least = Some((index, child));
                }
            });
            let children = || (0..node.count).map(|index| node.rect(index)).collect::<SmallVec<[_; 32]>>();
            let least = least.map(|(index, _)| index);
            let chosen = least.or_else(|| choose::grow(&children(), rect, level == 0));
            chosen.map(|index| node.item(index))
        })?;
        let chosen = chosen.ok_or(Interrupt::stale(page.at(), "it has no children"))?;
        // A child that covers the entry needs nothing of the pages above, whatever they say.
        let child = match is_all && chosen.rect.contains(rect) {
            true => access.descend(page, chosen.link(), Hint::DOWN).await?,
            false => access.follow(page, chosen.link(), Hint::DOWN).await?,
        };
        // A page that was freed, and is one of a load that nothing leads to yet, has another stamp.
        if child.level() != level || child.read(|words| Node::<_, D>::of(words).stamp())? != chosen.stamp {
            return Err(Interrupt::stale(child.at(), "it is not the page that its link promised"));
        }
        path.push(child);
    }
}

/// Enlarges the boxes on the way to a page that does not cover an entry, all in one change with what `f` does to that page.
pub(super) async fn enlarge<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    path: Path<'a, A>,
    rect: &Rect<D>,
    f: impl FnOnce(&mut A::PagesMut<'a>, Slot),
) -> Result<(), Interrupt> {
    let mut boxes = Vec::with_capacity(path.len());
    for page in &path {
        boxes.push(page.read(|words| Node::<_, D>::of(words).bounds())?);
    }
    let top = boxes.iter().rposition(|bounds| bounds.contains(rect));
    let top = top.ok_or_else(|| match path[0].at() == access.context().structure.root {
        true => Interrupt::stale(path[0].at(), "it is the root, and its box is not everything"),
        false => Interrupt::above(),
    })?;
    let mut steps = Vec::new();
    for pair in path[top..].windows(2) {
        let index = pair[0].read(|words| {
            let node = Node::<_, D>::of(words);
            (0..node.count).find(|&index| access.leads_to(Link::from_word(node.word(index)), &pair[1]))
        })?;
        steps.push(index.ok_or(Interrupt::stale(pair[0].at(), "it does not lead to its child"))?);
    }
    let mut pages = Pages::new();
    let slots: Vec<_> = path.into_iter().skip(top).map(|page| pages.add(page)).collect();
    let change = |pages: &mut A::PagesMut<'a>| {
        for (number, &index) in steps.iter().enumerate() {
            let larger = boxes[top + number + 1].union(rect);
            let item = Node::<_, D>::of(&pages.page(slots[number])).item(index);
            node::set_item(pages, slots[number], index, &Item { rect: larger, ..item });
            node::set_bounds(pages, slots[number + 1], &larger);
        }
        f(pages, slots[slots.len() - 1]);
    };
    access.change(pages, change).await.map(drop)
}

pub(super) async fn insert<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    from: Start,
    insert: &Insert<D>,
) -> Result<(), Interrupt> {
    let Insert { rect, payload } = *insert;
    rect.require_finite().map_err(Error::from)?;
    let item = Item { rect, word: payload, stamp: 0 };
    let mut path = choose_path(access, from, &rect, true).await?;
    let leaf = &path[path.len() - 1];
    let (is_full, covers) = leaf.read(|words| {
        let node = Node::<_, D>::of(words);
        (node.is_full(), node.bounds().contains(&rect))
    })?;
    if is_full {
        let is_added = shape::make_room(access, path, Some(item)).await?;
        return is_added.then_some(()).ok_or(Interrupt::again());
    }
    let Some(leaf) = path.pop() else { return Err(Interrupt::above()) };
    if !covers {
        path.push(leaf);
        return enlarge(access, path, &rect, |pages, leaf| node::push(pages, leaf, &item)).await;
    }
    let add = |pages: &mut A::PagesMut<'_>| {
        let slot = Slot::ONLY;
        let fits = leaf_of::<_, D>(&pages.page(slot)).is_some_and(|it| !it.is_full() && it.bounds().contains(&rect));
        if fits {
            node::push(pages, slot, &item);
        }
        fits
    };
    let (fits, _) = access.change(Pages::current(leaf), add).await?;
    fits.then_some(()).ok_or(Interrupt::conflict())
}

/// What a way down is to end at.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wanted<const D: usize> {
    /// The leaf with an entry.
    Entry(Rect<D>, u64),
    /// A page of a level, of which, or of one below it, an entry with this rectangle has gone.
    Page(Link, u8, Rect<D>),
}

/// Looks for an entry, or a page, below where an operation begins, one child after the other.
struct Locate<'a, A: Access<Plugin = Tree<D>>, const D: usize> {
    access: &'a A,
    wanted: Wanted<D>,
    path: Path<'a, A>,
    /// Children of each page of the path that were not looked at.
    left: Vec<Vec<Item<D>>>,
    passed: Vec<RemotePtr>,
    /// The same, where they are to be validated.
    relied_on: Path<'a, A>,
}

impl<'a, A: Access<Plugin = Tree<D>>, const D: usize> Locate<'a, A, D> {
    async fn new(access: &'a A, from: Start, wanted: Wanted<D>) -> Result<Self, Interrupt> {
        let (path, left, passed, relied_on) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut locate = Self { access, wanted, path, left, passed, relied_on };
        let page = access.open(from).await?;
        locate.enter(page, None)?;
        Ok(locate)
    }

    fn enter(&mut self, page: A::Page<'a>, by: Option<&Item<D>>) -> Result<(), Interrupt> {
        require_page(self.access, &page)?;
        let (rect, level) = match self.wanted {
            Wanted::Entry(rect, _) => (rect, 0),
            Wanted::Page(_, level, rect) => (rect, level),
        };
        let (head, left) = page.read(|words| {
            let node = Node::<_, D>::of(words);
            let is_above = node.level > level;
            let children = (0..node.count).filter(|&index| match self.wanted {
                Wanted::Entry(..) => is_above && node.rect(index).contains(&rect),
                Wanted::Page(..) => is_above && node.rect(index).intersects(&rect),
            });
            (node.head(), children.map(|index| node.item(index)).collect())
        })?;
        let above = self.path.last().map(|above| above.level());
        let is_as_promised = by.is_none_or(|by| by.stamp == head.stamp && above == head.level.checked_add(1));
        if head.level != page.level() || !is_as_promised {
            return Err(Interrupt::stale(page.at(), "it is not the page that its link promised"));
        }
        self.path.push(page);
        self.left.push(left);
        Ok(())
    }

    /// Whether the way has come to its end.
    fn is_there(&self) -> Result<bool, Interrupt> {
        let Some(page) = self.path.last() else { return Ok(false) };
        match self.wanted {
            Wanted::Entry(rect, payload) if page.level() == 0 => {
                page.read(|words| Node::<_, D>::of(words).position(&rect, payload).is_some())
            }
            Wanted::Entry(..) => Ok(false),
            Wanted::Page(link, level, _) => Ok(page.level() == level && page.link() == link),
        }
    }

    /// The next child to look at, which the last page of the path leads to.
    fn next(&mut self) -> Result<Option<Item<D>>, Interrupt> {
        while let Some(left) = self.left.last_mut() {
            if let Some(next) = left.pop() {
                return Ok(Some(next));
            }
            self.left.pop();
            let passed = self.path.pop();
            self.passed.extend(passed.as_ref().map(PageRef::at));
            self.relied_on.extend(passed.filter(|_| A::VALIDATES));
            require_different(self.passed.iter().copied())?;
        }
        Ok(None)
    }

    /// To its end; the path is empty if there is none.
    async fn run(&mut self) -> Result<(), Interrupt> {
        while !self.is_there()? {
            let Some(next) = self.next()? else { return self.validate().await };
            let page = self.access.follow(&self.path[self.path.len() - 1], next.link(), Hint::DOWN).await?;
            self.enter(page, Some(&next))?;
        }
        Ok(())
    }

    async fn validate(&self) -> Result<(), Interrupt> {
        self.access.validate(&self.relied_on.iter().collect::<Vec<_>>()).await
    }
}

pub(super) async fn delete<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    from: Start,
    delete: &Delete<D>,
) -> Result<bool, Interrupt> {
    let Delete { rect, payload } = *delete;
    let mut locate = Locate::new(access, from, Wanted::Entry(rect, payload)).await?;
    while !locate.is_there()? {
        let Some(next) = locate.next()? else { return locate.validate().await.map(|()| false) };
        match access.fork_one(&locate.path[locate.path.len() - 1], next.link(), delete).await? {
            Forked::Page(page) => locate.enter(page, Some(&next))?,
            Forked::Done(true) => return Ok(true),
            // What has moved while it was sent may have moved here.
            Forked::Done(false) => locate.path[locate.path.len() - 1].read(|_| ())?,
        }
    }
    let mut path = locate.path;
    let Some(leaf) = path.pop() else { return Err(Interrupt::above()) };
    let is_from_root = path.first().unwrap_or(&leaf).at() == access.context().structure.root;
    let is_sparse = leaf.read(|words| {
        let node = Node::<_, D>::of(words);
        node.count <= count_min(node.capacity)
    })?;
    // To condense it takes pages above, which are not for whoever began below the root.
    if is_sparse && !is_from_root {
        return Err(Interrupt::above());
    }
    let remove = |pages: &mut A::PagesMut<'_>| {
        let slot = Slot::ONLY;
        let found = leaf_of::<_, D>(&pages.page(slot)).and_then(|it| it.position(&rect, payload));
        if let Some(index) = found {
            node::remove_at::<D>(pages, slot, index);
        }
        found.is_some()
    };
    let (is_gone, mut after) = access.change(Pages::current(leaf), remove).await?;
    if !is_gone {
        return Err(Interrupt::conflict());
    }
    path.extend(after.take(Slot::ONLY));
    clean_up_behind(access, path, rect).await;
    Ok(true)
}

/// Gives entries of a leaf that has too few to its siblings, and shrinks boxes, from the end of a path upwards. The entry is gone:
/// what cannot be done is left.
async fn clean_up_behind<'a, A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &'a A,
    path: Path<'a, A>,
    rect: Rect<D>,
) {
    let Some(page) = path.last() else { return };
    let at = Cell::new((page.link(), page.level()));
    let mut known = Some(path);
    clean_up(&access.context().worker, CLEAN_UP_MAX, async || {
        let attempt = async {
            let path = match known.take() {
                Some(path) => path,
                None => {
                    let (link, level) = at.get();
                    let mut locate = Locate::new(access, Start::Anew, Wanted::Page(link, level, rect)).await?;
                    locate.run().await?;
                    locate.path
                }
            };
            shape::settle(access, path, &at).await
        };
        match attempt.await {
            // Not for whoever began below the root.
            Err(Interrupt::Restart(Cause::Above)) => Ok(()),
            settled => settled,
        }
    })
    .await;
}

pub(super) async fn update<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    from: Start,
    update: &Update<D>,
) -> Result<bool, Interrupt> {
    let Update { rect, payload, to } = *update;
    to.require_finite().map_err(Error::from)?;
    if matches!(from, Start::Page(at) if at != access.context().structure.root_link()) {
        return Err(Interrupt::above());
    }
    let mut locate = Locate::new(access, from, Wanted::Entry(rect, payload)).await?;
    locate.run().await?;
    let mut old = locate.path;
    let Some(leaf) = old.pop() else { return Ok(false) };
    let item = Item { rect: to, word: payload, stamp: 0 };
    if leaf.read(|words| Node::<_, D>::of(words).bounds().contains(&to))? {
        let set = |pages: &mut A::PagesMut<'_>| {
            let slot = Slot::ONLY;
            let words = pages.page(slot);
            let found = leaf_of::<_, D>(&words).filter(|it| it.bounds().contains(&to));
            let found = found.and_then(|it| it.position(&rect, payload));
            drop(words);
            if let Some(index) = found {
                node::set_item(pages, slot, index, &item);
            }
            found.is_some()
        };
        let (is_set, mut after) = access.change(Pages::current(leaf), set).await?;
        if !is_set {
            return Err(Interrupt::conflict());
        }
        old.extend(after.take(Slot::ONLY));
        clean_up_behind(access, old, rect).await;
        return Ok(true);
    }
    let mut new = choose_path(access, from, &to, false).await?;
    let (is_full, covers) = new[new.len() - 1].read(|words| {
        let node = Node::<_, D>::of(words);
        (node.is_full(), node.bounds().contains(&to))
    })?;
    if is_full {
        shape::make_room(access, new, None).await?;
        return Err(Interrupt::again());
    }
    if !covers {
        // A larger box is no effect that anybody sees.
        enlarge(access, new, &to, |_, _| {}).await?;
        return Err(Interrupt::again());
    }
    let Some(target) = new.pop().filter(|target| target.at() != leaf.at()) else { return Err(Interrupt::conflict()) };
    let found = leaf.read(|words| Node::<_, D>::of(words).position(&rect, payload))?;
    let index = found.ok_or(Interrupt::conflict())?;
    let mut pages = Pages::new();
    let (leaf, target) = (pages.add(leaf), pages.add(target));
    let move_over = |pages: &mut A::PagesMut<'_>| {
        node::remove_at::<D>(pages, leaf, index);
        node::push(pages, target, &item);
    };
    let (_, mut after) = access.change(pages, move_over).await?;
    old.extend(after.take(leaf));
    drop(after);
    clean_up_behind(access, old, rect).await;
    Ok(true)
}
