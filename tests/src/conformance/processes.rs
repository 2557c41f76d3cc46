//! Compute servers in processes of their own. Each is the test's own program, told by its environment to be one.

use std::{path::PathBuf, process::Command, sync::Arc, time::Duration};

use anyhow::Context;
use farlink_children::Child;
use farlink_runtime::{
    access::Structure,
    catalog,
    fabric::{Fabric, mem::MemFabric},
    server::MemoryServer,
    wire::{Wire, decode_all},
};
use serde::{Deserialize, Serialize};

use super::{
    AccessVariant, Event, Model,
    many::{self, Common, Plan},
    scene::{self, SERVER_BYTES, SERVERS},
    variants,
    variants::Client,
    with_seeds,
};
use crate::{
    backend::{Backend, FabricProfile, fleet},
    bounded::Watchdog,
    cluster,
};

/// Tells a test program to be a compute server.
const CHILD: &str = "FARLINK_KIT_CHILD";
/// Before what a child says to its parent: the test harness says something, too.
const MARK: &str = "@kit ";
const READY: &str = "ready";
const LIMIT: Duration = Duration::from_secs(20);

/// What a child does.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    dir: PathBuf,
    /// Its place among the accesses.
    variant: usize,
    profile: FabricProfile,
    plan: Plan,
    name: String,
}

/// What a child says of an operation: its number, when, and its answer as words.
type Reported = (usize, u64, u64, Option<Vec<u64>>);

/// Histories of workers in several processes are linearizable. `child` is the path of the test that is the other side.
///
/// # Panics
/// If one is not, or the structure is not clean behind it.
pub fn processes<M: Model>(child: &str) {
    if Backend::chosen() == Backend::Verbs {
        return println!("skipped on verbs");
    }
    with_seeds::<M>("processes", &AccessVariant::ALL, |variants, seed| {
        // One after another, each with an even seed and with an odd one.
        let number = (seed / 2 % variants.len() as u64) as usize;
        let profile = scene::profiles();
        let profile = profile[(seed / 16 % profile.len() as u64) as usize];
        many::until_decided(|ops| run::<M>(child, number, profile, seed, ops).unwrap());
        true
    });
}

/// Whether it was found out that all is well.
fn run<M: Model>(child: &str, number: usize, profile: FabricProfile, seed: u64, ops: usize) -> anyhow::Result<bool> {
    let variant = variants::<M>()[number];
    let context = format!("{variant:?} and {profile:?} in processes, seed {seed}");
    let _watchdog = Watchdog::start(context.clone(), LIMIT);
    let dir = cluster::scratch()?;
    let start = |server| MemoryServer::start(&cluster::serve_options(dir.path(), server, SERVERS, SERVER_BYTES));
    let servers = (0..SERVERS).map(start).collect::<Result<Vec<_>, _>>()?;
    let serve = |server| fleet::ship_of(server, dir.path(), 1, profile, scene::registry::<M>());
    let ships = if variant.ships() { servers.iter().map(serve).collect::<Result<Vec<_>, _>>()? } else { Vec::new() };
    let fabric: Arc<dyn Fabric> = Arc::new(MemFabric::open(dir.path(), profile.options())?);
    let structure = scene::create::<M>(&fabric, variant)?;
    let filled = many::fill::<M>(&fabric, &structure, &context, seed);
    let computes = variant.computes();
    let plan = |number_of_child| Plan { number: number_of_child, seed, ops, drops: false, faulty: false };
    let task = |number_of_child| Task {
        dir: dir.path().to_owned(),
        variant: number,
        profile,
        plan: plan(number_of_child),
        name: structure.name.clone(),
    };
    let mut children =
        (0..computes).map(|number| start_child(child, &task(number))).collect::<anyhow::Result<Vec<_>>>()?;
    children.iter_mut().try_for_each(|child| child.send("go"))?;
    let mut history = filled;
    for (number, child) in children.iter_mut().enumerate() {
        let ops = many::ops_of::<M>(plan(number));
        let reported: Vec<Reported> = serde_json::from_str(&hear(child)?)?;
        for (index, begin_ns, end_ns, outcome) in reported {
            let op = ops.get(index).context("a child speaks of an operation that there is not")?.clone();
            let outcome = outcome.as_deref().map(decode_all::<M::Output>).transpose()?;
            history.push(Event { worker: number, op, outcome, begin_ns, end_ns });
        }
    }
    children.into_iter().try_for_each(Child::finish)?;
    history.extend(many::look_by::<M>(&fabric, &structure, &context));
    let decided = scene::judge::<M>(&history, &context);
    drop(ships);
    scene::check::<M>(&fabric, &context, false);
    drop((fabric, servers));
    Ok(decided)
}

fn start_child(test: &str, task: &Task) -> anyhow::Result<Child> {
    // Its path in the program, without the name of the crate.
    let test = test.split_once("::").map_or(test, |(_, path)| path);
    let mut command = Command::new(std::env::current_exe()?);
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, serde_json::to_string(task)?);
    let mut child = Child::start("a compute server", command)?;
    anyhow::ensure!(hear(&mut child)? == READY, "a compute server begins with something else");
    Ok(child)
}

/// The next thing that a child has to say.
fn hear(child: &mut Child) -> anyhow::Result<String> {
    loop {
        let line = child.receive(None)?;
        if let Some((_, said)) = line.split_once(MARK) {
            return Ok(said.to_owned());
        }
    }
}

/// The other side of [`processes`]: a compute server, if the environment says so.
///
/// # Panics
/// If it cannot do what it is to do.
pub fn child<M: Model>() {
    if let Ok(task) = std::env::var(CHILD) {
        be_child::<M>(&task).unwrap();
    }
}

fn be_child<M: Model>(task: &str) -> anyhow::Result<()> {
    let Task { dir, variant, profile, plan, name } = serde_json::from_str(task)?;
    let variant: AccessVariant = *variants::<M>().get(variant).context("there is no such variant")?;
    let fabric: Arc<dyn Fabric> = Arc::new(MemFabric::open(&dir, profile.options())?);
    let compute = Arc::new(cluster::join(&fabric, plan.seed + plan.number as u64)?);
    let worker = compute.worker()?;
    let structure: Structure = worker.block_on(catalog::open::<M::Plugin>(&worker, &name))?;
    let client = Client::<M>::new(structure, variant, None, plan.seed, false)?;
    let server = client.serve(&compute, plan.number == 0)?;
    println!("{MARK}{READY}");
    std::io::stdin().read_line(&mut String::new())?;
    let mut reported = Vec::<Reported>::new();
    for (index, event) in many::work::<M>(&compute, &client, plan, &Common::of(1)) {
        let words = |outcome: M::Output| {
            let mut words = Vec::new();
            outcome.encode(&mut words);
            words
        };
        reported.push((index, event.begin_ns, event.end_ns, event.outcome.map(words)));
    }
    client.leave(&compute)?;
    drop((worker, server));
    drop((client, compute));
    println!("{MARK}{}", serde_json::to_string(&reported)?);
    Ok(())
}
