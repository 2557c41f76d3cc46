//! The acceptance test without processes: compute servers and memory servers are threads of this one. It costs less, so that
//! many short runs can be made.

use std::{
    sync::{
        Arc, Barrier, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farlink_children::Scratch;
use farlink_runtime::fabric::{Fabric, faulty};

use crate::{
    backend::Backend,
    bounded::Watchdog,
    cluster,
    deadlines::PATIENCE,
    fleet::Fleet,
    history::History,
    peer::{self, BREAKS, PeerReport, Work},
    stress::{self, Options, Summary},
    subject::Subject,
};

/// One run at a time: each has more threads than small machines have cores, and in its time has to get to splits and merges.
static TURN: Mutex<()> = Mutex::new(());

/// Where requests fail and there are real connections, they all break after so long, and again after twice as long each time. It takes
/// a second until a break is noticed, and more on a slow machine: with a fixed pause, no operation would ever end there.
const FIRST_BREAK: Duration = Duration::from_millis(500);

/// Runs the workload that the processes of the acceptance test run, as threads.
///
/// # Errors
/// If it cannot be run. What did not hold is in the summary.
pub fn run<S: Subject>(options: &Options) -> anyhow::Result<Summary> {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let limit = Duration::from_secs_f64(options.seconds + 120.0) + PATIENCE;
    let _watchdog = Watchdog::start(format!("{:?} with seed {}", options.access, options.seed), limit);
    let Fleet { servers, cluster } =
        Fleet::start_with(options.servers, options.server_bytes(), options.server_threads(), options.profile)?;
    let (fabric, sound) = (cluster.fabric(), cluster.sound_fabric());
    let histories = Scratch::inside(&std::env::temp_dir())?;
    let breaks_before = faulty::breaks();
    let works = stress::prepare::<S>(&sound, options, histories.path())?;
    let begin = Barrier::new(works.len());
    let begun = Instant::now();
    let is_over = AtomicBool::new(false);
    let pull_cables = || {
        let mut pause = FIRST_BREAK;
        while !is_over.load(Ordering::Acquire) {
            std::thread::park_timeout(pause);
            cluster.break_connections();
            pause *= 2;
        }
    };
    let peer_reports = std::thread::scope(|scope| {
        let has_cables = options.profile.faults().is_some() && Backend::chosen() == Backend::Verbs;
        let cables = has_cables.then(|| scope.spawn(pull_cables));
        let computes: Vec<_> =
            works.iter().map(|work| scope.spawn(|| run_compute::<S>(&fabric, options, work, &begin))).collect();
        let peer_reports = computes.into_iter().map(|thread| thread.join().expect("no compute server panics"));
        let peer_reports: Vec<_> = peer_reports.collect();
        is_over.store(true, Ordering::Release);
        cables.iter().for_each(|cables| cables.thread().unpark());
        peer_reports
    });
    let seconds = begun.elapsed().as_secs_f64();
    let mut peer_report = PeerReport::default();
    for did in peer_reports {
        peer_report.add(&did?);
    }
    // Theirs together: all are in this process.
    peer_report.counters.insert(BREAKS.into(), faulty::breaks() - breaks_before);
    // They leave the cluster, and give back what they hold.
    drop(servers);
    let mut history = History::read_dir(histories.path())?;
    history.set_initial(options.initial());
    Summary::judge(&sound, options, history, peer_report, seconds)
}

fn run_compute<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    options: &Options,
    work: &Work,
    begin: &Barrier,
) -> anyhow::Result<PeerReport> {
    // Everybody comes to the barrier once, whatever fails.
    let prepare = || {
        let compute = cluster::join(fabric, options.seed)?;
        let client = peer::open_client::<S>(&compute, stress::TREE, options.proof(), work.reach)?;
        anyhow::Ok((compute, client))
    };
    let (compute, client) = prepare().inspect_err(|_| {
        begin.wait();
    })?;
    let wait = || {
        begin.wait();
        Ok(())
    };
    let tally = peer::run_work(work, options.seed, &client, &compute, &Arc::new(AtomicBool::new(false)), wait)?;
    peer::close(tally, &client, compute)
}
