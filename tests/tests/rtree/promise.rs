//! What a search promises holds while entries come, move and go on other threads.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farlink_offload::{
    Adaptive, CacheOptions, ComputeCache, Engine, EngineOptions, Hybrid, Policies, Remote,
    policy::{Choice, Miss, Policy},
    ship::Registry,
};
use farlink_runtime::{
    access::{Access, Region},
    one_sided::{OneSided, Proof},
    operation::Run,
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Counters,
};
use farlink_structures::rtree::{Entry, Query, RTree, RTreeOptions, Rect, Tree};
use farlink_tests::{
    backend::FabricProfile,
    bounded::Watchdog,
    cluster,
    deadlines::{Awaited, Deadlines, PATIENCE},
    fleet::Fleet,
    settings,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::entries::{Key, a_query, a_rect, key};

/// Entries that are there all the time; their payloads are the numbers below.
pub(crate) const LASTING: u64 = 300;
/// So many where they are owned, and how large the cache is: it has room for half of the tree, so that operations wait for pages, and
/// others change meanwhile what they have seen.
const OWNED: (u64, usize) = (1500, 64 << 10);

/// What a run takes at most on an idle machine, beyond what it waits for.
const LIMIT: Duration = Duration::from_secs(20);

/// How searches reach the tree in `keeps_its_promise`, and those who change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    OneSided,
    /// What searches are told is old: changes are one-sided.
    CachedInner,
    /// All are workers of the owner.
    Cached,
    /// So they are, and memory servers do some of it.
    Engine,
    /// A memory server does all of it.
    Remote,
    /// It searches the pages above the leaves.
    Hybrid,
    /// It does some of it; the rest is one-sided, at the same time.
    Adaptive,
}

impl Reach {
    const ALL: [Self; 7] =
        [Self::OneSided, Self::CachedInner, Self::Cached, Self::Engine, Self::Remote, Self::Hybrid, Self::Adaptive];

    fn owns(self) -> bool {
        matches!(self, Self::Cached | Self::Engine)
    }

    fn ships(self) -> bool {
        matches!(self, Self::Engine | Self::Remote | Self::Hybrid | Self::Adaptive)
    }

    fn placement(self) -> StructurePlacement {
        let policy = match self {
            Self::Remote => PlacementPolicy::OneServer,
            Self::Hybrid => PlacementPolicy::Leaves,
            _ => PlacementPolicy::RoundRobin,
        };
        StructurePlacement { policy, root: ServerId::new(1) }
    }
}

#[derive(Debug, Clone, Copy)]
enum Role {
    Changes(u64),
    Searches,
}

/// Ships now and then.
#[derive(Debug)]
struct NowAndThen;

impl Policy for NowAndThen {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        if miss.one_in(3) { Choice::SHIP } else { Choice::FETCH }
    }
}

/// The entries that are there all the time.
pub(crate) fn lasting<const D: usize>(seed: u64, count: u64) -> Vec<Entry<D>> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..count).map(|number| (a_rect(&mut rng, 2), number)).collect()
}

/// Entries of one writer come, move and go in waves, so that pages are split, share entries, are condensed and freed. `goes_on` is told how
/// many waves are over.
pub(crate) async fn come_move_and_go<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    (seed, number): (u64, u64),
    goes_on: impl Fn(u64) -> bool,
) {
    let mut rng = SmallRng::seed_from_u64(seed ^ (number + 1));
    let (mut there, mut payload) = (Vec::<Entry<D>>::new(), (number + 1) << 32);
    let (mut grows, mut waves) = (true, 0);
    while goes_on(waves) {
        waves += u64::from(!grows && there.is_empty());
        grows = if grows { there.len() < 400 } else { there.is_empty() };
        let rect = a_rect(&mut rng, 2);
        match rng.random_range(0..8) {
            0 if !there.is_empty() => {
                let index = rng.random_range(0..there.len());
                let (from, payload) = there[index];
                assert!(tree.update(from, payload, rect).await.unwrap());
                there[index].0 = rect;
            }
            1.. if grows => {
                payload += 1;
                tree.insert(rect, payload).await.unwrap();
                there.push((rect, payload));
            }
            _ if !there.is_empty() => {
                let entry = there.swap_remove(rng.random_range(0..there.len()));
                assert!(tree.delete(entry.0, entry.1).await.unwrap(), "{entry:?} is not there");
            }
            _ => {}
        }
    }
}

