//! The partition map: who owns which regions of a structure, and who uses it without owning any.
//!
//! It stands in the structure's descriptor page ([`catalog`](crate::catalog)), from word 32 on, and is changed like any
//! other page, under the page's remote lock:
//!
//! ```text
//! word 0      epoch: grows with each change of an owner or a region, and may grow without one
//! word 1      number of entries
//! then, for each entry:
//! word 0      words that follow:32 | what it is:8 | incarnation of the compute server:24
//! word 1..    the region, as it is sent (`Wire`); nothing for a user
//! ```
//!
//! A region belongs to one compute server, whose pages inside it are in nobody else's hands (DEX, VLDB 2024, section 4). A
//! *shared* entry is of a compute server that uses the structure one-sided, and changes it under remote locks. A structure has owners or
//! shared users, never both.

use crate::{
    error::Error,
    lock::OwnerId,
    ptr::RemotePtr,
    wire::{Wire, decode_all},
    words::Words,
};

/// Where the map begins in a descriptor page.
pub(crate) const MAP: usize = 32;
const HEAD: usize = 2;
const REGION: u64 = 1;
const SHARED: u64 = 2;

/// What a compute server has of a structure.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Part {
    /// A region, as words: pages inside are its own.
    Region(Vec<u64>),
    /// The right to read pages, and to change them under their remote locks, which others have as well.
    Shared,
}

impl Part {
    /// That of an owner.
    pub fn region<R: Wire>(region: &R) -> Self {
        let mut words = Vec::new();
        region.encode(&mut words);
        Self::Region(words)
    }

    /// The region, if it is one.
    ///
    /// # Errors
    /// [`Error::Malformed`] if its words are none.
    pub fn to_region<R: Wire>(&self) -> Result<Option<R>, Error> {
        match self {
            Self::Region(words) => Ok(Some(decode_all(words)?)),
            Self::Shared => Ok(None),
        }
    }
}

/// One entry of a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MapEntry {
    /// The compute server.
    pub owner: OwnerId,
    /// What it has.
    pub part: Part,
}

/// A partition map, as it was at some moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartitionMap {
    /// Grows with each change of an owner or a region, and may grow when an owner enters the same again. What only a shared user does
    /// leaves it as it is.
    pub epoch: u64,
    /// In no order.
    pub entries: Vec<MapEntry>,
}

impl PartitionMap {
    /// The map in the words of a descriptor page.
    ///
    /// # Errors
    /// [`Error::Inconsistent`] if they are none.
    pub(crate) fn decode(words: &(impl Words + ?Sized), page: RemotePtr) -> Result<Self, Error> {
        let wrong = Error::Inconsistent { page, why: "its partition map is damaged" };
        let mut map = Self { epoch: words.word(MAP), entries: Vec::new() };
        let mut next = MAP + HEAD;
        for _ in 0..words.word(MAP + 1) {
            if next >= words.count() {
                return Err(wrong);
            }
            let head = words.word(next);
            let length = (head >> 32) as usize;
            let Some(owner) = OwnerId::new(head & 0xff_ffff).filter(|_| words.count() - next > length) else {
                return Err(wrong);
            };
            let region = || Part::Region((next + 1..=next + length).map(|index| words.word(index)).collect());
            let part = match (head >> 24 & 0xff, length) {
                (REGION, _) => region(),
                (SHARED, 0) => Part::Shared,
                _ => return Err(wrong),
            };
            map.entries.push(MapEntry { owner, part });
            next += 1 + length;
        }
        Ok(map)
    }

    /// The words of the map, if so many are enough.
    ///
    /// # Errors
    /// [`Error::PartitionMapFull`].
    pub(crate) fn encode(&self, words_max: usize) -> Result<Vec<u64>, Error> {
        let mut words = vec![self.epoch, self.entries.len() as u64];
        for MapEntry { owner, part } in &self.entries {
            let (kind, region) = match part {
                Part::Region(region) => (REGION, &region[..]),
                Part::Shared => (SHARED, &[][..]),
            };
            words.push((region.len() as u64) << 32 | kind << 24 | u64::from(owner.incarnation()));
            words.extend_from_slice(region);
        }
        if words.len() > words_max { Err(Error::PartitionMapFull { words_max }) } else { Ok(words) }
    }

    /// Those who own something, with their regions.
    pub fn owners(&self) -> impl Iterator<Item = (OwnerId, &Part)> {
        let regions = self.entries.iter().filter(|entry| matches!(entry.part, Part::Region(_)));
        regions.map(|entry| (entry.owner, &entry.part))
    }

    /// A compute server that uses the structure one-sided.
    pub fn user(&self) -> Option<OwnerId> {
        self.entries.iter().find(|entry| entry.part == Part::Shared).map(|entry| entry.owner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WORDS: usize = 512;

    fn at() -> RemotePtr {
        crate::layout::catalog_page_at(1)
    }

    fn entry() -> impl Strategy<Value = MapEntry> {
        let part = prop_oneof![Just(Part::Shared), prop::collection::vec(any::<u64>(), 0..9).prop_map(Part::Region)];
        (1u64..1 << 23, part).prop_map(|(owner, part)| MapEntry { owner: OwnerId::new(owner).unwrap(), part })
    }

    proptest! {
        #[test]
        fn a_map_is_what_its_words_say(epoch: u64, entries in prop::collection::vec(entry(), 0..60)) {
            let map = PartitionMap { epoch, entries };
            let mut page = vec![0; WORDS];
            match map.encode(WORDS - MAP) {
                Ok(words) => {
                    page[MAP..MAP + words.len()].copy_from_slice(&words);
                    prop_assert_eq!(PartitionMap::decode(&page[..], at()).unwrap(), map);
                }
                Err(_) => prop_assert!(map.entries.len() > 47),
            }
        }

        #[test]
        fn random_words_are_a_map_or_refused(
            count in prop_oneof![0u64..200, any::<u64>()],
            words in prop::collection::vec(prop_oneof![any::<u64>(), (1u64..1 << 23, 0u64..4, 0u64..300)
                .prop_map(|(owner, kind, length)| owner | kind << 24 | length << 32)], WORDS),
        ) {
            let mut words = words;
            words[MAP + 1] = count;
            let _ = PartitionMap::decode(&words[..], at());
        }
    }
}
