//! The mapping table: where the word of a page's number stands, and numbers for new pages.
//!
//! The structure's root page is its directory: the word of the root's number, then links to the pages of the table. Both, and
//! the words of the table, change by [`install`](Access::install) alone. The table grows by a page at a time, the first ones of
//! 4 KiB, later ones up to 64 KiB; its pages stay. They are on different memory servers, and a record is allocated where the word
//! of its page is, so that one doorbell writes it and swaps the word.
//!
//! A place in the table is free as long as its word leads to no record. Whoever needs one looks at some words at random, and takes
//! one by the very swap that makes it lead to the new page. So nobody counts places, and no process that dies can hold one. A
//! number says how often its place was used before, and so does each record: whoever holds a number that was given up, however
//! long, finds that the page there is another one. So a place can be used again at once.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
};

use farlink_runtime::{
    access::*,
    error::Error,
    page::{HEADER_WORDS, SizeClass},
    ptr::ServerId,
};
use rand::RngExt;

use super::{
    Bw,
    record::{MapWord, Mapped, Pid},
};

/// The kind of the directory, in its header.
pub(super) const DIRECTORY_KIND: u8 = 8;
/// The kind of a page of the table.
pub(super) const TABLE_KIND: u8 = 9;
/// The size of the first pages of the table.
const FIRST_BYTES: usize = 4096;
/// Words looked at in one round trip to find a free place.
const PROBES: usize = 16;
/// Round trips before the table grows.
const PROBE_TRIPS: usize = 2;
/// Generations that a place can have.
const GENERATIONS: u32 = 1 << 24;

/// What a handle knows of the table. Links of the directory never change once they are there.
#[derive(Debug, Default)]
pub struct Known {
    /// Pages of the table, in the order of the directory.
    pages: RefCell<Vec<Link>>,
    /// Places that were free.
    free: RefCell<Vec<Free>>,
    /// How deep the help within help is that is being polled.
    pub(super) nested: Cell<u32>,
}

/// A place that was free.
#[derive(Debug, Clone, Copy)]
pub(super) struct Free {
    /// The number that the page there will have.
    pub(super) pid: Pid,
    /// Where its word stands,
    pub(super) at: WordPtr,
    /// and what it was.
    pub(super) word: MapWord,
}

const BEYOND: Error = Error::Malformed("a number lies beyond the mapping table");

/// The word of a page's number. Suspends if the directory has to be asked.
pub(super) async fn word_of<A: Access<Plugin = Bw>>(access: &A, pid: Pid) -> Result<WordPtr, Interrupt> {
    if pid == Pid::ROOT {
        return Ok(WordPtr { page: access.context().structure.root_link(), index: HEADER_WORDS });
    }
    let (page, index) = ((pid.place() >> 16) as usize, HEADER_WORDS + (pid.place() & 0xffff) as usize);
    let number = page.checked_sub(1).ok_or(BEYOND)?;
    if number >= access.context().local.pages.borrow().len() {
        learn(access, number).await?;
    }
    let page = access.context().local.pages.borrow().get(number).copied().ok_or(BEYOND)?;
    match page.remote() {
        Some((_, class)) if index < class.words() => Ok(WordPtr { page, index }),
        _ => Err(BEYOND.into()),
    }
}

/// How many pages the table can have.
pub(super) fn pages_max<A: Access<Plugin = Bw>>(access: &A) -> usize {
    access.context().structure.class.words() - HEADER_WORDS - 1
}

fn entry_of<A: Access<Plugin = Bw>>(access: &A, number: usize) -> WordPtr {
    WordPtr { page: access.context().structure.root_link(), index: HEADER_WORDS + 1 + number }
}

/// Learns the links of the directory up to a page of the table, if it has so many, and some more.
pub(super) async fn learn<A: Access<Plugin = Bw>>(access: &A, upto: usize) -> Result<(), Interrupt> {
    let known = access.context().local.pages.borrow().len();
    let end = pages_max(access).min(upto.saturating_add(8));
    let words: Vec<_> = (known..end).map(|number| entry_of(access, number)).collect();
    let found = access.load(&words).await?;
    let mut pages = access.context().local.pages.borrow_mut();
    // Another operation of this worker may have been faster.
    for link in found.into_iter().skip(pages.len() - known).map(Link::from_word).take_while(|link| !link.is_null()) {
        pages.push(link);
    }
    Ok(())
}

/// The pages of the table.
pub(super) async fn pages<A: Access<Plugin = Bw>>(access: &A) -> Result<Vec<Link>, Interrupt> {
    let mut known = usize::MAX;
    while known != access.context().local.pages.borrow().len() {
        known = access.context().local.pages.borrow().len();
        learn(access, known).await?;
    }
    Ok(access.context().local.pages.borrow().clone())
}

