//! The pages of one change: those that it alters, those that it only relies on, new ones.

use smallvec::SmallVec;

use crate::{pages::NewPage, words::Words};

/// A page of a change, as [`Pages`] has named it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(u16);

const NEW: u16 = 1 << 15;

impl Slot {
    /// The only page of a change: that of [`Pages::current`].
    pub const ONLY: Self = Self(0);

    /// The new page with this number, counted from 0.
    ///
    /// # Panics
    /// From 2^15 pages on.
    pub fn new_page(index: usize) -> Self {
        Self(
            u16::try_from(index).ok().filter(|index| index & NEW == 0).expect("a change has fewer than 2^15 pages")
                | NEW,
        )
    }

    /// The page that was there before with this number.
    pub(crate) fn old_page(index: usize) -> Self {
        Self(Self::new_page(index).0 & !NEW)
    }

    /// Its place among so many pages that were there before, and the new ones after them.
    #[inline]
    pub fn index(self, old: usize) -> usize {
        let index = usize::from(self.0 & !NEW);
        if self.0 & NEW == 0 { index } else { old + index }
    }
}

/// What a change does with a page that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It alters the page as it was read.
    AsRead,
    /// It alters the page as it is then.
    Current,
    /// It alters other pages if this one is as it was read.
    ReliedOn,
}

/// The pages of one change, each under a name of its own.
#[derive(Debug)]
pub struct Pages<P> {
    old: SmallVec<[(Option<P>, Role); 2]>,
    new: Vec<NewPage>,
}

impl<P> Default for Pages<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P> Pages<P> {
    /// None yet.
    pub fn new() -> Self {
        Self { old: SmallVec::new(), new: Vec::new() }
    }

    /// One page, altered as it is when the change is made: its slot is [`Slot::ONLY`].
    #[inline]
    pub fn current(page: P) -> Self {
        let mut pages = Self::new();
        pages.add_current(page);
        pages
    }

    /// A page with what the change does with it.
    #[inline]
    pub fn add_as(&mut self, page: P, role: Role) -> Slot {
        self.old.push((Some(page), role));
        Slot::old_page(self.old.len() - 1)
    }

    /// A page to alter as it was read: if it has changed since, nothing is done.
    pub fn add(&mut self, page: P) -> Slot {
        self.add_as(page, Role::AsRead)
    }

    /// A page to alter as it is when the change is made: it may have changed since it was read, and the function looks again at
    /// what it relies on, the page's level included. Spares writers of one page the retries where the access can queue them; beside
    /// other pages it is [`Pages::add`]. It cannot be freed.
    #[inline]
    pub fn add_current(&mut self, page: P) -> Slot {
        self.add_as(page, Role::Current)
    }

    /// A page that is not altered: if it has changed since it was read, nothing is done. Not locked for others, nor made to look
    /// changed.
    pub fn add_relied_on(&mut self, page: P) -> Slot {
        self.add_as(page, Role::ReliedOn)
    }

    /// A new page. Its words are zero at first. It is published even if the function sets nothing: such a change cannot be taken back
    /// there.
    pub fn add_new(&mut self, page: NewPage) -> Slot {
        self.new.push(page);
        Slot::new_page(self.new.len() - 1)
    }

    /// Takes a page out. After a change, as the change has left it: `None` for new ones, those freed, and those taken already.
    pub fn take(&mut self, slot: Slot) -> Option<P> {
        self.old.get_mut(slot.index(usize::MAX / 2))?.0.take()
    }

    /// What an access makes a change of: the pages that are there, in the order of their slots, and the new ones.
    pub fn into_parts(self) -> (impl ExactSizeIterator<Item = (P, Role)>, Vec<NewPage>) {
        let old = self.old.into_iter().map(|(page, role)| (page.expect("a page of a change was not taken out"), role));
        (old, self.new)
    }

    /// The pages that are there, in the order of their slots; `None` for those taken out or freed.
    pub fn into_each(self) -> impl Iterator<Item = Option<P>> {
        self.old.into_iter().map(|(page, _)| page)
    }

    /// The pages that are there, but for those taken out.
    pub fn iter(&self) -> impl Iterator<Item = &P> {
        self.old.iter().filter_map(|(page, _)| page.as_ref())
    }

    /// How many of them are new.
    pub fn new_count(&self) -> usize {
        self.new.len()
    }

    /// The same pages after the change; `None` for those that were freed.
    pub fn after(old: impl IntoIterator<Item = Option<P>>) -> Self {
        Self { old: old.into_iter().map(|page| (page, Role::AsRead)).collect(), new: Vec::new() }
    }
}

/// The pages of one change, open for writing. Words below [`HEADER_WORDS`](crate::page::HEADER_WORDS) belong to the framework.
pub trait PagesMut {
    /// The words of a page, as changed so far. Those of a new page are zero at first.
    fn page(&self, slot: Slot) -> impl Words + '_;

    /// Sets a word of a page.
    ///
    /// A link that was read from a page may be swizzled. Such a word is moved, not copied, from a page of this change to a word that
    /// [`Plugin::links`](crate::access::Plugin::links) names. All else is refused with [`Error::Cache`](crate::error::Error::Cache), but
    /// perhaps for one whose page has left the cache long ago. Elsewhere a link is [`PageRef::link`](crate::access::PageRef::link) of its
    /// page.
    fn set(&mut self, slot: Slot, index: usize, word: u64);

    /// Sets the words of a page from `index` on.
    fn fill(&mut self, slot: Slot, index: usize, words: &[u64]) {
        for (index, &word) in (index..).zip(words) {
            self.set(slot, index, word);
        }
    }

    /// Says what a page is from now on: a new page, which is of level 0 and kind 0 unless said otherwise, or one that changes
    /// its level in place.
    fn describe(&mut self, slot: Slot, level: u8, kind: u8);

    /// [`PagesMut::describe`] for a new page whose words change by [`Access::install`](crate::access::Access::install) alone: it has
    /// no checksum, each of its words is whole by itself.
    fn describe_words(&mut self, slot: Slot, level: u8, kind: u8);

    /// Frees a page, which this change unlinks: it becomes unreadable with the change, and is reused after a grace period.
    ///
    /// # Panics
    /// If the page is not one of those [as they were read](Pages::add). As with any panic, nothing is changed then.
    fn free(&mut self, slot: Slot);
}
