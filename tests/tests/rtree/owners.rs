//! Several compute servers own a part each: what they answer together, while parts move, and when an owner dies.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::poll_fn,
    pin::pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use farlink_offload::{
    CacheOptions, ComputeCache, Durability, Holdings, OwnerServer, Router, Routes, Served, ShardKey, Sharded,
    route::move_region,
};
use farlink_runtime::{
    access::{Region as _, Structure},
    audit, catalog,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Fabric,
        listener::ListenOptions,
        mortal::{MortalFabric, Order},
    },
    messaging::{ServeMessages, Wait},
    one_sided::{Proof, ownership},
    worker::Worker,
};
use farlink_structures::rtree::{Entry, Query, RTree, RTreeOptions, Rect, Scope, Tree};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::Watchdog,
    cluster, settings,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    model::{same, some},
    promise::{LASTING, come_move_and_go, lasting, searches_meanwhile},
};

const PARTS: usize = 3;

type Routed = RTree<Sharded<Router<Tree>>>;

/// A compute server that can own any part, and does what others send.
struct Owner {
    // Before its worker.
    server: Option<OwnerServer>,
    holdings: Vec<Holdings<Tree>>,
    worker: Worker,
    compute: Arc<ComputeServer>,
}

impl Owner {
    /// Of the part of that number, to begin with.
    fn new(fabric: &Arc<dyn Fabric>, parts: &[Structure], number: usize) -> Self {
        Self::with(fabric, parts, number, Durability::WriteBack)
    }

    fn with(fabric: &Arc<dyn Fabric>, parts: &[Structure], number: usize, durability: Durability) -> Self {
        let compute = join(fabric, number as u64 + 1);
        let worker = compute.worker().unwrap();
        let cache = || ComputeCache::new(CacheOptions::new(128 << 10)).unwrap().with_durability(durability);
        let holdings: Vec<_> = parts.iter().map(|part| Holdings::new(part, cache())).collect();
        worker.block_on(holdings[number].take(&worker, Scope::everything())).unwrap();
        let served = holdings.iter().map(Served::new).collect();
        let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
        let listener = compute.listen(&ListenOptions::default()).unwrap();
        let server = Some(OwnerServer::start(listener, &compute, served, &messages).unwrap());
        Self { server, holdings, worker, compute }
    }

    /// Its way to all parts.
    fn tree(&self) -> Routed {
        let router = |holdings: &Holdings<Tree>| {
            let routes = self.worker.block_on(Routes::read(&self.worker, holdings.structure().clone())).unwrap();
            Router::new(&self.worker, &routes, holdings.here(&self.worker))
        };
        over(self.holdings.iter().map(router).collect())
    }

    fn close(self) {
        let give_up = |part: &Holdings<Tree>| self.worker.block_on(part.give_up_all(&self.worker)).unwrap();
        self.holdings.iter().for_each(give_up);
    }
}

fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Arc<ComputeServer> {
    Arc::new(cluster::join(fabric, seed).unwrap())
}

fn over(routers: Vec<Router<Tree>>) -> Routed {
    RTree::over(Sharded::new(routers, ShardKey::Hash(PARTS)).unwrap())
}

/// The way of somebody who owns nothing.
fn guest_tree(worker: &Worker, parts: &[Structure]) -> Routed {
    let router = |part: &Structure| {
        let routes = worker.block_on(Routes::read(worker, part.clone())).unwrap();
        Router::to_owners(worker, &routes)
    };
    over(parts.iter().map(router).collect())
}

fn make_parts(fabric: &Arc<dyn Fabric>) -> Vec<Structure> {
    let compute = join(fabric, 99);
    let worker = compute.worker().unwrap();
    let make = |number| {
        let name = format!("part {number}");
        let made = worker.block_on(RTree::<_, 2>::create(&worker, &name, RTreeOptions::default())).unwrap();
        drop(made);
        worker.block_on(catalog::open::<Tree>(&worker, &name)).unwrap()
    };
    (0..PARTS).map(make).collect()
}

/// Once all have left: each part is sound and has some of so many entries, and nothing is anybody's.
fn assert_left_clean(fabric: &Arc<dyn Fabric>, entries: usize) {
    let compute = join(fabric, 98);
    let worker = compute.worker().unwrap();
    // Its own maintenance may be at work on what the dead one held.
    assert!(worker.block_on(compute.settle(&worker)).unwrap(), "something holds up the epoch");
    let (mut sum, mut bytes) = (0, 0);
    for number in 0..PARTS {
        let name = format!("part {number}");
        let tree = worker.block_on(RTree::<_, 2>::open(&worker, &name, Proof::Checksum)).unwrap();
        let report = worker.block_on(tree.check()).unwrap();
        assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
        assert!(report.entries as usize > entries / PARTS / 3, "{} of {entries} in part {number}", report.entries);
        (sum, bytes) = (sum + report.entries as usize, bytes + report.bytes);
    }
    assert_eq!(sum, entries);
    assert_eq!(worker.block_on(audit::memory(&worker)).unwrap().used_bytes(), bytes);
}