/// A place that is free, or was a short while ago, on the memory server where a page is to be.
pub(super) async fn free<A: Access<Plugin = Bw>>(access: &A, level: u8, beside: RemotePtr) -> Result<Free, Interrupt> {
    let Context { worker, structure, local } = access.context();
    let random = || worker.random(|rng| rng.random::<u32>());
    let server = match structure.placement(level, beside) {
        Placement::RoundRobin => worker.next_server(),
        Placement::Server(server) => server,
        Placement::With(page) => page.server(),
    };
    // If the table cannot grow there, any place will do.
    let anywhere = Cell::new(false);
    let is_there = |link: Link| anywhere.get() || link.remote().is_some_and(|(at, _)| at.server() == server);
    let known = local.free.borrow().iter().position(|free| is_there(free.at.page));
    if let Some(index) = known {
        return Ok(local.free.borrow_mut().swap_remove(index));
    }
    loop {
        let rooms: Vec<(usize, Link, usize)> = {
            let pages = local.pages.borrow();
            let there = pages.iter().enumerate().filter(|&(_, &link)| is_there(link));
            there.map(|(number, &link)| (number, link, room(link))).collect()
        };
        let all: usize = rooms.iter().map(|&(.., room)| room).sum();
        for _ in 0..if all == 0 { 0 } else { PROBE_TRIPS } {
            // Not side by side: places that were found together are taken together.
            let places: BTreeSet<usize> = (0..PROBES).map(|_| random() as usize % all).collect();
            let of = |mut place: usize| {
                let &(number, page, _) = rooms.iter().find(|&&(.., room)| match place.checked_sub(room) {
                    Some(beyond) => {
                        place = beyond;
                        false
                    }
                    None => true,
                })?;
                Some((((number + 1) << 16 | place) as u32, WordPtr { page, index: HEADER_WORDS + place }))
            };
            let (places, words): (Vec<u32>, Vec<WordPtr>) = places.into_iter().filter_map(of).unzip();
            let found = access.load(&words).await?;
            for ((&place, &at), word) in places.iter().zip(&words).zip(found.into_iter().map(MapWord)) {
                let mut free = local.free.borrow_mut();
                free.retain(|known| known.at != at);
                if let Some(Mapped::Not(generation)) = word.target().filter(|&it| it != Mapped::Not(GENERATIONS - 1)) {
                    free.push(Free { pid: Pid::new(place, generation), at, word });
                }
            }
            let found = local.free.borrow().iter().rposition(|free| is_there(free.at.page));
            if let Some(index) = found {
                return Ok(local.free.borrow_mut().swap_remove(index));
            }
        }
        let before = local.pages.borrow().len();
        learn(access, before).await?;
        if local.pages.borrow().len() == before {
            match grow(access, before, server).await {
                Err(Interrupt::Failed(error))
                    if matches!(*error, Error::OutOfMemory { .. } | Error::MappingTableFull { .. })
                        && !anywhere.get() => {}
                grown => grown?,
            }
            anywhere.set(true);
        }
    }
}

/// How many places a page of the table has.
fn room(page: Link) -> usize {
    page.remote().map_or(0, |(_, class)| class.words() - HEADER_WORDS)
}

impl Known {
    /// Of the table what another handle knows.
    pub(super) fn learn_from(&self, other: &Self) {
        self.pages.borrow_mut().clone_from(&other.pages.borrow());
    }
}

/// Adds a page to the table, unless others have. Its words are zero: places that were never used.
async fn grow<A: Access<Plugin = Bw>>(access: &A, number: usize, server: ServerId) -> Result<(), Interrupt> {
    let pages_max = pages_max(access);
    if number >= pages_max {
        return Err(Error::MappingTableFull { pages_max }.into());
    }
    // Larger where each server has some, or where the directory fills: many servers have room for as many numbers as few.
    let doublings = (number / access.context().worker.servers()).max(number * 8 / pages_max).min(4);
    let class = SizeClass::of_bytes(FIRST_BYTES << doublings).expect("4 to 64 KiB are size classes");
    let page = access.allocate(class, Placement::Server(server)).await?;
    let swap = Swap { word: entry_of(access, number), old: 0, to: page.link().word(), found_by: None };
    let describe = |pages: &mut A::PagesMut<'_>| pages.describe_words(Slot::new_page(0), 0, TABLE_KIND);
    access.install(vec![page], describe, swap, vec![]).await?.ok();
    learn(access, number).await
}
