//! What a dead owner had goes to those that live: whoever has an operation for it and can own takes it, and else asks one who can: an
//! owner of another region first, then whichever compute server there is. What nobody owns for a while, because the owner died as it
//! handed it on, whoever has an operation for it and can own takes, or has another one take if it fails.

use farlink_runtime::{
    access::{Overlap, Plugin, Region},
    compute,
    error::Error,
    lock::OwnerId,
};

use super::{moves::take_region, router::Inner};

impl<P: Plugin> Inner<P> {
    /// Has each region of a dead owner taken, as far as the map that is known goes. False if nobody whom it has asked took one: nobody
    /// can, or somebody else has.
    ///
    /// # Errors
    /// What this compute server failed with when it took one, if no other took it; or when it looked who lives.
    #[cold]
    pub(super) async fn take_from_dead(&self, dead: OwnerId) -> Result<bool, Error> {
        let map = self.map.get();
        let mut heirs = None;
        for (_, region) in map.parts.iter().filter(|(owner, _)| *owner == dead) {
            if !self.take_or_have_taken(region, &mut heirs).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes what has had an owner and has none, as far as some of it lies in a region, if this compute server can own.
    #[cold]
    pub(super) async fn take_unowned(&self, about: &P::Region) {
        let map = self.map.get();
        // Nobody has owned any yet: who is to, knows itself.
        if map.epoch == 0 || self.here.is_none() {
            return;
        }
        let mut heirs = None;
        for region in map.gaps.iter().filter(|gap| gap.overlap(about) != Overlap::Outside) {
            if let Err(error) = self.take_or_have_taken(region, &mut heirs).await {
                tracing::debug!(structure = self.routes.structure().name, %error, "did not take what nobody owns");
            }
        }
    }

    /// Takes a region, if this compute server can own, or has one of the `heirs` take it, which are looked up once; true also if somebody else
    /// was first.
    ///
    /// # Errors
    /// As [`Self::take_from_dead`].
    async fn take_or_have_taken(&self, region: &P::Region, heirs: &mut Option<Vec<OwnerId>>) -> Result<bool, Error> {
        let mut failure = None;
        if let Some(here) = &self.here {
            match here.holdings().take_at_once(&self.worker, region.clone()).await {
                Ok(()) | Err(Error::Owned { .. }) => return Ok(true),
                // Its cache may have been closed, or memory be full: others can, perhaps.
                Err(error) => failure = Some(error),
            }
        }
        let heirs = match heirs {
            Some(heirs) => heirs,
            none => none.insert(self.heirs().await?),
        };
        match (self.is_taken_by_one_of(heirs, region).await, failure) {
            (false, Some(error)) => Err(error),
            (is_taken, _) => Ok(is_taken),
        }
    }

    /// Who can be asked: owners first.
    async fn heirs(&self) -> Result<Vec<OwnerId>, Error> {
        let map = self.map.get();
        let living = compute::living(&self.worker).await?;
        let is_owner = |owner: &OwnerId| map.parts.iter().any(|(other, _)| other == owner);
        let (owners, others): (Vec<_>, Vec<_>) = living.into_iter().partition(is_owner);
        Ok(owners.into_iter().chain(others).filter(|&owner| owner != self.worker.owner()).collect())
    }

    async fn is_taken_by_one_of(&self, heirs: &[OwnerId], region: &P::Region) -> bool {
        let structure = self.routes.structure();
        for &heir in heirs {
            match take_region(&self.worker, structure, region, heir).await {
                Ok(()) => return true,
                Err(error) => {
                    tracing::debug!(structure = structure.name, %heir, %error, "did not take what a dead one had")
                }
            }
        }
        false
    }
}
