//! What a chain of records says: a logical page.

use farlink_runtime::access::{PagesMut, Slot, Unlinked, Words};
use smallvec::SmallVec;

use super::record::{About, Base, Change, Delta, Fences, MapWord, Pid, Side, write_base};

/// Changes of a chain, as a rule.
const CHANGES_USUAL: usize = 4;

/// A record, apart from the page it was read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A delta.
    Delta(Delta),
    /// A base page.
    Base(State),
}

impl Record {
    /// `None` if these are not the words of a record.
    pub fn of(words: &(impl Words + ?Sized)) -> Option<Self> {
        if let Some(base) = Base::of(words) {
            let entries = (0..base.count()).map(|index| base.entry(index)).collect();
            return Some(Self::Base(State { entries, ..State::new(base.about, base.fences()) }));
        }
        Delta::of(words).map(Self::Delta)
    }

    /// Of which page, and how long the chain is below it.
    pub fn about(&self) -> About {
        match self {
            Self::Delta(delta) => delta.about,
            Self::Base(base) => base.about,
        }
    }
}

/// What a chain says: a logical page as it was when the first of its records was the newest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Of which page; how many records there are below the newest.
    pub about: About,
    /// Its fences.
    pub fences: Fences,
    /// Its entries, in ascending order of keys.
    pub entries: Vec<(u64, u64)>,
    /// Whether it is being merged into the page to its left.
    pub is_removed: bool,
    /// An entry whose page is being merged into the one to its left.
    pub merging: Option<(u64, Pid)>,
}

impl State {
    /// A page without entries.
    pub const fn new(about: About, fences: Fences) -> Self {
        Self { about, fences, entries: Vec::new(), is_removed: false, merging: None }
    }

    /// The value of a key.
    pub fn value(&self, key: u64) -> Option<u64> {
        let index = self.entries.binary_search_by_key(&key, |entry| entry.0).ok()?;
        Some(self.entries[index].1)
    }

    /// Of an inner page: the index of the entry behind which a key is.
    pub fn child_for(&self, key: u64) -> Option<usize> {
        self.entries.partition_point(|entry| entry.0 <= key).checked_sub(1)
    }

    /// Writes it into a new page, as the base of a new chain.
    pub fn write(&self, pages: &mut impl PagesMut, slot: Slot) {
        write_base(self.about, self.fences, &self.entries, pages, slot);
    }

    /// Puts or deletes an entry.
    pub fn change(&mut self, change: Change) {
        self.apply([change]);
    }

    /// That the entries are in order and between the fences.
    fn require_order(&self) -> Result<(), Flaw> {
        let within = |&(key, _): &(u64, u64)| self.fences.side(key) == Side::Here;
        let in_order = self.entries.is_sorted_by(|a, b| a.0 < b.0) && self.entries.iter().all(within);
        let first = self.entries.first().map(|entry| entry.0);
        match in_order && (self.about.level == 0 || first == Some(self.fences.low)) {
            true => Ok(()),
            false => Err(Flaw("its keys are out of order or outside its fences")),
        }
    }

    /// Applies changes, the newest first.
    fn apply(&mut self, newest_first: impl IntoIterator<Item = Change>) {
        // Of each key the newest change alone counts.
        let mut changes: SmallVec<[(u64, Option<u64>); CHANGES_USUAL]> = SmallVec::new();
        let mut merging = None;
        for one in newest_first {
            let (key, to) = match one {
                Change::Put { key, value } => (key, Some(value)),
                Change::Delete { key } => (key, None),
                Change::Merging { at, child } => (at, Some(child.word())),
                Change::Remove | Change::Merge { .. } => {
                    self.is_removed |= one == Change::Remove;
                    continue;
                }
            };
            if changes.iter().all(|change| change.0 != key) {
                changes.push((key, to));
                if let Change::Merging { at, child } = one {
                    merging = Some((at, child));
                }
            }
        }
        // The entry's deletion ends what was under way; before that nothing is done there. It may have been put in anew since.
        self.merging = merging.or(self.merging.filter(|&(at, _)| changes.iter().all(|change| change.0 != at)));
        for (key, to) in changes {
            match (self.entries.binary_search_by_key(&key, |entry| entry.0), to) {
                (Ok(index), Some(value)) => self.entries[index].1 = value,
                (Ok(index), None) => drop(self.entries.remove(index)),
                (Err(index), Some(value)) => self.entries.insert(index, (key, value)),
                (Err(_), None) => {}
            }
        }
    }
}

