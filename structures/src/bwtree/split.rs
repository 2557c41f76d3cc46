//! Changes of a page: a delta, a new base, a split.
//!
//! A split is three swaps, each of which leaves the tree whole: the right half appears under a number of its own, to which
//! nothing leads; a new base of the page is the left half, and leads to it; a delta on the page above does so too. (In the paper the
//! second is a delta. But a page is full when its chain is as long as it may be, and the next write would make the new base.) Between
//! the last two a search finds its way over the right link, and if it goes before a change it puts the index term in ([`post`]). A process
//! that dies behind the first leaves a page that nothing leads to; the check counts those.
//!
//! The root keeps its number: its halves become new pages, and a new base of the root leads to both, with one swap.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
};

use farlink_runtime::{
    access::*,
    error::Error,
    one_sided::{OneSided, Proof},
    operation::{clean_up, persist},
    page::SizeClass,
};
use rand::RngExt;

use super::{
    Bw, CONSOLIDATIONS,
    chain::{Logical, State},
    merge,
    page::{Found, Search, View, descend, find, remember, right_of},
    record::{About, Change, Fences, MapWord, Pid, Side, capacity},
    table::{self, Free},
};

/// Attempts to take a free place.
const TAKE_MAX: u32 = 16;
/// Attempts to put in an index term behind a split. Whoever comes by puts it in later.
const POST_MAX: u32 = 4;

/// How deep help is within help. Twice the height does in a sound tree.
const NESTED_MAX: u32 = 32;

/// Sets it back, whatever comes of a poll.
struct Back<'a>(&'a Cell<u32>, u32);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Recursion needs a box: what is met half-done above is finished first.
pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, Interrupt>> + 'a>>;

/// Recursion that ends, also where damaged pages are said to be half-done in a ring.
pub(super) fn boxed<'a, A: Access<Plugin = Bw>, T>(
    access: &'a A,
    future: impl Future<Output = Result<T, Interrupt>> + 'a,
) -> Boxed<'a, T> {
    Box::pin(async move {
        let Context { structure, local, .. } = access.context();
        let mut future = pin!(future);
        // Within one poll, so it is of one operation.
        poll_fn(|cx| {
            let nested = local.nested.get();
            if nested == NESTED_MAX {
                return Poll::Ready(Err(Interrupt::stale(structure.root, "what is half-done is so in a ring")));
            }
            local.nested.set(nested + 1);
            let _back = Back(&local.nested, nested);
            future.as_mut().poll(cx)
        })
        .await
    })
}

/// Writes a record of a page, and makes its word, which was `old`, lead there: the record and the word that does, or the word that
/// others have put there.
async fn publish<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    class: SizeClass,
    write: impl FnOnce(&mut A::PagesMut<'a>),
    (at, old): (WordPtr, MapWord),
    found_by: Option<[u64; 2]>,
    unlinked: Vec<Unlinked>,
) -> Result<Result<(MapWord, Unlinked), MapWord>, Interrupt> {
    // On the memory server of the word, so that one doorbell does for both.
    let beside = at.page.remote().map_or(Placement::RoundRobin, |(page, _)| Placement::Server(page.server()));
    let page = access.allocate(class, beside).await?;
    let out_of_reach = || Bw::error("it has records on 1024 memory servers of 1 TiB at most");
    let (to, record) = (MapWord::to_new(&page).ok_or_else(out_of_reach)?, Unlinked::from(&page));
    let swap = Swap { word: at, old: old.0, to: to.0, found_by };
    let installed = access.install(vec![page], write, swap, unlinked).await?;
    Ok(installed.map(|()| (to, record)).map_err(MapWord))
}

impl View {
    /// If the answer to a swap of its word is lost, to a record of this level, the chain in which its pages are is found by the level
    /// and the low fence: a page's low fence stays, and what is absorbed by the page to the left is in a chain of that one. A split
    /// replaces the whole chain.
    fn found_by(&self, level: u8) -> Option<[u64; 2]> {
        Some([u64::from(level), self.state.fences.low])
    }