/// Every search meanwhile has each of the lasting entries once; how many there were.
pub(crate) async fn searches_meanwhile<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    (seed, lasting): (u64, &[Entry<D>]),
    goes_on: impl Fn() -> bool,
) -> u64 {
    let mut rng = SmallRng::seed_from_u64(!seed);
    let mut searches = 0;
    while goes_on() {
        let query = if rng.random() { a_query(&mut rng) } else { Query::Intersects(Rect::EVERYTHING) };
        let found = tree.search(query).all().await.unwrap();
        let mut counts = BTreeMap::<Key, u64>::new();
        found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
        for entry in lasting.iter().filter(|(rect, _)| query.matches(rect)) {
            assert!(counts.contains_key(&key(entry)), "{entry:?} is missing from {query:?}");
        }
        for (key, count) in counts {
            // What is moved to and fro may be two entries.
            let most = if key.1 < lasting.len() as u64 { 1 } else { u64::MAX };
            assert!(count <= most, "{count} of payload {} in {query:?}", key.1);
        }
        searches += 1;
    }
    searches
}

/// One worker's part, until it is over; how many searches there were.
async fn take_part<A: Run<Plugin = Tree<D>>, const D: usize>(
    access: A,
    role: Role,
    (seed, lasting): (u64, &[Entry<D>]),
    goes_on: impl Fn(u64) -> bool,
) -> u64 {
    let tree = RTree::over(access);
    match role {
        Role::Changes(number) => {
            come_move_and_go(&tree, (seed, number), goes_on).await;
            0
        }
        Role::Searches => searches_meanwhile(&tree, (seed, lasting), || goes_on(0)).await,
    }
}

