//! What a check of a structure found.

use std::{collections::HashSet, fmt};

use crate::{
    audit::{self, Audit},
    error::Error,
    ptr::{Link, RemotePtr},
    structure::Structure,
    worker::Handle,
};

/// Problems listed; more are only counted.
const PROBLEMS_MAX: usize = 100;

/// Something wrong with a structure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The page where it shows.
    pub page: RemotePtr,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}: {}", self.page, self.what)
    }
}

/// What the check of a structure found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Pages of each level, the lowest first.
    pub pages_by_level: Vec<u64>,
    /// Entries at level 0.
    pub entries: u64,
    /// Bytes of all pages, its descriptor included.
    pub bytes: u64,
    /// Broken invariants: the first hundred.
    pub problems: Vec<Problem>,
    /// How many broken invariants there are.
    pub problem_count: u64,
    /// What the cluster's memory holds besides.
    pub audit: Audit,
    /// Whether pages could not be read, so that not all was seen.
    pub is_partial: bool,
}

impl Report {
    /// Whether every invariant holds, and no page is leaked or lost.
    pub fn is_clean(&self) -> bool {
        let Audit { leaked, reached_but_free, .. } = &self.audit;
        self.problem_count == 0 && leaked.is_empty() && reached_but_free.is_empty() && self.audit.lost() == 0
    }

    /// How many pages are leaked; unknown where pages could not be read, because others may lie behind them.
    pub fn leaked(&self) -> Option<usize> {
        (!self.is_partial).then_some(self.audit.leaked.len())
    }

    /// Levels: in a tree, the READs of a lookup.
    pub fn height(&self) -> usize {
        self.pages_by_level.len()
    }

    /// All pages of the structure.
    pub fn pages(&self) -> u64 {
        self.pages_by_level.iter().sum()
    }

    /// Adds a page that cannot be read.
    pub fn add_unreadable(&mut self, page: RemotePtr, why: &impl fmt::Display) {
        self.is_partial = true;
        self.add(page, format!("cannot be read: {why}"));
    }

    /// Looks for pages of the structure besides those that were reached. What is behind an unreadable page cannot be told from
    /// what is lost, so then none counts as leaked.
    ///
    /// # Errors
    /// If the fabric fails.
    pub async fn audit(
        &mut self,
        worker: &Handle,
        structure: &Structure,
        reached: &HashSet<RemotePtr>,
    ) -> Result<(), Error> {
        self.audit = audit::audit(worker, structure.id, structure.descriptor, reached).await?;
        self.bytes += structure.descriptor.and_then(Link::remote).map_or(0, |(_, class)| class.bytes() as u64);
        if self.is_partial {
            self.audit.leaked.clear();
        }
        Ok(())
    }

    /// Adds a problem.
    pub fn add(&mut self, page: RemotePtr, what: impl Into<String>) {
        self.problem_count += 1;
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(Problem { page, what: what.into() });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What compute servers may hold is not lost.
    #[test]
    fn a_report_of_lost_pages_is_not_clean() {
        let of =
            |held, has_holders| Report { audit: Audit { held, has_holders, ..Audit::default() }, ..Report::default() };
        assert!(of(0, false).is_clean() && of(7, true).is_clean());
        assert!(!of(1, false).is_clean());
    }

    /// Nobody knows what is behind a page that cannot be read.
    #[test]
    fn what_is_leaked_is_unknown_where_a_page_cannot_be_read() {
        let mut report = Report::default();
        assert_eq!(report.leaked(), Some(0));
        report.add_unreadable(RemotePtr::from_raw(64).unwrap(), &"it is damaged");
        assert_eq!(report.leaked(), None);
    }
}