    /// Adds a delta, behind which there are so many records more than behind the newest one; the word of the page, if others were
    /// first.
    pub(super) async fn add<A: Access<Plugin = Bw>>(
        &self,
        access: &A,
        change: Change,
        more: u8,
    ) -> Result<Result<(), MapWord>, Interrupt> {
        let below = self.state.about.below.checked_add(more).ok_or(self.stale("its chain is too long"))?;
        let about = About { below, ..self.state.about };
        let delta = self.delta(self.word, about, change);
        let write = |pages: &mut A::PagesMut<'_>| delta.write(pages, Slot::new_page(0));
        let found_by = self.found_by(self.level());
        Ok(publish(access, delta.class(), write, (self.at, self.word), found_by, vec![]).await?.map(|(to, added)| {
            // What is absorbed, or about to be, is read when it is next needed.
            if A::REMEMBERS && change.entry().is_some() {
                remember(access, self.at, to, &Arc::new(self.with(change, delta, added)));
            }
        }))
    }

    /// Whether the next change is to be a new base.
    pub(super) fn is_long<A: Access<Plugin = Bw>>(&self, access: &A) -> bool {
        self.state.about.below >= Bw::chain_max(&access.context().structure)
    }

    /// Adds a delta, or writes a new base if the chain is long enough: whether it did. The word of the page, if others were first.
    pub(super) async fn alter<A: Access<Plugin = Bw>>(
        &self,
        access: &A,
        change: Change,
    ) -> Result<Result<bool, MapWord>, Interrupt> {
        if self.state.merging.is_some() {
            merge::finish(access, self.level(), self.state.fences.low).await?;
            return Err(Interrupt::again());
        }
        if !self.is_long(access) {
            return Ok(self.add(access, change, 1).await?.map(|()| false));
        }
        let mut state = self.state.clone();
        state.change(change);
        if state.entries.len() > capacity(access.context().structure.class) && self.state.entries.len() > 1 {
            self.require_fresh()?;
            split(access, self.pid()).await?;
            return Err(Interrupt::again());
        }
        Ok(self.replace(access, state, &[]).await?.map(|()| true))
    }

    /// Writes a new base in place of the whole chain, which is free then, and so are other records. The word of the page, if others
    /// were first.
    pub(super) async fn replace<A: Access<Plugin = Bw>>(
        &self,
        access: &A,
        mut state: State,
        others: &[Unlinked],
    ) -> Result<Result<(), MapWord>, Interrupt> {
        let class = class_for(access, &state)?;
        let write = |pages: &mut A::PagesMut<'_>| state.write(pages, Slot::new_page(0));
        // The root can come to be of another level: it is found by the higher one in any case.
        let found_by = self.found_by(self.level().max(state.about.level));
        let unlinked = [&self.records, others].concat();
        let published = publish(access, class, write, (self.at, self.word), found_by, unlinked).await?;
        Ok(published.map(|(to, base)| {
            access.context().worker.count(CONSOLIDATIONS);
            state.about.below = 0;
            remember(access, self.at, to, &Arc::new(Logical::of_base(state, Some(base))));
        }))
    }
}

/// Splits a page that is full. A task of the worker: if others are first, what it has made is taken back, whatever becomes of the
/// caller.
async fn split<A: Access<Plugin = Bw>>(access: &A, pid: Pid) -> Result<(), Interrupt> {
    let Context { worker, structure, local } = access.context();
    let (access, pin) = (OneSided::<Bw>::new(worker, structure.clone(), Proof::Checksum), worker.pin());
    access.context().local.learn_from(local);
    let whole = async move {
        let Found::Page(page) = find(&access, pid).await? else { return Ok(()) };
        let mut made = Vec::new();
        let outcome = match page.state.entries.len() < capacity(access.context().structure.class) {
            true => return Ok(()),
            false => halve(&access, page, &mut made).await,
        };
        if let Err(interrupt) = &outcome {
            for page in made {
                let may_be_linked = matches!(interrupt, Interrupt::Failed(_));
                if let Err(error) = page.undo(&access, may_be_linked).await {
                    tracing::warn!(%error, "a page of a failed split was not freed");
                }
            }
        }
        drop(pin);
        outcome
    };
    worker.spawn_to_end(whole).await
}

/// Splits a page; of the new pages it makes a list.
async fn halve<A: Access<Plugin = Bw>>(access: &A, page: View, made: &mut Vec<Created>) -> Result<(), Interrupt> {
    if page.state.merging.is_some() {
        return merge::finish(access, page.level(), page.state.fences.low).await;
    }
    let (State { about, fences, .. }, level) = (&page.state, page.level().saturating_add(1));
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
        page.replace(access, root, &[]).await?.map_err(|_| Interrupt::conflict())?;
    } else {
        let fences = Fences { low: fences.low, right: Some((at, new)) };
        let left = State { entries: left.to_vec(), ..State::new(*about, fences) };
        page.replace(access, left, &[]).await?.map_err(|_| Interrupt::conflict())?;
        clean_up(&access.context().worker, POST_MAX, async || post(access, level, at).await).await;
    }
    access.context().worker.count_split();
    Ok(())
}

