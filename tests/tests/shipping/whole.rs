//! Operations that are shipped whole: where their pages are, and what is done here because a memory server cannot.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
    thread,
    time::Duration,
};

use farlink_offload::{
    Adaptive, CacheOptions, ComputeCache, Hybrid, MappingCache, Policies, Remote,
    policy::{Always, Choice, Miss, Policy},
    ship::{ShipOptions, ShipServer},
};
use farlink_runtime::{
    access::{Link, PageRef, Plugin, Structure},
    error::Error,
    fabric::listener::ListenOptions,
    one_sided::{OneSided, Proof},
    operation::Run,
    page::SizeClass,
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeOptions, Tree},
    bwtree::{Bw, BwTree, BwTreeOptions},
    map::{KeyRange, Map, OrderedMap},
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST},
    fleet::{self, Fleet},
    here, settings,
};

const KEYS: u64 = 3000;

fn always(worker: &Worker, tree: &BTree<OneSided<Tree>>) -> BTree<Adaptive<OneSided<Tree>>> {
    let structure = tree.structure().clone();
    let here = OneSided::new(worker, structure.clone(), Proof::Checksum);
    BTree::over(Adaptive::new(here, worker, structure, Policies::new(Always)))
}

/// How many leaves are on each of three memory servers.
async fn leaves_by_server(tree: &BTree<OneSided<Tree>>) -> Result<[usize; 3], Error> {
    let (mut to_visit, mut leaves) = (vec![tree.structure().root_link()], [0; 3]);
    while let Some(link) = to_visit.pop() {
        let page = tree.access().read_page(link).await.expect("nobody changes it");
        if page.level() == 0 {
            leaves[page.at().server().index()] += 1;
            continue;
        }
        let words = page.into_words();
        to_visit.extend(Tree::links(&*words).map(|slot| Link::from_word(words[slot])));
    }
    Ok(leaves)
}

/// Its own compute server becomes the owner of what a memory server reads for it: the answer is no older than what the owner has answered.
#[test]
fn what_is_read_there_as_an_owner_comes_is_read_anew() {
    let _watch = Watchdog::start("read anew", Duration::from_secs(120));
    let fleet = Fleet::start(1, 8 << 20, 1, FAST).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    let made = worker.block_on(BTree::create(&worker, "read", BTreeOptions::default())).unwrap();
    let structure = made.structure().clone();
    worker.block_on(made.insert(10, 0)).unwrap();
    let remote = BTree::over(Remote::new(&worker, structure.clone()));
    let hybrid = BTree::over(Hybrid::new(&worker, structure.clone(), Proof::Checksum));
    let adaptive = always(&worker, &made);
    let read = async |way| match way {
        "remote" => remote.get(10).await,
        "remote, a scan" => Ok(remote.range(10..).take(1).await?.first().map(|&(_, value)| value)),
        "hybrid" => hybrid.get(10).await,
        _ => adaptive.get(10).await,
    };
    let mut last = 0;
    for what in ["remote", "remote, a scan", "hybrid", "adaptive"] {
        for gives_up in [false, true] {
            // The way there is open.
            assert_eq!(worker.block_on(read(what)).unwrap(), Some(last), "{what}");
            let done = fleet.counts().done;
            let mut reading = pin!(read(what));
            assert!(reading.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(), "{what}");
            // A search is not counted: it goes on from here.
            while fleet.counts().done == done && what != "hybrid" {
                worker.turn();
                thread::yield_now();
            }
            let cache = ComputeCache::new(CacheOptions::new(1 << 20)).unwrap();
            let owned = worker.block_on(cache.own(&worker, structure.clone(), KeyRange::ALL)).unwrap();
            let tree = BTree::over(owned);
            worker.block_on(tree.update(10, last + 1)).unwrap();
            last += 1;
            if gives_up {
                worker.block_on(tree.access().close()).unwrap();
            }
            match worker.block_on(reading) {
                Err(Error::Owned { owner, .. }) if !gives_up => assert_eq!(owner, compute.owner()),
                Ok(found) if gives_up => assert_eq!(found, Some(last), "{what}"),
                other => panic!("{what}, gives up {gives_up}: {other:?}"),
            }
            worker.block_on(tree.access().close()).unwrap();
        }
    }
    let owned = ComputeCache::new(CacheOptions::new(1 << 20)).unwrap();
    let owned = BTree::over(worker.block_on(owned.own(&worker, structure.clone(), KeyRange::ALL)).unwrap());
    worker.block_on(owned.update(10, last + 1)).unwrap();
    // For who says so, that is no matter.
    let old = [
        worker.block_on(BTree::over(Remote::new(&worker, structure.clone()).beside_owners()).get(10)),
        worker.block_on(BTree::over(Hybrid::new(&worker, structure.clone(), Proof::Checksum).beside_owners()).get(10)),
        worker.block_on(BTree::over(adaptive.access().clone().beside_owners()).get(10)),
    ];
    assert!(old.iter().all(|read| matches!(read, Ok(Some(value)) if *value == last)), "{old:?}");
}

