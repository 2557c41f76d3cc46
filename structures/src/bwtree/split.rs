//! Changes of a page: a delta, a new base, a split.
//!
//! A split is three swaps, each of which leaves the tree whole: the right half appears under a number of its own, to which
//! nothing leads; a delta on the page says that all from a key on is there; a delta on the page above says so too. Between the last
//! two a search finds its way over the right link, and if it goes before a change it puts the index term in ([`post`]). A process
//! that dies behind the first leaves a page that nothing leads to; the check counts those.
//!
//! The root keeps its number: its halves become new pages, and a new base of the root leads to both, with one swap.

use std::{future::Future, pin::Pin};

use farlink_runtime::{
    access::*,
    error::Error,
    one_sided::{OneSided, Proof},
    operation::clean_up,
    page::SizeClass,
};
use rand::RngExt;

use super::{
    Bw, merge,
    page::{Found, View, descend, find, right_of},
    record::{About, Change, DELTA, Delta, Fences, MapWord, Pid, Side, State, capacity},
    table::{self, Free},
};

/// Attempts to take a free place.
const TAKE_MAX: u32 = 16;
/// Attempts to put in an index term behind a split. Whoever comes by puts it in later.
const POST_MAX: u32 = 4;

/// Attempts to take back what a split has made in vain.
const UNDO_MAX: u32 = 16;

/// Recursion needs a box: what is met half-done above is finished first.
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, Interrupt>> + 'a>>;

/// The word that leads to a new page.
fn to(page: &NewPage) -> Result<MapWord, Error> {
    MapWord::to_new(page).ok_or(Error::Malformed("a Bw-tree has records on 1024 memory servers of 1 TiB at most"))
}

/// Where a record is to be: on the memory server of its page's word, so that one doorbell does for both.
fn placement(at: WordPtr) -> Placement {
    at.page.remote().map_or(Placement::RoundRobin, |(page, _)| Placement::Server(page.server()))
}

/// Adds a delta to a page; false if others were first.
pub(super) async fn add<A: Access<Plugin = Bw>>(
    access: &A,
    (at, old): (WordPtr, MapWord),
    about: About,
    change: Change,
) -> Result<bool, Interrupt> {
    let page = access.allocate(DELTA, placement(at)).await?;
    let swap = Swap { word: at, old: old.0, to: to(&page)?.0 };
    let delta = Delta { about, next: old, change };
    let write = |pages: &mut A::PagesMut<'_>| delta.write(pages, Slot::new_page(0));
    Ok(access.install(vec![page], write, swap, vec![]).await?.is_ok())
}

impl<'a, A: Access<Plugin = Bw>> View<'a, A> {
    /// What a delta on top says of its chain.
    pub(super) fn above(&self) -> Result<About, Interrupt> {
        let below = self.state.about.below.checked_add(1).ok_or(self.stale("its chain is too long"))?;
        Ok(About { below, ..self.state.about })
    }

    /// Whether the next change is to be a new base.
    pub(super) fn is_long(&self, access: &A) -> bool {
        self.state.about.below >= Bw::chain_max(&access.context().structure)
    }

    /// Adds a delta, or writes a new base if the chain is long enough: whether it did.
    pub(super) async fn alter(self, access: &'a A, change: Change) -> Result<bool, Interrupt> {
        if self.state.merging.is_some() {
            merge::finish(access, self.level(), self.state.fences.low).await?;
            return Err(Interrupt::again());
        }
        if !self.is_long(access) {
            return match add(access, (self.at, self.word), self.above()?, change).await? {
                true => Ok(false),
                false => Err(Interrupt::conflict()),
            };
        }
        let mut state = State::clone(&self.state);
        state.change(change);
        if state.entries.len() > capacity(access.context().structure.class) && self.state.entries.len() > 1 {
            split(access, self.pid()).await?;
            return Err(Interrupt::again());
        }
        self.replace(access, state).await.map(|()| true)
    }

    /// Writes a new base in place of the whole chain, which is free then.
    pub(super) async fn replace(self, access: &'a A, state: State) -> Result<(), Interrupt> {
        let page = access.allocate(class_for(access, &state)?, placement(self.at)).await?;
        let swap = Swap { word: self.at, old: self.word.0, to: to(&page)?.0 };
        let write = |pages: &mut A::PagesMut<'_>| state.write(pages, Slot::new_page(0));
        match access.install(vec![page], write, swap, self.records).await? {
            Ok(()) => Ok(()),
            Err(_) => Err(Interrupt::conflict()),
        }
    }
}

/// Splits a page that is full. A task of the worker: if others are first, what it has made is taken back, whatever becomes of the
/// caller.
async fn split<A: Access<Plugin = Bw>>(access: &A, pid: Pid) -> Result<(), Interrupt> {
    let Context { worker, structure, .. } = access.context();
    let (access, pin) = (OneSided::<Bw>::new(worker, structure.clone(), Proof::Checksum), worker.pin());
    let whole = async move {
        let Found::Page(page) = find(&access, pid).await? else { return Ok(()) };
        let mut made = Vec::new();
        let outcome = match page.state.entries.len() < capacity(access.context().structure.class) {
            true => return Ok(()),
            false => halve(&access, page, &mut made).await,
        };
        if let Err(Interrupt::Restart(_)) = outcome {
            for page in made {
                clean_up(&access.context().worker, UNDO_MAX, async || Created::undo(page, &access).await).await;
            }
        }
        drop(pin);
        outcome
    };
    worker.spawn_to_end(whole).await
}

