//! Requests that fail, connections that break, memory that is refused: over the `faulty` fabric every structure, however it is
//! reached, does what it promises. Runs end, histories are linearizable, no page is left locked, and none is lost.
//!
//! `FARLINK_FAILING_RUNS` says how many runs of each kind, each with another seed; `FARLINK_FAILING_SECONDS` how long each;
//! `FARLINK_FAILING_KEYS` how many keys the owners of trees have (below 3,500 their caches have room for all).

use farlink_offload::Durability;
use farlink_runtime::{error::Error, page::SizeClass, ptr::RemotePtr};
use farlink_tests::{
    access_under_test::ShipChoice,
    backend::{Backend, Cluster, FabricProfile, Fate, Faults},
    cluster, in_process, settings,
    stress::{AccessMode, Awaits, Options},
    subject::{StructureName, Subject},
    test_every_structure,
};

/// One request in so many fails.
const ONE_IN: u32 = 200;

fn holds<S: Subject>(name: &str, options: &Options) {
    let seed = settings::seed(name);
    for run in 0..settings::from_env("FARLINK_FAILING_RUNS", 1) {
        for (index, fate) in Fate::ALL.into_iter().enumerate() {
            let seed = seed.wrapping_add(run);
            let logs = options.access == AccessMode::Cached && (seed >> index) % 2 == 1;
            let faults = Faults { seed, one_in: ONE_IN, fate, is_weak: (run + index as u64) % 2 == 1 };
            let options = Options {
                structure: S::WHICH,
                seconds: settings::from_env("FARLINK_FAILING_SECONDS", 0.05),
                workers: 2,
                in_flight: 4,
                servers: 2,
                profile: FabricProfile::Faulty(faults),
                seed,
                durability: if logs { Durability::Logged } else { Durability::WriteBack },
                awaits: Awaits::Nothing,
                ..options.clone()
            };
            let summary =
                in_process::run::<S>(&options).unwrap_or_else(|error| panic!("{name}, {faults:?}: {error:?}"));
            println!("{name}, {fate:?}, {}: {summary}", options.durability);
            assert!(summary.wrongs().is_empty(), "{name}, {faults:?}: {summary}\n{}", summary.wrongs().join("\n"));
        }
    }
}

fn shared<S: Subject>(access: AccessMode) -> Options {
    // Few keys: they meet.
    Options { access, processes: 2, keys: 300, structure: S::WHICH, ..Options::default() }
}

fn owned<S: Subject>() -> Options {
    // A skip list has one owner, and a node for each key.
    let trees = || (2, settings::from_env("FARLINK_FAILING_KEYS", 5_000));
    let (processes, keys) = if S::WHICH == StructureName::SkipList { (1, 3_000) } else { trees() };
    let cache_bytes = Some(64 << 10);
    Options { access: AccessMode::Cached, processes, keys, cache_bytes, ..Options::default() }
}

fn one_sided<S: Subject>() {
    holds::<S>("one-sided", &shared::<S>(AccessMode::OneSided));
    holds::<S>("one-sided, three waits", &Options { three_waits: true, ..shared::<S>(AccessMode::OneSided) });
}

fn dropped_in_mid_flight<S: Subject>() {
    holds::<S>("one-sided, dropping", &Options { drop_one_in: 20, ..shared::<S>(AccessMode::OneSided) });
}

fn cached_and_dropped<S: Subject>() {
    holds::<S>("cached, dropping", &Options { drop_one_in: 20, ..owned::<S>() });
}

fn cached<S: Subject>() {
    holds::<S>("cached", &owned::<S>());
}

fn cached_inner_pages<S: Subject>() {
    holds::<S>("shared inner", &shared::<S>(AccessMode::CachedInner));
}

/// One that reads nothing before it changes what it remembers.
fn cached_mapping<S: Subject>() {
    let options = shared::<S>(AccessMode::CachedMapping);
    holds::<S>("cached mapping", &options);
    holds::<S>("cached mapping, dropping", &Options { drop_one_in: 20, ..options });
}

fn shipped<S: Subject>() {
    holds::<S>("coarse", &shared::<S>(AccessMode::Coarse));
}

fn searched_by_memory_servers<S: Subject>() {
    holds::<S>("hybrid", &shared::<S>(AccessMode::Hybrid));
}

fn cached_and_shipped<S: Subject>() {
    holds::<S>("shipping", &Options { ship: Some(ShipChoice::Always), ..owned::<S>() });
}

test_every_structure!(
    one_sided,
    dropped_in_mid_flight,
    cached_and_dropped,
    cached,
    cached_inner_pages,
    shipped,
    searched_by_memory_servers,
    cached_and_shipped;
    bwtree: one_sided, dropped_in_mid_flight, cached_inner_pages, cached_mapping, shipped, searched_by_memory_servers,
);

/// Buffers that are on their way at a time, as the parts of one batch of an owner's log; and how often.
const AT_A_TIME: usize = 8;
const ROUNDS: u64 = 40;

/// A connection that breaks costs one more WRITE for each that was under way, not one for each of their words.
#[test]
fn a_buffer_is_written_again_as_a_whole() {
    let seed = settings::seed("written again");
    let faults = Faults { seed, one_in: 30, fate: Fate::Lost, is_weak: false };
    let bytes = 4 << 20;
    let fabric = Cluster::start(Backend::chosen(), 1, bytes, FabricProfile::Faulty(faults)).unwrap();
    let compute = cluster::join(&fabric, seed).unwrap();
    let worker = compute.worker().unwrap();
    let words = SizeClass::of_bytes(16 << 10).unwrap().words();
    // In chunks that nobody leases.
    let free = RemotePtr::from_raw(bytes - (AT_A_TIME * words * 8) as u64).unwrap();
    let before = worker.counters().writes;
    worker
        .block_on(async {
            // Memory is refused, too.
            let mut spare = Vec::new();
            while spare.len() < 3 * AT_A_TIME {
                spare.extend(worker.buffer(words));
            }
            drop(spare);
            for round in 0..ROUNDS {
                let mut posted = Vec::new();
                for index in 0..AT_A_TIME {
                    let mut buffer = worker.buffer(words)?;
                    buffer.fill(round);
                    posted.push(worker.write_private(free.word(index * words), buffer));
                }
                for posted in posted {
                    posted.await?;
                }
            }
            for index in 0..AT_A_TIME {
                let found = worker.read(free.word(index * words), words).await?;
                assert!(found.iter().all(|&word| word == ROUNDS - 1));
            }
            Ok::<_, Box<Error>>(())
        })
        .unwrap();
    let writes = worker.counters().writes - before;
    let asked = ROUNDS * AT_A_TIME as u64;
    assert!((asked + 1..asked * 4).contains(&writes), "{writes} WRITEs for {asked}");
}
