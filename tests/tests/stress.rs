//! The acceptance test, for a few seconds: `FARLINK_STRESS_SECONDS` says how many without a cache,
//! `FARLINK_CACHED_SECONDS` how many through caches, and `FARLINK_CACHED_KEYS` of how many keys.

use std::path::Path;

use farlink_offload::Durability;
use farlink_tests::{
    access_under_test::{Admit, ShipChoice},
    backend::{Backend, FabricProfile, Fate, Faults},
    settings,
    stress::{self, AccessMode, Awaits, Options, Summary},
    subject::StructureName,
};

/// What fails is drawn from the seed of the run, too, and whether owners log.
fn holds(name: &str, options: Options) -> Summary {
    let seed = settings::seed(name);
    let profile = match options.profile {
        FabricProfile::Faulty(faults) => FabricProfile::Faulty(Faults { seed, ..faults }),
        profile => profile,
    };
    let logs = options.access == AccessMode::Cached && seed % 2 == 1;
    let durability = if logs { Durability::Logged } else { Durability::WriteBack };
    let options = Options { seed, profile, durability, ..options };
    let summary = stress::run(Path::new(env!("CARGO_BIN_EXE_farlink-stress")), &options).unwrap();
    println!("{name}, {durability}: {summary}");
    assert!(summary.failures().is_empty(), "{name}: {summary}\n{}", summary.failures().join("\n"));
    summary
}

/// A cache of one percent for each process.
fn cached() -> Options {
    let seconds = settings::from_env("FARLINK_CACHED_SECONDS", 0.2);
    let keys = settings::from_env("FARLINK_CACHED_KEYS", 50_000);
    Options { seconds, access: AccessMode::Cached, keys, in_flight: 4, ..Options::default() }
}

fn shared() -> Options {
    Options { access: AccessMode::CachedInner, keys: 1000, processes: 2, in_flight: 8, ..cached() }
}

#[test]
fn eight_workers_in_four_processes() {
    let seconds = settings::from_env("FARLINK_STRESS_SECONDS", 0.5);
    holds("eight_workers_in_four_processes", Options { seconds, ..Options::default() });
}

#[test]
fn eight_workers_share_a_cache_of_one_percent() {
    for admit in [Admit::Frequency, Admit::Dex, Admit::Always] {
        let name = format!("a cache of one percent, {admit:?}");
        holds(&name, Options { processes: 1, workers: 8, admit, ..cached() });
    }
}

#[test]
fn eight_workers_drop_operations_on_a_cache_of_one_percent() {
    holds("cached, dropping", Options { processes: 1, workers: 8, drop_one_in: 20, ..cached() });
}

#[test]
fn workers_ship_what_is_not_cached() {
    let seconds = settings::from_env("FARLINK_SHIPPED_SECONDS", 0.2);
    let shipping = Options { seconds, workers: 4, servers: 2, keys: 20_000, ..cached() };
    let always = Options { processes: 1, ship: Some(ShipChoice::Always), drop_one_in: 20, ..shipping.clone() };
    // Few pages: everybody wants the same ones.
    let cost = Options { processes: 2, workers: 2, ship: Some(ShipChoice::Cost), admit: Admit::Dex, ..shipping };
    let cost = Options { keys: 10_000, profile: FabricProfile::Weak, ..cost };
    for (name, options) in [("shipping always", always), ("shipping by cost", cost)] {
        let summary = holds(name, options);
        assert!(summary.peer_report.counter("shipped") > 0, "{name}: {summary}");
    }
}

#[test]
fn three_owners_of_one_tree() {
    holds("three owners", Options { processes: 3, ..cached() });
    // Few enough that the pages at the cuts fill up.
    holds("three owners of a small tree", Options { processes: 3, keys: 20_000, ..cached() });
}

/// A tree that grows tenfold, at the hands of four owners, over a fabric that tears and over one that fails as well: nothing is
/// refused, and no page of those that they share is lost. `FARLINK_OWNERS_KEYS` says how many keys, `FARLINK_CACHED_SECONDS` how long.
#[test]
fn four_owners_insert_into_one_tree() {
    let keys = settings::from_env("FARLINK_OWNERS_KEYS", 10_000);
    let grows = Options { processes: 4, workers: 1, keys, grows: true, ..cached() };
    let faults = Faults { seed: 0, one_in: 200, fate: Fate::Any, is_weak: false };
    for (name, profile) in [("nasty", FabricProfile::Nasty), ("faulty", FabricProfile::Faulty(faults))] {
        let summary = holds(&format!("four owners insert, {name}"), Options { profile, ..grows.clone() });
        let before = grows.initial().len() as u64;
        assert!(summary.check.entries > before, "the tree has not grown from {before}: {summary}");
    }
}

