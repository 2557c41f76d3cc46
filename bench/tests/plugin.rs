//! A structure of another crate, which is no ordered map, has the whole program; and a bench ends when what it needs dies.
//!
//! This test is such a program: with a command it does what `farlink` does with it, without one it runs its tests.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farlink_bench::{GoOn, Job, Outcomes, Setting, Subject, WorkerId, plugin};
use farlink_runtime::access::*;
use farlink_runtime::error::Error;
use farlink_runtime::operation::{Run, retry};
use farlink_runtime::report::Report;
use farlink_runtime::wire::wire;

/// Sums in the words of one page, which anybody adds to.
#[derive(Debug, Clone, Copy, Default)]
struct Sums;

/// The words of the page that are the framework's.
const FIRST: usize = 4;
/// How often something was added; the sums come after it.
const COUNT: usize = FIRST;
const SUMS: usize = 8;

/// Adds to a sum.
#[derive(Debug, Clone, Copy)]
struct Add {
    sum: u64,
    by: u64,
}

wire!(struct Add { sum, by });

impl Operation for Add {
    type Output = u64;
    type Plugin = Sums;
    const NAME: &'static str = "add";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Sums>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let page = access.open(from).await?;
        let index = FIRST + 1 + self.sum as usize % SUMS;
        let add = |pages: &mut A::PagesMut<'_>| {
            let words = pages.page(Pages::<()>::ONLY);
            let (sum, count) = (words.word(index).wrapping_add(self.by), words.word(COUNT) + 1);
            drop(words);
            pages.set(Pages::<()>::ONLY, index, sum);
            pages.set(Pages::<()>::ONLY, COUNT, count);
            sum
        };
        Ok(access.change(Pages::current(page), add).await?.0)
    }
}

impl Plugin for Sums {
    const NAME: &'static str = "sums";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 128..=128;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn overlap(_page: &(impl Words + ?Sized), (): &()) -> Overlap {
        Overlap::Inside
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 0, 1);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Add>();
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        let Context { worker, structure, .. } = access.context();
        let read = async || access.open(Start::Root).await?.read(|words| words.word(COUNT));
        let mut report = Report { entries: retry(worker, read).await?, pages_by_level: vec![1], ..Report::default() };
        report.audit(worker, structure, &[structure.root].into()).await?;
        Ok(report)
    }
}

/// One worker's additions.
struct Additions {
    next: u64,
    left: Option<u64>,
    panics: bool,
    share: u64,
}

impl Iterator for Additions {
    type Item = Add;

    fn next(&mut self) -> Option<Add> {
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(1)?;
        }
        self.next += 1;
        assert!(!(self.panics && self.next > 50), "a planted panic");
        Some(Add { sum: self.next, by: 1 })
    }
}

impl Subject for Sums {
    type Data = u64;
    type Request = Add;
    type Source = Additions;
    const WORKLOADS: &'static [&'static str] = &["add", "panic"];

    fn data(setting: &Setting) -> anyhow::Result<u64> {
        Ok(setting.entries)
    }

    fn entries(data: &u64) -> u64 {
        *data
    }

    fn source(data: &Arc<u64>, worker: WorkerId) -> Additions {
        let share = **data / worker.total + u64::from(worker.index < **data % worker.total);
        // The last worker of all is the one that panics.
        Additions { next: 0, left: None, panics: worker.index + 1 == worker.total, share }
    }

    fn prepare(source: &mut Additions, job: Job<'_>, _go_on: GoOn<'_>) -> anyhow::Result<()> {
        source.next = 0;
        source.left = matches!(job, Job::Load).then_some(source.share);
        source.panics &= !matches!(job, Job::Workload { name: "add", .. });
        if matches!(job, Job::Load) {
            let panics = std::mem::take(&mut source.panics);
            PANICS.with(|cell| cell.set(panics));
        } else if matches!(job, Job::Workload { name: "panic", .. }) {
            source.panics = PANICS.with(std::cell::Cell::get);
        }
        Ok(())
    }

    async fn run<R: Run<Plugin = Self>>(run: &R, request: Add) -> Result<Outcomes, Error> {
        run.perform(&request).await?;
        Ok(Outcomes { ops: 1, inserted: 1, ..Outcomes::default() })
    }
}

thread_local! {
    static PANICS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}
