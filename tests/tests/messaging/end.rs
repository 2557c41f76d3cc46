//! Servers that end in good order, under load: `FARLINK_END_ROUNDS` of them, each after `FARLINK_END_REQUESTS` at most.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use farlink_runtime::{
    compute::ComputeServer,
    fabric::{Error as FabricError, mem::MemOptions},
    messaging::{Error as MessagingError, Kind, Priority, ServeMessages},
    worker::Handle,
};
use farlink_tests::{
    cluster::{FAST, NASTY, WEAK},
    settings,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::scene::{ABOVE_100, COUNT, ECHO, LATER, SLOWLY, SMALL, Scene, TALLY, scene, server};

const THREADS: usize = 2;
const IN_FLIGHT: usize = 12;
const TASKS: u64 = (THREADS * IN_FLIGHT) as u64;
/// Longer than any answer takes.
const PATIENT: Duration = Duration::from_secs(60);

/// What became of requests.
#[derive(Debug, Default)]
struct Outcomes {
    /// Tasks that have a channel.
    opened: AtomicU64,
    answered: AtomicU64,
    missing: AtomicU64,
}

/// Sends until the server is missing.
async fn send_all(worker: Handle, seed: u64, outcomes: Arc<Outcomes>) {
    let mut rng = StdRng::seed_from_u64(seed);
    let channel = worker.channel_with(server(0), ABOVE_100).await.expect("the server ends when all have come");
    outcomes.opened.fetch_add(1, Ordering::Relaxed);
    loop {
        let priority = if rng.random() { Priority::Latency } else { Priority::BestEffort };
        let words = [1, 30, 3000, 20_000][rng.random_range(0..4usize)];
        let (kind, params): (Kind, Vec<u64>) = match rng.random_range(0..5) {
            0 => (ECHO, vec![7; words]),
            1 => (COUNT, vec![words as u64]),
            2 => (LATER, vec![7; words]),
            3 => (SLOWLY, vec![7; words]),
            _ => (TALLY, Vec::new()),
        };
        let count = match channel.request_words(kind, &params, priority).await {
            Ok(_) => &outcomes.answered,
            Err(MessagingError::Fabric(FabricError::ServerMissing { .. })) => {
                outcomes.missing.fetch_add(1, Ordering::Relaxed);
                break;
            }
            Err(error) => panic!("{kind:?} of {} words, {priority:?}: {error}", params.len()),
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn work(compute: &ComputeServer, seed: u64, outcomes: &Arc<Outcomes>) {
    let worker = compute.worker().unwrap();
    let task = |task: u64| worker.spawn(send_all(Handle::clone(&worker), seed ^ task << 8, Arc::clone(outcomes)));
    let tasks: Vec<_> = (0..IN_FLIGHT as u64).map(task).collect();
    worker.block_on(async {
        for task in tasks {
            task.await;
        }
    });
}

/// How many requests were not taken.
fn ends(options: MemOptions, seed: u64, requests_max: u64) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    let serve = ServeMessages { end_wait: PATIENT, ..ServeMessages::default() };
    let Scene { seen, mut messages, cluster, fabric, .. } = scene(1, options, SMALL, &serve);
    let compute = farlink_tests::cluster::join(&fabric, seed).unwrap();
    let outcomes = Arc::new(Outcomes::default());
    let (handled_min, begun) = (rng.random_range(0..requests_max), Instant::now());
    std::thread::scope(|scope| {
        let (ended, has_ended) = mpsc::channel();
        for thread in 0..THREADS as u64 {
            let (ended, compute, outcomes) = (ended.clone(), &compute, &outcomes);
            scope.spawn(move || {
                work(compute, seed ^ thread << 32, outcomes);
                ended.send(()).unwrap();
            });
        }
        drop(ended);
        let is_under_way =
            || outcomes.opened.load(Ordering::Relaxed) == TASKS && seen.handled.load(Ordering::Relaxed) >= handled_min;
        while !is_under_way() && begun.elapsed() < PATIENT {
            std::thread::yield_now();
        }
        messages.clear();
        (0..THREADS).for_each(|_| has_ended.recv().expect("a worker failed: see above"));
    });
    drop(cluster);
    let (handled, answered) = (seen.handled.load(Ordering::Relaxed), outcomes.answered.load(Ordering::Relaxed));
    assert_eq!(handled, answered, "seed {seed}: as many were taken as were answered");
    outcomes.missing.load(Ordering::Relaxed)
}

/// What it has taken it answers; of the rest it says that it has not taken it, so that it can be sent elsewhere.
#[test]
fn a_server_that_ends_leaves_no_outcome_unknown() {
    let seed = settings::seed("ends");
    let rounds: u64 = settings::from_env("FARLINK_END_ROUNDS", 6);
    let requests_max = settings::from_env("FARLINK_END_REQUESTS", 2000);
    let mut missing = 0;
    for round in 0..rounds {
        let options = [FAST, NASTY, WEAK][round as usize % 3];
        missing += ends(options, seed.wrapping_add(round), requests_max);
    }
    assert_eq!(missing, TASKS * rounds, "the last request of each task is not taken");
}
