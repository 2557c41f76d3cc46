//! One attempt over copies, for an operation that goes back to more pages than the cache keeps in their places.
//!
//! A page of [`Cached`] is read where it stands: once the cache has moved it, or a link in it, the attempt that holds it has lost
//! it. Where that happens again and again, an attempt copies each page as it comes, with unswizzled links, as one-sided access
//! does; a copy is true of the moment it was made. To change a page it looks the page up again, and goes on only if that still
//! reads as the copy does. To follow a link it does so as well, but there it is enough that the link is still in the page,
//! whatever else has changed: otherwise an operation that comes back to one page for long would have to begin anew with
//! each change of it, and never end. That what the link leads to is what the copy promised is for the structure to see, as it
//! is over one-sided access.

use std::{cell::Cell, rc::Rc, sync::atomic::Ordering};

use farlink_runtime::{
    access::{
        Access, Cause, Context, FastPath, Hint, Interrupt, Link, NewPage, PageRef, Pages, Placement, Plugin, Start,
        Swap, Unlinked, WordPtr,
    },
    change::Role,
    error::Error,
    page::SizeClass,
};
use smallvec::SmallVec;

use super::{Cached, CachedPage, CachedPages};

/// Pages that one attempt holds copies of at a time, at most.
pub(super) const HELD_MAX: usize = 4096;
/// Links that one attempt follows at a time: each takes a frame for the parent besides that of the page, and must not keep the others from
/// theirs where the cache is small.
const FOLLOWED_AT_A_TIME: usize = 4;
/// Without room it is a conflict, after which the next attempt begins.
const TURN_WAITS_MAX: u32 = 64;
/// How often a link is followed before it counts as lost to others: more often than they get in between.
const FOLLOWED_MAX: u32 = 64;
/// How often pages of a change are looked up once more, until all are in their places.
const PLACES_MAX: u32 = 8;

/// [`Cached`] access for one attempt.
#[derive(Debug)]
pub(super) struct Holding<P: Plugin> {
    cached: Cached<P>,
    /// Each copy shares it, so that they are counted.
    held: Rc<()>,
    /// Links that are followed now.
    followed: Cell<usize>,
}

/// A link that is followed.
struct Turn<'a>(&'a Cell<usize>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A copy of a page.
#[derive(Debug)]
pub(super) struct HeldPage {
    link: Link,
    level: u8,
    kind: u8,
    words: Box<[u64]>,
    _held: Rc<()>,
}

impl PageRef for HeldPage {
    type Words = [u64];

    fn link(&self) -> Link {
        self.link
    }

    fn level(&self) -> u8 {
        self.level
    }

    fn kind(&self) -> u8 {
        self.kind
    }

    fn read<R>(&self, f: impl FnOnce(&[u64]) -> R) -> Result<R, Interrupt> {
        Ok(f(&self.words))
    }
}

impl<P: Plugin> Holding<P> {
    pub(super) fn new(cached: &Cached<P>) -> Self {
        Self { cached: cached.clone(), held: Rc::default(), followed: Cell::new(0) }
    }

    fn copy(&self, page: &CachedPage<'_, P>) -> Result<HeldPage, Interrupt> {
        if Rc::strong_count(&self.held) > HELD_MAX {
            return Err(Error::TooManyPages { limit: HELD_MAX }.into());
        }
        let (link, level, kind) = (page.link(), page.level(), page.kind());
        Ok(HeldPage { link, level, kind, words: self.cached.snapshot(page)?, _held: Rc::clone(&self.held) })
    }

