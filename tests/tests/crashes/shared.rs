//! An owner of the upper keys of a B+-tree dies while it splits and merges pages, some of which the owner of the lower keys shares. Others
//! read the lower keys before anybody has looked for the dead, then own both halves: all that was flushed is there, and all that was
//! answered, where it logs; and no page is lost.

use std::cell::Cell;

use farlink_offload::{Cached, Durability};
use farlink_runtime::{error::Error, one_sided::Proof, report::Report, worker::Worker};
use farlink_structures::{
    btree::{BTree, Tree},
    map::KeyRange,
};
use farlink_tests::{
    cluster::{FAST, WEAK},
    crash::{Scene, enumerate_one_in},
};

use crate::{maps, owners::own};

type Half = BTree<Cached<Tree>>;

/// Keys that are there before: every tenth.
const KEYS: u64 = 160;
/// Keys that each owner inserts beside the cut.
const MORE: u64 = 80;

#[derive(Debug)]
struct Halves {
    script: maps::Script<Tree>,
    durability: Durability,
    /// How many of its keys the victim has inserted, and how many of those it has removed, as far as that lasts.
    inserted: Cell<u64>,
    removed: Cell<u64>,
    /// Where the keys are cut.
    near: u64,
    cut: Cell<u64>,
    /// Who comes first: the owner of the lower keys, or who takes the upper ones over.
    is_lower_first: Cell<bool>,
}

impl Halves {
    fn cut_at(near: u64, durability: Durability) -> Self {
        let script = maps::Script::new((0..KEYS).map(|key| key * 10), [], maps::Op::Insert(0));
        let [inserted, removed, cut] = [const { Cell::new(0) }; 3];
        Self { script, durability, inserted, removed, near, cut, is_lower_first: Cell::new(true) }
    }

    async fn own(&self, worker: &Worker, range: KeyRange) -> Result<Half, Error> {
        let map: maps::Opened<Tree> = BTree::open(worker, maps::MAP, Proof::Checksum).await?;
        let structure = map.structure().clone();
        Ok(BTree::over(own::<Tree>(worker, structure, range, 1 << 20, self.durability).await?))
    }

    fn lower(&self) -> KeyRange {
        KeyRange { low: 0, high: Some(self.cut.get()) }
    }

    fn upper(&self) -> KeyRange {
        KeyRange { low: self.cut.get(), high: None }
    }

    /// That who reads the lower keys one-sided, by way of pages that the victim may have locked, finds them.
    async fn read_lower(&self, worker: &Worker) -> Result<(), Error> {
        let map: maps::Opened<Tree> = BTree::open(worker, maps::MAP, Proof::Checksum).await?;
        for key in (0..self.cut.get()).step_by(10) {
            assert_eq!(map.get(key).await?, Some(key));
        }
        Ok(())
    }

    /// That an owner finds its keys, inserts and removes.
    async fn use_lower(&self, worker: &Worker) -> Result<Half, Error> {
        let (lower, cut) = (self.own(worker, self.lower()).await?, self.cut.get());
        for key in cut - MORE..cut {
            assert_eq!(lower.insert(key, key).await?, key % 10 != 0, "{key}");
        }
        for key in cut - MORE..cut {
            assert_eq!(lower.remove(key).await?, Some(key));
        }
        for key in (0..cut - MORE).filter(|key| key % 10 == 0) {
            assert_eq!(lower.get(key).await?, Some(key));
        }
        Ok(lower)
    }

    async fn use_upper(&self, worker: &Worker, flushed: bool) -> Result<Half, Error> {
        let (upper, cut) = (self.own(worker, self.upper()).await?, self.cut.get());
        for key in cut..cut + MORE {
            let found = upper.remove(key).await?;
            // The victim has inserted and then removed them all.
            let (inserted, removed) = (cut + self.inserted.get(), cut + self.removed.get());
            let is_gone = flushed || key < removed;
            let is_right = if is_gone { found.is_none() } else { found.is_none_or(|value| value == key) };
            assert!(is_right, "{key}: {found:?}, inserted to {inserted}, removed to {removed}");
            // One may be under way.
            let is_there = !flushed && key > removed && key < inserted;
            assert!(found.is_some() || !is_there, "{key} is lost, inserted to {inserted}, removed to {removed}");
        }
        for key in (cut + MORE..KEYS * 10).filter(|key| key % 10 == 0) {
            assert_eq!(upper.get(key).await?, Some(key));
        }
        for key in cut..cut + MORE {
            assert!(upper.insert(key, key).await?, "{key}");
        }
        for key in cut..cut + MORE {
            assert_eq!(upper.remove(key).await?, Some(key));
        }
        Ok(upper)
    }
}

impl Scene for Halves {
    type Open = Half;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.script.prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Half, Error> {
        let map = self.script.open(worker).await?;
        self.cut.set(map.leaf_low(self.near).await?);
        let upper = self.own(worker, self.upper()).await?;
        // Its pages are cached, and its log has room.
        upper.update(self.cut.get(), self.cut.get()).await?;
        upper.access().flush().await?;
        Ok(upper)
    }

    async fn act(&self, upper: &Half) -> Result<(), Error> {
        let (cut, lasts) = (self.cut.get(), u64::from(self.durability == Durability::Logged));
        self.inserted.set(0);
        self.removed.set(0);
        for key in cut..cut + MORE {
            upper.insert(key, key).await?;
            self.inserted.update(|inserted| inserted + lasts);
        }
        for key in cut..cut + MORE {
            upper.remove(key).await?;
            self.removed.update(|removed| removed + lasts);
        }
        upper.access().flush().await
    }

    fn take_way(&self, is_other: bool) {
        self.is_lower_first.set(!is_other);
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let (lower, upper) = match self.is_lower_first.get() {
            true => {
                self.read_lower(worker).await?;
                let lower = self.use_lower(worker).await?;
                (lower, self.use_upper(worker, flushed).await?)
            }
            false => {
                let upper = self.use_upper(worker, flushed).await?;
                (self.use_lower(worker).await?, upper)
            }
        };
        lower.access().close().await?;
        upper.access().close().await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

#[test]
fn an_owner_dies_with_shared_pages() {
    // The cut lies in a page below the root, or between two of them.
    for near in [300, 600, 900] {
        enumerate_one_in(8, FAST, &Halves::cut_at(near, Durability::WriteBack));
    }
    enumerate_one_in(24, WEAK, &Halves::cut_at(600, Durability::WriteBack));
}

#[test]
fn an_owner_that_logs_dies_with_shared_pages() {
    for near in [300, 600, 900] {
        enumerate_one_in(8, FAST, &Halves::cut_at(near, Durability::Logged));
    }
    enumerate_one_in(24, WEAK, &Halves::cut_at(600, Durability::Logged));
}