/// Moves a part to the next owner that does not have it.
fn move_on(worker: &Worker, owners: &[Owner], part: &Structure, rng: &mut SmallRng) -> Result<(), Error> {
    let all = Scope::<2>::everything();
    let map = worker.block_on(ownership::read(worker, part))?;
    let Some((from, _)) = map.owners().next() else { return Ok(()) };
    let to = owners[rng.random_range(0..owners.len())].compute.owner();
    worker.block_on(move_region(worker, part, &all, from, to)).map(drop)
}

/// Whoever asks, an owner or not, has the answers of brute force: also after parts have moved.
#[test]
fn several_owners_answer_as_one_tree() {
    let seed = settings::seed("several owners");
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        let fabric = Cluster::of_this_run(2, 32 << 20, profile).unwrap();
        let parts = make_parts(&fabric);
        let owners: Vec<Owner> = (0..PARTS).map(|number| Owner::new(&fabric, &parts, number)).collect();
        let compute = join(&fabric, 9);
        let worker = compute.worker().unwrap();
        let tree = guest_tree(&worker, &parts);
        let (mut rng, mut model) = (SmallRng::seed_from_u64(seed), Vec::<Entry>::new());
        for round in 0..4 {
            worker.block_on(some(&tree, &mut model, &mut rng, 150)).unwrap();
            worker.block_on(same(&tree, &model, &mut rng)).unwrap();
            let owner = &owners[round % PARTS];
            owner.worker.block_on(some(&owner.tree(), &mut model, &mut rng, 50)).unwrap();
            owner.worker.block_on(same(&owner.tree(), &model, &mut rng)).unwrap();
            move_on(&worker, &owners, &parts[round % PARTS], &mut rng).unwrap();
        }
        // A change is about one part, so it is one exchange at most; a search asks all at the same time.
        let before = worker.counters();
        worker.block_on(tree.insert(model[0].0, 7)).unwrap();
        model.push((model[0].0, 7));
        let (after, query) = (worker.counters(), Query::Intersects(model[0].0));
        assert!((after - before).two_sided <= 2, "{:?}", after - before);
        worker.block_on(tree.count(query)).unwrap();
        let before = worker.counters();
        worker.block_on(tree.count(query)).unwrap();
        let cost = worker.counters() - before;
        assert_eq!((cost.two_sided, cost.reads), (PARTS as u64, 0), "{cost:?}");
        drop((tree, worker));
        owners.into_iter().for_each(Owner::close);
        drop(compute);
        assert_left_clean(&fabric, model.len());
    }
}

/// A search has every entry that is there all the time, once, while entries and parts move.
#[test]
fn a_search_keeps_its_promise_while_parts_move() {
    let seed = settings::seed("parts move");
    let fabric = Cluster::of_this_run(2, 32 << 20, FabricProfile::Nasty).unwrap();
    let parts = make_parts(&fabric);
    let owners: Vec<Owner> = (0..PARTS).map(|number| Owner::new(&fabric, &parts, number)).collect();
    let compute = join(&fabric, 9);
    let lasting = lasting::<2>(seed, LASTING);
    {
        let worker = compute.worker().unwrap();
        let tree = guest_tree(&worker, &parts);
        worker.block_on(async {
            for &(rect, payload) in &lasting {
                tree.insert(rect, payload).await.unwrap();
            }
        });
    }
    let limit = Duration::from_secs_f64(settings::from_env("FARLINK_KIT_SECONDS", 0.3));
    let (begun, has_moved) = (Instant::now(), AtomicBool::new(false));
    let goes_on = || begun.elapsed() < limit || !has_moved.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let (compute, parts, goes_on, lasting) = (&compute, &parts, &goes_on, &lasting);
        for number in 0..2u64 {
            scope.spawn(move || {
                let worker = compute.worker().unwrap();
                worker.block_on(come_move_and_go(&guest_tree(&worker, parts), (seed, number), |_| goes_on()));
            });
        }
        scope.spawn(move || {
            let worker = compute.worker().unwrap();
            let of = (seed, &**lasting);
            let searches = worker.block_on(searches_meanwhile(&guest_tree(&worker, parts), of, goes_on));
            println!("{searches} searches over {PARTS} owners");
        });
        let worker = compute.worker().unwrap();
        let mut rng = SmallRng::seed_from_u64(seed);
        for part in parts.iter().cycle().take(12) {
            move_on(&worker, &owners, part, &mut rng).unwrap();
        }
        has_moved.store(true, Ordering::Relaxed);
    });
    let worker = compute.worker().unwrap();
    let entries = worker.block_on(guest_tree(&worker, &parts).len()).unwrap() as usize;
    drop(worker);
    owners.into_iter().for_each(Owner::close);
    drop(compute);
    assert_left_clean(&fabric, entries);
}

