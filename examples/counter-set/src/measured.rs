//! What the program must know to measure counters: what to load, and what to do with it.

use std::sync::Arc;

use farlink_bench::{GoOn, Job, Outcomes, Setting, Subject, WorkerId};
use farlink_runtime::{access::Structure, catalog::CreateOptions, error::Error, operation::Run, worker::Handle};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{Add, CounterSet, Get, Name};

/// What surely fits into the buckets, the largest of which take 2728 each.
const ENTRIES_MAX: u64 = 40_000;

/// An operation of the program.
#[derive(Debug, Clone, Copy)]
pub enum Request {
    /// Makes a counter.
    Load(Add),
    /// Adds to one.
    Add(Add),
    /// Looks at one.
    Get(Get),
}

type Requests = Box<dyn Iterator<Item = Request>>;

/// One worker's operations.
#[allow(missing_debug_implementations, reason = "it holds a function")]
pub struct Source {
    setting: Arc<Setting>,
    worker: WorkerId,
    requests: Requests,
    /// How many workloads there were: each draws other names.
    workloads: u64,
}

impl Iterator for Source {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        self.requests.next()
    }
}

fn numbered(number: u64) -> Name {
    [number, 0]
}

impl Subject for CounterSet {
    type Data = Setting;
    type Request = Request;
    type Source = Source;
    const WORKLOADS: &'static [&'static str] = &["add", "get"];
    const WORKLOADS_USUAL: usize = 2;

    fn data(setting: &Setting) -> anyhow::Result<Setting> {
        anyhow::ensure!(
            setting.entries <= ENTRIES_MAX,
            "a counter-set has room for {ENTRIES_MAX} counters: --keys {ENTRIES_MAX}"
        );
        Ok(setting.clone())
    }

    fn entries(setting: &Setting) -> u64 {
        setting.entries
    }

    async fn make(worker: &Handle, name: &str, options: &CreateOptions) -> Result<Structure, Error> {
        use farlink_runtime::access::{Access as _, Plugin as _};
        if !Self::ROOT_BYTES.contains(&options.class.bytes()) {
            let why = format!("{}; a counter-set has one of {} B", options.class.bytes(), Self::ROOT_BYTES.start());
            return Err(Error::BadOption { option: "page-bytes", why });
        }
        Ok(crate::create(worker, name, options.placement.clone()).await?.context().structure.clone())
    }

    fn source(setting: &Arc<Setting>, worker: WorkerId) -> Source {
        Source { setting: Arc::clone(setting), worker, requests: Box::new(std::iter::empty()), workloads: 0 }
    }

    fn prepare(source: &mut Source, job: Job<'_>, _go_on: GoOn<'_>) -> anyhow::Result<()> {
        let (WorkerId { index, total }, entries) = (source.worker, source.setting.entries);
        let mut rng = SmallRng::seed_from_u64(source.setting.seed ^ index ^ source.workloads << 32);
        source.workloads += 1;
        let mut any = move || numbered(rng.random_range(0..entries.max(1)));
        source.requests = match job {
            Job::Workload { name: "add", .. } => {
                Box::new(std::iter::from_fn(move || Some(Request::Add(Add { name: any(), amount: 1 }))))
            }
            Job::Workload { .. } => Box::new(std::iter::from_fn(move || Some(Request::Get(Get { name: any() })))),
            _ => {
                let share = (index..entries).step_by(usize::try_from(total)?);
                Box::new(share.map(|number| Request::Load(Add { name: numbered(number), amount: 0 })))
            }
        };
        Ok(())
    }

    async fn run<R: Run<Plugin = Self>>(run: &R, request: Request) -> Result<Outcomes, Error> {
        let outcomes = Outcomes { ops: 1, ..Outcomes::default() };
        let is_found = match request {
            Request::Load(add) => {
                run.execute(&add).await?;
                return Ok(Outcomes { inserted: 1, ..outcomes });
            }
            Request::Add(add) => run.execute(&add).await? > 0,
            Request::Get(get) => run.execute(&get).await?.is_some(),
        };
        Ok(Outcomes { found: is_found.into(), missing: (!is_found).into(), ..outcomes })
    }
}
