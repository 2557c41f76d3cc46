//! What the framework promises to an author who errs, or who asks for much: no mistake is silent, and none harms others.

mod holding;

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    task::Waker,
    time::Duration,
};

use farlink_offload::{
    CacheOptions, ComputeCache, Remote,
    ship::{Registry, ShipOptions, ShipServer},
};
use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{Fabric, listener::ListenOptions, mem::MemOptions},
    one_sided::{OneSided, Proof},
    operation::{Restarts, Run},
    page::SizeClass,
    ptr::ServerId,
    report::Report,
    server::in_process,
    structure::{OPTIONS, StructurePlacement},
    wire::wire,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeOptions, Tree},
    map::KeyRange,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, WEAK},
};

const PAGE_BYTES: usize = 512;
const KEYS: u64 = 20_000;

/// A tree, and a worker beside it.
struct Scene {
    worker: Worker,
    _compute: ComputeServer,
    structure: Structure,
}

impl Scene {
    fn new(options: MemOptions) -> Self {
        let fabric: Arc<dyn Fabric> = Arc::new(in_process(2, 16 << 20, options).unwrap());
        let compute = cluster::join(&fabric, 1).unwrap();
        let worker = compute.worker().unwrap();
        let structure = worker.block_on(async {
            let options = BTreeOptions { page_bytes: PAGE_BYTES, ..BTreeOptions::default() };
            let tree = BTree::create(&worker, "t", options).await.unwrap();
            tree.bulk_load((0..KEYS).map(|key| (key, key)), 0.8).await.unwrap();
            tree.structure().clone()
        });
        Self { worker, _compute: compute, structure }
    }

    fn cache(&self, bytes: usize) -> ComputeCache<Tree> {
        let mut options = CacheOptions::new(bytes);
        options.page_bytes = PAGE_BYTES;
        ComputeCache::new(options).unwrap()
    }

    fn owned(&self, bytes: usize, keys: KeyRange) -> farlink_offload::Cached<Tree> {
        self.worker.block_on(self.cache(bytes).own(&self.worker, self.structure.clone(), keys)).unwrap()
    }

    fn one_sided(&self) -> OneSided<Tree> {
        OneSided::new(&self.worker, self.structure.clone(), Proof::Checksum)
    }

    fn is_whole(&self) {
        let tree = BTree::over(self.one_sided());
        let report = self.worker.block_on(tree.check()).unwrap();
        assert!(report.is_clean() && report.entries == KEYS, "{report:?}");
    }
}

/// The first leaf and its page above.
async fn first_leaf<A: Access<Plugin = Tree>>(access: &A) -> Result<A::Page<'_>, Interrupt> {
    let mut page: A::Page<'_> = access.open(Start::Root).await?;
    while page.level() > 0 {
        let link = page.read(|words| Tree::links(words).next().map(|index| Link::from_word(words.word(index))))?;
        page = access.follow(&page, link.expect("an inner page has a child"), Hint::DOWN).await?;
    }
    Ok(page)
}

#[test]
fn a_page_that_is_named_twice_is_refused() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let outcome = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let mut pages = Pages::new();
            let (first, again) = (first_leaf(access).await?, first_leaf(access).await?);
            let slot = pages.add(first);
            pages.add(again);
            access.change(pages, |pages| pages.set(slot, 60, 7)).await.map(drop)
        });
        let Err(Interrupt::Failed(error)) = outcome else { panic!("{outcome:?}") };
        assert!(matches!(*error, Error::PageTwice { .. }), "{error}");
    }
    for options in [FAST, WEAK] {
        let scene = Scene::new(options);
        test(&scene, &scene.one_sided());
        test(&scene, &scene.cache(1 << 20).share(&scene.worker, scene.structure.clone(), Proof::Checksum).unwrap());
        test(&scene, &scene.owned(1 << 20, KeyRange::ALL));
        scene.is_whole();
    }
}

