//! The commands of the program.

use std::io::{self, Write as _};

use anyhow::Context as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::server::{MemoryServer, ServeOptions};
use farlink_structures::BTree;

use crate::args::{BenchArgs, CheckArgs, FabricChoice, ServeArgs};
use crate::bench;
use crate::cluster::{self, Cluster as OwnCluster};
use crate::host;
use crate::inspect::{self, Cluster};
use crate::keys::KeySpace;
use crate::place::Place;
use crate::plan::{Load, Plan};
use crate::report::Reporter;
use crate::serve::{self, StopSignals, announce_ready};
use crate::trace::{self, Step, answer_line};
use crate::{compute, driver, verbs, work};

/// `farlink serve`.
pub(crate) fn serve(args: &ServeArgs) -> anyhow::Result<()> {
    args.validate()?;
    let Some(dir) = args.dir.clone().filter(|_| args.fabric == FabricChoice::Mem) else { return verbs::serve(args) };
    let signals = StopSignals::watch()?;
    let server = MemoryServer::start(&ServeOptions {
        dir: dir.clone(),
        server: args.server as usize,
        servers: args.servers as usize,
        bytes: args.bytes,
        ephemeral: args.ephemeral,
    })?;
    let shipping = match args.threads {
        0 => None,
        _ => Some(serve::ship(&server, &dir, args.threads)?),
    };
    announce_ready(&mut io::stdout(), args.server)?;
    signals.wait();
    // Leaves the cluster before its memory goes.
    drop(shipping);
    drop(server);
    Ok(())
}

/// `farlink check`.
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<()> {
    let cluster = Cluster::open(&Place::new(&args.connect, &args.verbs)?)?;
    let mut reporter = Reporter::new(io::stdout().lock(), args.json);
    if let Some(tree) = &args.tree {
        reporter.check(&cluster.check(tree)?.0)?;
        return reporter.all_held();
    }
    let structures = cluster.structures()?;
    if structures.is_empty() {
        reporter.note("there are no trees in this cluster")?;
    }
    for structure in structures {
        if inspect::is_tree(&structure) {
            reporter.check(&cluster.check(&structure.name)?.0)?;
        } else {
            eprintln!("farlink: `{}` is of kind {}, which this program cannot check", structure.name, structure.kind);
        }
    }
    reporter.all_held()
}

/// `farlink compute`: the bench is told what went wrong, and reports it. Answers whether all went well.
pub(crate) fn compute() -> anyhow::Result<bool> {
    let stop = host::watch_for_stop()?;
    compute::obey(&mut io::stdin().lock(), &mut io::stdout(), &stop)
}

/// `farlink bench`. Everything that a user can get wrong comes to light before anything is started.
pub(crate) fn bench(args: &BenchArgs) -> anyhow::Result<()> {
    let mut plan = args.plan()?;
    let there = args.connect.as_ref().map(|address| Place::new(address, &args.verbs)).transpose()?;
    let steps = args.trace.as_deref().map(trace::read).transpose()?;
    let (keys, duplicates_dropped) = work::key_space(&plan.keys)?;
    if duplicates_dropped > 0 {
        eprintln!("farlink: {duplicates_dropped} duplicate keys dropped, {} left", keys.loaded());
    }
    let keys = args.loads_keys().then_some(keys);
    if plan.access.caches() {
        let loaded = keys.as_ref().map_or(0, KeySpace::loaded);
        plan.cache_bytes = args.cache_bytes(loaded).or_else(|| Some(plan.default_cache_bytes(loaded)));
    }
    if steps.is_some() {
        plan.mixes.clear();
        plan.rounds = 0;
    }
    let (place, own) = match there {
        Some(place) => (place, None),
        None => {
            let count = keys.as_ref().map_or(0, KeySpace::loaded);
            let bytes = args.server_bytes.unwrap_or_else(|| cluster::default_server_bytes(count, plan.servers));
            let own = OwnCluster::start(plan.servers, bytes)?;
            (Place::Folder(own.dir().to_owned()), Some(own))
        }
    };
    let result = bench_on(plan, keys.as_ref(), steps.as_deref(), &place, own.is_some(), args.json);
    let stopped = own.map_or(Ok(()), OwnCluster::stop);
    result.and(stopped)
}

/// The bench, once there is a cluster.
fn bench_on(
    mut plan: Plan,
    keys: Option<&KeySpace>,
    steps: Option<&[Step]>,
    place: &Place,
    alone: bool,
    json: bool,
) -> anyhow::Result<()> {
    let cluster = Cluster::open(place)?;
    let opened = cluster.open_or_create(&plan.tree, plan.page_bytes)?;
    (plan.servers, plan.page_bytes, plan.run) = (cluster.servers(), opened.page_bytes, opened.run);
    if let (Some(keys), 1..) = (keys, opened.entries) {
        cluster.require_loaded(&plan.tree, keys)?;
        plan.load = Load::Found;
    }
    let Some(steps) = steps else {
        let loaded = keys.map_or(0, KeySpace::loaded);
        let mut reporter = Reporter::new(io::stdout(), json);
        let processes = cluster::start_compute(plan.processes)?;
        bench::run(&plan, loaded, place, processes, (&cluster, alone), &mut reporter)?;
        return reporter.all_held();
    };
    // Standard output is for the answers alone.
    let mut reporter = Reporter::new(io::stderr(), false);
    if let Some(keys) = keys {
        let processes = cluster::start_compute(plan.processes)?;
        bench::run(&plan, keys.loaded(), place, processes, (&cluster, alone), &mut reporter)?;
    }
    replay(&plan, place, steps)?;
    reporter.check(&cluster.final_check(&plan.tree, alone)?.0)?;
    reporter.all_held()
}

/// Replays a trace, one operation after the other, and prints what each answers.
fn replay(plan: &Plan, place: &Place, steps: &[Step]) -> anyhow::Result<()> {
    let compute = ComputeServer::join(plan.fabric(place)?, ComputeOptions::default())?;
    let worker = compute.worker()?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    worker.block_on(async {
        let tree = BTree::open(&worker, &plan.tree, plan.validation.proof()).await?;
        for (number, step) in (1u64..).zip(steps) {
            let answer = driver::replay(&tree, *step).await.with_context(|| format!("operation {number}, `{step}`"))?;
            writeln!(out, "{}", answer_line(*step, &answer))?;
        }
        anyhow::Ok(())
    })?;
    Ok(out.flush()?)
}
