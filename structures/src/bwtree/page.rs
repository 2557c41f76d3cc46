//! Logical pages, and the way down to one.
//!
//! Where the access remembers pages ([`FastPath::recall`]), a search takes those above the level that it is for as they are
//! remembered: as in any tree of this kind an old page leads too far left at worst, and pages have right links. What it
//! answers from, it takes only if the page's word is the one that goes with it. Before it goes to the right behind what it has
//! trusted, it reads the words of that: if they have not changed, the page to the right has no index term yet. What does not fit
//! what was remembered ends the attempt as stale, and the next one trusts nothing that is remembered.

use std::{mem, ops::Deref, sync::Arc};

use farlink_runtime::{access::*, operation::clean_up};

use super::{
    Bw,
    chain::{Chain, Logical, Record, State},
    merge,
    record::{About, Change, Fences, MapWord, Mapped, Pid, Side},
    split, table,
};

/// What a search may do on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Search {
    /// It finishes what it meets half-done, for it goes before a change.
    finishes: bool,
    /// The pages that it takes as they are remembered.
    trusts: Trusts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trusts {
    None,
    /// Those above the one it is for.
    Above,
    All,
}

impl Search {
    /// Before a change of the tree.
    pub(super) const TO_CHANGE: Self = Self { finishes: true, trusts: Trusts::None };
    /// Finds its way through what is half-done, and changes nothing.
    pub(super) const TO_READ: Self = Self { finishes: false, trusts: Trusts::None };

    /// To answer from the page, by an attempt that begins there.
    pub(super) fn to_answer(from: Start) -> Self {
        Self { trusts: if from == Start::Anew { Trusts::None } else { Trusts::Above }, ..Self::TO_READ }
    }

    /// For a swap of the page's word, which succeeds only if it is as remembered, by an attempt that begins there.
    pub(super) fn to_swap(from: Start) -> Self {
        Self { trusts: if from == Start::Anew { Trusts::None } else { Trusts::All }, ..Self::TO_CHANGE }
    }

    /// From which level on pages may be as they are remembered, in a search for one of this level.
    fn trusted_from(self, level: u8) -> Option<u8> {
        match self.trusts {
            Trusts::None => None,
            Trusts::Above => level.checked_add(1),
            Trusts::All => Some(level),
        }
    }
}

/// A logical page as it was when its word was read.
#[derive(Debug, Clone)]
pub(super) struct View {
    /// Where its word stands,
    pub(super) at: WordPtr,
    /// and what it was.
    pub(super) word: MapWord,
    page: Arc<Logical>,
    /// Whether that was in this attempt.
    is_fresh: bool,
}

impl Deref for View {
    type Target = Logical;

    fn deref(&self) -> &Logical {
        &self.page
    }
}

/// A page that is being merged into the one to its left: of its records only the newest was read.
#[derive(Debug, Clone)]
pub(super) struct Removed {
    pub(super) at: WordPtr,
    pub(super) word: MapWord,
    pub(super) pid: Pid,
    pub(super) head: Unlinked,
    /// The record below that of its removal,
    pub(super) below: MapWord,
    /// and how many there are down from there.
    pub(super) below_count: u8,
}

/// What a number leads to.
#[derive(Debug, Clone)]
pub(super) enum Found {
    Page(View),
    Removed(Removed),
    /// Nothing any more: the page was merged.
    Gone,
}

impl View {
    pub(super) fn pid(&self) -> Pid {
        self.state.about.pid
    }

    pub(super) fn level(&self) -> u8 {
        self.state.about.level
    }

    /// A record of it, or its mapping word's page: where it shows that something is wrong.
    pub(super) fn shown_at(&self) -> RemotePtr {
        let word = || self.at.page.remote().map(|(at, _)| at);
        self.records.first().map(Unlinked::at).or_else(word).expect("a page has an address")
    }

    pub(super) fn stale(&self, why: &'static str) -> Interrupt {
        Interrupt::stale(self.shown_at(), why)
    }

    /// That its word was read in this attempt.
    pub(super) fn require_fresh(&self) -> Result<(), Interrupt> {
        if self.is_fresh { Ok(()) } else { Err(self.stale("what is remembered of it is old")) }
    }

    /// Whether its word was read in this attempt.
    pub(super) fn is_fresh(&self) -> bool {
        self.is_fresh
    }

