//! What this compute server has of the structures that it uses: the local side of their partition maps.
//!
//! A [`Tenure`] is some entries of a map for as long as it exists. When the last holder has dropped it, the map is *behind*:
//! maintenance, leaving, or the next one of this compute server to change the map brings it up to date. Changes of one
//! structure's map take turns here, so the entries of a compute server are always those of its tenures.

use std::{
    collections::HashMap,
    sync::{Arc as StdArc, Weak},
};

use crate::{
    gate::Gate,
    page::StructureId,
    partition::Part,
    ptr::ServerId,
    structure::Structure,
    sync::{AtomicBool, Mutex, Ordering, lock},
};

/// The right to use parts of a structure, which the structure's partition map states: for as long as somebody holds it, or
/// until it is ended. The parts may change meanwhile.
#[derive(Debug)]
pub struct Tenure {
    structure: StructureId,
    parts: Mutex<Vec<Part>>,
    is_valid: AtomicBool,
    /// Those who change the structure one-sided by it are inside.
    gate: StdArc<Gate>,
    all: Weak<Tenures>,
}

impl Tenure {
    /// The gate that those who change the structure one-sided by it pass.
    pub(crate) fn gate(&self) -> &StdArc<Gate> {
        &self.gate
    }

    /// Whether it still holds. Cheap: one load.
    #[inline(always)]
    pub fn is_valid(&self) -> bool {
        self.is_valid.load(Ordering::Acquire)
    }

    /// What it is for now.
    pub fn parts(&self) -> Vec<Part> {
        lock(&self.parts).clone()
    }

    /// Whether it is that of a shared user.
    pub(crate) fn is_shared(&self) -> bool {
        lock(&self.parts).contains(&Part::Shared)
    }

    /// For whoever has the structure's [turn](Turn).
    pub(crate) fn set_parts(&self, parts: Vec<Part>) {
        *lock(&self.parts) = parts;
    }

    /// Nobody can say what became of a change by it that was sent to this memory server: until that is [settled](Tenures::settled), the map says
    /// that it holds.
    pub(crate) fn is_unsettled_at(self: &StdArc<Self>, server: ServerId) {
        let Some(all) = self.all.upgrade() else { return };
        let mut structures = lock(&all.held);
        let Some(held) = structures.get_mut(&self.structure).filter(|_| self.is_valid()) else { return };
        if !held.unsettled.iter().any(|(tenure, at)| *at == server && StdArc::ptr_eq(tenure, self)) {
            held.unsettled.push((StdArc::clone(self), server));
        }
    }

    /// From now on nothing may be done by it. The map is behind until it is published again.
    pub(crate) fn end(&self) {
        self.is_valid.store(false, Ordering::Release);
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        let Some(all) = self.all.upgrade() else { return };
        let mut structures = lock(&all.held);
        let Some(held) = structures.get_mut(&self.structure) else { return };
        held.undropped = held.undropped.saturating_sub(1);
        if self.is_valid() {
            held.is_behind = true;
            all.is_behind.store(true, Ordering::Release);
        } else if held.is_idle() {
            // Not under the lock: it may hold the last of another tenure.
            let idle = structures.remove(&self.structure);
            drop(structures);
            drop(idle);
        }
    }
}

#[derive(Debug)]
struct Held {
    structure: Structure,
    tenures: Vec<Weak<Tenure>>,
    /// Tenures that have not been dropped to the end: one that has no holder any more may still say that the map is behind.
    undropped: usize,
    /// Memory servers that may still make changes which were sent there, and by which tenure.
    unsettled: Vec<(StdArc<Tenure>, ServerId)>,
    /// Somebody changes the structure's map.
    is_busy: bool,
    is_behind: bool,
}

impl Held {
    /// Whether there is nothing to be known of it.
    fn is_idle(&self) -> bool {
        !self.is_busy && !self.is_behind && self.undropped == 0
    }
}

/// All tenures of a compute server.
#[derive(Debug)]
pub(crate) struct Tenures {
    held: Mutex<HashMap<StructureId, Held>>,
    /// Some map is behind.
    is_behind: AtomicBool,
    /// The newest epochs of maps that were seen.
    epochs: Mutex<HashMap<StructureId, u64>>,
}

impl Default for Tenures {
    fn default() -> Self {
        Self { held: Mutex::new(HashMap::new()), is_behind: AtomicBool::new(false), epochs: Mutex::new(HashMap::new()) }
    }
}

impl Tenures {
    /// A turn at a structure's map, if nobody else has one.
    pub(crate) fn try_turn(this: &StdArc<Self>, structure: &Structure) -> Option<Turn> {
        let mut held = lock(&this.held);
        let held = held.entry(structure.id).or_insert_with(|| Held {
            structure: structure.clone(),
            tenures: Vec::new(),
            undropped: 0,
            unsettled: Vec::new(),
            is_busy: false,
            is_behind: false,
        });
        if std::mem::replace(&mut held.is_busy, true) {
            return None;
        }
        // What is dropped from now on, perhaps after the map was published, is behind anew.
        let was_behind = std::mem::replace(&mut held.is_behind, false);
        Some(Turn { all: StdArc::clone(this), structure: structure.id, is_behind: AtomicBool::new(was_behind) })
    }

