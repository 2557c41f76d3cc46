//! The pool: memory that a side opened, from which the other side fetches. Slabs are cut into slots of one size class
//! each, and are whole again when their last slot comes back.

use crate::protocol::{Priority, RENDEZVOUS_WORDS, SLAB_WORDS};

/// Words of the smallest slot: a slab has as many as a word has bits.
const SMALLEST: usize = SLAB_WORDS / 64;

/// A part of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlabSlot {
    /// Its first word, from the pool's start.
    pub(crate) first: usize,
    words: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slab {
    /// Words of its slots; 0 while it is whole.
    slot_words: usize,
    used: u64,
}

#[derive(Debug)]
pub(crate) struct SlabPool {
    slabs: Vec<Slab>,
    whole: usize,
}

impl SlabPool {
    pub(crate) fn new(slabs: usize) -> Self {
        Self { slabs: vec![Slab::default(); slabs], whole: slabs }
    }

    /// A slot of at least `words`, at most [`RENDEZVOUS_WORDS`]; none while others have it all. The last quarter of the slabs is
    /// cut only for what is latency-sensitive.
    pub(crate) fn take(&mut self, words: usize, priority: Priority) -> Option<SlabSlot> {
        let slot_words = words.next_power_of_two().clamp(SMALLEST, RENDEZVOUS_WORDS);
        let all = all_slots(slot_words);
        let spared = match priority {
            Priority::Latency => 0,
            Priority::BestEffort => self.slabs.len() / 4,
        };
        let cut = self.slabs.iter().position(|slab| slab.slot_words == slot_words && slab.used != all);
        let index = cut.or_else(|| {
            let found =
                if self.whole > spared { self.slabs.iter().position(|slab| slab.slot_words == 0) } else { None };
            self.whole -= usize::from(found.is_some());
            found
        })?;
        let slab = &mut self.slabs[index];
        slab.slot_words = slot_words;
        let free = slab.used.trailing_ones();
        slab.used |= 1 << free;
        Some(SlabSlot { first: index * SLAB_WORDS + free as usize * slot_words, words: slot_words })
    }

    pub(crate) fn give_back(&mut self, slot: SlabSlot) {
        let slab = &mut self.slabs[slot.first / SLAB_WORDS];
        debug_assert_eq!(slab.slot_words, slot.words);
        slab.used &= !(1 << (slot.first % SLAB_WORDS / slot.words));
        if slab.used == 0 {
            slab.slot_words = 0;
            self.whole += 1;
        }
    }
}

/// The bits of all slots of a slab.
fn all_slots(slot_words: usize) -> u64 {
    u64::MAX >> (64 - SLAB_WORDS / slot_words)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slots_are_disjoint_and_all_come_back(
            steps in prop::collection::vec((any::<bool>(), 1..=RENDEZVOUS_WORDS, any::<bool>()), 1..200), slabs in 1usize..9
        ) {
            let mut pool = SlabPool::new(slabs);
            let mut held: Vec<SlabSlot> = Vec::new();
            for (take, words, latency) in steps {
                if take {
                    let priority = if latency { Priority::Latency } else { Priority::BestEffort };
                    if let Some(slot) = pool.take(words, priority) {
                        prop_assert!(slot.words >= words && slot.first + slot.words <= slabs * SLAB_WORDS);
                        let apart = |other: &SlabSlot| {
                            slot.first + slot.words <= other.first || other.first + other.words <= slot.first
                        };
                        prop_assert!(held.iter().all(apart));
                        held.push(slot);
                    }
                } else if !held.is_empty() {
                    pool.give_back(held.swap_remove(words % held.len()));
                }
            }
            held.into_iter().for_each(|slot| pool.give_back(slot));
            let chunks = (0..slabs * SLAB_WORDS / RENDEZVOUS_WORDS).filter(|_| {
                pool.take(RENDEZVOUS_WORDS, Priority::Latency).is_some()
            });
            prop_assert_eq!(chunks.count(), slabs * SLAB_WORDS / RENDEZVOUS_WORDS);
        }
    }

    #[test]
    fn best_effort_leaves_room_for_the_latency_sensitive() {
        let mut pool = SlabPool::new(8);
        while pool.take(RENDEZVOUS_WORDS, Priority::BestEffort).is_some() {}
        assert!(pool.take(RENDEZVOUS_WORDS, Priority::Latency).is_some());
    }
}