/// A logical page, and the records that say so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logical {
    /// What they say.
    pub state: State,
    /// All of them, the newest first.
    pub records: Vec<Unlinked>,
    /// The newest one, if it is a delta.
    pub newest: Option<Delta>,
}

impl Logical {
    /// A page of which there is a base page alone, or nothing.
    pub fn of_base(state: State, base: Option<Unlinked>) -> Self {
        Self { state, records: Vec::from_iter(base), newest: None }
    }

    /// The memory that it takes.
    pub fn bytes(&self) -> usize {
        let Self { state, records, newest } = self;
        let again = newest.as_ref().map_or(0, |newest| size_of_val(&*newest.changes) + size_of_val(&*newest.again));
        size_of::<Self>() + size_of_val(&*state.entries) + size_of_val(&**records) + again
    }

    /// The delta that makes a change, where `word` leads to the newest record.
    pub fn delta(&self, word: MapWord, about: About, change: Change) -> Delta {
        let again = self.newest.as_ref().and_then(|newest| newest.and(*self.records.first()?, about, change));
        again.unwrap_or(Delta::new(about, word, change))
    }

    /// As it is with one more delta, which makes this change.
    pub fn with(&self, change: Change, delta: Delta, at: Unlinked) -> Self {
        let mut entries = Vec::with_capacity(self.state.entries.len() + 1);
        entries.extend_from_slice(&self.state.entries);
        let mut state = State { about: delta.about, entries, ..self.state };
        state.change(change);
        let records = [at].into_iter().chain(self.records.iter().copied()).collect();
        Self { state, records, newest: Some(delta) }
    }
}

/// What is wrong with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Flaw(pub &'static str);

/// Which records a chain has, in the order in which they are read: each before what is below it; below a merge first the
/// page's own records, then those that it absorbs. It ends, whatever the records say.
#[derive(Debug, Clone)]
pub struct Chain {
    records: Vec<Record>,
    pages: Vec<Unlinked>,
    newest: Option<Delta>,
    /// What is still to be read, the next one last: the record, its page if it is known, how many there are below it at most.
    to_read: Vec<(MapWord, Option<Pid>, u8)>,
}

impl Chain {
    /// The chain of a page, of which its mapping word is known.
    pub fn new(pid: Pid, head: MapWord) -> Self {
        Self { records: Vec::new(), pages: Vec::new(), newest: None, to_read: vec![(head, Some(pid), u8::MAX)] }
    }

    /// The record to read next; `None` if all have been.
    pub fn next(&self) -> Option<MapWord> {
        self.to_read.last().map(|&(word, ..)| word)
    }

