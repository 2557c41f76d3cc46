//! Futures, workers and compute servers that end early, at every point where they can: what they leave behind is whole and
//! unlocked, no page is lost, and nobody waits for ever.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use farlink_runtime::{
    access::{self, Access, NewPage, Pages, PagesMut, Placement},
    audit, catalog,
    clock::Clock,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Error as FabricError, Fabric, Liveness,
        faulty::{FaultKinds, FaultOptions, FaultyFabric},
        mem::MemOptions,
    },
    one_sided::{OneSided, Proof},
    operation::{persist, retry},
    page::SizeClass,
    pages::allocate,
    ptr::{RemotePtr, ServerId},
    server::in_process,
    worker::{Handle, Worker},
};
use farlink_structures::btree::{self, BTree, BTreeOptions, PlacementPolicy};
use farlink_tests::{
    bounded::{self, Bound, Watchdog},
    cluster::{self, FAST, WEAK},
    drive::polled,
};

const TREE: &str = "endings";
const OPTIONS: BTreeOptions =
    BTreeOptions { page_bytes: 256, proof: Proof::Checksum, placement: PlacementPolicy::RoundRobin, root: None };
/// Far more than any single operation here takes, and far less than for ever.
const ENDS: Bound = Bound { reads_max: 10_000, turns_max: 100_000 };
/// More polls or turns than any future here takes.
const CUTS_MAX: u32 = 100_000;

type Tree = BTree<OneSided<btree::Tree>>;
type Doing = Pin<Box<dyn Future<Output = Result<(), Error>>>>;

/// For what has no turns to count: the end of a worker and of a compute server.
fn watch(what: &str) -> Watchdog {
    Watchdog::start(what, Duration::from_secs(60))
}

fn fabric(options: MemOptions) -> Arc<dyn Fabric> {
    Arc::new(in_process(2, 2 << 20, options).unwrap())
}

/// A compute server that nobody maintains but the test, its worker, and a tree.
struct Scene {
    fabric: Arc<dyn Fabric>,
    compute: Rc<ComputeServer>,
    worker: Worker,
    tree: Tree,
}

impl Scene {
    fn new(options: MemOptions) -> Self {
        let fabric = fabric(options);
        let compute = Rc::new(cluster::join_manual(&fabric, 1).unwrap());
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(BTree::create(&worker, TREE, OPTIONS)).unwrap();
        Self { fabric, compute, worker, tree }
    }

    /// The tree as another worker sees it, which must not have to wait for ever.
    fn get_as(&self, worker: &Worker, key: u64) -> Option<u64> {
        let handle = Handle::clone(worker);
        let get = async move { BTree::open(&handle, TREE, Proof::Checksum).await?.get(key).await };
        bounded::run(worker, ENDS, get).expect("a page stays locked").unwrap()
    }
}

/// Whether every structure of the cluster is clean, and all memory is either theirs or free. Nobody else is there.
fn assert_nothing_is_lost(fabric: &Arc<dyn Fabric>, context: &str) {
    let audit = async |worker: &Handle| {
        let mut bytes = 0;
        for structure in catalog::list(worker).await? {
            let report = BTree::open(worker, &structure.name, Proof::Checksum).await?.check().await?;
            assert!(report.is_clean() && report.audit.held == 0, "{context}: {report:?}");
            bytes += report.bytes;
        }
        let memory = audit::memory(worker).await?;
        assert_eq!(memory.used_bytes(), bytes, "{context}: {memory:?}, of which the structures use {bytes}");
        Ok::<_, Error>(())
    };
    cluster::with_worker(fabric, |worker| worker.block_on(audit(worker))).unwrap();
}

/// How a future ends early.
#[derive(Debug, Clone, Copy)]
enum Ending {
    /// It is dropped after so many polls, and its worker goes on.
    Dropped,
    /// It is dropped after so many polls, and so is its worker.
    DroppedThenWorker,
    /// Its worker is dropped after so many polls, and then it is.
    AfterWorker,
    /// It is a task, and its worker is dropped after so many turns.
    WithWorker,
}