/// New pages are where the structure's pages belong, whoever makes them.
#[test]
fn a_memory_server_places_pages_as_the_structure_says() {
    let _watch = Watchdog::start("placed", Duration::from_secs(120));
    let fleet = Fleet::start(3, 8 << 20, 1, FAST).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    let made = async |name, placement| {
        let options = BTreeOptions { page_bytes: 256, placement, root: ServerId::new(1), ..BTreeOptions::default() };
        let tree = BTree::create(&worker, name, options).await?;
        let shipped = always(&worker, &tree);
        for key in 0..KEYS {
            shipped.insert(key, key).await?;
        }
        assert_eq!(shipped.access().counts().shipped, KEYS);
        let report = tree.check().await?;
        assert!(report.is_clean() && report.entries == KEYS, "{report:?}");
        leaves_by_server(&tree).await
    };
    worker
        .block_on(async {
            let spread = made("spread", PlacementPolicy::RoundRobin).await?;
            let all: usize = spread.iter().sum();
            assert!(spread.iter().all(|&leaves| leaves > all / 6), "{spread:?}");
            let one = made("one", PlacementPolicy::OneServer).await?;
            assert!(one[1] > 100 && one[0] + one[2] == 0, "{one:?}");
            Ok::<_, Error>(())
        })
        .unwrap();
}

/// A memory server that cannot join the cluster keeps nobody from reading and changing.
#[test]
fn what_a_memory_server_cannot_begin_is_done_here() {
    let _watch = Watchdog::start("cannot join", Duration::from_secs(60));
    let why: [fn() -> Error; 2] = [
        || Error::OutOfMemory { class: SizeClass::SMALLEST },
        || Error::BadOption { option: "test", why: "it does not join".into() },
    ];
    for why in why {
        let cluster = here::start(1, 8 << 20, FAST).unwrap();
        let (fabric, server) = (cluster.fabric(), ServerId::new(0).unwrap());
        let listener = cluster.listen(server, &ListenOptions::default()).unwrap();
        let (memory, options) = (cluster.memory(server).unwrap(), ShipOptions::default());
        let _serving = ShipServer::start(listener, memory, fleet::registry(), &options, move || Err(why())).unwrap();
        let compute = cluster::join(&fabric, 1).unwrap();
        let worker = compute.worker().unwrap();
        worker.block_on(async {
            let options = BTreeOptions { page_bytes: 256, ..BTreeOptions::default() };
            let tree = BTree::create(&worker, "whole", options).await.unwrap();
            tree.insert(7, 70).await.unwrap();
            let shipped = always(&worker, &tree);
            assert_eq!(shipped.get(7).await.unwrap(), Some(70));
            shipped.insert(8, 80).await.unwrap();
            let hybrid = BTree::over(Hybrid::new(&worker, tree.structure().clone(), Proof::Checksum));
            hybrid.insert(9, 90).await.unwrap();
            assert_eq!(hybrid.get(8).await.unwrap(), Some(80));
            assert_eq!(shipped.range(..).take(9).await.unwrap(), [(7, 70), (8, 80), (9, 90)]);
            assert_eq!((shipped.access().counts().shipped, shipped.access().counts().came_back), (0, 3));
            // Who has no other way is told why.
            let remote = BTree::over(Remote::new(&worker, tree.structure().clone()));
            for refused in [remote.get(7).await, remote.insert(7, 71).await.map(|_| None)] {
                let says_why = |error: &str| error.contains("try again") && error.contains(&why().to_string());
                assert!(
                    matches!(&refused, Err(error @ Error::NotBegun { .. }) if says_why(&error.to_string())),
                    "{refused:?}"
                );
            }
            assert_eq!(tree.get(7).await.unwrap(), Some(70));
        });
    }
}