/// One comes and has nothing at first, one leaves in the middle of it: operations that go to the owners do not notice.
#[test]
fn owners_come_and_leave_while_ranges_move() {
    let moving = Options { processes: 4, workers: 1, keys: 10_000, route: true, move_every_ms: 20, ..cached() };
    holds("ranges move", moving.clone());
    let profile = FabricProfile::Faulty(Faults { seed: 0, one_in: 200, fate: Fate::Any, is_weak: false });
    holds("ranges move, inserts, faulty", Options { grows: true, profile, ..moving });
}

#[test]
fn two_processes_share_everything_but_inner_pages() {
    holds("shared inner", shared());
    holds("shared inner, dropping, weak", Options { drop_one_in: 20, profile: FabricProfile::Weak, ..shared() });
    holds("shared inner, three waits", Options { three_waits: true, keys: 300, ..shared() });
    // More inner pages than the cache holds.
    let summary = holds("shared inner, evicting", Options { keys: 60_000, ..shared() });
    assert!(summary.peer_report.counter("cache_evictions") > 0, "{summary}");
}

/// Memory servers carry out all operations, or search the inner levels. Only over files: others do not ship here.
fn shipping(access: AccessMode) -> Option<Options> {
    let options = Options { access, seconds: cached().seconds, processes: 2, in_flight: 4, ..Options::default() };
    (options.backend == Backend::MemProcesses).then_some(options)
}

#[test]
fn memory_servers_in_processes_carry_out_all_operations() {
    let Some(coarse) = shipping(AccessMode::Coarse) else { return };
    holds("coarse", coarse.clone());
    holds("coarse, weak, dropping", Options { profile: FabricProfile::Weak, drop_one_in: 20, ..coarse.clone() });
    holds("coarse, skip list", Options { structure: StructureName::SkipList, ..coarse });
}

#[test]
fn memory_servers_in_processes_search_the_inner_levels() {
    let Some(hybrid) = shipping(AccessMode::Hybrid) else { return };
    holds("hybrid", hybrid.clone());
    holds("hybrid, weak, dropping", Options { profile: FabricProfile::Weak, drop_one_in: 20, keys: 300, ..hybrid });
}

#[test]
fn memory_servers_in_processes_carry_out_some_operations_on_a_shared_tree() {
    let Some(adaptive) = shipping(AccessMode::Adaptive) else { return };
    holds("adaptive", Options { keys: 300, drop_one_in: 20, ..adaptive.clone() });
    holds("adaptive, skip list", Options { structure: StructureName::SkipList, ..adaptive });
}

/// A skip list takes more READs for an operation, and has one owner.
fn skiplist() -> Options {
    Options { structure: StructureName::SkipList, seconds: cached().seconds, ..Options::default() }
}

#[test]
fn a_skip_list_in_four_processes() {
    holds("skip list", skiplist());
    holds(
        "skip list, dropping, weak",
        Options { drop_one_in: 20, profile: FabricProfile::Weak, keys: 300, ..skiplist() },
    );
}

#[test]
fn a_skip_list_of_one_owner() {
    let cache_bytes = Some(256 << 10);
    let owned =
        Options { access: AccessMode::Cached, processes: 1, workers: 4, keys: 20_000, in_flight: 4, ..skiplist() };
    let owned = Options { cache_bytes, ..owned };
    holds("skip list, owned", Options { drop_one_in: 20, ..owned.clone() });
    holds("skip list, owned, as DEX admits", Options { admit: Admit::Dex, ..owned });
}

#[test]
fn two_processes_share_a_skip_list_but_for_inner_nodes() {
    holds("skip list, shared inner", Options { structure: StructureName::SkipList, ..shared() });
    let evicting = Options { keys: 20_000, drop_one_in: 20, awaits: Awaits::AllButTornReads, ..shared() };
    holds("skip list, shared inner, evicting", Options { structure: StructureName::SkipList, ..evicting });
}