/// Polls `future` when it was woken, so many times and no more; true if it is ready.
fn poll_some(worker: &Worker, future: &mut Doing, mut polls: u32) -> bool {
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Release);
        }
    }
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Waker::from(Arc::clone(&woken));
    let mut turns = 0;
    while turns < ENDS.turns_max {
        if woken.0.swap(false, Ordering::Acquire) {
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return true;
            }
            polls -= 1;
            if polls == 0 {
                return false;
            }
        }
        turns += u64::from(bounded::turn(worker));
    }
    panic!("woken no more, with {polls} polls to go");
}

/// Ends what `start` makes in the given way, after so many polls or turns; true if it was ready before that.
fn end_after(scene: Scene, ending: Ending, cuts: u32, start: fn(&Scene) -> Doing) -> (Arc<dyn Fabric>, bool) {
    let mut doing = start(&scene);
    let Scene { fabric, compute, worker, tree } = scene;
    let finished = match ending {
        Ending::WithWorker => {
            let done = Rc::new(Cell::new(false));
            let is_done = Rc::clone(&done);
            let task = worker.spawn(async move {
                let _ = doing.await;
                is_done.set(true);
            });
            for _ in 0..cuts {
                worker.turn();
            }
            drop((worker, task));
            done.get()
        }
        Ending::AfterWorker => {
            let finished = poll_some(&worker, &mut doing, cuts);
            drop(worker);
            drop(doing);
            finished
        }
        Ending::Dropped | Ending::DroppedThenWorker => {
            let finished = poll_some(&worker, &mut doing, cuts);
            drop(doing);
            if matches!(ending, Ending::Dropped) {
                let tree = tree.clone();
                bounded::run(&worker, ENDS, async move { tree.upsert(u64::MAX, 0).await })
                    .expect("a page stays locked")
                    .unwrap();
            }
            drop(worker);
            finished
        }
    };
    drop(tree);
    drop(compute);
    (fabric, finished)
}

const ENDINGS: &[Ending] = &[Ending::Dropped, Ending::DroppedThenWorker, Ending::WithWorker, Ending::AfterWorker];

/// Ends what `start` makes in these ways and at every point, on a fabric that is fast and on one that is hostile.
fn end_everywhere(what: &str, endings: &[Ending], prepare: fn(&Scene), start: fn(&Scene) -> Doing) {
    let _watch = watch(what);
    for options in [FAST, WEAK] {
        for &ending in endings {
            let mut cuts = 1;
            loop {
                let scene = Scene::new(options);
                prepare(&scene);
                let context = format!("{what}, nasty {}, {ending:?}, {cuts}", options.nasty);
                let (fabric, finished) = end_after(scene, ending, cuts, start);
                assert_nothing_is_lost(&fabric, &context);
                if finished {
                    println!("{context}: finished");
                    break;
                }
                assert!(cuts < CUTS_MAX, "{context}: still not finished");
                cuts += 1 + cuts / 32;
            }
        }
    }
}

fn keep_empty(_scene: &Scene) {}

fn fill(scene: &Scene) {
    scene.worker.block_on(scene.tree.bulk_load((0..100).map(|key| (key * 2, key)), 1.0)).unwrap();
}

fn fill_and_clear(scene: &Scene) {
    scene.worker.block_on(async {
        for key in 0..500 {
            scene.tree.insert(key, key).await.unwrap();
        }
        for key in 0..500 {
            scene.tree.remove(key).await.unwrap();
        }
    });
}

#[test]
fn loads_end_anywhere() {
    // After its worker there is nobody who could take back what it has written.
    end_everywhere("bulk load", &ENDINGS[..3], keep_empty, |scene| {
        let tree = scene.tree.clone();
        Box::pin(async move { tree.bulk_load((0..500).map(|key| (key, key)), 0.9).await.map(drop) })
    });
}

#[test]
fn creations_end_anywhere() {
    end_everywhere("create", ENDINGS, keep_empty, |scene| {
        let worker = Handle::clone(&scene.worker);
        Box::pin(async move { BTree::create(&worker, "another", OPTIONS).await.map(drop) })
    });
}

#[test]
fn maintenance_ends_anywhere() {
    end_everywhere("maintain", ENDINGS, fill_and_clear, |scene| {
        let (worker, compute) = (Handle::clone(&scene.worker), Rc::clone(&scene.compute));
        Box::pin(async move {
            for _ in 0..3 {
                compute.maintain(&worker).await?;
            }
            Ok(())
        })
    });
}

