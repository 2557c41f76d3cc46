//! Bulk load: pages are filled from left to right and level by level, and written before anything leads to them; the last
//! step makes the root lead there. Until then the tree is empty for everybody, and what was written is taken back if the
//! load fails or is dropped.

use std::{cell::RefCell, rc::Rc};

use farlink_runtime::{
    access::{self, Access, Interrupt, Link, NewPage, PageRef, Pages, Placement, Slot, Start},
    error::Error,
    operation::retry,
    ptr::ServerId,
    structure::PlacementPolicy,
    worker::Task,
};

use super::{
    Tree,
    node::{Fences, Node, NodeMut, capacity},
};

type Written = Rc<RefCell<Vec<Link>>>;

/// Pages written at once, and bytes: the smallest cache has room for that.
const BATCH: usize = 32;
const BATCH_BYTES: usize = 32 << 10;

/// A finished page that is not written yet.
struct Full {
    page: NewPage,
    level: u8,
    fences: Fences,
    right: Link,
    entries: Vec<(u64, u64)>,
}

/// The page that a level is filling.
#[derive(Default)]
struct Open {
    low: u64,
    entries: Vec<(u64, u64)>,
    /// Allocated when its left neighbour was finished, which links to it.
    page: Option<NewPage>,
    /// How many there are to its left.
    number: u64,
    is_first: bool,
}

struct Load<'a, A: Access<Plugin = Tree> + Clone + 'static> {
    access: &'a A,
    fill_count: usize,
    levels: Vec<Open>,
    full: Vec<Full>,
    /// Pages that nothing leads to yet.
    written: Written,
    writing: Option<Task<Result<(), Error>>>,
}

/// Loads entries in strictly ascending key order into the empty tree; `fill` is the share of each page to use.
pub(super) async fn load<A: Access<Plugin = Tree> + Clone + 'static>(
    access: &A,
    entries: impl IntoIterator<Item = (u64, u64)>,
    fill: f64,
) -> Result<u64, Error> {
    if !(0.1..=1.0).contains(&fill) {
        return Err(Error::BadOption { option: "fill", why: format!("{fill}; a page is filled from 0.1 to 1.0") });
    }
    retry(&access.context().worker, async || empty_root(access).await.map(drop)).await?;
    let room = capacity(access.context().structure.class.words());
    let mut load = Load {
        access,
        fill_count: ((room as f64 * fill) as usize).clamp(2, room),
        levels: Vec::new(),
        full: Vec::new(),
        written: Written::default(),
        writing: None,
    };
    let (mut count, mut last) = (0u64, None);
    for (key, value) in entries {
        if last.is_some_and(|last| key <= last) {
            return Err(Error::NotSorted { position: count, key });
        }
        load.push(0, (key, value)).await?;
        last = Some(key);
        count += 1;
    }
    load.finish().await?;
    access.settle().await?;
    Ok(count)
}

/// The root, if it is an empty leaf.
async fn empty_root<A: Access<Plugin = Tree>>(access: &A) -> Result<A::Page<'_>, Interrupt> {
    let root = access.open(Start::Anew).await?;
    match root.read(|words| root.level() == 0 && Node(words).count() == 0)? {
        true => Ok(root),
        false => Err(Error::NotEmpty.into()),
    }
}

async fn take_back<A: Access<Plugin = Tree>>(access: &A, written: &Written) {
    for page in written.take() {
        if let Err(error) = retry(&access.context().worker, async || access::free(access, page).await).await {
            tracing::warn!(?page, %error, "a page of a failed bulk load was not freed");
        }
    }
}

