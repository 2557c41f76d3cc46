//! The pages that a search has come to above the leaves, and those to come.

use std::{cmp::Reverse, collections::BTreeSet, rc::Rc};

use farlink_runtime::{
    access::{Interrupt, Link, PageRef, RemotePtr},
    error::Error,
};
use smallvec::SmallVec;

/// So many pages an operation goes by without a question.
const PAGES_SURE: usize = 1 << 12;
/// How often it comes to each of them on average, at most: more often than others can make it read a page again.
const TIMES_EACH_MAX: usize = 16;

/// That an operation does not come to the same pages again and again: where each page of a level has many links to one below,
/// their number grows with each level. Asked each time that they have become twice as many.
#[inline]
pub(super) fn require_different(pages: impl ExactSizeIterator<Item = RemotePtr>) -> Result<(), Interrupt> {
    let count = pages.len();
    if count < PAGES_SURE || !count.is_power_of_two() {
        return Ok(());
    }
    let pages: BTreeSet<_> = pages.collect();
    let why = "pages of its tree lead to it, or to others, again and again";
    match pages.first() {
        Some(&page) if pages.len() * TIMES_EACH_MAX < count => Err(Error::Inconsistent { page, why }.into()),
        _ => Ok(()),
    }
}

/// A page to be read. The first in the order is the greatest: a heap hands it out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pending {
    pub(super) order: Reverse<i64>,
    /// The link to it.
    pub(super) word: u64,
    /// What was promised.
    pub(super) stamp: u64,
    /// The number of the page that leads to it.
    pub(super) from: u32,
    /// The number of the page above that promised it.
    pub(super) above: u32,
    /// Steps to the right on the way.
    pub(super) steps: u8,
    pub(super) rereads: u8,
}

impl Pending {
    pub(super) fn link(&self) -> Link {
        Link::from_word(self.word)
    }
}

/// A page, shared with reads on their way once there is one.
enum Held<P> {
    Alone(P),
    Shared(Rc<P>),
    /// All below it is done.
    Released(RemotePtr),
}

impl<P: PageRef> Held<P> {
    fn at(&self) -> RemotePtr {
        match self {
            Self::Alone(page) => page.at(),
            Self::Shared(page) => page.at(),
            Self::Released(at) => *at,
        }
    }
}

/// A page that leads to others, or the one where the search begins.
struct Visit<P> {
    page: Held<P>,
    /// How it was come by; none where the search begins.
    by: Option<Pending>,
    /// It was split since, and the page to its right is looked at, too.
    leads_on: bool,
    is_dropped: bool,
    /// Pages to which it leads that are pending, or have pages below them that are.
    open: u32,
}

/// All of them, by their numbers.
pub(super) struct Visits<P> {
    all: SmallVec<[Visit<P>; 8]>,
    has_dropped: bool,
}

impl<P: PageRef> Visits<P> {
    pub(super) fn new() -> Self {
        Self { all: SmallVec::new(), has_dropped: false }
    }

    /// The number of the next one.
    pub(super) fn next_number(&self) -> u32 {
        self.all.len() as u32
    }

    /// A page with something open.
    pub(super) fn page(&self, visit: u32) -> &P {
        match &self.all[visit as usize].page {
            Held::Alone(page) => page,
            Held::Shared(page) => page,
            Held::Released(_) => unreachable!("a page is held while something below it is open"),
        }
    }

    /// The same, for a read on its way.
    pub(super) fn share(&mut self, visit: u32) -> Rc<P> {
        let held = &mut self.all[visit as usize].page;
        let at = held.at();
        *held = match std::mem::replace(held, Held::Released(at)) {
            Held::Alone(page) => Held::Shared(Rc::new(page)),
            shared => shared,
        };
        let Held::Shared(page) = held else { unreachable!("a page is held while something below it is open") };
        Rc::clone(page)
    }

    /// The pages that the answer relies on, where all are held.
    pub(super) fn relied_on(&self) -> SmallVec<[&P; 16]> {
        let visits = (0..).zip(&self.all).filter(|(_, visit)| !visit.is_dropped);
        visits.map(|(number, _)| self.page(number)).collect()
    }

    /// Adds a page that leads to so many others.
    ///
    /// # Errors
    /// If the search comes to the same pages again and again.
    pub(super) fn add(&mut self, page: P, by: Option<Pending>, leads_on: bool, open: usize) -> Result<(), Interrupt> {
        let page = Held::Alone(page);
        self.all.push(Visit { page, by, leads_on, is_dropped: false, open: open as u32 });
        require_different(self.all.iter().map(|visit| visit.page.at()))
    }

    /// All below a page to which this one leads is done: if that was the last, its page is not held any more, and so on upwards.
    pub(super) fn close_one(&mut self, mut visit: u32) {
        loop {
            let of = &mut self.all[visit as usize];
            of.open = of.open.saturating_sub(1);
            if of.open > 0 {
                return;
            }
            of.page = Held::Released(of.page.at());
            let Some(by) = of.by else { return };
            visit = by.from;
        }
    }

    /// Whether a page is below one that is read again, or is it.
    pub(super) fn is_dropped(&self, visit: u32) -> bool {
        let above = |&visit: &u32| self.all[visit as usize].by.map(|by| by.above);
        self.has_dropped && std::iter::successors(Some(visit), above).any(|visit| self.all[visit as usize].is_dropped)
    }

    /// Drops a page, to be read again. Of a page that was split since, it is the page above: else its right neighbours would be
    /// looked at twice. `None` if it was read so often, or nothing leads to it.
    pub(super) fn read_again(&mut self, mut visit: u32, rereads_max: u8) -> Option<Pending> {
        while let Visit { by: Some(by), leads_on: true, .. } = &self.all[visit as usize] {
            visit = by.above;
        }
        let of = &mut self.all[visit as usize];
        let again = of.by.filter(|by| by.rereads < rereads_max)?;
        (of.is_dropped, self.has_dropped) = (true, true);
        self.all[again.from as usize].open += 1;
        Some(Pending { rereads: again.rereads + 1, ..again })
    }
}