#[test]
fn changes_end_anywhere() {
    // The pages are full, so that it splits one, and the way up to the root.
    end_everywhere("upsert", ENDINGS, fill, |scene| {
        let tree = scene.tree.clone();
        Box::pin(async move { tree.upsert(101, 0).await.map(drop) })
    });
    // And this merges some.
    end_everywhere("remove", ENDINGS, fill, |scene| {
        let tree = scene.tree.clone();
        Box::pin(async move {
            for key in 0..20 {
                tree.remove(key * 2).await?;
            }
            Ok(())
        })
    });
}

#[test]
fn retirements_end_anywhere() {
    // A page that nothing leads to is retired.
    let _watch = watch("retire");
    for options in [FAST, WEAK] {
        for cuts in 1..CUTS_MAX {
            let Scene { fabric, compute, worker, tree } = Scene::new(options);
            let page = worker.block_on(async {
                let page = tree.access().allocate(tree.structure().class, Placement::RoundRobin).await.unwrap();
                let (link, mut pages) = (page.link(), Pages::new());
                let slot = pages.add_new(page);
                tree.access().change(pages, |pages| pages.describe(slot, 0, 9)).await.unwrap();
                link
            });
            let retire = |tree: Tree| async move {
                retry(&tree.access().context().worker, async || access::free(tree.access(), page).await).await
            };
            let finished = poll_some(&worker, &mut (Box::pin(retire(tree.clone())) as Doing), cuts);
            // Again: it ends, by freeing the page or by finding that it is free.
            let again = bounded::run(&worker, ENDS, retire(tree.clone())).expect("retired again and again");
            assert!(!finished || matches!(again, Err(Error::Inconsistent { .. })), "{again:?}");
            drop((tree, worker));
            drop(compute);
            assert_nothing_is_lost(&fabric, &format!("retire, nasty {}, {cuts}", options.nasty));
            if finished {
                break;
            }
        }
    }
}

/// Calls `test` with more and more polls until it says that the future was ready before.
fn at_every_poll(what: &str, test: impl FnMut(u32) -> bool) {
    let _watch = watch(what);
    assert!((1..100).any(test), "{what}: not ready after 100 polls");
}

#[test]
fn two_workers_of_one_thread() {
    at_every_poll("block_on returns with a change under way", |polls| {
        let scene = Scene::new(FAST);
        let other = scene.compute.worker().unwrap();
        let finished = scene.worker.block_on(async {
            let finished = polled(polls, scene.tree.upsert(1, 2)).await.is_some();
            scene.worker.turn();
            finished
        });
        let found = scene.get_as(&other, 1);
        assert!(found == Some(2) || found.is_none() && !finished, "{found:?} after {polls} polls");
        finished
    });
}

#[test]
fn a_future_that_outlives_its_worker() {
    at_every_poll("a future dropped after its worker", |polls| {
        let mut scene = Scene::new(FAST);
        let others = cluster::join_manual(&scene.fabric, 2).unwrap();
        let tree = scene.tree.clone();
        let mut upsert: Doing = Box::pin(async move { tree.upsert(1, 2).await.map(drop) });
        let finished = poll_some(&scene.worker, &mut upsert, polls);
        scene.worker.turn();
        scene.worker = others.worker().unwrap();
        drop(upsert);
        // The compute server that the change was of is still alive, so nobody may break its locks.
        scene.get_as(&scene.worker, 1);
        finished
    });
}

#[test]
fn a_compute_server_dropped_before_its_worker() {
    at_every_poll("a compute server dropped before its worker", |polls| {
        let Scene { fabric, compute, worker, tree } = Scene::new(FAST);
        let others = cluster::join_manual(&fabric, 2).unwrap();
        let other = others.worker().unwrap();
        let owner = compute.owner();
        drop(compute);
        let upserted = tree.clone();
        let mut upsert: Doing = Box::pin(async move { upserted.upsert(1, 2).await.map(drop) });
        let finished = poll_some(&worker, &mut upsert, polls);
        worker.turn();
        assert_eq!(fabric.liveness(owner), Liveness::Alive, "its worker is at work");
        if !finished {
            bounded::run(&worker, ENDS, upsert).expect("it goes on").unwrap();
        }
        let handle = Handle::clone(&other);
        let get = async move { BTree::open(&handle, TREE, Proof::Checksum).await?.get(1).await };
        assert_eq!(bounded::run(&other, ENDS, get).expect("a page stays locked").unwrap(), Some(2));
        drop((tree, worker));
        assert_eq!(fabric.liveness(owner), Liveness::Dead, "the last worker leaves the cluster");
        drop((other, others));
        assert_nothing_is_lost(&fabric, &format!("left after {polls} polls"));
        finished
    });
}