fn keeps_its_promise<const D: usize>(profile: FabricProfile, reach: Reach) {
    let seed = settings::seed("promise");
    let _watch =
        Watchdog::start(format!("promise, {reach:?}, {profile:?}, FARLINK_TEST_SEED={seed}"), PATIENCE + LIMIT);
    let owns = reach.owns();
    let (count, cache_bytes) = if owns { OWNED } else { (LASTING, 256 << 10) };
    let lasting = lasting::<D>(seed, count);
    let registry = Registry::new().with::<Tree<D>>();
    let mut fleet = Fleet::start_of(2, 32 << 20, 0, profile, &registry).unwrap();
    let member = reach.ships().then(|| Arc::new(cluster::join(&fleet.fabric(), !seed).unwrap()));
    member.iter().for_each(|member| fleet.serve_as(member, &registry).unwrap());
    let computes: Vec<_> = (0..2).map(|number| cluster::join(&fleet.fabric(), seed ^ number).unwrap()).collect();
    let structure = {
        let worker = computes[0].worker().unwrap();
        worker.block_on(async {
            let options = RTreeOptions { placement: reach.placement(), ..RTreeOptions::default() };
            let tree = RTree::<_, D>::create(&worker, "promise", options).await.unwrap();
            for &(rect, payload) in &lasting {
                tree.insert(rect, payload).await.unwrap();
            }
            tree.access().context().structure.clone()
        })
    };
    let mut options = CacheOptions::new(cache_bytes);
    options.excludes_subtrees = owns;
    let cache = ComputeCache::<Tree<D>>::new(options).unwrap();
    // A tree at rest shows nothing: all go on until pages have split and merged, and a search is over.
    let directory = cluster::scratch().unwrap();
    let deadlines = Deadlines::new(Awaited { splits: true, merges: true, ..Awaited::default() }, directory.path());
    let over_at = Instant::now() + Duration::from_secs_f64(settings::from_env("FARLINK_KIT_SECONDS", 0.3));
    let searches_begun = AtomicU64::new(0);
    let is_over = |counters: &dyn Fn() -> Counters| {
        let has_searched = searches_begun.load(Ordering::Relaxed) > 1;
        deadlines.is_over(over_at, 0, counters) && (has_searched || Instant::now() > over_at + PATIENCE)
    };
    let parts = std::thread::scope(|scope| {
        let begin = |role| {
            let of_both = usize::from(matches!(role, Role::Changes(1)) && !owns);
            let (compute, structure, cache, of) = (&computes[of_both], &structure, &cache, (seed, &*lasting));
            let (is_over, searches_begun) = (&is_over, &searches_begun);
            scope.spawn(move || {
                let worker = compute.worker().unwrap();
                // What a memory server does is not counted here. Behind a wave, pages have split and merged.
                let counters = |waves| {
                    let mut counters = worker.counters();
                    if reach == Reach::Remote {
                        (counters.splits, counters.merges) = (waves, waves);
                    }
                    counters
                };
                let goes_on = |waves| match role {
                    Role::Changes(_) => !is_over(&|| counters(waves)),
                    Role::Searches => {
                        searches_begun.fetch_add(1, Ordering::Relaxed);
                        !is_over(&Counters::default)
                    }
                };
                let searches = worker.block_on(async {
                    let structure = structure.clone();
                    match (reach, role) {
                        (Reach::CachedInner, Role::Searches) => {
                            let shared = cache.share(&worker, structure, Proof::Checksum).unwrap();
                            take_part(shared, role, of, goes_on).await
                        }
                        (Reach::OneSided | Reach::CachedInner, _) => {
                            let one_sided = OneSided::new(&worker, structure, Proof::Checksum);
                            take_part(one_sided, role, of, goes_on).await
                        }
                        (Reach::Cached | Reach::Engine, _) => {
                            let owned = cache.own(&worker, structure, Region::everything()).await.unwrap();
                            if reach == Reach::Cached {
                                return take_part(owned, role, of, goes_on).await;
                            }
                            let options = EngineOptions { level_max: Some(1) };
                            let engine = Engine::new(owned, Policies::new(NowAndThen), options).unwrap();
                            take_part(engine, role, of, goes_on).await
                        }
                        (Reach::Remote, _) => take_part(Remote::new(&worker, structure), role, of, goes_on).await,
                        (Reach::Hybrid, _) => {
                            take_part(Hybrid::new(&worker, structure, Proof::Checksum), role, of, goes_on).await
                        }
                        (Reach::Adaptive, _) => {
                            let here = OneSided::new(&worker, structure.clone(), Proof::Checksum);
                            let adaptive = Adaptive::new(here, &worker, structure, Policies::new(NowAndThen));
                            take_part(adaptive, role, of, goes_on).await
                        }
                    }
                });
                (searches, worker.counters())
            })
        };
        let parts: Vec<_> = [Role::Changes(0), Role::Changes(1), Role::Searches].into_iter().map(begin).collect();
        parts.into_iter().map(|part| part.join().unwrap()).collect::<Vec<_>>()
    });
    let (mut searches, mut counts) = (0, Counters::default());
    parts.into_iter().for_each(|(some, of_one)| {
        searches += some;
        counts += of_one;
    });
    let done = fleet.counts().done;
    // With their threads go their workers, and are counted.
    fleet.servers.clear();
    member.iter().for_each(|member| counts += member.counters());
    let Counters { reads, restarts, splits, merges, .. } = counts;
    println!(
        "{searches} searches beside {splits} splits and {merges} merges, {reads} READs, {restarts} restarts: {reach:?}, {D} dimensions, \
         {profile:?}"
    );
    assert!(searches > 0 && splits > 0 && merges > 0, "the test has not tested them");
    assert!(done > 0 || !reach.ships(), "memory servers have done nothing");
    let worker = computes[0].worker().unwrap();
    worker.block_on(async {
        if owns {
            let owned = cache.own(&worker, structure.clone(), Region::everything()).await.unwrap();
            owned.close().await.unwrap();
        }
        let tree = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
        let report = tree.check().await.unwrap();
        assert!(report.is_clean(), "{report:?}");
    });
}

pub(crate) fn keeps_its_promise_in<const D: usize>() {
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        for reach in Reach::ALL {
            keeps_its_promise::<D>(profile, reach);
        }
    }
}
