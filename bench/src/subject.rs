//! What the program wants of a structure to measure it, beyond its [`Plugin`].

use std::sync::Arc;

use anyhow::bail;
pub use farlink_offload::AccessMode;
use farlink_offload::ShardKey;
use farlink_runtime::access::{Access, Plugin, Structure};
use farlink_runtime::catalog::{self, CreateOptions};
use farlink_runtime::error::Error;
use farlink_runtime::one_sided::Proof;
use farlink_runtime::operation::Run;
use farlink_runtime::worker::Handle;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::counts::counts;
use crate::input::InputFile;

counts! {
    /// What operations came to. The checks at the end of a bench follow from the sums of all workers.
    #[derive(Copy)]
    pub Outcomes {
        /// Operations finished.
        ops: u64,
        /// Operations on loaded entries that found theirs.
        found: u64,
        /// Such that did not. A lost entry, unless a workload removes entries.
        missing: u64,
        /// Reads of what was inserted last that found nothing: the insert may still have been under way.
        latest_missing: u64,
        /// Entries added. Less those removed, the structure's [`Report`](farlink_runtime::report::Report) must count so many.
        inserted: u64,
        /// Inserts of new entries that found theirs present already.
        duplicates: u64,
        /// Entries taken out.
        removed: u64,
        /// Removes that found nothing.
        remove_missing: u64,
        /// Entries that scans returned.
        scanned: u64,
        /// Values that were never stored where they were found.
        wrong_values: u64,
        /// Scans that were out of order, out of range, or longer than asked.
        wrong_scans: u64,
    }
}

/// How operations choose among the loaded entries.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// Every entry alike.
    Uniform,
    /// Zipf with this exponent.
    Zipf(f64),
}

impl Distribution {
    /// The name that a measured row carries.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf(_) => "zipf",
        }
    }

    /// The exponent, where there is one.
    pub fn theta(self) -> Option<f64> {
        match self {
            Self::Uniform => None,
            Self::Zipf(theta) => Some(theta),
        }
    }
}

/// In which order entries are inserted one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum InsertOrder {
    /// Shuffled.
    Random,
    /// As the file has them, or the generator.
    Given,
    /// Sub-regions of 20,000 rectangles in random order; in each, rows from north to south, and each row from west to
    /// east.
    Rows,
}

impl InsertOrder {
    /// The name that a measured row carries.
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Given => "given",
            Self::Rows => "rows",
        }
    }
}

/// What a run works on, as the command line says. Every process of the run has the same one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// How many entries to load, if no file says.
    pub entries: u64,
    /// Where the keys to load come from, if from a file.
    pub keys_file: Option<InputFile>,
    /// Where the rectangles to load come from, if from a file.
    pub rects_file: Option<InputFile>,
    /// In which order they are inserted.
    pub insert_order: InsertOrder,
    /// How operations choose among them.
    pub distribution: Distribution,
    /// Entries that a scan asks for.
    pub scan_length: u32,
    /// Decides everything random.
    pub seed: u64,
    /// Which run on its cluster this is: two runs insert different entries.
    pub run: u32,
}

impl Setting {
    /// So many entries, and nothing else out of the ordinary.
    pub fn of_entries(entries: u64) -> Self {
        Self {
            entries,
            keys_file: None,
            rects_file: None,
            insert_order: InsertOrder::Random,
            distribution: Distribution::Zipf(0.99),
            scan_length: 100,
            seed: 1,
            run: 0,
        }
    }
}

/// A worker, counted over all processes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerId {
    /// Its number.
    pub index: u64,
    /// How many there are.
    pub total: u64,
}

/// What a worker is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job<'a> {
    /// Insert the entries to load, each once: of all workers each its share. The source ends.
    Load,
    /// Remove them again.
    RemoveAll {
        /// Counted from 1.
        round: u32,
    },
    /// Insert them once more.
    InsertAll {
        /// Counted from 1.
        round: u32,
    },
    /// A workload. The source does not end.
    Workload {
        /// Its name.
        name: &'a str,
        /// How many operations this worker will take, if that is known.
        operations: Option<u64>,
    },
}