#[test]
fn a_worker_dropped_in_virtual_time() {
    const STEP_NS: u64 = 500;
    at_every_poll("a worker dropped in virtual time", |steps| {
        let Scene { fabric, compute, worker, tree } = Scene::new(MemOptions { latency_ns: 1000, ..FAST });
        let structure = tree.structure().clone();
        drop((tree, worker));
        let now = Rc::new(Cell::new(0));
        let worker = compute.worker_with(Clock::Virtual(Rc::clone(&now))).unwrap();
        let tree = BTree::over(OneSided::new(&worker, structure, Proof::Checksum));
        let done = Rc::new(Cell::new(false));
        let is_done = Rc::clone(&done);
        let task = worker.spawn(async move {
            tree.upsert(1, 2).await.unwrap();
            is_done.set(true);
        });
        for step in 0..u64::from(steps) {
            now.set(step * STEP_NS);
            worker.turn();
        }
        drop((worker, task));
        drop(compute);
        assert_nothing_is_lost(&fabric, &format!("dropped after {steps} steps"));
        done.get()
    });
}

#[test]
fn a_task_that_panics() {
    let _watch = watch("a worker whose task has panicked");
    let Scene { fabric, compute, worker, tree } = Scene::new(FAST);
    let panics = || worker.block_on(worker.spawn_to_end(async { panic!("on purpose") }));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err(), "the panic is its caller's");
    drop((tree, worker));
    drop(compute);
    assert_nothing_is_lost(&fabric, "a task panicked");
}

/// What a task that must not be cut off has started is not cut off either, whether it is waited for or not.
#[test]
fn tasks_of_a_task_that_is_not_cut_off() {
    let _watch = watch("a worker with tasks of a task that must not be cut off");
    let Scene { fabric, compute, worker, tree } = Scene::new(FAST);
    let (handle, done) = (Handle::clone(&worker), Rc::new(Cell::new(0)));
    let count = Rc::clone(&done);
    drop(worker.spawn_to_end(async move {
        let part = || {
            let (handle, count) = (handle.clone(), Rc::clone(&count));
            async move {
                for _ in 0..10 {
                    handle.yield_now().await;
                }
                count.set(count.get() + 1);
            }
        };
        let awaited = handle.spawn(part());
        drop(handle.spawn(part()));
        awaited.await;
        drop(handle.spawn(part()));
    }));
    worker.turn();
    drop((tree, worker));
    assert_eq!(done.get(), 3);
    drop(compute);
    assert_nothing_is_lost(&fabric, "dropped with tasks of a task");
}

/// Who waits for a task that panics is not left waiting, nor is the worker that they belong to.
#[test]
fn a_task_that_waits_for_one_that_panics() {
    let _watch = watch("a worker with a task that waits for one that has panicked");
    let Scene { fabric, compute, worker, tree } = Scene::new(FAST);
    let handle = Handle::clone(&worker);
    let panics = AssertUnwindSafe(move || {
        let _tree = tree;
        drop(worker.spawn_to_end(async move { handle.spawn_to_end(async { panic!("on purpose") }).await }));
        worker.turn();
        worker.turn();
    });
    assert!(catch_unwind(panics).is_err(), "the panic is its caller's");
    drop(compute);
    assert_nothing_is_lost(&fabric, "a task panicked that another one waited for");
}