impl<'a, A: Access<Plugin = Tree> + Clone + 'static> Load<'a, A> {
    async fn push(&mut self, level: usize, entry: (u64, u64)) -> Result<(), Error> {
        let mut next = Some((level, entry));
        while let Some((level, entry)) = next {
            if level == self.levels.len() {
                self.levels.push(Open { is_first: true, ..Open::default() });
            }
            let is_full = self.levels[level].entries.len() == self.fill_count;
            next = if is_full { Some((level + 1, self.close(level, Some(entry.0)).await?)) } else { None };
            self.levels[level].entries.push(entry);
        }
        Ok(())
    }

    /// Finishes the open page of a level, whose keys end below `high`, and opens the next one if there is one. Returns the
    /// entry that leads to it.
    async fn close(&mut self, level: usize, high: Option<u64>) -> Result<(u64, u64), Error> {
        let number = self.levels[level].number;
        let right = if high.is_some() { Some(self.allocate(level, number + 1).await?) } else { None };
        let page = match self.levels[level].page.take() {
            Some(page) => page,
            None => self.allocate(level, number).await?,
        };
        let right_link = right.as_ref().map_or(Link::NULL, NewPage::link);
        let next = Open { low: high.unwrap_or(0), page: right, number: number + 1, ..Open::default() };
        let open = std::mem::replace(&mut self.levels[level], next);
        let entry = (open.low, page.link().word());
        let fences = Fences { low: open.low, high };
        self.full.push(Full { page, level: level as u8, fences, right: right_link, entries: open.entries });
        let class = self.access.context().structure.class;
        if self.full.len() >= (BATCH_BYTES / class.bytes()).clamp(1, BATCH) {
            self.write().await?;
        }
        Ok(entry)
    }

    /// The page of a level that has so many to its left.
    async fn allocate(&self, level: usize, number: u64) -> Result<NewPage, Error> {
        let structure = &self.access.context().structure;
        let placement = match structure.policy {
            PlacementPolicy::Subtrees { level: top } if level <= usize::from(top) => {
                // All pages to the left are full, and the same number of them make each page above.
                let pages = (self.fill_count as u64).saturating_pow(u32::from(top) - level as u32);
                let servers = self.access.context().worker.servers() as u64;
                let server = (structure.root.server().index() as u64 + number / pages) % servers;
                ServerId::new(server as u16).map_or(Placement::RoundRobin, Placement::Server)
            }
            _ => structure.placement(level as u8, structure.root),
        };
        self.access.allocate(structure.class, placement).await
    }

    async fn write(&mut self) -> Result<(), Error> {
        let (access, written) = (self.access.clone(), Rc::clone(&self.written));
        let full = std::mem::take(&mut self.full);
        let writing = self.writing.insert(self.access.context().worker.spawn_to_end(write(access, full, written)));
        let outcome = writing.await;
        self.writing = None;
        outcome
    }

    async fn finish(mut self) -> Result<(), Error> {
        let mut level = 0;
        while level < self.levels.len() && !self.levels[level].is_first {
            let entry = self.close(level, None).await?;
            self.push(level + 1, entry).await?;
            level += 1;
        }
        if level == self.levels.len() {
            return Ok(()); // no entries
        }
        self.write().await?;
        let entries = std::mem::take(&mut self.levels[level].entries);
        // From here on the task decides whether the pages are the tree's or are taken back.
        let (access, written) = (self.access.clone(), std::mem::take(&mut self.written));
        let lead = async move {
            let outcome = retry(&access.context().worker, async || {
                let root = empty_root(&access).await?;
                let mut pages = Pages::new();
                let root = pages.add(root);
                // With another page it is a change of several: an owner records it, as it has those that it leads to.
                if let Some(&(_, below)) = entries.first().filter(|_| level > 0) {
                    pages.add_relied_on(access.open(Start::Page(Link::from_word(below))).await?);
                }
                let lead = |pages: &mut A::PagesMut<'_>| {
                    NodeMut::new(pages, root).rewrite(level as u8, Fences::ALL, Link::NULL, &entries);
                };
                let led = access.change(pages, lead).await.map(drop);
                // It may have been made, and fail for want of a record: then the pages are the tree's, unless its root shows that
                // it was not.
                let is_empty = async || empty_root(&access).await.map(drop);
                if matches!(led, Err(Interrupt::Failed(_))) && retry(&access.context().worker, is_empty).await.is_err()
                {
                    written.take();
                }
                led
            })
            .await;
            if outcome.is_err() {
                take_back(&access, &written).await;
            }
            outcome
        };
        self.access.context().worker.spawn_to_end(lead).await
    }
}

/// Writes finished pages, and notes them as written.
async fn write<A: Access<Plugin = Tree>>(access: A, full: Vec<Full>, written: Written) -> Result<(), Error> {
    let (mut pages, mut contents) = (Pages::new(), Vec::with_capacity(full.len()));
    for Full { page, level, fences, right, entries } in full {
        contents.push((page.link(), level, fences, right, entries));
        pages.add_new(page);
    }
    let mut is_made = false;
    let fill = |pages: &mut A::PagesMut<'_>| {
        is_made = true;
        for (index, (_, level, fences, right, entries)) in contents.iter().enumerate() {
            NodeMut::new(pages, Slot::new_page(index)).rewrite(*level, *fences, *right, entries);
        }
    };
    let changed = access.change(pages, fill).await.map(drop);
    // What lacks nothing but its record is made, and cached.
    if is_made && changed.as_ref().err().is_none_or(Interrupt::lacks_record) {
        written.borrow_mut().extend(contents.iter().map(|&(link, ..)| link));
    }
    match changed {
        Ok(()) => Ok(()),
        Err(Interrupt::Failed(error)) => Err(*error),
        Err(_) => Err(Error::BadOption {
            option: "cache",
            why: format!("it has no room for {} new pages at once; give it more", contents.len()),
        }),
    }
}

impl<A: Access<Plugin = Tree> + Clone + 'static> Drop for Load<'_, A> {
    /// Takes back what was written and is still this load's.
    fn drop(&mut self) {
        let (access, written, writing) = (self.access.clone(), Rc::clone(&self.written), self.writing.take());
        if writing.is_none() && written.borrow().is_empty() {
            return;
        }
        self.access.context().worker.spawn_to_end(async move {
            if let Some(writing) = writing {
                let _ = writing.await;
            }
            take_back(&access, &written).await;
        });
    }
}