/// What a dead owner had is taken over.
#[test]
fn an_owner_dies_and_its_part_lives() {
    let seed = settings::seed("an owner dies");
    let fabric = Cluster::of_this_run(2, 32 << 20, FabricProfile::Fast).unwrap();
    let life = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
    let deadly: Arc<dyn Fabric> = Arc::new(life.clone());
    let parts = make_parts(&fabric);
    let of = |number| if number == 2 { &deadly } else { &fabric };
    let mut owners: Vec<Owner> = (0..PARTS).map(|number| Owner::new(of(number), &parts, number)).collect();
    let compute = join(&fabric, 9);
    let worker = compute.worker().unwrap();
    let tree = guest_tree(&worker, &parts);
    let (mut rng, mut model) = (SmallRng::seed_from_u64(seed), Vec::<Entry>::new());
    worker.block_on(some(&tree, &mut model, &mut rng, 400)).unwrap();
    let mut mortal = owners.pop().unwrap();
    mortal.worker.block_on(mortal.holdings[2].flush(&mortal.worker)).unwrap();
    mortal.server = None;
    life.dies_after(0);
    life.is_taken_for_dead();
    worker.block_on(same(&tree, &model, &mut rng)).unwrap();
    worker.block_on(some(&tree, &mut model, &mut rng, 200)).unwrap();
    worker.block_on(same(&tree, &model, &mut rng)).unwrap();
    drop((tree, worker));
    owners.into_iter().for_each(Owner::close);
    drop((mortal, compute));
    assert_left_clean(&fabric, model.len());
}

/// Tasks that change entries of all parts while an owner dies, and what each does once it is dead.
const TASKS: u64 = 4;
const CHANGES_AFTER: u64 = 40;
/// The owner makes more requests before.
const DIES_AFTER_MAX: u64 = 300;

/// What is known of an entry.
#[derive(Debug, Clone, Copy)]
struct Known {
    rect: Rect,
    /// Whether it is there, if its last change was answered.
    is_there: Option<bool>,
    /// Whether that lasts: its owner has written it, or lives.
    lasts: bool,
}

/// Entries that are changed while an owner dies.
#[derive(Debug, Default)]
struct Load {
    known: RefCell<BTreeMap<u64, Known>>,
    is_dead: Cell<bool>,
}

impl Load {
    fn know(&self, payload: u64, known: Known) {
        self.known.borrow_mut().insert(payload, known);
    }

    /// Inserts an entry or more, and deletes some, until an owner has been dead for a while.
    async fn change(&self, tree: &Routed, task: u64, seed: u64, is_logged: bool) {
        let mut rng = SmallRng::seed_from_u64(seed ^ task << 32);
        let mut left = CHANGES_AFTER;
        for number in 0.. {
            if self.is_dead.get() {
                left -= 1;
            }
            if left == 0 {
                break;
            }
            let payload = task << 32 | number;
            let at = [rng.random_range(0..40), rng.random_range(0..40)].map(f64::from);
            let rect = Rect::new(at, at.map(|at| at + 1.5)).unwrap();
            let lasts = || is_logged || self.is_dead.get();
            let begun = lasts();
            self.know(payload, Known { rect, is_there: None, lasts: false });
            match tree.insert(rect, payload).await {
                Ok(()) => self.know(payload, Known { rect, is_there: Some(true), lasts: begun }),
                Err(Error::OwnerLost { .. }) => {}
                Err(error) => panic!("inserting {payload}: {error}"),
            }
            let older = task << 32 | rng.random_range(0..=number);
            let before = self.known.borrow()[&older];
            if rng.random_ratio(2, 3) || before.is_there == Some(false) {
                continue;
            }
            let begun = lasts();
            self.know(older, Known { is_there: None, lasts: false, ..before });
            match tree.delete(before.rect, older).await {
                Ok(was_there) => {
                    assert!(
                        was_there || before.is_there.is_none() || !before.lasts,
                        "{older} was not there: {before:?}"
                    );
                    self.know(older, Known { is_there: Some(false), lasts: begun, ..before });
                }
                Err(Error::OwnerLost { .. }) => {}
                Err(error) => panic!("deleting {older}: {error}"),
            }
        }
    }