    /// Waits until few links are followed; not for ever, for those may be of futures that nobody polls until this one is done.
    async fn turn(&self) -> Turn<'_> {
        for attempt in 0..TURN_WAITS_MAX {
            if self.followed.get() < FOLLOWED_AT_A_TIME {
                break;
            }
            self.cached.worker().back_off(attempt).await;
        }
        self.followed.set(self.followed.get() + 1);
        Turn(&self.followed)
    }

    /// The page that a copy is of, if it still is as it was.
    async fn page_of(&self, copy: &HeldPage) -> Result<CachedPage<'_, P>, Interrupt> {
        let page = self.cached.open(Start::Page(copy.link)).await?;
        match self.cached.snapshot(&page)? == copy.words {
            true => Ok(page),
            false => Err(Interrupt::conflict()),
        }
    }

    /// The pages that copies are of, if all are as they were. To bring one may cost another its place.
    async fn places_of(&self, copies: &[(HeldPage, Role)]) -> Result<SmallVec<[CachedPage<'_, P>; 4]>, Interrupt> {
        let mut places = SmallVec::new();
        for (copy, _) in copies {
            places.push(self.page_of(copy).await?);
        }
        Ok(places)
    }

    /// The page that a link of a copy leads to. `None`: whoever changes the parent all the time was faster.
    async fn followed(&self, from: &HeldPage, link: Link, hint: Hint) -> Result<Option<HeldPage>, Interrupt> {
        let parent = self.cached.open(Start::Page(from.link)).await?;
        let Ok(now) = self.cached.snapshot(&parent) else { return Ok(None) };
        let link = match P::links(&*now).find(|&index| now.get(index) == Some(&link.word())) {
            // As it stands there: a swizzled one is not in the table.
            Some(index) => parent.read(|words| words.get(index).map(|word| word.load(Ordering::Relaxed))),
            // To the right, say: nothing tells where it stands.
            None => Ok((now == from.words).then_some(link.word())),
        };
        let Ok(link) = link else { return Ok(None) };
        let link = link.map(Link::from_word).ok_or(Interrupt::conflict())?;
        // Without letting others run first, who would change the parent.
        match self.cached.following(&parent, link, hint).fetch().await {
            Ok(page) => self.copy(&page).map(Some),
            Err(Interrupt::Restart(Cause::Conflict | Cause::Moved)) if parent.read(|_| ()).is_err() => Ok(None),
            Err(interrupt) => Err(interrupt),
        }
    }
}

impl<P: Plugin> FastPath for Holding<P> {
    type Plugin = P;
    type Page<'a> = HeldPage;
    const VALIDATES: bool = false;
}

impl<P: Plugin> Access for Holding<P> {
    type PagesMut<'a> = CachedPages<'a>;

    fn context(&self) -> &Context<P> {
        self.cached.context()
    }

    async fn open(&self, start: Start) -> Result<HeldPage, Interrupt> {
        self.copy(&self.cached.open(start).await?)
    }

    async fn follow(&self, from: &HeldPage, link: Link, hint: Hint) -> Result<HeldPage, Interrupt> {
        let _turn = self.turn().await;
        for _ in 0..FOLLOWED_MAX {
            if let Some(page) = self.followed(from, link, hint).await? {
                return Ok(page);
            }
        }
        Err(Interrupt::conflict())
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        let (old, new) = pages.into_parts();
        let old: SmallVec<[_; 4]> = old.collect();
        // Where there is little, to make room costs pages their places: that for new pages is made first, and is there when they need it.
        let mut room = Vec::with_capacity(new.len());
        for page in &new {
            room.push(self.cached.reserve(page).await?);
        }
        let mut found = self.places_of(&old).await?;
        for _ in 0..PLACES_MAX {
            if found.iter().all(|page| page.read(|_| ()).is_ok()) {
                break;
            }
            found = self.places_of(&old).await?;
        }
        drop(room);
        let mut live = Pages::new();
        for (page, (_, role)) in found.into_iter().zip(&old) {
            live.add_as(page, *role);
        }
        for page in new {
            live.add_new(page);
        }
        let (result, after) = self.cached.change(live, f).await?;
        // The change is made: what is not to be had is given as freed.
        let copy = |page: Option<CachedPage<'_, P>>| page.and_then(|page| self.copy(&page).ok());
        Ok((result, Pages::after(after.into_each().map(copy))))
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.cached.install(new, f, swap, unlinked).await
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        self.cached.load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.cached.allocate(class, placement).await
    }

    fn leads_to(&self, link: Link, page: &HeldPage) -> bool {
        link == page.link
    }
}
