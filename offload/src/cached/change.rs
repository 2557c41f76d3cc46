//! A change through the cache.

use super::*;

impl<P: Plugin> Cached<P> {
    /// [`Access::change`], which is called with many functions, and is long: compiled once.
    pub(super) async fn change_by<'a>(
        &'a self,
        pages: Pages<CachedPage<'a, P>>,
        f: &mut dyn FnMut(&mut CachedPages<'a>),
    ) -> Result<Pages<CachedPage<'a, P>>, Interrupt> {
        let Structure { id: structure, root: structure_root, .. } = self.context().structure;
        self.cache.store().require_tenure()?;
        let (old, new) = pages.into_parts();
        let mut old: SmallVec<[_; 2]> = old.collect();
        if let ([(_, Role::Current)], true) = (&*old, new.is_empty())
            && let Some((page, _)) = old.pop()
        {
            self.require_owned(&page)?;
            let altered = self.cache.update(&page.0, |change| {
                let mut pages = CachedPages::open(change, structure, [Role::Current].into_iter(), &[]);
                f(&mut pages);
                pages.close(change, |words| self.overlap(words) == Overlap::Inside);
            });
            altered.map_err(|error| self.refused(error, page.at()))?;
            return Ok(Pages::after([Some(page)]));
        }
        for (index, (page, role)) in old.iter().enumerate() {
            if *role != Role::ReliedOn {
                self.require_owned(page)?;
            }
            if old[..index].iter().any(|(other, _)| other.0.id() == page.0.id()) {
                return Err(Error::PageTwice { page: page.at() }.into());
            }
        }
        let mut reserved = Vec::with_capacity(new.len());
        for page in &new {
            reserved.push(
                self.cache
                    .reserve(page_id(page.link()), to_cache(page.class()))
                    .await
                    .map_err(|error| self.cache.store().interrupt(error))?,
            );
        }
        let held: SmallVec<[_; 4]> = old.iter().map(|(page, _)| &page.0).collect();
        let mut begun: SmallVec<[Link; 2]> = SmallVec::new();
        let changed = self.cache.change(&held, reserved, |change| {
            let mut pages = CachedPages::open(change, structure, old.iter().map(|&(_, role)| role), &new);
            f(&mut pages);
            let freed = pages.close(change, |words| self.overlap(words) == Overlap::Inside);
            // Before anybody can see the change, and read from remote memory what it has freed.
            begun.extend(freed.iter().map(|&(page, _)| old[page].0.link()));
            begun.iter().for_each(|&page| self.cache.store().freeing().begin(page));
            freed
        });
        drop(held);
        let freed = match changed {
            Ok(freed) => freed,
            Err(error) => {
                begun.iter().for_each(|&page| self.cache.store().freeing().end(page));
                return Err(self.refused(error, old.first().map_or(structure_root, |(page, _)| page.at())));
            }
        };
        new.into_iter().for_each(NewPage::publish);
        let mut after: SmallVec<[_; 4]> = old.into_iter().map(|(page, _)| Some(page)).collect();
        for (page, lock) in freed {
            let Some(link) = after[page].take().map(|page| page.link()) else { continue };
            let Some((at, class)) = link.remote() else { continue };
            let free = allocation::free_owned(self.worker().clone(), at, class, lock);
            let freeing = self.cache.store().freeing().clone();
            // Nobody waits for it: the page is out of use already.
            let task = async move {
                match free.await {
                    Ok(()) => freeing.end(link),
                    Err(error) => tracing::warn!(page = %at, %error, "a page was not freed"),
                }
            };
            drop(self.worker().spawn_to_end(task));
        }
        Ok(Pages::after(after))
    }
}