/// Asked now and then by what takes long; an error ends it.
pub type GoOn<'a> = &'a dyn Fn() -> anyhow::Result<()>;

/// What an operation of a trace answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// A line for people.
    pub line: String,
    /// The same for scripts.
    pub fields: Vec<(&'static str, Value)>,
}

impl Answer {
    /// How many entries it has.
    pub(crate) fn results(&self) -> u64 {
        let entries = self.fields.iter().find(|(name, _)| *name == "entries");
        entries.and_then(|(_, entries)| entries.as_array()).map_or(0, |entries| entries.len() as u64)
    }
}

/// What samples of a quiet structure's answers came to, beside what the data say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Samples {
    /// The name of the check.
    pub name: &'static str,
    /// How many there were.
    pub taken: u64,
    /// Entries that they returned.
    pub returned: u64,
    /// The first wrong answer, if there was one.
    pub problem: Option<String>,
}

/// A structure that can be measured. Ordered maps are, by [`MapSubject`](crate::MapSubject).
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Subject: Plugin {
    /// What is to be loaded: keys, points, edges. Each process has it once.
    type Data: Send + Sync + 'static;
    /// One operation, ready to run.
    type Request: Copy + 'static;
    /// One worker's operations, in all jobs of a run.
    type Source: Iterator<Item = Self::Request> + 'static;

    /// The names of its workloads, for help and errors. Those that run if none is named come first.
    const WORKLOADS: &'static [&'static str];
    /// How many of those run if none is named.
    const WORKLOADS_USUAL: usize = 1;
    /// Whether it has a [bulk load](Subject::bulk_load).
    const BULK_LOADS: bool = false;
    /// Whether the entries that an operation returns are worth a column of the table.
    const RETURNS_MANY: bool = false;
    /// Whether all entries can be removed and inserted again ([`Job::RemoveAll`]).
    const HAS_ROUNDS: bool = false;

    /// Whether operations choose among the loaded entries as [`Setting::distribution`] says. Where they do not, the head and the rows of a bench
    /// name no distribution, and `--theta` is refused.
    const HAS_DISTRIBUTION: bool = false;

    /// Why it is not to be reached in this way, if it is not.
    fn refuses(mode: AccessMode) -> Option<&'static str> {
        let why = "it has no words that are swapped, so nothing of it would be cached; use cached-inner";
        mode.is_of_words().then_some(why)
    }

    /// Bytes of its root, and of other pages, if the user does not say.
    fn page_bytes() -> usize {
        1024.clamp(*Self::ROOT_BYTES.start(), *Self::ROOT_BYTES.end())
    }

    /// Reads or computes what is to be loaded. Operations are drawn in [`Subject::prepare`].
    ///
    /// # Errors
    /// What is wrong with the setting, in terms of the command line's options.
    fn data(setting: &Setting) -> anyhow::Result<Self::Data>;

    /// How many entries are to be loaded.
    fn entries(data: &Self::Data) -> u64;

    /// What the user should know of the data.
    fn remark(_data: &Self::Data) -> Option<String> {
        None
    }

    /// Whether a workload can run.
    ///
    /// # Errors
    /// If there is none of that name.
    fn require_workload(name: &str) -> anyhow::Result<()> {
        if Self::WORKLOADS.contains(&name) {
            return Ok(());
        }
        let (name, known) = (crate::units::shorten(name), Self::WORKLOADS.join(", "));
        bail!("a {} has no workload `{name}`; its workloads are {known}", Self::NAME)
    }

    /// Whether a workload removes loaded entries: then one that is not found is no loss.
    fn removes(_workload: &str) -> bool {
        false
    }

    /// Makes an empty structure.
    ///
    /// # Errors
    /// As [`catalog::create`].
    async fn make(worker: &Handle, name: &str, options: &CreateOptions) -> Result<Structure, Error> {
        let made = catalog::create::<Self>(worker, name, options, Proof::Checksum).await?;
        Ok(farlink_runtime::access::Access::context(&made).structure.clone())
    }

    /// Loads those entries that are in this part, by its number and the cut, in the order that suits the structure, which
    /// is empty, and fills pages to this share; how many.
    ///
    /// # Errors
    /// If it has no bulk load, or it fails.
    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        _access: &A,
        _data: &Self::Data,
        _part: (&ShardKey<Self::Region>, usize),
        _fill: f64,
    ) -> Result<u64, Error> {
        Err(Error::BadOption { option: "load", why: format!("bulk; a {} has no bulk load", Self::NAME) })
    }

    /// How it is divided among so many memory servers, where each has a part of it: into one part, unless it says otherwise.
    fn divide(_data: &Self::Data, _servers: usize) -> ShardKey<Self::Region> {
        ShardKey::whole()
    }

    /// How it is divided among so many compute servers, each of which owns a part: a region of one structure, if it can be owned so
    /// ([`Plugin::can_own`]), or else a structure of its own. As among memory servers, unless it says otherwise.
    fn divide_among_owners(data: &Self::Data, owners: usize) -> ShardKey<Self::Region> {
        Self::divide(data, owners)
    }

    /// An entry that is in the structure and not in this region, if there is one: for people.
    ///
    /// # Errors
    /// If the structure cannot be read.
    async fn outside<R: Run<Plugin = Self>>(_run: &R, _region: &Self::Region) -> Result<Option<String>, Error> {
        Ok(None)
    }

    /// Whether the structure, loaded by an earlier run, holds these entries, as far as samples tell.
    ///
    /// # Errors
    /// If it does not, or cannot be read.
    async fn require_loaded<R: Run<Plugin = Self>>(_run: &R, _data: &Self::Data) -> anyhow::Result<()> {
        Ok(())
    }

    /// Samples of what the structure answers, compared with brute force over the data, all of which it holds;
    /// `has_more`: and other entries. Nobody changes it meanwhile. `None` if there is nothing to compare.
    ///
    /// # Errors
    /// If the structure cannot be read.
    async fn compare<R: Run<Plugin = Self>>(
        _run: &R,
        _data: &Self::Data,
        _has_more: bool,
    ) -> Result<Option<Samples>, Error> {
        Ok(None)
    }

    /// The region that a text means.
    ///
    /// # Errors
    /// If it means none, or regions of this structure move as a whole.
    fn parse_region(_text: &str) -> anyhow::Result<Self::Region> {
        bail!("a {} is owned as a whole, so there is no region to be named: use --away-from", Self::NAME)
    }

    /// A region as [`Subject::parse_region`] takes it, or for people.
    fn show_region(region: &Self::Region) -> String {
        format!("{region:?}")
    }

    /// The operations of a worker, before it has been given a job.
    fn source(data: &Arc<Self::Data>, worker: WorkerId) -> Self::Source;

    /// Gets a job ready, with the clock stopped: all of its randomness is drawn here.
    ///
    /// # Errors
    /// If it is none for this structure; or `go_on`'s.
    fn prepare(source: &mut Self::Source, job: Job<'_>, go_on: GoOn<'_>) -> anyhow::Result<()>;

    /// Runs one operation, checks what it answers, and says what it came to.
    ///
    /// # Errors
    /// What it failed with: the run ends.
    async fn run<R: Run<Plugin = Self>>(run: &R, request: Self::Request) -> Result<Outcomes, Error>;

    /// The operation that a line of a trace means.
    ///
    /// # Errors
    /// What is wrong with the line.
    fn parse(_line: &str) -> anyhow::Result<Self::Request> {
        bail!("a {} replays no traces", Self::NAME)
    }

    /// Runs one operation of a trace.
    ///
    /// # Errors
    /// What it failed with.
    async fn answer<R: Run<Plugin = Self>>(_run: &R, _request: Self::Request) -> Result<Answer, Error> {
        Err(Error::BadOption { option: "trace", why: format!("a {} replays none", Self::NAME) })
    }
}
