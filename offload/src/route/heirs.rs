//! What a dead owner had goes to those that live: whoever has an operation for it and can own takes it, and else asks one who can: an
//! owner of another region first, then whichever compute server there is. What nobody owns for a while, because the owner died as it
//! handed it on, whoever has an operation for it and can own takes.

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
    /// What this compute server failed with when it took one, or when it looked who lives.
    #[cold]
    pub(super) async fn take_from_dead(&self, dead: OwnerId) -> Result<bool, Error> {
        let map = self.map.get();
        let mut heirs = Vec::new();
        if self.here.is_none() {
            let living = compute::living(&self.worker).await?;
            let is_owner = |owner: &OwnerId| map.parts.iter().any(|(other, _)| other == owner);
            let (owners, others): (Vec<_>, Vec<_>) = living.into_iter().partition(is_owner);
            heirs = owners.into_iter().chain(others).filter(|&owner| owner != self.worker.owner()).collect();
        }
        for (_, region) in map.parts.iter().filter(|(owner, _)| *owner == dead) {
            let is_taken = match &self.here {
                Some(here) => match here.holdings().take_at_once(&self.worker, region.clone()).await {
                    // Somebody else was first.
                    Ok(()) | Err(Error::Owned { .. }) => true,
                    Err(error) => return Err(error),
                },
                None => self.is_taken_by_one_of(&heirs, region).await,
            };
            if !is_taken {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes what has had an owner and has none, if this compute server can own.
    #[cold]
    pub(super) async fn take_unowned(&self) {
        let (map, Some(here)) = (self.map.get(), &self.here) else { return };
        // Nobody has owned any yet: who is to, knows itself.
        if map.epoch == 0 {
            return;
        }
        for region in unowned(map.parts.iter().map(|(_, region)| region)) {
            if let Err(error) = here.holdings().take_at_once(&self.worker, region).await {
                tracing::debug!(structure = self.routes.structure().name, %error, "did not take what nobody owns");
            }
        }
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

/// All but these regions.
fn unowned<'a, R: Region>(owned: impl Iterator<Item = &'a R>) -> Vec<R> {
    owned.fold(vec![R::everything()], |gaps, owned| {
        let left = |gap: R| match gap.overlap(owned) {
            Overlap::Outside => vec![gap],
            _ => gap.without(owned).unwrap_or_default(),
        };
        gaps.into_iter().flat_map(left).collect()
    })
}