    /// The page as it is now, at the word that was found in place of the one that it had, if it still holds a key.
    pub(super) async fn at_word<A: Access<Plugin = Bw>>(
        self,
        access: &A,
        word: MapWord,
        key: u64,
    ) -> Result<Self, Interrupt> {
        let known = (self.word.0, Arc::clone(&self.page));
        match read(access, self.pid(), (self.at, word), Some(known)).await? {
            Found::Page(page) if page.level() == self.level() && page.state.fences.side(key) == Side::Here => Ok(page),
            _ => Err(self.require_fresh().err().unwrap_or(Interrupt::conflict())),
        }
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

impl Removed {
    /// What the page held. Whoever has seen, in the same attempt, that the page to its left still leads here, may take it for
    /// what was true at some moment since: nothing is changed here any more, nor has it yet been there.
    pub(super) async fn content<A: Access<Plugin = Bw>>(self, access: &A) -> Result<View, Interrupt> {
        let Self { at, word, pid, below, .. } = self;
        let page = read_chain(access, pid, below, None, None).await?;
        Ok(View { at, word, page: Arc::new(page), is_fresh: true })
    }
}

/// The record that a word leads to.
async fn record<A: Access<Plugin = Bw>>(access: &A, word: MapWord) -> Result<A::Page<'_>, Interrupt> {
    match word.target() {
        Some(Mapped::To(link)) => access.open(Start::Page(link)).await,
        _ => Err(Interrupt::stale(access.context().structure.root, "a link between its records leads nowhere")),
    }
}

/// Reads a chain, of which the first record may have been read, to its end or down to what is known.
async fn read_chain<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    pid: Pid,
    head: MapWord,
    mut first: Option<A::Page<'a>>,
    known: Option<&(u64, Arc<Logical>)>,
) -> Result<Logical, Interrupt> {
    let mut chain = Chain::new(pid, head);
    let mut at = access.context().structure.root;
    while let Some(word) = chain.next() {
        if known.is_some_and(|(word, page)| chain.add_known(MapWord(*word), page)) {
            continue;
        }
        let page = match first.take() {
            Some(page) => page,
            None => record(access, word).await?,
        };
        at = page.at();
        page.read(|words| chain.add(words))?.map_err(|flaw| Interrupt::stale(at, flaw.0))?;
    }
    chain.merge().map_err(|flaw| Interrupt::stale(at, flaw.0))
}

/// Remembers what a page's chain comes to.
pub(super) fn remember<A: Access<Plugin = Bw>>(access: &A, at: WordPtr, word: MapWord, page: &Arc<Logical>) {
    access.remember(at, word.0, page, page.bytes());
}

/// Reads the page of a number.
pub(super) async fn find<A: Access<Plugin = Bw>>(access: &A, pid: Pid) -> Result<Found, Interrupt> {
    look(access, pid, None).await
}

/// [`find`]; a page from this level on may be as it is remembered.
async fn look<A: Access<Plugin = Bw>>(access: &A, pid: Pid, trusted_from: Option<u8>) -> Result<Found, Interrupt> {
    let at = table::word_of(access, pid).await?;
    let known = access.recall::<Logical>(at).filter(|(_, page)| page.state.about.pid == pid);
    if let (Some((word, page)), Some(level)) = (&known, trusted_from)
        && page.state.about.level >= level
    {
        return Ok(Found::Page(View { at, word: MapWord(*word), page: Arc::clone(page), is_fresh: false }));
    }
    let word = MapWord(access.load(&[at]).await?[0]);
    read(access, pid, (at, word), known).await
}

/// What a number leads to whose word was this just now.
async fn read<A: Access<Plugin = Bw>>(
    access: &A,
    pid: Pid,
    (at, word): (WordPtr, MapWord),
    known: Option<(u64, Arc<Logical>)>,
) -> Result<Found, Interrupt> {
    if let Some((_, page)) = known.as_ref().filter(|known| known.0 == word.0) {
        return Ok(Found::Page(View { at, word, page: Arc::clone(page), is_fresh: true }));
    }
    match word.target() {
        Some(Mapped::Not(0)) if pid == Pid::ROOT && word == MapWord::NEVER => {
            // Nobody has put anything into the tree yet.
            let state = State::new(About { pid, level: 0, below: u8::MAX }, Fences::ALL);
            let page = Arc::new(Logical::of_base(state, None));
            return Ok(Found::Page(View { at, word, page, is_fresh: true }));
        }
        Some(Mapped::To(_)) => {}
        _ => return Ok(Found::Gone),
    }
    let head = record(access, word).await?;
    let (kept, newest, page) = head.read(|words| (word.is_to(words), Record::of(words), Unlinked::of(words)))?;
    let (Some(newest), Some(page), true) = (newest, page, kept) else {
        return Err(Interrupt::stale(head.at(), "it is no record of a Bw-tree"));
    };
    if newest.about().pid != pid {
        return Ok(Found::Gone);
    }
    if let Record::Delta(delta) = &newest
        && delta.changes[0] == Change::Remove
    {
        let (below, below_count) = (delta.next, delta.about.below);
        return Ok(Found::Removed(Removed { at, word, pid, head: page, below, below_count }));
    }
    let page = Arc::new(read_chain(access, pid, word, Some(head), known.as_ref()).await?);
    remember(access, at, word, &page);
    Ok(Found::Page(View { at, word, page, is_fresh: true }))
}