/// Splits a page; of the new pages it makes a list.
async fn halve<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    page: View<'a, A>,
    made: &mut Vec<Created>,
) -> Result<(), Interrupt> {
    let (State { about, fences, .. }, level) = (&*page.state, page.level().saturating_add(1));
    let (left, right) = page.state.entries.split_at(page.state.entries.len() / 2);
    let at = right.first().ok_or(page.stale("a page without entries is full"))?.0;
    let beside = page.at.page.remote().map_or(access.context().structure.root, |(at, _)| at);
    let mut create = async |entries: &[(u64, u64)], fences| {
        let state = State { entries: entries.to_vec(), ..State::new(*about, fences) };
        let new = Created::beside(access, state, beside).await?;
        made.push(new);
        Ok::<_, Interrupt>(new.pid)
    };
    let new = create(right, Fences { low: at, ..*fences }).await?;
    if page.pid() == Pid::ROOT {
        let left = create(left, Fences { low: fences.low, right: Some((at, new)) }).await?;
        let entries = vec![(fences.low, left.word()), (at, new.word())];
        let root = State { entries, ..State::new(About { level, ..*about }, Fences::ALL) };
        page.replace(access, root).await?;
    } else if add(access, (page.at, page.word), page.above()?, Change::Split { at, right: new }).await? {
        clean_up(&access.context().worker, POST_MAX, async || post(access, level, at).await).await;
    } else {
        return Err(Interrupt::conflict());
    }
    access.context().worker.count_split();
    Ok(())
}

/// The size of a base page for so many entries: that of the structure, or the next one that does.
fn class_for<A: Access<Plugin = Bw>>(access: &A, state: &State) -> Result<SizeClass, Error> {
    let least = access.context().structure.class;
    let class = SizeClass::all().find(|&class| class >= least && capacity(class) >= state.entries.len());
    class.ok_or(Error::Malformed("a page holds more entries than any page can"))
}

/// A page to which nothing leads yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Created {
    pub(super) pid: Pid,
    at: WordPtr,
    word: MapWord,
}

impl Created {
    /// A page with a number of its own, near another page.
    pub(super) async fn beside<A: Access<Plugin = Bw>>(
        access: &A,
        mut state: State,
        beside: RemotePtr,
    ) -> Result<Self, Interrupt> {
        for _ in 0..TAKE_MAX {
            let Free { pid, at, word: old } = table::free(access, state.about.level, beside).await?;
            let page = access.allocate(class_for(access, &state)?, placement(at)).await?;
            let word = to(&page)?;
            state.about.pid = pid;
            let write = |pages: &mut A::PagesMut<'_>| state.write(pages, Slot::new_page(0));
            if access.install(vec![page], write, Swap { word: at, old: old.0, to: word.0 }, vec![]).await?.is_ok() {
                return Ok(Self { pid, at, word });
            }
        }
        Err(Interrupt::conflict())
    }

    /// Gives page and number up again.
    pub(super) async fn undo<A: Access<Plugin = Bw>>(self, access: &A) -> Result<(), Interrupt> {
        let Found::Page(View { records, .. }) = find(access, self.pid).await? else { return Ok(()) };
        unmap(access, self.pid, (self.at, self.word), records).await.map(drop)
    }
}

/// Gives a number up, and frees records; false if others were first.
pub(super) async fn unmap<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    pid: Pid,
    (word, old): (WordPtr, MapWord),
    records: Vec<A::Page<'a>>,
) -> Result<bool, Interrupt> {
    let random = access.context().worker.random(|rng| rng.random::<u64>());
    let to = MapWord::not_mapped(pid.generation() + 1, random).0;
    Ok(access.install(vec![], |_| (), Swap { word, old: old.0, to }, records).await?.is_ok())
}

/// Puts the index term of a split into the page above, unless it is there: `at` is where the split page ends, `level` that of the
/// page above.
pub(super) fn post<A: Access<Plugin = Bw>>(access: &A, level: u8, at: u64) -> Boxed<'_, ()> {
    Box::pin(async move {
        let parent = descend(access, at, level, true).await?;
        if parent.level() != level || parent.state.value(at).is_some() {
            return Ok(());
        }
        let (_, first) = parent.child_for(at)?;
        // Only a page of which the page above knows is ever merged. So what is found now, behind the reading of the page above,
        // is still so if the swap succeeds.
        let mut left = match find(access, first).await? {
            Found::Page(left) => left,
            Found::Removed(_) => return merge::finish(access, level, at).await,
            Found::Gone => return Err(parent.stale("a page below it is gone")),
        };
        let right = loop {
            match (left.state.fences.side(at), left.state.fences.right) {
                (Side::Right, Some((high, right))) if high == at => break right,
                (Side::Right, _) => left = right_of(access, &left, true).await?,
                // The page was merged back.
                _ => return Ok(()),
            }
        };
        parent.alter(access, Change::Put { key: at, value: right.word() }).await.map(drop)
    })
}