/// Ships every second operation.
#[derive(Debug)]
struct EverySecond(bool);

impl Policy for EverySecond {
    fn choose(&mut self, _: &Miss<'_>) -> Choice {
        self.0 = !self.0;
        if self.0 { Choice::SHIP } else { Choice::FETCH }
    }
}

/// Two compute servers write keys of their own and read all, by turns sent and done over `here`: each finds what it has written just now,
/// and nothing of the other's is older than what it has seen.
fn write_and_read_by_turns<S: OrderedMap, A: Run<Plugin = S>>(
    fleet: &Fleet,
    structure: &Structure,
    here: impl Fn(&Worker, Structure) -> A + Sync,
    hits: fn(&A) -> u64,
) {
    const KEYS: u64 = 150;
    let rounds = settings::from_env("FARLINK_TURN_ROUNDS", 30);
    thread::scope(|scope| {
        for own in 0..2 {
            let here = &here;
            scope.spawn(move || {
                let compute = cluster::join(&fleet.fabric(), own).unwrap();
                let worker = compute.worker().unwrap();
                let access = here(&worker, structure.clone());
                let policies = Policies::new(EverySecond(false));
                let map = Map::<S, _>::over(Adaptive::new(access, &worker, structure.clone(), policies));
                let mut seen = vec![None; KEYS as usize];
                worker.block_on(async {
                    for round in 1..=rounds {
                        // Sent and then done here, or the other way round: an odd number of operations a round.
                        for key in (0..KEYS).filter(|key| key % 2 == own) {
                            assert_eq!(map.upsert(key, round).await.unwrap(), Some(round - 1).filter(|&at| at > 0));
                            assert_eq!(map.get(key).await.unwrap(), Some(round), "key {key}");
                        }
                        for key in (0..KEYS).filter(|key| key % 2 != own) {
                            let found = map.get(key).await.unwrap();
                            let before = seen[key as usize].replace(found).flatten();
                            assert!(found >= before, "key {key} had {before:?}, and {found:?} later");
                        }
                    }
                });
                let (shipped, hits) = (map.access().counts().shipped, hits(map.access().here()));
                assert!(shipped >= rounds * KEYS / 2 && hits > 100, "{shipped} operations shipped, {hits} hits");
            });
        }
    });
}

/// Memory servers change what is cached behind the caches' backs.
#[test]
fn operations_are_sent_or_done_over_caches() {
    let _watch = Watchdog::start("adaptive over caches", Duration::from_secs(120));
    let fleet = Fleet::start(2, 16 << 20, 1, FAST).unwrap();
    let compute = cluster::join(&fleet.fabric(), 9).unwrap();
    let worker = compute.worker().unwrap();
    let (placement, root) = (PlacementPolicy::OneServer, ServerId::new(1));
    let options = BTreeOptions { page_bytes: 256, placement, root, ..BTreeOptions::default() };
    let tree = worker.block_on(BTree::create(&worker, "inner", options)).unwrap();
    let inner = |worker: &Worker, structure| {
        let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap();
        cache.share(worker, structure, Proof::Checksum).unwrap()
    };
    write_and_read_by_turns(&fleet, tree.structure(), inner, |here| here.counters().total().hits);
    let placement = StructurePlacement { policy: placement, root };
    let options = BwTreeOptions { page_bytes: 256, placement, ..BwTreeOptions::default() };
    let words = worker.block_on(BwTree::create(&worker, "words", options)).unwrap();
    let mapping = |worker: &Worker, structure| MappingCache::<Bw>::new(64 << 10).share(worker, structure);
    write_and_read_by_turns(&fleet, words.structure(), mapping, |here| here.counters().hits);
    worker.block_on(async {
        for report in [tree.check().await.unwrap(), words.check().await.unwrap()] {
            assert!(report.is_clean() && report.entries == 150, "{report:?}");
        }
    });
}