/// Halfway through a change: nobody sees that half, neither here nor after a flush.
#[test]
fn a_panic_in_a_change_leaves_everything_as_it_was() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        for current in [false, true] {
            let change = async {
                let _pin = scene.worker.pin();
                let leaf = first_leaf(access).await?;
                let new = access.allocate(scene.structure.class, Placement::RoundRobin).await?;
                let mut pages = Pages::new();
                let slot = if current { pages.add_current(leaf) } else { pages.add(leaf) };
                if !current {
                    pages.add_new(new);
                }
                let half = |pages: &mut A::PagesMut<'_>| {
                    (8..20).for_each(|index| pages.set(slot, index, u64::MAX));
                    panic!("in the middle of a change");
                };
                access.change(pages, half).await.map(drop)
            };
            let panicked = catch_unwind(AssertUnwindSafe(|| scene.worker.block_on(change)));
            assert!(panicked.is_err());
        }
    }
    for options in [FAST, WEAK] {
        let scene = Scene::new(options);
        test(&scene, &scene.one_sided());
        scene.is_whole();
        let owned = scene.owned(1 << 20, KeyRange::ALL);
        test(&scene, &owned);
        let tree = BTree::over(owned);
        for key in 0..100 {
            assert_eq!(scene.worker.block_on(tree.get(key)).unwrap(), Some(key));
        }
        scene.worker.block_on(tree.access().flush()).unwrap();
        scene.is_whole();
    }
}

/// An owner may not have a page reach beyond what it owns: others would not find it, or change it, too.
#[test]
fn an_owner_does_not_widen_a_page_beyond_its_region() {
    /// Position of the high fence in a page of the tree.
    const HIGH: usize = 5;
    let scene = Scene::new(FAST);
    let tree = BTree::over(scene.one_sided());
    let cut = scene.worker.block_on(tree.leaf_low(KEYS / 2)).unwrap();
    let keys = KeyRange { low: 0, high: Some(cut) };
    let owned = scene.owned(1 << 20, keys);
    for current in [false, true] {
        let outcome = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let leaf = first_leaf(&owned).await?;
            let mut pages = Pages::new();
            let slot = if current { pages.add_current(leaf) } else { pages.add(leaf) };
            owned.change(pages, |pages| pages.set(slot, HIGH, cut + 1)).await.map(drop)
        });
        let Err(Interrupt::Failed(error)) = outcome else { panic!("{outcome:?}") };
        assert!(matches!(*error, Error::SharedPage { .. }), "{error}");
    }
    let tree = BTree::over(owned);
    assert_eq!(scene.worker.block_on(tree.get(0)).unwrap(), Some(0));
    scene.worker.block_on(tree.access().flush()).unwrap();
    scene.is_whole();
}

#[test]
fn conflicts_in_a_row_end_in_an_attempt_that_trusts_no_copy() {
    let mut restarts = Restarts::default();
    let starts: Vec<Start> = (0..16).map(|_| restarts.start_after(&Interrupt::conflict())).collect();
    assert_eq!(starts.iter().filter(|&&start| start == Start::Anew).count(), 2);
    assert_eq!(restarts.start_after(&Interrupt::again()), Start::Root);
}

/// A damaged page can have an attempt make room that the next one does not reach.
#[test]
fn attempts_that_make_room_or_meet_stale_pages_in_turn_end() {
    let _watch = Watchdog::start("attempts in turn", Duration::from_secs(60));
    let scene = Scene::new(FAST);
    let mut restarts = Restarts::from_root(scene.structure.root);
    let error = scene.worker.block_on(async {
        loop {
            for interrupt in [Interrupt::stale(scene.structure.root, "it is another one"), Interrupt::again()] {
                if let Err(error) = restarts.back_off(&scene.worker, interrupt).await {
                    return error;
                }
            }
        }
    });
    assert!(matches!(error, Error::Inconsistent { .. }), "{error}");
}

/// A split is no lost race: what it has made room for is done by the next attempt.
#[test]
fn an_operation_that_comes_again_has_not_lost_a_race() {
    let scene = Scene::new(FAST);
    let tree = BTree::over(scene.one_sided());
    let before = scene.worker.counters();
    scene.worker.block_on(async {
        for key in KEYS..KEYS + 1000 {
            tree.insert(key, key).await.unwrap();
        }
    });
    let cost = scene.worker.counters() - before;
    assert!(cost.splits > 10 && cost.restarts == 0, "{cost:?}");
}

