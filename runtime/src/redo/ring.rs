//! Room in rings: who writes records decides where, in its own memory.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    rc::Rc,
};

use smallvec::SmallVec;

use super::{RING_CLASS, RING_FIRST};
use crate::ptr::{RemotePtr, ServerId};

/// A ring of one worker, and which of its words are in use.
#[derive(Debug, Clone)]
pub struct RingSpace(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    ring: RemotePtr,
    used: RefCell<Used>,
}

/// Records in the order in which they were placed.
#[derive(Debug, Default)]
struct Used {
    parts: VecDeque<UsedPart>,
    /// The number of the first of them.
    first: u64,
}

#[derive(Debug)]
struct UsedPart {
    from: usize,
    to: usize,
    is_done: bool,
}

impl Used {
    /// Room for so many words.
    fn room(&self, words: usize) -> Option<usize> {
        let (Some(oldest), Some(latest)) = (self.parts.front(), self.parts.back()) else {
            return (RING_FIRST + words <= RING_CLASS.words()).then_some(RING_FIRST);
        };
        match latest.to > oldest.from {
            true if latest.to + words <= RING_CLASS.words() => Some(latest.to),
            true => (RING_FIRST + words <= oldest.from).then_some(RING_FIRST),
            false => (latest.to + words <= oldest.from).then_some(latest.to),
        }
    }
}

impl RingSpace {
    /// All of the ring is free.
    pub fn new(ring: RemotePtr) -> Self {
        Self(Rc::new(Inner { ring, used: RefCell::default() }))
    }

    /// The ring's page.
    pub(crate) fn ring(&self) -> RemotePtr {
        self.0.ring
    }

    /// Takes room for a part of so many words, if there is any.
    fn take(&self, words: usize) -> Option<Place> {
        let used = &mut *self.0.used.borrow_mut();
        let from = used.room(words)?;
        used.parts.push_back(UsedPart { from, to: from + words, is_done: false });
        Some(Place { ring: self.clone(), number: used.first + used.parts.len() as u64 - 1, from })
    }
}

/// The rings of one worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerRings {
    by_server: RefCell<BTreeMap<ServerId, Vec<RingSpace>>>,
    pub(crate) is_growing: Cell<bool>,
}

impl WorkerRings {
    /// How many it has on a memory server.
    pub(crate) fn count(&self, server: ServerId) -> usize {
        self.by_server.borrow().get(&server).map_or(0, Vec::len)
    }

    pub(crate) fn add(&self, ring: RemotePtr) {
        self.by_server.borrow_mut().entry(ring.server()).or_default().push(RingSpace::new(ring));
    }

    /// See [`Places::take`].
    pub(crate) fn take(&self, server: ServerId, parts: &[usize]) -> Option<Places> {
        if parts.is_empty() {
            return Some(Places(SmallVec::new()));
        }
        Places::take(self.by_server.borrow().get(&server)?, parts.iter().copied())
    }

    /// All of them, which it does not use any more.
    pub(crate) fn take_all(&self) -> Vec<RemotePtr> {
        let all = std::mem::take(&mut *self.by_server.borrow_mut());
        all.into_values().flatten().map(|ring| ring.ring()).collect()
    }
}

/// Room for one part; free again when dropped.
#[derive(Debug)]
struct Place {
    ring: RingSpace,
    number: u64,
    from: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        let used = &mut *self.ring.0.used.borrow_mut();
        used.parts[(self.number - used.first) as usize].is_done = true;
        while used.parts.front().is_some_and(|part| part.is_done) {
            used.parts.pop_front();
            used.first += 1;
        }
    }
}

/// Room for the parts of one record on one memory server; free again when dropped.
#[derive(Debug)]
pub struct Places(SmallVec<[Place; 1]>);

impl Places {
    /// Takes room for parts of these lengths, all or none. Records of one part take it in the first ring, longer ones in the others,
    /// each part in one of its own: so short ones cannot keep a long one waiting for ever.
    pub fn take(rings: &[RingSpace], parts: impl ExactSizeIterator<Item = usize>) -> Option<Self> {
        let rings = if parts.len() == 1 { rings } else { rings.get(1..)? };
        let places = parts.zip(rings.iter().map(Some).chain(std::iter::repeat(None)));
        places.map(|(words, ring)| ring?.take(words)).collect::<Option<_>>().map(Self)
    }

    /// How many rings a record of so many parts needs.
    pub(crate) fn rings_for(parts: usize) -> usize {
        match parts {
            0 | 1 => parts,
            _ => parts + 1,
        }
    }

    /// Where the parts stand.
    pub(crate) fn at(&self) -> impl Iterator<Item = RemotePtr> {
        self.0.iter().map(|place| place.ring.ring().word(place.from))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ptr::ServerId;

    fn ring() -> RingSpace {
        RingSpace::new(RemotePtr::new(ServerId::new(0).unwrap(), 1 << 14).unwrap())
    }

    proptest! {
        #[test]
        fn parts_never_overlap_and_all_room_comes_back(steps in proptest::collection::vec((1usize..900, 0usize..6), 1..200)) {
            let ring = ring();
            let mut live: Vec<(Place, usize)> = Vec::new();
            for (words, drop) in steps {
                if let Some(place) = ring.take(words) {
                    prop_assert!(place.from >= RING_FIRST && place.from + words <= RING_CLASS.words());
                    for (other, length) in &live {
                        prop_assert!(place.from + words <= other.from || other.from + length <= place.from);
                    }
                    live.push((place, words));
                } else {
                    prop_assert!(!live.is_empty());
                }
                if drop < live.len() {
                    live.swap_remove(drop);
                }
            }
            live.clear();
            prop_assert!(ring.take(RING_CLASS.words() - RING_FIRST).is_some());
        }
    }

    #[test]
    fn long_records_have_rings_of_their_own() {
        let rings = [ring(), ring(), ring()];
        let short = Places::take(&rings, [2000].into_iter()).unwrap();
        assert!(Places::take(&rings, [2000].into_iter()).is_none(), "the first ring is full");
        let long = Places::take(&rings, [2040, 100].into_iter()).unwrap();
        assert!(Places::take(&rings, [2040, 100].into_iter()).is_none());
        assert!(Places::take(&rings, [1, 1, 1].into_iter()).is_none(), "there are not so many");
        drop((short, long));
        assert!(Places::take(&rings, [2040, 2040].into_iter()).is_some());
    }
}
