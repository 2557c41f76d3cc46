//! A structure's partition map, as a process knows it.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use farlink_runtime::{
    access::{Overlap, Plugin, Region, Structure},
    error::Error,
    lock::OwnerId,
    one_sided::ownership,
    partition::PartitionMap,
    versioned::{Versioned, VersionedReader},
    worker::Handle,
};

/// A partition map whose regions are those of a plug-in.
#[derive(Debug, Clone)]
pub(super) struct RouteMap<R> {
    pub(super) epoch: u64,
    pub(super) parts: Vec<(OwnerId, R)>,
    /// What nobody owns.
    pub(super) gaps: Vec<R>,
}

impl<R: Region> RouteMap<R> {
    fn of(map: &PartitionMap) -> Result<Self, Error> {
        let mut parts = Vec::new();
        for (owner, part) in map.owners() {
            parts.extend(part.to_region::<R>()?.map(|region| (owner, region)));
        }
        let gaps = gaps(parts.iter().map(|(_, region)| region));
        Ok(Self { epoch: map.epoch, parts, gaps })
    }

    /// The owner of a part in which all of a region lies.
    #[inline]
    pub(super) fn owner_of(&self, region: &R) -> Option<&OwnerId> {
        self.parts.iter().find(|(_, part)| region.overlap(part) == Overlap::Inside).map(|(owner, _)| owner)
    }

    /// Whether all of a region has owners.
    pub(super) fn covers(&self, region: &R) -> bool {
        let has_nothing = || region.overlap(region) != Overlap::Inside;
        self.gaps.iter().all(|gap| gap.overlap(region) == Overlap::Outside) || has_nothing()
    }
}

/// All but these regions. Of those that cannot be cut, all of a gap counts as one.
fn gaps<'a, R: Region>(owned: impl Iterator<Item = &'a R> + Clone) -> Vec<R> {
    if R::are_everything(&owned.clone().cloned().collect::<Vec<_>>()) {
        return Vec::new();
    }
    owned.fold(vec![R::everything()], |gaps, owned| {
        let left = |gap: R| match gap.overlap(owned) {
            Overlap::Outside => vec![gap],
            Overlap::Inside => Vec::new(),
            Overlap::Partly => gap.without(owned).unwrap_or_else(|| vec![gap]),
        };
        gaps.into_iter().flat_map(left).collect()
    })
}

/// The partition map of a structure, as all workers of a process know it. Cheap to clone.
#[derive(Debug)]
pub struct Routes<P: Plugin>(Arc<Shared<P>>);

#[derive(Debug)]
struct Shared<P: Plugin> {
    structure: Structure,
    map: Arc<Versioned<RouteMap<P::Region>>>,
    /// Somebody reads it.
    is_read: AtomicBool,
    /// Somebody takes what a dead owner had.
    is_taken: AtomicBool,
    /// How often it was read.
    reads: AtomicU64,
}

impl<P: Plugin> Clone for Routes<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<P: Plugin> Routes<P> {
    /// The map as it is now. One READ.
    ///
    /// # Errors
    /// As [`ownership::read`].
    pub async fn read(worker: &Handle, structure: Structure) -> Result<Self, Error> {
        let map = RouteMap::of(&ownership::read(worker, &structure).await?)?;
        let (map, is_read, is_taken) = (Versioned::new(map), AtomicBool::default(), AtomicBool::default());
        Ok(Self(Arc::new(Shared { structure, map, is_read, is_taken, reads: AtomicU64::new(1) })))
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        &self.0.structure
    }

    /// The epoch of the map that is known.
    pub fn epoch(&self) -> u64 {
        self.0.map.copy().epoch
    }

    /// How often the map was read.
    pub fn reads(&self) -> u64 {
        self.0.reads.load(Ordering::Relaxed)
    }

    pub(super) fn reader(&self) -> VersionedReader<RouteMap<P::Region>> {
        self.0.map.reader()
    }

    /// To take what a dead owner had, unless somebody else of this process does; also then, if `insists`.
    pub(super) fn turn_to_take(&self, insists: bool) -> Option<OneTurn<'_>> {
        OneTurn::begin(&self.0.is_taken, insists)
    }

    /// Reads the map, unless somebody else of this process does: false then. If `insists`, it does in any case.
    ///
    /// # Errors
    /// As [`ownership::read`].
    pub(super) async fn renew(&self, worker: &Handle, insists: bool) -> Result<bool, Error> {
        let Some(_turn) = OneTurn::begin(&self.0.is_read, insists) else { return Ok(false) };
        let new = RouteMap::of(&ownership::read(worker, &self.0.structure).await?)?;
        self.0.reads.fetch_add(1, Ordering::Relaxed);
        self.0.map.update(|map| {
            let is_newer = new.epoch > map.epoch;
            if is_newer {
                *map = new;
            }
            is_newer
        });
        Ok(true)
    }
}

/// One at a time, as long as nobody insists; over when it is dropped. What two do at once is done twice, and does no harm.
pub(super) struct OneTurn<'a>(&'a AtomicBool);

impl<'a> OneTurn<'a> {
    fn begin(flag: &'a AtomicBool, insists: bool) -> Option<Self> {
        // Not made in vain: dropped, it would end that of another.
        (!flag.swap(true, Ordering::Acquire) || insists).then(|| Self(flag))
    }
}

impl Drop for OneTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_gets_no_turn_ends_that_of_nobody() {
        let flag = AtomicBool::new(false);
        let turn = OneTurn::begin(&flag, false).expect("nobody has it");
        assert!((0..3).all(|_| OneTurn::begin(&flag, false).is_none()));
        drop(OneTurn::begin(&flag, true).expect("it insists"));
        drop(turn);
        assert!(OneTurn::begin(&flag, false).is_some());
    }
}