/// A new page is of level 0 and kind 0 until it is said to be something else.
#[test]
fn a_new_page_that_is_not_described_can_be_read() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let outcome: Result<(), Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let mut pages = Pages::new();
            let leaf = pages.add(first_leaf(access).await?);
            let page = access.allocate(scene.structure.class, Placement::RoundRobin).await?;
            let (link, new) = (page.link(), pages.add_new(page));
            access
                .change(pages, |pages| {
                    pages.set(leaf, 60, 7);
                    pages.set(new, 60, 8);
                })
                .await?;
            let page = access.open(Start::Page(link)).await?;
            assert_eq!((page.level(), page.kind(), page.read(|words| words.word(60))?), (0, 0, 8));
            Ok(())
        });
        outcome.unwrap();
    }
    let scene = Scene::new(FAST);
    test(&scene, &scene.one_sided());
    test(&scene, &scene.cache(1 << 20).share(&scene.worker, scene.structure.clone(), Proof::Checksum).unwrap());
}

/// A structure whose operations are no good.
#[derive(Debug, Clone, Copy, Default)]
struct Trouble;

/// Panics where it runs.
#[derive(Debug, Clone)]
struct Panics;

/// Answers so many words.
#[derive(Debug, Clone)]
struct Answers {
    words: u64,
}

wire! {
    struct Panics {}
    struct Answers { words }
}

impl Operation for Panics {
    type Output = ();
    type Plugin = Trouble;
    const NAME: &'static str = "panics";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Trouble>>(&self, access: &A, from: Start) -> Result<(), Interrupt> {
        access.open(from).await?;
        panic!("as it does");
    }
}

impl Operation for Answers {
    type Output = Vec<u64>;
    type Plugin = Trouble;
    const NAME: &'static str = "answers";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Trouble>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        access.open(from).await?;
        let answers = &access.context().local;
        answers.set(answers.get() + 1);
        Ok(vec![7; self.words as usize])
    }
}

impl Plugin for Trouble {
    const NAME: &'static str = "trouble";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 64..=64;
    type Region = ();
    /// Answers given.
    type Local = std::cell::Cell<u64>;

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 0, 1);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Panics>().add::<Answers>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

#[test]
fn a_shipped_operation_that_panics_or_answers_too_much_harms_nobody_else() {
    let _watch = Watchdog::start("trouble", Duration::from_secs(60));
    let fabric = Arc::new(in_process(1, 8 << 20, FAST).unwrap());
    let joining = Arc::clone(&fabric);
    let server = ServerId::new(0).unwrap();
    let listener = fabric.listen(server, &ListenOptions::default()).unwrap();
    let join = move || Ok(Arc::new(cluster::join_manual(&(joining.clone() as Arc<_>), 0)?));
    let registry = Registry::new().with::<Trouble>();
    let memory = fabric.memory(server).unwrap();
    let _serving = ShipServer::start(listener, memory, registry, &ShipOptions::default(), join).unwrap();
    let compute = cluster::join(&(fabric.clone() as Arc<_>), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let class = SizeClass::SMALLEST;
        let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
        let made = catalog::create::<Trouble>(&worker, "s", &options, Proof::Checksum).await.unwrap();
        let remote = Remote::<Trouble>::new(&worker, made.context().structure.clone());
        for _ in 0..3 {
            let error = remote.execute(&Panics).await.unwrap_err();
            assert_eq!(error.to_string(), "a shipped operation panicked: as it does; it has changed nothing");
            let error = remote.execute(&Answers { words: 5 << 20 }).await.unwrap_err();
            assert!(matches!(error, Error::AnswerTooLarge { words, .. } if words > 5 << 20), "{error}");
            assert_eq!(remote.execute(&Answers { words: 1000 }).await.unwrap(), [7; 1000]);
        }
        // The longest answer there is, and one that is longer by a word.
        let too_long = 5 << 20;
        let error = remote.execute(&Answers { words: too_long }).await.unwrap_err();
        let Error::AnswerTooLarge { words, limit } = error else { panic!("{error}") };
        let most = limit - (words - too_long);
        assert_eq!(remote.execute(&Answers { words: most }).await.unwrap().len() as u64, most);
        let error = remote.execute(&Answers { words: most + 1 }).await.unwrap_err();
        assert!(matches!(error, Error::AnswerTooLarge { words, .. } if words == limit + 1), "{error}");
        // What a structure counts of its own stands in what the handle keeps.
        for answers in 0..3 {
            assert_eq!(made.context().local.get(), answers);
            made.execute(&Answers { words: 1 }).await.unwrap();
        }
    });
}

