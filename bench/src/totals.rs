//! The run's totals: what all phases came to, and the checks that follow from it.
//!
//! The workers' own counts say how many entries the structure must hold at the end, and which outcomes cannot happen in a
//! structure that is right: a loaded key that is gone although nothing removes keys, a value under the wrong key, a new key
//! that was there already.

use crate::report::CheckRow;
use crate::subject::Outcomes;

/// What a run did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Totals {
    total: Outcomes,
    /// Whether some workload removes entries: then entries may be missing.
    may_miss: bool,
}

impl Totals {
    /// No totals yet.
    pub(crate) fn new(may_miss: bool) -> Self {
        Self { total: Outcomes::default(), may_miss }
    }

    /// Whether the run itself may have removed what it misses.
    pub(crate) fn may_miss(&self) -> bool {
        self.may_miss
    }

    /// Enters what all workers did in one phase. A bulk load counts as that many inserts.
    pub(crate) fn enter(&mut self, phase: &Outcomes) {
        self.total += *phase;
    }

    /// How many entries the structure must hold now; `None` if more were removed than ever inserted.
    pub(crate) fn entries(&self) -> Option<u64> {
        self.total.inserted.checked_sub(self.total.removed)
    }

    /// The checks: `found_entries` is what the structure itself says, if it could be asked.
    pub(crate) fn checks(&self, found_entries: Option<u64>) -> Vec<CheckRow> {
        let total = &self.total;
        let entries = found_entries.map(|found| {
            let entries = match self.entries() {
                Some(expected) => CheckRow::equal("entries", expected, found),
                None => CheckRow::new("entries", Some("more keys were removed than inserted".to_owned()))
                    .count("found", found),
            };
            entries.count("inserted", total.inserted).count("removed", total.removed)
        });

        let missing = total.missing + total.remove_missing;
        let lost = (missing > 0 && !self.may_miss).then(|| format!("{missing} loaded keys were not found"));
        let present = CheckRow::new("keys-present", lost)
            .count("found", total.found)
            .count("missing", missing)
            .count("latest_missing", total.latest_missing);

        let twice = (total.duplicates > 0).then(|| format!("{} new keys were there already", total.duplicates));
        let new =
            CheckRow::new("inserts-new", twice).count("inserted", total.inserted).count("duplicates", total.duplicates);

        let wrong = (total.wrong_values > 0).then(|| format!("{} values belong to other keys", total.wrong_values));
        let values = CheckRow::new("values", wrong)
            .count("seen", total.found + total.removed + total.scanned)
            .count("wrong", total.wrong_values);

        let unsound = (total.wrong_scans > 0)
            .then(|| format!("{} scans were out of order, out of range or too long", total.wrong_scans));
        let scans = CheckRow::new("scans", unsound).count("entries", total.scanned).count("wrong", total.wrong_scans);

        entries.into_iter().chain([present, new, values, scans]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(may_miss: bool, found: u64, outcomes: Outcomes) -> Vec<String> {
        let mut totals = Totals::new(may_miss);
        totals.enter(&Outcomes { inserted: 100, ..Outcomes::default() });
        totals.enter(&outcomes);
        totals.checks(Some(found)).into_iter().filter(|check| !check.ok).map(|check| check.name).collect()
    }

    #[test]
    fn a_clean_run_passes() {
        let clean = Outcomes { inserted: 5, removed: 3, found: 9, latest_missing: 2, ..Outcomes::default() };
        assert!(failed(false, 102, clean).is_empty());
    }

    #[test]
    fn each_fault_fails_its_check() {
        let none = Outcomes::default();
        assert_eq!(failed(false, 99, none), ["entries"]);
        assert_eq!(failed(false, 0, Outcomes { removed: 101, ..none }), ["entries"]);
        assert_eq!(failed(false, 100, Outcomes { missing: 1, ..none }), ["keys-present"]);
        assert_eq!(failed(false, 100, Outcomes { remove_missing: 1, ..none }), ["keys-present"]);
        assert!(failed(true, 100, Outcomes { missing: 1, ..none }).is_empty());
        assert_eq!(failed(false, 100, Outcomes { duplicates: 1, ..none }), ["inserts-new"]);
        assert_eq!(failed(false, 100, Outcomes { wrong_values: 1, ..none }), ["values"]);
        assert_eq!(failed(false, 100, Outcomes { wrong_scans: 1, ..none }), ["scans"]);
    }
}
