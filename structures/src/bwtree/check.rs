//! The checker: every page of every level along its right links, what the pages above say of them, the mapping table, and records
//! that nothing leads to. What is half-done, because a process died or gave up in the middle, is no fault: others go on from it.

use std::collections::{HashMap, HashSet};

use farlink_runtime::{access::*, error::Error, operation::retry, report::Report};

use super::{
    Bw,
    page::{Found, View, find},
    record::Pid,
    table,
};

/// Nobody may change the tree meanwhile.
pub(super) async fn check<A: Access<Plugin = Bw>>(access: &A) -> Result<Report, Error> {
    let Context { worker, structure, .. } = access.context();
    retry(worker, async || access.open(Start::Root).await.map(drop)).await?;
    let mut check = Check { report: Report::default(), reached: HashSet::from([structure.root]) };
    check.report.bytes = structure.class.bytes() as u64;
    match table::pages(access).await {
        Ok(pages) => pages.into_iter().filter_map(Link::remote).for_each(|(at, class)| {
            check.reached.insert(at);
            check.report.bytes += class.bytes() as u64;
        }),
        Err(interrupt) => check.report.add_unreadable(structure.root, &interrupt),
    }
    // What the pages of the level above lead to, by number: with which low fence.
    let mut expected = HashMap::from([(Pid::ROOT, 0)]);
    let mut first = Some(Pid::ROOT);
    let mut level: Option<u8> = None;
    while let Some(pid) = first.take() {
        let row = check.row(access, pid, level, &mut expected).await;
        for (pid, low) in expected.drain() {
            if let Err(interrupt) = check.passed(access, pid, low, &row).await {
                check.report.add_unreadable(structure.root, &interrupt);
            }
        }
        check.report.pages_by_level.insert(0, row.len() as u64);
        // Counted down, so that it ends where damaged pages lead to each other in a ring.
        level = level.or(row.first().map(|page| page.level())).and_then(|level| level.checked_sub(1));
        if level.is_none() {
            break;
        }
        for page in row.iter().filter(|page| page.level() > 0) {
            for (index, &(key, _)) in page.state.entries.iter().enumerate() {
                match page.child(index) {
                    Ok(child) if expected.insert(child, key).is_some() => {
                        check.report.add(page.shown_at(), "more than one entry leads to a page")
                    }
                    Ok(child) => first = first.or(Some(child)),
                    Err(interrupt) => check.report.add_unreadable(page.shown_at(), &interrupt),
                }
            }
        }
    }
    let Check { mut report, reached } = check;
    report.audit(worker, structure, &reached).await?;
    Ok(report)
}

struct Check {
    report: Report,
    reached: HashSet<RemotePtr>,
}

impl Check {
    fn reach(&mut self, page: &Unlinked) {
        if !self.reached.insert(page.at()) {
            self.report.add(page.at(), "more than one link leads to it");
        }
        self.report.bytes += page.class().bytes() as u64;
    }

    /// A page that is reached over the left link or from the first entry above. One that is being merged, and is reached so, still
    /// has its records to itself.
    async fn read<A: Access<Plugin = Bw>>(&mut self, access: &A, pid: Pid) -> Result<View, Interrupt> {
        let page = match find(access, pid).await? {
            Found::Page(page) => page,
            Found::Removed(removed) => {
                self.reach(&removed.head);
                removed.content(access).await?
            }
            Found::Gone => {
                return Err(Interrupt::stale(access.context().structure.root, "a link leads to a page that is gone"));
            }
        };
        page.records.iter().for_each(|record| self.reach(record));
        Ok(page)
    }

    /// The pages of a level from the first to the last. Takes those out that were expected.
    async fn row<A: Access<Plugin = Bw>>(
        &mut self,
        access: &A,
        first: Pid,
        level: Option<u8>,
        expected: &mut HashMap<Pid, u64>,
    ) -> Vec<View> {
        let (mut row, mut pid, mut low) = (Vec::new(), first, 0);
        loop {
            let page = match self.read(access, pid).await {
                Ok(page) => page,
                Err(interrupt) => {
                    self.report.add_unreadable(access.context().structure.root, &interrupt);
                    return row;
                }
            };
            let (at, fences) = (page.shown_at(), page.state.fences);
            if level.is_some_and(|level| level != page.level()) || fences.low != low {
                self.report.add(at, format!("has level {} and {fences:?}, not {level:?} and {low}", page.level()));
            }
            if expected.remove(&pid).is_some_and(|key| key != low) {
                self.report.add(at, "the page above leads to it from another key");
            }
            if page.level() == 0 {
                self.report.entries += page.state.entries.len() as u64;
            }
            row.push(page);
            match fences.right {
                Some((high, right)) if high > low => (low, pid) = (high, right),
                Some(_) => break self.report.add(at, "its high fence is not above its low fence"),
                None => break,
            }
        }
        row
    }

    /// A page that an entry leads to, and no page of its level: its merge is not finished.
    async fn passed<A: Access<Plugin = Bw>>(
        &mut self,
        access: &A,
        pid: Pid,
        low: u64,
        row: &[View],
    ) -> Result<(), Interrupt> {
        let is_held = row
            .iter()
            .any(|page| page.state.fences.low < low && page.state.fences.high().is_none_or(|high| low < high));
        match find(access, pid).await? {
            Found::Removed(removed) if is_held => self.reach(&removed.head),
            Found::Gone if is_held => {}
            _ => self.report.add(
                access.context().structure.root,
                format!("an entry of key {low} leads to {pid:?}, which is no page of its level"),
            ),
        }
        Ok(())
    }
}
