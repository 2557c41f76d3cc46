//! Several compute servers in one process, their workers on threads, over memory that behaves badly: every kind of fabric,
//! proof and page size, with operations that are dropped in mid-flight. `FARLINK_THREADS_SECONDS` says how long for each.

use std::{
    path::Path,
    rc::Rc,
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use farlink_runtime::{fabric::Fabric, one_sided::OneSided};
use farlink_structures::btree::BTree;
use farlink_tests::{
    backend::{Cluster, Manners},
    bounded::Watchdog,
    cluster,
    drive::{Tally, drive},
    history::{Flush, History, Recorder},
    peer::Tale,
    settings,
    stress::{Options, Summary, TREE},
    workload::Workload,
};

/// Runs the workload that the processes of the acceptance test run, as threads.
fn run(options: &Options) -> anyhow::Result<Summary> {
    let fabric = Cluster::of_this_run(options.servers, 16 << 20, options.manners)?;
    cluster::create_tree(&fabric, TREE, options.tree())?;
    let (mut history, mut tale) = (History::new(), Tale::default());
    let begun = Instant::now();
    for (part, did) in run_computes(&fabric, options)? {
        history.merge(part);
        tale.add(&did);
    }
    Summary::judge(&fabric, options, history, tale, begun.elapsed().as_secs_f64())
}

fn run_computes(fabric: &Arc<dyn Fabric>, options: &Options) -> anyhow::Result<Vec<(History, Tale)>> {
    let start = Barrier::new((options.processes * options.workers) as usize);
    std::thread::scope(|scope| {
        let computes: Vec<_> = (0..options.processes)
            .map(|process| {
                let start = &start;
                scope.spawn(move || run_compute(fabric, options, process, start))
            })
            .collect();
        computes.into_iter().map(|thread| thread.join().expect("no compute server panics")).collect()
    })
}

fn run_compute(
    fabric: &Arc<dyn Fabric>,
    options: &Options,
    process: u32,
    start: &Barrier,
) -> anyhow::Result<(History, Tale)> {
    let compute = cluster::join(fabric, options.seed ^ u64::from(process))?;
    let work = options.work(process, Path::new(""));
    let run_worker = |client: u32| {
        let worker = compute.worker()?;
        let tree = worker.block_on(BTree::<OneSided>::open(&worker, TREE, options.tree().proof))?;
        let recorder = Rc::new(Recorder::new(Vec::new(), client, Flush::WhenFull)?);
        let workload = Workload::new(&work.workload(options.seed), client)?;
        start.wait();
        let deadline = Instant::now() + Duration::from_secs_f64(options.seconds);
        let tally = drive(&worker, &tree, workload, &recorder, work.plan(), move || Instant::now() >= deadline)?;
        drop((tree, worker));
        let recorder = Rc::into_inner(recorder).expect("no operation outlives its worker");
        anyhow::Ok((History::decode(&recorder.finish()?)?, tally))
    };
    let (history, tally) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.workers)
            .map(|index| {
                let run_worker = &run_worker;
                scope.spawn(move || run_worker(work_client(options, process, index)))
            })
            .collect();
        let (mut history, mut total) = (History::new(), Tally::default());
        for worker in workers {
            let (part, tally) = worker.join().expect("no worker panics")?;
            history.merge(part);
            total += tally;
        }
        anyhow::Ok((history, total))
    })?;
    let counters = compute.counters();
    drop(compute);
    Ok((history, Tale::new(tally, counters)))
}

fn work_client(options: &Options, process: u32, index: u32) -> u32 {
    process * options.workers + index
}

fn holds(name: &str, options: Options) {
    let options = Options {
        seconds: settings::from_env("FARLINK_THREADS_SECONDS", 2.0),
        processes: 2,
        workers: 2,
        seed: settings::seed(name),
        ..options
    };
    let _watchdog = Watchdog::start(name, Duration::from_secs_f64(options.seconds + 120.0));
    let summary = run(&options).unwrap();
    println!("{name}: {summary}");
    assert!(summary.failures().is_empty(), "{name}: {summary}\n{}", summary.failures().join("\n"));
    assert_eq!(summary.tale.dropped > 0, options.drop_one_in > 0, "{summary}");
}

#[test]
fn a_nasty_fabric() {
    holds("nasty", Options { keys: 300, ..Options::default() });
}

#[test]
fn a_nasty_fabric_and_larger_pages() {
    holds("nasty, 1024 B", Options { page_bytes: 1024, ..Options::default() });
}

#[test]
fn a_weak_fabric() {
    holds("weak", Options { manners: Manners::Weak, keys: 300, ..Options::default() });
}

#[test]
fn readers_that_wait_three_times() {
    for (name, manners) in [("nasty, three waits", Manners::Nasty), ("weak, three waits", Manners::Weak)] {
        holds(name, Options { manners, three_waits: true, keys: 300, ..Options::default() });
    }
}

#[test]
fn operations_dropped_in_mid_flight() {
    let dropping = Options { drop_one_in: 20, keys: 300, ..Options::default() };
    holds("nasty, dropping", dropping.clone());
    holds("nasty, dropping, 1024 B", Options { page_bytes: 1024, keys: 1000, ..dropping.clone() });
    holds("weak, dropping", Options { manners: Manners::Weak, ..dropping.clone() });
    holds("nasty, dropping, three waits", Options { three_waits: true, ..dropping });
}
