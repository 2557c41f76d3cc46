//! Logical pages, and the way down to one.

use std::rc::Rc;

use farlink_runtime::access::*;

use super::{
    Bw, merge,
    record::{About, Chain, Change, Delta, Fences, MapWord, Mapped, Pid, Record, Side, State, merge as merge_records},
    split, table,
};

/// A logical page as it was when its word was read.
pub(super) struct View<'a, A: Access<Plugin = Bw> + 'a> {
    /// Where its word stands,
    pub(super) at: WordPtr,
    /// and what it was.
    pub(super) word: MapWord,
    /// What the records say.
    pub(super) state: Rc<State>,
    /// All records that it was read from.
    pub(super) records: Vec<A::Page<'a>>,
}

/// A page that is being merged into the one to its left: of its records only the newest was read.
pub(super) struct Removed<'a, A: Access<Plugin = Bw> + 'a> {
    pub(super) at: WordPtr,
    pub(super) word: MapWord,
    pub(super) pid: Pid,
    pub(super) head: A::Page<'a>,
    /// The record below that of its removal,
    pub(super) below: MapWord,
    /// and how many there are down from there.
    pub(super) below_count: u8,
}

/// What a number leads to.
pub(super) enum Found<'a, A: Access<Plugin = Bw> + 'a> {
    Page(View<'a, A>),
    Removed(Removed<'a, A>),
    /// Nothing any more: the page was merged.
    Gone,
}

impl<'a, A: Access<Plugin = Bw>> View<'a, A> {
    pub(super) fn pid(&self) -> Pid {
        self.state.about.pid
    }

    pub(super) fn level(&self) -> u8 {
        self.state.about.level
    }

    /// A record of it, or its mapping word's page: where it shows that something is wrong.
    pub(super) fn shown_at(&self) -> RemotePtr {
        self.records
            .first()
            .map(PageRef::at)
            .or(self.at.page.remote().map(|(at, _)| at))
            .expect("a page has an address")
    }

    pub(super) fn stale(&self, why: &'static str) -> Interrupt {
        Interrupt::stale(self.shown_at(), why)
    }

    /// The child behind which a key is.
    pub(super) fn child_for(&self, key: u64) -> Result<(usize, Pid), Interrupt> {
        let index =
            self.state.child_for(key).ok_or(self.stale("an inner page has no child for a key between its fences"))?;
        Ok((index, self.child(index)?))
    }

    pub(super) fn child(&self, index: usize) -> Result<Pid, Interrupt> {
        let entry = self.state.entries.get(index).and_then(|entry| Pid::from_word(entry.1));
        entry.ok_or(self.stale("an entry of an inner page leads to no page"))
    }
}

impl<'a, A: Access<Plugin = Bw>> Removed<'a, A> {
    /// What the page held. Whoever has seen, in the same operation, that the page to its left still leads here, may take it for
    /// what was true at some moment since: nothing is changed here any more, nor has it yet been there.
    pub(super) async fn content(self, access: &'a A) -> Result<View<'a, A>, Interrupt> {
        self.split(access).await.map(|(_, content)| content)
    }

    /// The record of its removal, and [`Removed::content`].
    pub(super) async fn split(self, access: &'a A) -> Result<(A::Page<'a>, View<'a, A>), Interrupt> {
        let Self { at, word, pid, below, head, .. } = self;
        let (state, records) = read_chain(access, pid, below, None).await?;
        Ok((head, View { at, word, state: Rc::new(state), records }))
    }
}

/// The record that a word leads to.
async fn record<A: Access<Plugin = Bw>>(access: &A, word: MapWord) -> Result<A::Page<'_>, Interrupt> {
    match word.target() {
        Some(Mapped::To(link)) => access.open(Start::Page(link)).await,
        _ => Err(Interrupt::stale(access.context().structure.root, "a link between its records leads nowhere")),
    }
}

/// Reads a chain to its end, of which the first record may have been read.
async fn read_chain<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    pid: Pid,
    head: MapWord,
    mut first: Option<A::Page<'a>>,
) -> Result<(State, Vec<A::Page<'a>>), Interrupt> {
    let (mut chain, mut records) = (Chain::new(pid, head), Vec::new());
    let mut at = access.context().structure.root;
    while let Some(word) = chain.next() {
        let page = match first.take() {
            Some(page) => page,
            None => record(access, word).await?,
        };
        at = page.at();
        page.read(|words| chain.add(words).map(drop))?.map_err(|flaw| Interrupt::stale(at, flaw.0))?;
        records.push(page);
    }
    let state = merge_records(chain.records()).map_err(|flaw| Interrupt::stale(at, flaw.0))?;
    Ok((state, records))
}

/// Reads the page of a number.
pub(super) async fn find<A: Access<Plugin = Bw>>(access: &A, pid: Pid) -> Result<Found<'_, A>, Interrupt> {
    let at = table::word_of(access, pid).await?;
    let word = MapWord(access.load(&[at]).await?[0]);
    match word.target() {
        Some(Mapped::Not(0)) if pid == Pid::ROOT && word == MapWord::NEVER => {
            // Nobody has put anything into the tree yet.
            let state = State::new(About { pid, level: 0, below: u8::MAX }, Fences::ALL);
            return Ok(Found::Page(View { at, word, state: Rc::new(state), records: Vec::new() }));
        }
        Some(Mapped::To(_)) => {}
        _ => return Ok(Found::Gone),
    }
    let head = record(access, word).await?;
    let (kept, newest) = head.read(|words| (word.is_to(words), Record::of(words)))?;
    let newest = newest.filter(|_| kept).ok_or(Interrupt::stale(head.at(), "it is no record of a Bw-tree"))?;
    if newest.about().pid != pid {
        return Ok(Found::Gone);
    }
    if let Record::Delta(Delta { next, change: Change::Remove, about }) = newest {
        return Ok(Found::Removed(Removed { at, word, pid, head, below: next, below_count: about.below }));
    }
    let (state, records) = read_chain(access, pid, word, Some(head)).await?;
    Ok(Found::Page(View { at, word, state: Rc::new(state), records }))
}

