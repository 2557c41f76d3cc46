//! What is recorded, until it is written.

use hashbrown::HashMap;

use crate::{ptr::Link, redo::PageRecord};

/// Records that are not on their way yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) records: Vec<PageRecord>,
    pub(super) words: usize,
    /// Where the last one of each page is.
    last: HashMap<Link, usize>,
}

impl Pending {
    /// The last one of a page.
    pub(super) fn last(&self, page: Link) -> Option<&PageRecord> {
        self.last.get(&page).map(|&index| &self.records[index])
    }

    pub(super) fn add(&mut self, record: PageRecord) {
        let PageRecord { page, version, ref what, .. } = record;
        let last = self.last.get(&page).copied();
        if let Some(index) = last.filter(|&index| what.is_whole() && self.records[index].version <= version) {
            // A batch counts as a whole.
            self.words = self.words + record.words() - self.records[index].words();
            self.records[index] = record;
            return;
        }
        if last.is_none_or(|index| self.records[index].version < version) {
            self.last.insert(page, self.records.len());
        }
        self.words += record.words();
        self.records.push(record);
    }

    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.last.clear();
        self.words = 0;
    }
}