    /// Adds the record that was to be read, as found there.
    ///
    /// # Errors
    /// If it is none of this chain.
    pub fn add(&mut self, words: &(impl Words + ?Sized)) -> Result<(), Flaw> {
        let (word, pid, most) = self.to_read.pop().ok_or(Flaw("the chain has ended"))?;
        let record = Record::of(words).filter(|_| word.is_to(words)).ok_or(Flaw("it is not the record of the link"))?;
        let (about, first) = (record.about(), self.records.first().map(Record::about));
        if pid.is_some_and(|pid| pid != about.pid) || first.is_some_and(|first| first.level != about.level) {
            return Err(Flaw("it is of another page"));
        }
        if about.below > most {
            return Err(Flaw("the chain is longer than its head says"));
        }
        self.pages.extend(Unlinked::of(words));
        if let Record::Delta(delta) = &record {
            let below = about.below.checked_sub(delta.changes.len() as u8).ok_or(Flaw("the chain has no end"))?;
            if let Some((_, absorbed)) = delta.absorbed() {
                self.to_read.push((absorbed, None, below.saturating_sub(1)));
            }
            self.to_read.push((delta.next, Some(about.pid), below));
            self.pages.extend_from_slice(&delta.again);
            if self.records.is_empty() {
                self.newest = Some(delta.clone());
            }
        }
        if self.records.len() > usize::from(u8::MAX) {
            return Err(Flaw("the chain has no end"));
        }
        self.records.push(record);
        Ok(())
    }

    /// Takes the record that is to be read and all below it from a page as it was when this word led to it; whether it can. The page
    /// may have deltas above that record which those that were read say again: to make a change once more changes nothing.
    pub fn add_known(&mut self, word: MapWord, page: &Logical) -> bool {
        let above = page.newest.as_ref().filter(|newest| self.next() == Some(newest.next)).map(|it| 1 + it.again.len());
        let above = if self.next() == Some(word) { Some(0) } else { above.filter(|_| !self.records.is_empty()) };
        if let Some(above) = above {
            self.to_read.pop();
            self.newest = self.newest.take().or_else(|| page.newest.clone());
            self.records.push(Record::Base(page.state.clone()));
            self.pages.extend_from_slice(&page.records[above..]);
        }
        above.is_some()
    }

    /// How many records were read.
    pub fn count(&self) -> usize {
        self.records.len()
    }

    /// What all its records come to: the page's entries in the order of their keys, and its fences.
    ///
    /// # Errors
    /// If they are no whole chain.
    pub fn merge(self) -> Result<Logical, Flaw> {
        let mut rest = self.records.into_iter();
        let state = merge_one(&mut rest)?;
        state.require_order()?;
        match rest.next() {
            None => Ok(Logical { state, records: self.pages, newest: self.newest }),
            Some(_) => Err(Flaw("there are records behind the chain")),
        }
    }
}