/// Finds the page of a level to which a key belongs; the root, if the tree is not that high. A search that goes before a change
/// finishes what it meets half-done; others find their way through it, and change nothing.
pub(super) async fn descend<A: Access<Plugin = Bw>>(
    access: &A,
    key: u64,
    level: u8,
    changes: bool,
) -> Result<View<'_, A>, Interrupt> {
    let structure = &access.context().structure;
    let Found::Page(mut page) = find(access, Pid::ROOT).await? else {
        return Err(Interrupt::stale(structure.root, "there is no root"));
    };
    loop {
        match page.state.fences.side(key) {
            Side::Left => return Err(page.stale("its keys are all above the key it was to hold")),
            Side::Right => {
                if changes {
                    let high = page.state.fences.high().unwrap_or(0);
                    split::post(access, page.level() + 1, high).await?;
                }
                page = right_of(access, &page, changes).await?;
            }
            Side::Here if page.level() <= level => return Ok(page),
            Side::Here => {
                let below = child(access, &page, key, changes).await?;
                if below.level() + 1 != page.level() {
                    return Err(below.stale("it is not of the level that the page above promised"));
                }
                page = below;
            }
        }
    }
}

/// The page to the right.
pub(super) async fn right_of<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    page: &View<'a, A>,
    changes: bool,
) -> Result<View<'a, A>, Interrupt> {
    let (high, pid) = page.state.fences.right.ok_or(page.stale("there is no page to its right"))?;
    let right = match find(access, pid).await? {
        Found::Page(right) => right,
        Found::Removed(_) if changes => {
            merge::finish(access, page.level() + 1, high).await?;
            return Err(Interrupt::again());
        }
        Found::Removed(removed) => removed.content(access).await?,
        Found::Gone => return Err(page.stale("the page to its right is gone")),
    };
    match right.level() == page.level() && right.state.fences.low == high && high > page.state.fences.low {
        true => Ok(right),
        false => Err(right.stale("it does not lie to the right of the page that leads to it")),
    }
}

/// The page below to which a key belongs, or one to the left of that.
async fn child<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    page: &View<'a, A>,
    key: u64,
    changes: bool,
) -> Result<View<'a, A>, Interrupt> {
    let (index, pid) = page.child_for(key)?;
    let removed = match find(access, pid).await? {
        Found::Page(child) => return Ok(child),
        // Its number is given up before the entry goes.
        Found::Gone if page.state.merging.is_some_and(|(_, child)| child == pid) => None,
        Found::Gone => return Err(page.stale("a page below it is gone")),
        Found::Removed(removed) => Some(removed),
    };
    if changes {
        merge::finish(access, page.level(), page.state.entries[index].0).await?;
        return Err(Interrupt::again());
    }
    let is_only = page.pid() == Pid::ROOT && page.state.merging == Some((page.state.fences.low, pid));
    let held = async |removed: Option<Removed<'a, A>>| match removed {
        Some(removed) => removed.content(access).await,
        None => Err(page.stale("a page below it is gone")),
    };
    if is_only {
        return held(removed).await;
    }
    let left = index.checked_sub(1).ok_or(page.stale("its first child is being merged"))?;
    let Found::Page(mut left) = find(access, page.child(left)?).await? else {
        return Err(page.stale("the page to the left of one that is being merged is gone"));
    };
    loop {
        match left.state.fences.right {
            Some((_, right)) if right == pid => return held(removed).await,
            Some(_) if left.state.fences.side(key) == Side::Right => left = right_of(access, &left, false).await?,
            _ => return Ok(left),
        }
    }
}