    /// Has the owner write what it has changed, again and again, until it is dead.
    async fn flush(&self, owner: &Owner) {
        loop {
            let answered = self.known.borrow().clone();
            if owner.holdings[2].flush(&owner.worker).await.is_err() {
                return;
            }
            for (payload, before) in answered {
                let mut known = self.known.borrow_mut();
                let now = known.get_mut(&payload).expect("nothing is forgotten");
                now.lasts |= before.is_there.is_some() && now.is_there == before.is_there;
            }
            owner.worker.yield_now().await;
        }
    }

    /// The entries that there are, which are those that there have to be.
    async fn judge(self, tree: &Routed) -> Result<Vec<Entry>, Error> {
        let found = tree.search(Query::Intersects(Rect::EVERYTHING)).all().await?;
        let known = self.known.into_inner();
        for &(rect, payload) in &found {
            assert!(known.get(&payload).is_some_and(|known| known.rect == rect), "{payload} at {rect:?}");
        }
        for (payload, Known { is_there, lasts, .. }) in known {
            let is_found = found.iter().filter(|&&(_, other)| other == payload).count();
            let may_be = if let (Some(is_there), true) = (is_there, lasts) {
                is_found == usize::from(is_there)
            } else {
                is_found < 2
            };
            assert!(may_be, "{payload}: found {is_found} times; there: {is_there:?}, lasting: {lasts}");
        }
        Ok(found)
    }
}

/// One dies while others have it change entries, and while it writes them: all that lasts is there, and others go on with its part.
#[test]
fn an_owner_dies_while_it_changes_its_part() {
    let seed = settings::seed("an owner dies at work");
    let _watch = Watchdog::start(format!("an owner dies at work, seed {seed}"), Duration::from_secs(200));
    for (round, durability) in Durability::ALL.into_iter().cycle().take(6).enumerate() {
        let seed = seed.wrapping_add(round as u64);
        let mut rng = SmallRng::seed_from_u64(seed);
        let fabric = Cluster::of_this_run(2, 32 << 20, FabricProfile::Fast).unwrap();
        let life = MortalFabric::new(Arc::clone(&fabric), Order::Posted, rng.random()).with_seed(seed);
        let deadly: Arc<dyn Fabric> = Arc::new(life.clone());
        let parts = make_parts(&fabric);
        let of = |number| if number == 2 { &deadly } else { &fabric };
        let own = |number| Owner::with(of(number), &parts, number, durability);
        let mut owners: Vec<Owner> = (0..PARTS).map(own).collect();
        let mut mortal = owners.pop().unwrap();
        let compute = join(&fabric, 9);
        let worker = compute.worker().unwrap();
        let tree = guest_tree(&worker, &parts);
        let load = Rc::new(Load::default());
        let after = rng.random_range(0..DIES_AFTER_MAX);
        println!("{durability}: dies after {after} requests");
        life.dies_after(after);
        let task = |number| {
            let (load, tree) = (Rc::clone(&load), tree.clone());
            async move { load.change(&tree, number, seed, durability == Durability::Logged).await }
        };
        let tasks: Vec<_> = (0..TASKS).map(|number| worker.spawn(task(number))).collect();
        {
            let mut all = pin!(async {
                for task in tasks {
                    task.await;
                }
            });
            let mut flushing = pin!(mortal.worker.drive(load.flush(&mortal)));
            let mut is_flushing = true;
            worker.block_on(poll_fn(|cx| {
                cx.waker().wake_by_ref();
                is_flushing = is_flushing && flushing.as_mut().poll(cx).is_pending();
                if life.since_told().1 && !load.is_dead.replace(true) {
                    life.is_taken_for_dead();
                }
                all.as_mut().poll(cx)
            }));
        }
        mortal.server = None;
        let load = Rc::into_inner(load).expect("all tasks have ended");
        let mut model = worker.block_on(load.judge(&tree)).unwrap();
        println!("{} entries", model.len());
        worker.block_on(some(&tree, &mut model, &mut rng, 100)).unwrap();
        worker.block_on(same(&tree, &model, &mut rng)).unwrap();
        drop((tree, worker));
        owners.into_iter().for_each(Owner::close);
        drop((mortal, compute));
        assert_left_clean(&fabric, model.len());
    }
}