/// Finds the page of a level to which a key belongs, as it is now; the root, if the tree is not that high.
pub(super) async fn descend<A: Access<Plugin = Bw>>(
    access: &A,
    key: u64,
    level: u8,
    search: Search,
) -> Result<View, Interrupt> {
    let trusted_from = search.trusted_from(level);
    let Found::Page(mut page) = look(access, Pid::ROOT, trusted_from).await? else {
        return Err(Interrupt::stale(access.context().structure.root, "there is no root"));
    };
    let mut above: Option<View> = None;
    loop {
        match page.state.fences.side(key) {
            Side::Left => return Err(page.stale("its keys are all above the key it was to hold")),
            Side::Right if page.pid() == Pid::ROOT => return Err(page.stale("the root has a page to its right")),
            Side::Right => {
                require_as_remembered(access, [above.as_mut(), Some(&mut page)]).await?;
                if search.finishes {
                    let (high, above) = (page.state.fences.high().unwrap_or(0), page.level() + 1);
                    // Help, without which the page to the right is whole: others may keep the page above busy for long.
                    clean_up(&access.context().worker, 1, async || split::post(access, above, high).await).await;
                }
                page = right_of(access, &page, search.finishes).await?;
            }
            Side::Here if page.level() <= level => return Ok(page),
            Side::Here => {
                let below = child(access, &page, key, search.finishes, trusted_from).await?;
                if below.level() + 1 != page.level() {
                    return Err(below.stale("it is not of the level that the page above promised"));
                }
                above = Some(mem::replace(&mut page, below));
            }
        }
    }
}

/// Reads the words of those pages whose words were not read in this attempt.
async fn require_as_remembered<A: Access<Plugin = Bw>>(
    access: &A,
    pages: [Option<&mut View>; 2],
) -> Result<(), Interrupt> {
    let trusted: Vec<&mut View> = pages.into_iter().flatten().filter(|page| !page.is_fresh).collect();
    if trusted.is_empty() {
        return Ok(());
    }
    let words: Vec<WordPtr> = trusted.iter().map(|page| page.at).collect();
    for (page, word) in trusted.into_iter().zip(access.load(&words).await?) {
        page.is_fresh = page.word.0 == word;
        page.require_fresh()?;
    }
    Ok(())
}

/// The page to the right of one that is fresh.
pub(super) async fn right_of<A: Access<Plugin = Bw>>(
    access: &A,
    page: &View,
    finishes: bool,
) -> Result<View, Interrupt> {
    let (high, pid) = page.state.fences.right.ok_or(page.stale("there is no page to its right"))?;
    let right = match find(access, pid).await? {
        Found::Page(right) => right,
        Found::Removed(_) if finishes => {
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
async fn child<A: Access<Plugin = Bw>>(
    access: &A,
    page: &View,
    key: u64,
    finishes: bool,
    trusted_from: Option<u8>,
) -> Result<View, Interrupt> {
    let (index, pid) = page.child_for(key)?;
    let removed = match look(access, pid, trusted_from).await? {
        Found::Page(child) => return Ok(child),
        _ if !page.is_fresh => return Err(page.stale("what is remembered of it is old")),
        // Its number is given up before the entry goes.
        Found::Gone if page.state.merging.is_some_and(|(_, child)| child == pid) => None,
        Found::Gone => return Err(page.stale("a page below it is gone")),
        Found::Removed(removed) => Some(removed),
    };
    if finishes {
        merge::finish(access, page.level(), page.state.entries[index].0).await?;
        return Err(Interrupt::again());
    }
    let is_only = page.pid() == Pid::ROOT && page.state.merging == Some((page.state.fences.low, pid));
    let held = async |removed: Option<Removed>| match removed {
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