    /// A map with this epoch was seen.
    pub(crate) fn saw_epoch(&self, structure: StructureId, epoch: u64) {
        let mut epochs = lock(&self.epochs);
        let newest = epochs.entry(structure).or_default();
        *newest = epoch.max(*newest);
    }

    /// The newest epoch of a structure's map that was seen; 0 if none was.
    pub(crate) fn epoch(&self, structure: StructureId) -> u64 {
        lock(&self.epochs).get(&structure).copied().unwrap_or(0)
    }

    /// Structures whose maps are behind.
    pub(crate) fn behind(&self) -> Vec<Structure> {
        if !self.is_behind.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        lock(&self.held).values().filter(|held| held.is_behind).map(|held| held.structure.clone()).collect()
    }

    /// Some map that was found to be behind still is.
    pub(crate) fn remain_behind(&self) {
        self.is_behind.store(true, Ordering::Release);
    }

    /// Memory servers that may still make changes of a structure which were sent there.
    pub(crate) fn unsettled(&self, structure: StructureId) -> Vec<ServerId> {
        let held = lock(&self.held);
        let mut servers: Vec<ServerId> =
            held.get(&structure).into_iter().flat_map(|of| &of.unsettled).map(|&(_, server)| server).collect();
        servers.dedup();
        servers
    }

    /// This memory server makes none of them any more.
    pub(crate) fn settled(&self, structure: StructureId, server: ServerId) {
        let mut held = lock(&self.held);
        let Some(of) = held.get_mut(&structure) else { return };
        let settled: Vec<_> = of.unsettled.extract_if(.., |(_, at)| *at == server).collect();
        // The last holders may be these: not to be dropped under the lock.
        drop(held);
        drop(settled);
    }

    /// Ends all tenures of a structure that is no more.
    pub(crate) fn forget(&self, structure: StructureId) {
        lock(&self.epochs).remove(&structure);
        let mut held = lock(&self.held);
        let Some(of) = held.get_mut(&structure) else { return };
        let (tenures, unsettled) = (std::mem::take(&mut of.tenures), std::mem::take(&mut of.unsettled));
        (of.is_behind, of.undropped) = (false, 0);
        if of.is_idle() {
            held.remove(&structure);
        }
        drop(held);
        tenures.iter().filter_map(Weak::upgrade).for_each(|tenure| tenure.end());
        drop(unsettled);
    }

    /// Ends all: others take over what this compute server had. Their maps are left to them.
    pub(crate) fn end_all(&self) {
        let held = lock(&self.held);
        let tenures: Vec<StdArc<Tenure>> = held.values().flat_map(|of| &of.tenures).filter_map(Weak::upgrade).collect();
        drop(held);
        tenures.iter().for_each(|tenure| tenure.end());
    }

    /// All structures that this compute server may have an entry of.
    pub(crate) fn all(&self) -> Vec<Structure> {
        lock(&self.held).values().map(|held| held.structure.clone()).collect()
    }
}

/// Leave to change one structure's map, which nobody else of this compute server does meanwhile.
#[derive(Debug)]
pub(crate) struct Turn {
    all: StdArc<Tenures>,
    structure: StructureId,
    /// The map is, as far as this turn has to do with it.
    is_behind: AtomicBool,
}

impl Turn {
    fn with<R>(&self, f: impl FnOnce(&mut Held) -> R) -> R {
        f(lock(&self.all.held).get_mut(&self.structure).expect("a structure's entry stays while somebody has its turn"))
    }

    /// The tenures that hold.
    pub(crate) fn tenures(&self) -> Vec<StdArc<Tenure>> {
        // The last holders may be these: not to be dropped under the lock.
        let all = self.with(|held| {
            held.tenures.retain(|tenure| tenure.strong_count() > 0);
            held.tenures.clone()
        });
        all.iter().filter_map(Weak::upgrade).filter(|tenure| tenure.is_valid()).collect()
    }

    /// Adds one, which the map states already.
    pub(crate) fn add(&self, part: Part) -> StdArc<Tenure> {
        let tenure = StdArc::new(Tenure {
            structure: self.structure,
            parts: Mutex::new(vec![part]),
            is_valid: AtomicBool::new(true),
            gate: StdArc::default(),
            all: StdArc::downgrade(&self.all),
        });
        self.with(|held| {
            held.tenures.push(StdArc::downgrade(&tenure));
            held.undropped += 1;
        });
        tenure
    }

    /// Whether the map was brought up to date.
    pub(crate) fn has_published(&self, is_up_to_date: bool) {
        self.is_behind.store(!is_up_to_date, Ordering::Relaxed);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut structures = lock(&self.all.held);
        let Some(held) = structures.get_mut(&self.structure) else { return };
        held.is_busy = false;
        held.tenures.retain(|tenure| tenure.strong_count() > 0);
        if self.is_behind.load(Ordering::Relaxed) {
            held.is_behind = true;
            self.all.is_behind.store(true, Ordering::Release);
        }
        if held.is_idle() {
            let idle = structures.remove(&self.structure);
            drop(structures);
            drop(idle);
        }
    }
}