/// The size of a base page for so many entries: that of the structure, or the next one that does.
fn class_for<A: Access<Plugin = Bw>>(access: &A, state: &State) -> Result<SizeClass, Error> {
    let least = access.context().structure.class;
    let class = SizeClass::all().find(|&class| class >= least && capacity(class) >= state.entries.len());
    class.ok_or_else(|| Bw::error("a page holds more entries than any page can"))
}

/// A page to which nothing leads yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Created {
    pub(super) pid: Pid,
    at: WordPtr,
    word: MapWord,
    base: Unlinked,
    level: u8,
    low: u64,
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
            state.about.pid = pid;
            let class = class_for(access, &state)?;
            let write = |pages: &mut A::PagesMut<'_>| state.write(pages, Slot::new_page(0));
            if let Ok((word, base)) = publish(access, class, write, (at, old), None, vec![]).await? {
                return Ok(Self { pid, at, word, base, level: state.about.level, low: state.fences.low });
            }
        }
        Err(Interrupt::conflict())
    }

    /// Gives page and number up again; unless the tree leads there, if it is not known whether it does.
    ///
    /// # Errors
    /// If a memory server is lost.
    pub(super) async fn undo<A: Access<Plugin = Bw>>(self, access: &A, may_be_linked: bool) -> Result<(), Box<Error>> {
        let (Self { pid, at, word, base, level, low }, worker) = (self, &access.context().worker);
        let find = async || descend(access, low, level, Search::TO_CHANGE).await;
        if may_be_linked && persist(worker, find).await?.pid() == pid {
            return Ok(());
        }
        give_up(access, pid, (at, word), base, [u64::from(level), low]).await
    }
}

/// Gives up a number to which nothing leads any more, and its record, unless others have. `found_by` are the level and the low fence
/// of its page: if an answer is lost, the place may be another page's when its word is read again.
///
/// # Errors
/// If a memory server is lost.
pub(super) async fn give_up<A: Access<Plugin = Bw>>(
    access: &A,
    pid: Pid,
    (at, word): (WordPtr, MapWord),
    record: Unlinked,
    found_by: [u64; 2],
) -> Result<(), Box<Error>> {
    let attempt = async || {
        let is_done = unmap(access, pid, (at, word), vec![record], found_by).await?;
        // A swap that was refused is one that failed.
        match is_done || access.load(&[at]).await?[0] != word.0 {
            true => Ok(()),
            false => Err(Interrupt::stale(record.at(), "its number cannot be given up")),
        }
    };
    persist(&access.context().worker, attempt).await
}

/// Gives a number up, and frees records; false if others were first. The level and the low fence of the page say what became of a
/// lost answer, as those of [`View::found_by`] do.
pub(super) async fn unmap<A: Access<Plugin = Bw>>(
    access: &A,
    pid: Pid,
    (word, old): (WordPtr, MapWord),
    records: Vec<Unlinked>,
    found_by: [u64; 2],
) -> Result<bool, Interrupt> {
    let random = access.context().worker.random(|rng| rng.random::<u64>());
    let to = MapWord::not_mapped(pid.generation() + 1, random).0;
    let swap = Swap { word, old: old.0, to, found_by: Some(found_by) };
    Ok(access.install(vec![], |_| (), swap, records).await?.is_ok())
}

/// The records of a page: see [`View::found_by`].
pub(super) async fn reachable<A: Access<Plugin = Bw>>(
    access: &A,
    [level, low]: [u64; 2],
) -> Result<Option<Vec<RemotePtr>>, Interrupt> {
    let page = descend(access, low, u8::try_from(level).unwrap_or(u8::MAX), Search::TO_CHANGE).await?;
    Ok(Some(page.records.iter().map(Unlinked::at).collect()))
}

/// Puts the index term of a split into the page above, unless it is there: `at` is where the split page ends, `level` that of the
/// page above.
pub(super) fn post<A: Access<Plugin = Bw>>(access: &A, level: u8, at: u64) -> Boxed<'_, ()> {
    boxed(access, async move {
        let parent = descend(access, at, level, Search::TO_CHANGE).await?;
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
        let put = Change::Put { key: at, value: right.word() };
        parent.alter(access, put).await?.map(drop).map_err(|_| Interrupt::conflict())
    })
}
