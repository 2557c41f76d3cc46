//! Several compute servers in one process, their workers on threads, and memory servers of several threads, over memory that
//! behaves badly: histories are linearizable, and what is left is sound. `FARLINK_THREADS_SECONDS` says how long for each.

use std::{
    path::Path,
    rc::Rc,
    sync::{Arc, Barrier, Mutex, PoisonError},
    time::{Duration, Instant},
};

use farlink_runtime::{compute::ComputeServer, one_sided::OneSided, worker::Handle};
use farlink_structures::map::Map;
use farlink_tests::{
    backend::Manners,
    bounded::Watchdog,
    cluster,
    drive::Tally,
    fleet::Fleet,
    history::{Flush, History, Recorder},
    patience::{PATIENCE, Patience},
    peer::Tale,
    reach::{Reach, Station},
    settings,
    stress::{Access, Options, Summary, TREE},
    subject::Subject,
    test_every_structure,
    workload::Workload,
};

fn run<S: Subject>(options: &Options) -> anyhow::Result<Summary> {
    let Fleet { servers, cluster } =
        Fleet::start(options.servers, 16 << 20, options.server_threads, options.manners.options())?;
    let fabric = cluster.fabric();
    cluster::create_at::<S>(&fabric, TREE, options.page_bytes, options.proof(), options.access.placed())?;
    let (mut history, mut tale) = (History::new(), Tale::default());
    let begun = Instant::now();
    let start = Barrier::new((options.processes * options.workers) as usize);
    let patience = Arc::new(Patience::new(options.awaited()));
    let parts = std::thread::scope(|scope| {
        let computes: Vec<_> = (0..options.processes)
            .map(|process| {
                let (start, fabric, patience) = (&start, &fabric, &patience);
                let compute = move || {
                    let compute = cluster::join(fabric, options.seed ^ u64::from(process))?;
                    run_compute::<S>(compute, options, process, start, patience)
                };
                scope.spawn(compute)
            })
            .collect();
        computes.into_iter().map(|thread| thread.join().expect("no compute server panics")).collect::<Vec<_>>()
    });
    for part in parts {
        let (part, did) = part?;
        history.merge(part);
        tale.add(&did);
    }
    let seconds = begun.elapsed().as_secs_f64();
    // They leave the cluster, and give back what they hold.
    drop(servers);
    Summary::judge(&fabric, options, history, tale, seconds)
}

fn run_compute<S: Subject>(
    compute: ComputeServer,
    options: &Options,
    process: u32,
    start: &Barrier,
    patience: &Arc<Patience>,
) -> anyhow::Result<(History, Tale)> {
    let work = options.work(process, Path::new(""));
    let reach = if options.access == Access::Coarse { Reach::Coarse } else { Reach::Hybrid };
    let run_worker = |client: u32| {
        let worker = compute.worker()?;
        let tree = worker.block_on(Map::<S, OneSided>::open(&worker, TREE, options.proof()))?;
        let sent = Station::<S>::new(tree.structure().clone(), options.proof(), reach)?.tree(&worker)?;
        worker.block_on(sent.connect())?;
        let recorder = Rc::new(Recorder::new(Vec::new(), client, Flush::WhenFull)?);
        let workload = Workload::new(&work.workload(options.seed), client)?;
        start.wait();
        let deadline = Instant::now() + Duration::from_secs_f64(options.seconds);
        let (counting, patience) = (Handle::clone(&worker), Arc::clone(patience));
        let stop = move || patience.is_over(deadline, || counting.counters());
        let tally = sent.drive(&worker, workload, &recorder, work.plan(), stop)?;
        drop((sent, tree, worker));
        let recorder = Rc::into_inner(recorder).expect("no operation outlives its worker");
        anyhow::Ok((History::decode(&recorder.finish()?)?, tally))
    };
    let (mut history, mut total) = (History::new(), Tally::default());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.workers)
            .map(|index| {
                let run_worker = &run_worker;
                scope.spawn(move || run_worker(process * options.workers + index))
            })
            .collect();
        for worker in workers {
            let (part, tally) = worker.join().expect("no worker panics")?;
            history.merge(part);
            total += tally;
        }
        anyhow::Ok(())
    })?;
    let counters = compute.counters();
    drop(compute);
    Ok((history, Tale::new(total, counters)))
}

/// One run at a time: each has more threads than small machines have cores.
static TURN: Mutex<()> = Mutex::new(());

fn holds<S: Subject>(name: &str, options: Options) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let options = Options {
        structure: S::WHICH,
        seconds: settings::from_env("FARLINK_THREADS_SECONDS", 1.0),
        processes: 2,
        workers: 2,
        servers: 2,
        keys: 300,
        seed: settings::seed(name),
        ..options
    };
    let _watchdog = Watchdog::start(name, Duration::from_secs_f64(options.seconds + 120.0) + PATIENCE);
    let summary = run::<S>(&options).unwrap();
    println!("{name}: {summary}");
    assert!(summary.failures().is_empty(), "{name}: {summary}\n{}", summary.failures().join("\n"));
    assert_eq!(summary.tale.dropped > 0, options.drop_one_in > 0, "{summary}");
}

fn all_is_sent<S: Subject>() {
    let coarse = Options { access: Access::Coarse, ..Options::default() };
    holds::<S>("coarse, nasty", coarse.clone());
    holds::<S>("coarse, fast, dropping", Options { manners: Manners::Fast, drop_one_in: 20, ..coarse });
}

fn inner_levels_are_searched_where_they_are<S: Subject>() {
    let hybrid = Options { access: Access::Hybrid, ..Options::default() };
    holds::<S>("hybrid, weak", Options { manners: Manners::Weak, ..hybrid.clone() });
    holds::<S>("hybrid, nasty, dropping", Options { drop_one_in: 20, ..hybrid });
}

test_every_structure!(all_is_sent, inner_levels_are_searched_where_they_are);