/// The panic is caught, and the worker is dropped later: it leaves all the same, and says that tasks have not come to their end.
#[test]
fn a_worker_that_outlives_a_panic_leaves() {
    let _watch = watch("a worker that outlives a panic");
    let Scene { fabric, compute, worker, tree } = Scene::new(FAST);
    let (handle, done) = (Handle::clone(&worker), Rc::new(Cell::new(false)));
    drop(worker.spawn_to_end(async move { handle.spawn_to_end(async { panic!("on purpose") }).await }));
    let turns = || worker.turn() && worker.turn();
    assert!(catch_unwind(AssertUnwindSafe(turns)).is_err(), "the panic is its caller's");
    let (handle, is_done) = (Handle::clone(&worker), Rc::clone(&done));
    drop(worker.spawn_to_end(async move {
        for _ in 0..10 {
            handle.yield_now().await;
        }
        is_done.set(true);
    }));
    assert!(catch_unwind(AssertUnwindSafe(|| drop((tree, worker)))).is_err(), "a task has not come to its end");
    assert!(done.get(), "another one was cut off");
    drop(compute);
    assert_nothing_is_lost(&fabric, "a worker outlived a panic");
}

/// What must not be left undone outlasts requests that fail, and some refusals of memory besides.
#[test]
fn refusals_of_memory_are_counted_apart_from_failures() {
    let Scene { worker, .. } = Scene::new(FAST);
    let page = RemotePtr::new(ServerId::new(0).unwrap(), 4096).unwrap();
    let mut attempts = 0;
    let attempt = async || {
        attempts += 1;
        let error = match attempts {
            ..=40 => FabricError::RequestFailed { what: "READ", at: page, why: "its connection broke".into() },
            41 => FabricError::RegistrationRefused {
                bytes: 64,
                device: "a device".into(),
                cause: std::io::ErrorKind::OutOfMemory.into(),
                remedy: "try again".into(),
            },
            _ => return Ok(attempts),
        };
        Err(Error::from(error).into())
    };
    assert_eq!(worker.block_on(persist(&worker, attempt)).unwrap(), 42);
}

/// Others that were ready at that time are, still.
#[test]
fn tasks_beside_one_that_panics_come_to_their_end() {
    let _watch = watch("a worker with tasks beside one that has panicked");
    let Scene { fabric, compute, worker, tree } = Scene::new(FAST);
    let done = Rc::new(Cell::new(0));
    drop(worker.spawn(async { panic!("on purpose") }));
    for _ in 0..100 {
        let done = Rc::clone(&done);
        drop(worker.spawn_to_end(async move { done.set(done.get() + 1) }));
    }
    assert!(catch_unwind(AssertUnwindSafe(|| worker.turn())).is_err(), "the panic is its caller's");
    assert_eq!(done.get(), 0, "it came first");
    drop((tree, worker));
    assert_eq!(done.get(), 100);
    drop(compute);
    assert_nothing_is_lost(&fabric, "a task panicked beside others");
}

/// Tasks of a compute server that get the last pages, while requests fail: each page has one of them.
#[test]
fn no_page_is_allocated_twice() {
    let _watch = watch("the last pages");
    let class = SizeClass::of_bytes(16 << 10).unwrap();
    for seed in 0..100 {
        let fabric: Arc<dyn Fabric> = Arc::new(in_process(1, 1 << 20, MemOptions::default()).unwrap());
        let kinds = FaultKinds { refused: true, done: false, lost: false };
        let options = FaultOptions { kinds, requests_one_in: 4, ..FaultOptions::one_in(0, seed) };
        let faulty: Arc<dyn Fabric> = Arc::new(FaultyFabric::new(Arc::clone(&fabric), options));
        let compute = cluster::join_manual(&faulty, seed).unwrap();
        let workers = [(); 2].map(|()| compute.worker().unwrap());
        let pages = Rc::new(RefCell::new(Vec::new()));
        for worker in workers.iter().cycle().take(8) {
            let (handle, pages) = (Handle::clone(worker), Rc::clone(&pages));
            drop(worker.spawn_to_end(async move {
                while let Ok(page) = allocate(&handle, class, Placement::RoundRobin).await {
                    pages.borrow_mut().push(page);
                }
            }));
        }
        while workers.iter().any(|worker| worker.is_unfinished()) {
            for worker in &workers {
                worker.turn();
            }
        }
        let mut at: Vec<_> = pages.borrow().iter().map(NewPage::at).collect();
        at.sort_unstable();
        assert!(at.windows(2).all(|pair| pair[0] != pair[1]), "{seed}: {at:?}");
        drop(pages.take());
    }
}