/// To join, it connects to all memory servers, which may take its time. It says that it lives meanwhile.
#[test]
fn a_memory_server_that_joins_for_long_is_not_taken_for_a_stopped_one() {
    const ANSWER_WAIT: Duration = Duration::from_secs(1);
    let _watch = Watchdog::start("joins for long", Duration::from_secs(60));
    let fabric = Arc::new(in_process(1, 8 << 20, FAST).unwrap());
    let joining = Arc::clone(&fabric);
    let server = ServerId::new(0).unwrap();
    let listener = fabric.listen(server, &ListenOptions::default()).unwrap();
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let panicked = AtomicBool::new(false);
    let join = move || {
        assert!(panicked.swap(true, Ordering::Relaxed), "the first attempt panics");
        released.lock().unwrap().recv().unwrap();
        Ok(Arc::new(cluster::join_manual(&(joining.clone() as Arc<_>), 0)?))
    };
    let registry = Registry::new().with::<Trouble>();
    let memory = fabric.memory(server).unwrap();
    let _serving = ShipServer::start(listener, memory, registry, &ShipOptions::default(), join).unwrap();
    // Dropped before that, which waits for who joins.
    let release = release;
    let options = ComputeOptions { answer_wait: ANSWER_WAIT, ..ComputeOptions::default() };
    let compute = ComputeServer::join(fabric.clone() as Arc<_>, options).unwrap();
    let worker = compute.worker().unwrap();
    let class = SizeClass::SMALLEST;
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    let made = worker.block_on(catalog::create::<Trouble>(&worker, "s", &options, Proof::Checksum)).unwrap();
    let remote = Remote::<Trouble>::new(&worker, made.context().structure.clone());
    let error = worker.block_on(remote.execute(&Answers { words: 10 })).unwrap_err();
    assert!(error.to_string().contains("joining the cluster panicked"), "{error}");
    let mut asked = Box::pin(worker.spawn(async move { remote.execute(&Answers { words: 10 }).await }));
    let until_ns = worker.clock().now_ns() + 3 * ANSWER_WAIT.as_nanos() as u64 / 2;
    while worker.clock().now_ns() < until_ns {
        worker.turn();
        let early = asked.as_mut().poll(&mut std::task::Context::from_waker(Waker::noop()));
        assert!(early.is_pending(), "it has not joined yet: {early:?}");
    }
    release.send(()).unwrap();
    assert_eq!(worker.block_on(asked).unwrap(), [7; 10]);
}

/// A second structure with the names of the first.
#[derive(Debug, Clone, Copy, Default)]
struct Double;

#[derive(Debug, Clone)]
struct Again;

wire!(
    struct Again {}
);

impl Operation for Again {
    type Output = ();
    type Plugin = Double;
    const NAME: &'static str = "again";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Double>>(&self, _access: &A, _from: Start) -> Result<(), Interrupt> {
        Ok(())
    }
}

impl Plugin for Double {
    const NAME: &'static str = "trouble";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 64..=64;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(_pages: &mut impl PagesMut, _root: Slot, _structure: &Structure) {}

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Again>().add::<Again>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

#[test]
#[should_panic(expected = "two plug-ins are named trouble")]
fn two_plug_ins_of_one_name_are_refused() {
    let _ = Registry::new().with::<Trouble>().with::<Double>();
}

#[test]
#[should_panic(expected = "trouble has two operations named again")]
fn two_operations_of_one_name_are_refused() {
    let _ = Registry::new().with::<Double>();
}
