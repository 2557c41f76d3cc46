//! A change through the cache.

use super::*;

impl<P: Plugin> Cached<P> {
    /// [`Access::change`], which is called with many functions, and is long: compiled once.
    pub(super) async fn change_by<'a>(
        &'a self,
        pages: Pages<CachedPage<'a, P>>,
        f: &mut dyn FnMut(&mut CachedPages<'a>),
    ) -> Result<Pages<CachedPage<'a, P>>, Interrupt> {
        self.cache.store().require_tenure()?;
        let structure = self.context().structure.id;
        let (old, new) = pages.into_parts();
        let mut old: SmallVec<[_; 2]> = old.collect();
        if let ([(page, Role::Current)], true) = (&*old, new.is_empty())
            && self.overlap_of(page)? == Overlap::Inside
            && let Some((page, _)) = old.pop()
        {
            let altered = self.cache.alter(&page.0, |change| {
                let mut pages = CachedPages::open(change, structure, [Role::Current].into_iter(), &[]);
                f(&mut pages);
                pages.close(change, |_, words| self.overlap(words) == Overlap::Inside);
            });
            altered.map_err(|error| self.refused(error, page.at()))?;
            return Ok(Pages::after([Some(page)]));
        }
        let mut is_shared = false;
        let mut overlaps: SmallVec<[Overlap; 4]> = SmallVec::new();
        for (index, (page, _)) in old.iter().enumerate() {
            let overlap = self.overlap_of(page)?;
            is_shared |= overlap != Overlap::Inside;
            overlaps.push(overlap);
            if old[..index].iter().any(|(other, _)| other.0.id() == page.0.id()) {
                return Err(Error::PageTwice { page: page.at() }.into());
            }
        }
        if is_shared {
            let old = old.into_iter().zip(overlaps).map(|((page, role), overlap)| (page, role, overlap)).collect();
            return Box::pin(self.change_shared(old, new, f)).await;
        }
        let mut reserved = Vec::with_capacity(new.len());
        for page in &new {
            reserved.push(self.reserve(page).await?);
        }
        let held: SmallVec<[_; 4]> = old.iter().map(|(page, _)| &page.0).collect();
        let mut begun: SmallVec<[Link; 2]> = SmallVec::new();
        let changed = self.cache.change(&held, reserved, |change| {
            let mut pages = CachedPages::open(change, structure, old.iter().map(|&(_, role)| role), &new);
            f(&mut pages);
            let closed = pages.close(change, |_, words| self.overlap(words) == Overlap::Inside);
            // Before anybody can see the change, and read from remote memory what it has freed.
            begun.extend(closed.freed().map(|(page, _)| old[page].0.link()));
            begun.iter().for_each(|&page| self.cache.store().known().freeing.insert(page));
            closed
        });
        drop(held);
        let closed = match changed {
            Ok(closed) => closed,
            Err(error) => {
                begun.iter().for_each(|&page| self.cache.store().known().freeing.remove(page));
                return Err(
                    self.refused(error, old.first().map_or(self.context().structure.root, |(page, _)| page.at()))
                );
            }
        };
        new.into_iter().for_each(NewPage::publish);
        let mut after: SmallVec<[_; 4]> = old.into_iter().map(|(page, _)| Some(page)).collect();
        for (page, lock) in closed.freed() {
            let Some(link) = after[page].take().map(|page| page.link()) else { continue };
            let Some((at, class)) = link.remote() else { continue };
            let free = allocation::free_owned(self.worker().clone(), at, class, lock);
            let freeing = self.cache.store().known().freeing.clone();
            // Nobody waits for it: the page is out of use already.
            let task = async move {
                match free.await {
                    Ok(()) => freeing.remove(link),
                    Err(error) => tracing::warn!(page = %at, %error, "a page was not freed"),
                }
            };
            drop(self.worker().spawn_to_end(task));
        }
        Ok(Pages::after(after))
    }
}