fn merge_one(records: &mut std::vec::IntoIter<Record>) -> Result<State, Flaw> {
    let (mut changes, mut about) = (Vec::new(), None);
    let mut state = loop {
        let record = records.next().ok_or(Flaw("the chain is not whole"))?;
        about = about.or(Some(record.about()));
        let delta = match record {
            Record::Base(base) => break base,
            Record::Delta(delta) => delta,
        };
        if let Some((at, _)) = delta.absorbed() {
            let (mut state, absorbed) = (merge_one(records)?, merge_one(records)?);
            if state.fences.high() != Some(at) || absorbed.fences.low != at {
                return Err(Flaw("it absorbs a page that does not lie to its right"));
            }
            state.fences.right = absorbed.fences.right;
            state.merging = state.merging.or(absorbed.merging);
            state.entries.extend(absorbed.entries);
            break state;
        }
        changes.extend(delta.changes.into_iter().rev());
    };
    state.apply(changes);
    state.about = about.unwrap_or(state.about);
    Ok(state)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use farlink_runtime::{
        access::RemotePtr,
        page::{self, HEADER_WORDS, IDENTITY, Identity, LOCK, SizeClass, StructureId},
        ptr::ServerId,
    };
    use proptest::prelude::*;

    use super::{
        super::record::{CHANGES_MAX, Mapped},
        *,
    };

    /// A page that is written in memory of its own.
    struct Page(Vec<u64>);

    impl PagesMut for Page {
        fn page(&self, _slot: Slot) -> impl Words + '_ {
            &*self.0
        }
        fn set(&mut self, _slot: Slot, index: usize, word: u64) {
            self.0[index] = word;
        }
        fn describe(&mut self, _slot: Slot, level: u8, kind: u8) {
            let class = SizeClass::of_bytes(self.0.len() * 8).unwrap();
            self.0[IDENTITY] = Identity { structure: StructureId(1), level, class, kind, is_words: false }.word();
        }
        fn describe_words(&mut self, _slot: Slot, _level: u8, _kind: u8) {
            unreachable!("records have no such words");
        }
        fn free(&mut self, _slot: Slot) {}
    }

    /// Memory with records in it.
    #[derive(Default)]
    struct Memory(Vec<Vec<u64>>);

    impl Memory {
        fn add(&mut self, class: SizeClass, write: impl FnOnce(&mut Page)) -> MapWord {
            let at = RemotePtr::new(ServerId::new(3).unwrap(), (self.0.len() as u64 + 1) << 16).unwrap();
            let mut page = Page(vec![0; class.words()]);
            write(&mut page);
            let identity = Identity::from_word(page.0[IDENTITY]).unwrap();
            page::seal(&mut page.0, at, identity, 2 * self.0.len() as u64 + 1);
            let word = MapWord::to_record(&*page.0).unwrap();
            self.0.push(page.0);
            word
        }

        fn find(&self, word: MapWord) -> &[u64] {
            let Some(Mapped::To(link)) = word.target() else { panic!("{word:?} leads nowhere") };
            &self.0[(link.remote().unwrap().0.offset() >> 16) as usize - 1]
        }

        fn chain(&self, pid: Pid, head: MapWord) -> Result<Chain, Flaw> {
            let mut chain = Chain::new(pid, head);
            while let Some(word) = chain.next() {
                chain.add(self.find(word))?;
            }
            Ok(chain)
        }
    }

    const SLOT: Slot = Slot::ONLY;
    const CLASS: SizeClass = SizeClass::of_bytes(1024).unwrap();
    const LEFT: Pid = Pid::new(5, 1);
    const RIGHT_PAGE: Pid = Pid::new(6, 0);

    fn about(pid: Pid, below: u8) -> About {
        About { pid, level: 0, below }
    }

    fn base(memory: &mut Memory, pid: Pid, fences: Fences, entries: impl IntoIterator<Item = (u64, u64)>) -> MapWord {
        let state = State { entries: entries.into_iter().collect(), ..State::new(about(pid, 0), fences) };
        memory.add(CLASS, |page| state.write(page, SLOT))
    }

    fn write(memory: &mut Memory, delta: &Delta) -> MapWord {
        memory.add(delta.class(), |page| delta.write(page, SLOT))
    }

    /// A delta as a writer makes it, who has read the chain.
    fn on(memory: &mut Memory, pid: Pid, below: u8, next: MapWord, change: Change) -> MapWord {
        let page = memory.chain(pid, next).unwrap().merge().unwrap();
        write(memory, &page.delta(next, about(pid, below), change))
    }

    proptest! {
        /// Puts and deletes on a base page, then what is split off, and merged back.
        #[test]
        fn a_chain_says_what_was_done(
            first in prop::collection::btree_map(0u64..60, any::<u64>(), 0..40),
            changes in prop::collection::vec((0u64..60, any::<Option<u64>>()), 0..20),
            at in 1u64..60,
            merges: bool,
            known_at in 0u8..6,
        ) {
            let (mut memory, mut model) = (Memory::default(), first.clone());
            let mut head = base(&mut memory, LEFT, Fences::ALL, first);
            let mut below = 0;
            for &(key, to) in &changes[..changes.len() / 2] {
                below += 1;
                head = on(&mut memory, LEFT, below, head, to.map_or(Change::Delete { key }, |value| Change::Put { key, value }));
                match to {
                    Some(value) => drop(model.insert(key, value)),
                    None => drop(model.remove(&key)),
                }
            }
            let half = model.split_off(&at);
            let fences = Fences { low: at, right: None };
            let right = base(&mut memory, RIGHT_PAGE, fences, half.clone());
            let fences = Fences { low: 0, right: Some((at, RIGHT_PAGE)) };
            head = base(&mut memory, LEFT, fences, model.clone());
            let mut records = 1;
            below = 0;
            if merges {
                model.extend(half);
                below += 2;
                let merge = Delta::new(about(LEFT, below), head, Change::Merge { at, absorbed: right });
                head = write(&mut memory, &merge);
                records = 3;
            }
            let (mut known, mut known_word, known_below) = (memory.chain(LEFT, head).unwrap().merge().unwrap(), head, below);
            for &(key, to) in changes[changes.len() / 2..].iter().filter(|change| merges || change.0 < at) {
                if below == known_below + known_at {
                    (known, known_word) = (memory.chain(LEFT, head).unwrap().merge().unwrap(), head);
                }
                records += 1;
                below += 1;
                head = on(&mut memory, LEFT, below, head, to.map_or(Change::Delete { key }, |value| Change::Put { key, value }));
                match to {
                    Some(value) => drop(model.insert(key, value)),
                    None => drop(model.remove(&key)),
                }
            }
            let chain = memory.chain(LEFT, head).unwrap();
            let deltas = usize::from(below - known_below);
            prop_assert_eq!(chain.count(), records - deltas + deltas.div_ceil(CHANGES_MAX));
            let page = chain.merge().unwrap();
            prop_assert_eq!(page.records.len(), records);
            prop_assert!(page.records.iter().map(Unlinked::at).collect::<HashSet<_>>().len() == records);
            // Read from above, down to what is known.
            let mut above = Chain::new(LEFT, head);
            while let Some(word) = above.next() {
                if !above.add_known(known_word, &known) {
                    above.add(memory.find(word)).unwrap();
                }
            }
            prop_assert_eq!(above.merge().unwrap(), page.clone());
            let state = page.state;
            prop_assert_eq!(state.entries.iter().copied().collect::<BTreeMap<_, _>>(), model);
            prop_assert_eq!(state.fences.right, (!merges).then_some((at, RIGHT_PAGE)));
            prop_assert_eq!(state.about, about(LEFT, below));
        }

        /// Index terms come and go, with merges in between: whatever the page is known as from before, it comes to the same.
        #[test]
        fn a_mark_ends_with_its_entry(keys in prop::collection::vec(1u64..4, 1..16)) {
            let inner = |below| About { level: 1, ..about(LEFT, below) };
            let child = |key: u64| Pid::new(7 + key as u32, 0);
            let (mut memory, mut model) = (Memory::default(), BTreeMap::from([(0, child(0).word())]));
            let state = State { entries: vec![(0, child(0).word())], ..State::new(inner(0), Fences::ALL) };
            let mut known = vec![memory.add(CLASS, |page| state.write(page, SLOT))];
            let mut merging = None;
            for (below, key) in (1..).zip(keys) {
                let change = match merging.take() {
                    Some((key, _)) => Change::Delete { key },
                    None if model.contains_key(&key) => Change::Merging { at: key, child: child(key) },
                    None => Change::Put { key, value: child(key).word() },
                };
                match change {
                    Change::Delete { key } => drop(model.remove(&key)),
                    Change::Merging { at, child } => merging = Some((at, child)),
                    _ => drop(model.insert(key, child(key).word())),
                }
                let next = known[known.len() - 1];
                let delta = memory.chain(LEFT, next).unwrap().merge().unwrap().delta(next, inner(below), change);
                let head = write(&mut memory, &delta);
                let page = memory.chain(LEFT, head).unwrap().merge().unwrap();
                prop_assert_eq!((&page.state.merging, page.state.entries.len()), (&merging, model.len()));
                prop_assert!(page.state.entries.iter().copied().eq(model.clone()));
                for &word in &known {
                    let before = memory.chain(LEFT, word).unwrap().merge().unwrap();
                    let mut above = Chain::new(LEFT, head);
                    while let Some(next) = above.next() {
                        if !above.add_known(word, &before) {
                            above.add(memory.find(next)).unwrap();
                        }
                    }
                    prop_assert_eq!(above.merge().unwrap(), page.clone());
                }
                known.push(head);
            }
        }

        #[test]
        fn any_words_make_no_panic(words in prop::collection::vec(any::<u64>(), 12..=12), kind: u8, class in 0u8..5, count in 0u64..64) {
            let mut memory = Memory::default();
            let class = SizeClass::from_index(class).unwrap();
            let head = memory.add(class, |page| {
                page.describe(SLOT, 0, kind);
                page.fill(SLOT, HEADER_WORDS, &words[..words.len().min(class.words() - HEADER_WORDS)]);
                if class.words() > 16 {
                    page.set(SLOT, HEADER_WORDS + 4, count);
                }
            });
            let mut chain = Chain::new(LEFT, head);
            if chain.add(memory.find(head)).is_ok() && chain.next().is_none() {
                let _ = chain.merge();
            }
        }
    }

    #[test]
    fn a_chain_that_is_a_ring_or_of_another_page_is_refused() {
        let mut memory = Memory::default();
        let bottom = base(&mut memory, LEFT, Fences::ALL, [(1, 10)]);
        let head = on(&mut memory, LEFT, 1, bottom, Change::Put { key: 2, value: 20 });
        assert!(memory.chain(RIGHT_PAGE, head).is_err(), "it is of another page");
        assert_eq!(memory.chain(LEFT, head).unwrap().merge().unwrap().state.entries, [(1, 10), (2, 20)]);
        memory.0[1][HEADER_WORDS + 1] = head.0;
        assert!(memory.chain(LEFT, head).is_err(), "it leads to itself");
        // The same memory, used again.
        memory.0[1][HEADER_WORDS + 1] = bottom.0;
        memory.0[0][LOCK] += 2;
        assert!(memory.chain(LEFT, head).is_err(), "its base is gone");
    }

    #[test]
    fn a_page_that_none_can_be_above_is_refused() {
        for (level, is_refused) in [(u8::MAX - 1, false), (u8::MAX, true)] {
            let mut memory = Memory::default();
            let state = State::new(About { level, ..about(LEFT, 0) }, Fences::ALL);
            let bottom = memory.add(CLASS, |page| state.write(page, SLOT));
            assert_eq!(memory.chain(LEFT, bottom).is_err(), is_refused, "level {level}");
        }
    }

    #[test]
    fn an_index_term_that_is_deleted_ends_what_was_going_on_behind_it() {
        let mut memory = Memory::default();
        let inner = |below| About { level: 1, ..about(LEFT, below) };
        let entries = vec![(0, RIGHT_PAGE.word()), (9, Pid::new(7, 0).word())];
        let state = State { entries, ..State::new(inner(0), Fences::ALL) };
        let bottom = memory.add(CLASS, |page| state.write(page, SLOT));
        let merging = Change::Merging { at: 9, child: Pid::new(7, 0) };
        let begun = write(&mut memory, &Delta::new(inner(1), bottom, merging));
        let page = memory.chain(LEFT, begun).unwrap().merge().unwrap();
        let state = &page.state;
        assert_eq!((state.merging, state.entries.len()), (Some((9, Pid::new(7, 0))), 2));
        let ended = write(&mut memory, &Delta::new(inner(2), begun, Change::Delete { key: 9 }));
        let mut above = Chain::new(LEFT, ended);
        above.add(memory.find(ended)).unwrap();
        assert!(above.add_known(begun, &page));
        for state in [memory.chain(LEFT, ended).unwrap().merge().unwrap().state, above.merge().unwrap().state] {
            assert_eq!((state.merging, state.entries), (None, vec![(0, RIGHT_PAGE.word())]));
        }
    }
}
