//! Several compute servers in one process, their workers on threads, over memory that behaves badly: every kind of fabric,
//! proof and page size, with operations that are dropped in mid-flight. `FARLINK_THREADS_SECONDS` says how long for each;
//! on a slow machine it takes as long as it takes to see splits, merges and conflicts.

use std::{
    path::Path,
    rc::Rc,
    sync::{Arc, Barrier, Mutex, PoisonError},
    time::{Duration, Instant},
};

use farlink_runtime::{fabric::Fabric, worker::Handle};
use farlink_structures::map::Map;
use farlink_tests::{
    backend::{Cluster, Manners},
    bounded::Watchdog,
    cluster,
    drive::{Tally, drive},
    history::{Flush, History, Recorder},
    patience::Patience,
    peer::Tale,
    settings,
    stress::{Options, Summary, TREE},
    subject::Subject,
    test_every_structure,
    workload::Workload,
};

/// Runs the workload that the processes of the acceptance test run, as threads.
fn run<S: Subject>(options: &Options) -> anyhow::Result<Summary> {
    let fabric = Cluster::of_this_run(options.servers, 16 << 20, options.manners)?;
    cluster::create::<S>(&fabric, TREE, options.page_bytes, options.proof())?;
    let (mut history, mut tale) = (History::new(), Tale::default());
    let begun = Instant::now();
    for (part, did) in run_computes::<S>(&fabric, options)? {
        history.merge(part);
        tale.add(&did);
    }
    Summary::judge(&fabric, options, history, tale, begun.elapsed().as_secs_f64())
}

fn run_computes<S: Subject>(fabric: &Arc<dyn Fabric>, options: &Options) -> anyhow::Result<Vec<(History, Tale)>> {
    let start = Barrier::new((options.processes * options.workers) as usize);
    let patience = Arc::new(Patience::new(options.awaited()));
    std::thread::scope(|scope| {
        let computes: Vec<_> = (0..options.processes)
            .map(|process| {
                let (start, patience) = (&start, &patience);
                scope.spawn(move || run_compute::<S>(fabric, options, process, start, patience))
            })
            .collect();
        computes.into_iter().map(|thread| thread.join().expect("no compute server panics")).collect()
    })
}

fn run_compute<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    options: &Options,
    process: u32,
    start: &Barrier,
    patience: &Arc<Patience>,
) -> anyhow::Result<(History, Tale)> {
    let compute = cluster::join(fabric, options.seed ^ u64::from(process))?;
    let work = options.work(process, Path::new(""));
    let run_worker = |client: u32| {
        let worker = compute.worker()?;
        let tree = worker.block_on(Map::<S, _>::open(&worker, TREE, options.proof()))?;
        let recorder = Rc::new(Recorder::new(Vec::new(), client, Flush::WhenFull)?);
        let workload = Workload::new(&work.workload(options.seed), client)?;
        start.wait();
        let deadline = Instant::now() + Duration::from_secs_f64(options.seconds);
        let (counting, patience) = (Handle::clone(&worker), Arc::clone(patience));
        let is_over = move || patience.is_over(deadline, || counting.counters());
        let tally = drive(&worker, &tree, workload, &recorder, work.plan(), is_over)?;
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

/// One run at a time: each has more threads than small machines have cores, and in its time has to get to splits and merges.
static TURN: Mutex<()> = Mutex::new(());

fn holds<S: Subject>(name: &str, options: Options) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let options = Options {
        structure: S::WHICH,
        seconds: settings::from_env("FARLINK_THREADS_SECONDS", 2.0),
        processes: 2,
        workers: 2,
        seed: settings::seed(name),
        ..options
    };
    let _watchdog = Watchdog::start(name, Duration::from_secs_f64(options.seconds + 120.0));
    let summary = run::<S>(&options).unwrap();
    println!("{name}: {summary}");
    assert!(summary.failures().is_empty(), "{name}: {summary}\n{}", summary.failures().join("\n"));
    assert_eq!(summary.tale.dropped > 0, options.drop_one_in > 0, "{summary}");
}

fn a_nasty_fabric<S: Subject>() {
    holds::<S>("nasty", Options { keys: 300, ..Options::default() });
}

fn a_nasty_fabric_and_larger_pages<S: Subject>() {
    holds::<S>("nasty, 1024 B", Options { page_bytes: 1024, ..Options::default() });
}

fn a_weak_fabric<S: Subject>() {
    holds::<S>("weak", Options { manners: Manners::Weak, keys: 300, ..Options::default() });
}

fn readers_that_wait_three_times<S: Subject>() {
    for (name, manners) in [("nasty, three waits", Manners::Nasty), ("weak, three waits", Manners::Weak)] {
        holds::<S>(name, Options { manners, three_waits: true, keys: 300, ..Options::default() });
    }
}

fn operations_dropped_in_mid_flight<S: Subject>() {
    let dropping = Options { drop_one_in: 20, keys: 300, ..Options::default() };
    holds::<S>("nasty, dropping", dropping.clone());
    holds::<S>("nasty, dropping, 1024 B", Options { page_bytes: 1024, keys: 1000, ..dropping.clone() });
    holds::<S>("weak, dropping", Options { manners: Manners::Weak, ..dropping.clone() });
    holds::<S>("nasty, dropping, three waits", Options { three_waits: true, ..dropping });
}

test_every_structure!(
    a_nasty_fabric,
    a_nasty_fabric_and_larger_pages,
    a_weak_fabric,
    readers_that_wait_three_times,
    operations_dropped_in_mid_flight,
);
