//! What every way to reach pages promises to a structure's code, beyond what the structures at hand make use of.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    rc::Rc,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Waker},
};

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::{Access, Cause, Hint, Interrupt, Link, PageRef, Pages, PagesMut, Plugin, Slot, Start, Words},
    clock::Clock,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Error as FabricError, Fabric,
        mem::{MemFabric, MemOptions},
    },
    lock::{LockState, LockWord},
    one_sided::{OneSided, Proof},
    page::{CHECKSUM, HEADER_WORDS, LOCK, SELF, checksum},
    ptr::{RemotePtr, ServerId},
    server::{LocalMemory, MemoryServer, in_process},
    structure::Structure,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeOptions, Tree},
    map::KeyRange,
};
use farlink_tests::{
    bounded,
    cluster::{self, FAST, WEAK},
};

const TREE: &str = "access";
const PAGE_BYTES: usize = 1024;
const KEYS: u64 = 200;
/// More than anything here takes.
const TURNS_MAX: u32 = 100_000;

/// A tree of two levels, and a worker beside it.
struct Scene {
    worker: Worker,
    compute: ComputeServer,
    memory: LocalMemory,
    structure: Structure,
}

impl Scene {
    fn new(options: MemOptions) -> Self {
        let memory = Arc::new(in_process(1, 4 << 20, options).unwrap());
        let fabric: Arc<dyn Fabric> = memory.clone();
        Self::on(&fabric, memory.memory(ServerId::new(0).unwrap()).unwrap())
    }

    /// On a fabric with one memory server, which has this memory.
    fn on(fabric: &Arc<dyn Fabric>, memory: LocalMemory) -> Self {
        Self::of(fabric, memory, PAGE_BYTES, KEYS)
    }

    fn of(fabric: &Arc<dyn Fabric>, memory: LocalMemory, page_bytes: usize, keys: u64) -> Self {
        let tree = BTreeOptions { page_bytes, ..BTreeOptions::default() };
        cluster::create_tree(fabric, TREE, tree).unwrap();
        cluster::load::<Tree>(fabric, TREE, (0..keys).map(|key| (key, key)), 0.7).unwrap();
        let compute = cluster::join(fabric, 1).unwrap();
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(BTree::<OneSided<Tree>>::open(&worker, TREE, Proof::Checksum)).unwrap();
        let structure = tree.structure().clone();
        Self { worker, compute, memory, structure }
    }

    fn one_sided(&self, proof: Proof) -> OneSided<Tree> {
        OneSided::new(&self.worker, self.structure.clone(), proof)
    }

    fn lock(&self, page: Link) -> LockWord {
        LockWord::from_word(self.memory.words(at(page), 1).unwrap()[0].load(Ordering::Relaxed))
    }

    /// A leaf, by its number from the left.
    fn leaf<A: Access<Plugin = Tree>>(&self, access: &A, index: usize) -> Link {
        let leaf: Result<Link, Interrupt> = self.worker.block_on(async {
            let _pin = self.worker.pin();
            let root = access.open(Start::Root).await?;
            Ok(children(access, &root).await?[index])
        });
        leaf.unwrap()
    }

    fn cache(&self) -> ComputeCache<Tree> {
        let mut options = CacheOptions::new(1 << 20);
        options.page_bytes = PAGE_BYTES;
        ComputeCache::<Tree>::new(options).unwrap()
    }
}

fn as_read<P>(page: P) -> Pages<P> {
    let mut pages = Pages::new();
    pages.add(page);
    pages
}

fn at(page: Link) -> RemotePtr {
    page.remote().unwrap().0
}

/// Runs `test` with each access to the tree that can change it from here.
macro_rules! with_each_access {
    ($test:ident) => {
        for options in [FAST, WEAK] {
            let scene = Scene::new(options);
            $test(&scene, &scene.one_sided(Proof::Checksum));
            let scene = Scene::new(options);
            $test(&scene, &scene.one_sided(Proof::LockBodyLock));
            let scene = Scene::new(options);
            $test(&scene, &OneSided::within(&scene.worker, scene.structure.clone(), scene.memory.clone()));
            let scene = Scene::new(options);
            let shared = scene.cache().share(&scene.worker, scene.structure.clone(), Proof::Checksum).unwrap();
            $test(&scene, &shared);
            let scene = Scene::new(options);
            let cache = scene.cache();
            let owned = cache.own(&scene.worker, scene.structure.clone(), KeyRange::ALL);
            let owned = scene.worker.block_on(owned).unwrap();
            $test(&scene, &owned);
        }
    };
}

async fn children<A: Access<Plugin = Tree>>(access: &A, root: &A::Page<'_>) -> Result<Vec<Link>, Interrupt> {
    assert_eq!(root.level(), 1);
    let _ = access;
    root.read(|words| Tree::links(words).map(|index| Link::from_word(words.word(index))).collect())
}

#[test]
fn links_that_are_followed_together_have_a_result_each() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let outcome: Result<(), Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let root = access.open(Start::Root).await?;
            let links = children(access, &root).await?;
            let outside = RemotePtr::new(ServerId::new(0).unwrap(), (4 << 20) - 64).unwrap();
            let mixed = [links[0], Link::NULL, links[1], Link::to(outside, scene.structure.class), links[2]];
            let root = Rc::new(root);
            let pages = access.follow_each(mixed.map(|link| (Rc::clone(&root), link))).all().await;
            assert_eq!(pages.len(), mixed.len());
            for (index, page) in pages.iter().enumerate() {
                assert_eq!(page.is_ok(), index % 2 == 0, "link {index}: {:?}", page.as_ref().map(PageRef::at));
            }
            for (link, page) in mixed.iter().zip(&pages).step_by(2) {
                assert!(page.as_ref().is_ok_and(|page| access.leads_to(*link, page)));
            }
            Ok(())
        });
        outcome.unwrap();
    }
    with_each_access!(test);
}

/// A change that sets nothing still says that its pages were so at one moment.
#[test]
fn a_change_without_effect_is_one_of_pages_as_they_are() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let outcome: Result<(), Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            for changes_between in [false, true] {
                let root = access.open(Start::Root).await?;
                let links = children(access, &root).await?;
                let [left, again, right] = [
                    access.follow(&root, links[0], Hint::DOWN).await?,
                    access.follow(&root, links[0], Hint::DOWN).await?,
                    access.follow(&root, links[1], Hint::DOWN).await?,
                ];
                if changes_between {
                    // A value of the first leaf, which has no meaning to the framework.
                    let last = PAGE_BYTES / 8 - 1;
                    access.change(as_read(again), |pages| pages.set(Slot::ONLY, last, 7)).await?;
                }
                let mut both = as_read(left);
                let right = both.add(right);
                let first = |pages: &A::PagesMut<'_>, slot| pages.page(slot).word(HEADER_WORDS);
                let seen = access.change(both, |pages| first(pages, Slot::ONLY) + first(pages, right)).await.map(drop);
                assert_eq!(seen.is_ok(), !changes_between);
                assert!(matches!(seen, Ok(_) | Err(Interrupt::Restart(_))));
            }
            Ok(())
        });
        outcome.unwrap();
    }
    with_each_access!(test);
}

/// A page that a change only relies on, or does not touch: it has to be as it was read, and is left as it is.
#[test]
fn a_page_that_is_not_altered_is_compared_and_left_alone() {
    const LAST: usize = PAGE_BYTES / 8 - 1;
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        // Addresses, as long as no cache has swizzled them.
        let leaves = (scene.leaf(access, 0), scene.leaf(access, 1));
        for is_added_to_alter in [false, true] {
            not_altered(scene, access, leaves, is_added_to_alter);
        }
    }
    fn not_altered<A: Access<Plugin = Tree>>(
        scene: &Scene,
        access: &A,
        (altered, relied_on): (Link, Link),
        is_added_to_alter: bool,
    ) {
        let before = scene.lock(relied_on);
        for changes_between in [false, true] {
            let outcome = scene.worker.block_on(async {
                let _pin = scene.worker.pin();
                let root = access.open(Start::Root).await?;
                let links = children(access, &root).await?;
                let first = access.follow(&root, links[0], Hint::DOWN).await?;
                let second = access.follow(&root, links[1], Hint::DOWN).await?;
                if changes_between {
                    let again = access.follow(&root, links[1], Hint::DOWN).await?;
                    let word = again.read(|words| words.word(LAST))?;
                    access.change(as_read(again), |pages| pages.set(Slot::ONLY, LAST, word + 1)).await?;
                }
                let mut pages = as_read(first);
                match is_added_to_alter {
                    true => pages.add(second),
                    false => pages.add_relied_on(second),
                };
                let (_, after) = access.change(pages, |pages| pages.set(Slot::ONLY, LAST, 8)).await?;
                let words = after.into_each().map(|page| page.map(|page| page.read(|words| words.word(LAST))));
                assert!(matches!(words.collect::<Vec<_>>()[..], [Some(Ok(8)), Some(Ok(word))] if word != 8));
                Ok(())
            });
            let seen = scene.worker.block_on(async {
                let _pin = scene.worker.pin();
                access.open(Start::Page(altered)).await?.read(|words| words.word(LAST))
            });
            match changes_between {
                false => outcome.unwrap(),
                true => assert!(matches!(outcome, Err(Interrupt::Restart(_))), "{outcome:?}"),
            }
            assert_eq!(seen.unwrap() == 8, !changes_between);
            if !changes_between {
                assert_eq!(scene.lock(relied_on), before, "it was written");
                // The next round looks for another change.
                let undo = async {
                    let _pin = scene.worker.pin();
                    let page = access.open(Start::Page(altered)).await?;
                    access.change(as_read(page), |pages| pages.set(Slot::ONLY, LAST, 0)).await.map(drop)
                };
                scene.worker.block_on(undo).unwrap();
            }
        }
    }
    with_each_access!(test);
}

/// A page that was read before a change of it shows one moment, or is refused; never something in between.
#[test]
fn a_page_that_is_held_across_a_change_shows_one_moment() {
    const LAST: usize = PAGE_BYTES / 8 - 1;
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let outcome: Result<(), Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let root = access.open(Start::Root).await?;
            let links = children(access, &root).await?;
            let held = access.follow(&root, links[0], Hint::DOWN).await?;
            let read = |words: &<A::Page<'_> as PageRef>::Words| (words.word(LAST - 1), words.word(LAST));
            let before = held.read(read)?;
            let again = access.follow(&root, links[0], Hint::DOWN).await?;
            let after = access.change(as_read(again), |pages| pages.fill(Slot::ONLY, LAST - 1, &[7, 7])).await?;
            match held.read(read) {
                Ok(seen) => assert!(seen == before || seen == (7, 7), "{seen:?}"),
                Err(refused) => assert!(matches!(refused, Interrupt::Restart(_)), "{refused}"),
            }
            let left = after.1.into_each().flatten().next().expect("it was not freed");
            assert_eq!(left.read(read)?, (7, 7), "a page is not as the change has left it");
            Ok(())
        });
        outcome.unwrap();
    }
    with_each_access!(test);
}

/// A page that is altered as it is may be another one by then: it is not freed, over no access.
#[test]
fn a_page_that_is_altered_as_it_is_is_not_freed() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let leaf = scene.leaf(access, 0);
        let free = async {
            let _pin = scene.worker.pin();
            let page = access.open(Start::Page(leaf)).await?;
            access.change(Pages::current(page), |pages| pages.free(Slot::ONLY)).await.map(drop)
        };
        let freed = catch_unwind(AssertUnwindSafe(|| scene.worker.block_on(free)));
        assert!(freed.is_err(), "{freed:?}");
        assert_eq!(scene.leaf(access, 0), leaf);
        assert_eq!(scene.lock(leaf).state(), LockState::Unlocked);
    }
    with_each_access!(test);
}

#[test]
fn a_page_that_was_freed_is_freed_once() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let leaf: Result<Link, Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let root = access.open(Start::Root).await?;
            let links = children(access, &root).await?;
            Ok(access.follow(&root, links[0], Hint::DOWN).await?.link())
        });
        let leaf = leaf.unwrap();
        let free = || scene.worker.block_on(farlink_runtime::access::free(access, leaf));
        free().unwrap();
        let again = free().unwrap_err();
        assert!(matches!(again, Interrupt::Restart(_) | Interrupt::Failed(_)), "{again}");
        let one_sided = scene.one_sided(Proof::Checksum);
        let read = scene.worker.block_on(one_sided.read_page(leaf));
        assert!(matches!(read, Err(Interrupt::Restart(_))), "{read:?}");
    }
    with_each_access!(test);
}

/// Or a reader that holds an old copy could not tell it from the page that comes next.
#[test]
fn a_page_that_was_freed_has_a_later_version() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let leaf = scene.leaf(access, 0);
        let before = scene.lock(leaf);
        scene.worker.block_on(farlink_runtime::access::free(access, leaf)).unwrap();
        // An owner marks it free behind the change.
        for _ in 0..TURNS_MAX {
            if scene.lock(leaf).state() == LockState::Free {
                break;
            }
            scene.worker.turn();
        }
        let after = scene.lock(leaf);
        assert_eq!(after.state(), LockState::Free);
        assert!(after.version() > before.version(), "{before:?}, then {after:?}");
    }
    with_each_access!(test);
}

#[test]
fn a_page_of_another_structure_is_refused() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let options = BTreeOptions { page_bytes: PAGE_BYTES, ..BTreeOptions::default() };
        let other = scene.worker.block_on(BTree::create(&scene.worker, "other", options)).unwrap();
        let (ours, theirs) = (scene.leaf(access, 1), other.structure().root_link());
        let outcome = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            access.open(Start::Page(ours)).await?;
            access.open(Start::Page(theirs)).await.map(|page| page.link())
        });
        assert!(
            matches!(outcome, Err(Interrupt::Restart(Cause::Stale { page, .. })) if page == at(theirs)),
            "{outcome:?}"
        );
    }
    with_each_access!(test);
}

/// A page may be sound and stand where another one is to be: what it says of itself is the other one's, its address too.
#[test]
fn a_sound_page_in_the_place_of_another_is_refused() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let [copied, place, forged] = [0, 1, 2].map(|leaf| scene.leaf(access, leaf));
        let words = |page: Link| scene.memory.words(at(page), PAGE_BYTES / 8).unwrap();
        for (to, from) in words(place).iter().zip(words(copied)) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        // Or all of it is right, but for the address.
        let mut image: Vec<u64> = words(forged).iter().map(|word| word.load(Ordering::Relaxed)).collect();
        image[SELF] = at(copied).raw();
        image[CHECKSUM] = checksum(&image, LockWord::from_word(image[LOCK]).version());
        for (to, from) in words(forged).iter().zip(image) {
            to.store(from, Ordering::Relaxed);
        }
        for other in [place, forged] {
            let opened = scene.worker.block_on(async {
                let _pin = scene.worker.pin();
                access.open(Start::Page(other)).await.map(|page| page.link())
            });
            let is_refused = matches!(opened, Err(Interrupt::Restart(Cause::Stale { page, .. })) if page == at(other));
            assert!(is_refused, "{opened:?} in the place of {other:?}");
        }
    }
    with_each_access!(test);
}

/// A page that somebody writes, however slowly, is not a corrupt one; what stays as it is and does not fit is.
#[test]
fn a_page_that_is_being_written_is_waited_for() {
    const CHANGES: u64 = 2000;
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let leaf = scene.leaf(access, 2);
        let last = &scene.memory.words(at(leaf), PAGE_BYTES / 8).unwrap()[PAGE_BYTES / 8 - 1];
        let whole = last.load(Ordering::Relaxed);
        let enter = async || {
            let _pin = scene.worker.pin();
            access.open(Start::Page(leaf)).await.map(|page| page.link())
        };
        let mut reading = pin!(enter());
        let mut context = Context::from_waker(Waker::noop());
        for change in 1..=CHANGES {
            last.store(whole.wrapping_add(change), Ordering::Relaxed);
            for _ in 0..8 {
                scene.worker.turn();
                assert!(reading.as_mut().poll(&mut context).is_pending(), "it ended with change {change}");
            }
        }
        last.store(whole, Ordering::Relaxed);
        assert_eq!(scene.worker.block_on(reading).unwrap(), leaf);
        // A cache would not look at it again.
        let one_sided = scene.one_sided(Proof::Checksum);
        last.store(!whole, Ordering::Relaxed);
        let corrupt = scene.worker.block_on(one_sided.read_page(leaf));
        assert!(
            matches!(&corrupt, Err(Interrupt::Failed(error)) if matches!(**error, Error::PageCorrupt { page } if page == at(leaf)))
        );
    }
    for options in [FAST, WEAK] {
        let scene = Scene::new(options);
        test(&scene, &scene.one_sided(Proof::Checksum));
        let scene = Scene::new(options);
        test(&scene, &OneSided::within(&scene.worker, scene.structure.clone(), scene.memory.clone()));
        let scene = Scene::new(options);
        let cache = scene.cache();
        let owned = cache.own(&scene.worker, scene.structure.clone(), KeyRange::ALL);
        let owned = scene.worker.block_on(owned).unwrap();
        test(&scene, &owned);
    }
}

/// Whoever cuts the file of a memory server ends the change that one of its threads is at, and not the thread.
#[cfg(target_os = "linux")]
#[test]
fn a_change_in_memory_that_is_lost_meanwhile_is_an_error() {
    let dir = cluster::scratch().unwrap();
    let server = MemoryServer::start(&cluster::serve_options(dir.path(), 0, 1, 4 << 20)).unwrap();
    let fabric: Arc<dyn Fabric> = Arc::new(MemFabric::open(dir.path(), FAST).unwrap());
    let scene = Scene::on(&fabric, server.memory());
    let here = OneSided::<Tree>::within(&scene.worker, scene.structure.clone(), server.memory());
    let leaf = scene.leaf(&here, 1);
    let change = |meanwhile: fn(&std::path::Path)| {
        scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let page = here.read_page(leaf).await?;
            here.change(as_read(page), |pages| {
                // Two words: such a change has a record.
                for index in [PAGE_BYTES / 8 - 1, PAGE_BYTES / 8 - 9] {
                    let word = pages.page(Slot::ONLY).word(index);
                    pages.set(Slot::ONLY, index, word + 1);
                }
                meanwhile(&dir.path().join("server-0.mem"));
            })
            .await
        })
    };
    change(|_| ()).unwrap();
    let cut = change(|path| std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(4096).unwrap());
    let is_lost = |error: &Error| matches!(error, Error::Fabric(FabricError::ServerLost { .. }));
    assert!(matches!(&cut, Err(Interrupt::Failed(error)) if is_lost(error)), "{:?}", cut.err());
}

/// Who writes a page without its lock can be held up for longer than it takes to read the page some hundred times.
#[test]
fn a_writer_that_is_held_up_is_waited_for_a_while() {
    const READS: u64 = 500;
    const STEP_NS: u64 = 3000;
    let scene = Scene::new(FAST);
    let leaf = scene.leaf(&scene.one_sided(Proof::Checksum), 2);
    let last = &scene.memory.words(at(leaf), PAGE_BYTES / 8).unwrap()[PAGE_BYTES / 8 - 1];
    let whole = last.load(Ordering::Relaxed);
    let now = Rc::new(Cell::new(0));
    let worker = scene.compute.worker_with(Clock::Virtual(Rc::clone(&now))).unwrap();
    let one_sided = OneSided::<Tree>::new(&worker, scene.structure.clone(), Proof::Checksum);
    let mut context = Context::from_waker(Waker::noop());
    let step = || {
        now.set(now.get() + STEP_NS);
        worker.turn();
    };
    last.store(!whole, Ordering::Relaxed);
    {
        let mut reading = pin!(one_sided.read_page(leaf));
        while worker.counters().torn_reads < READS {
            step();
            assert!(reading.as_mut().poll(&mut context).is_pending(), "it is not whole, and not known to be corrupt");
        }
        last.store(whole, Ordering::Relaxed);
        let found = loop {
            step();
            if let Poll::Ready(found) = reading.as_mut().poll(&mut context) {
                break found;
            }
        };
        assert_eq!(found.unwrap().at(), at(leaf));
    }
    last.store(!whole, Ordering::Relaxed);
    let begun_ns = now.get();
    let mut reading = pin!(one_sided.read_page(leaf));
    let found = loop {
        step();
        assert!(now.get() - begun_ns < 1_000_000_000, "a second, and nobody has changed it");
        if let Poll::Ready(found) = reading.as_mut().poll(&mut context) {
            break found;
        }
    };
    assert!(
        matches!(found, Err(Interrupt::Failed(error)) if matches!(*error, Error::PageCorrupt { page } if page == at(leaf)))
    );

    // Nobody waits twice for the same.
    let (reads, begun_ns) = (worker.counters().reads, now.get());
    assert!(bounded::block_on(&worker, one_sided.read_page(leaf)).is_err());
    assert_eq!((worker.counters().reads - reads, now.get() - begun_ns), (1, 0));
    last.store(whole ^ 2, Ordering::Relaxed);
    let mut reading = pin!(one_sided.read_page(leaf));
    while worker.counters().reads - reads < READS {
        step();
        assert!(reading.as_mut().poll(&mut context).is_pending(), "it has changed: somebody writes");
    }
    last.store(whole, Ordering::Relaxed);
    assert!(bounded::block_on(&worker, reading).is_ok());
}

/// Where the fabric's atomics are not atomic against WRITEs, the unlock is a compare-and-swap, and tells.
#[test]
fn a_lock_that_was_taken_away_is_reported() {
    let scene = Scene::new(MemOptions { atomic_against_writes: false, ..FAST });
    let access = scene.one_sided(Proof::Checksum);
    let leaf = scene.leaf(&access, 0);
    let word = &scene.memory.words(at(leaf), 1).unwrap()[0];
    let change = async {
        let _pin = scene.worker.pin();
        let page = access.open(Start::Page(leaf)).await?;
        access.change(as_read(page), |pages| pages.set(Slot::ONLY, PAGE_BYTES / 8 - 1, 7)).await.map(drop)
    };
    let mut changing = pin!(change);
    for _ in 0..TURNS_MAX {
        assert!(changing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        if matches!(scene.lock(leaf).state(), LockState::LockedBy(_)) {
            break;
        }
        scene.worker.turn();
    }
    let taken = LockWord::unlocked(scene.lock(leaf).version() + 40);
    word.store(taken.word(), Ordering::Relaxed);
    let outcome = scene.worker.block_on(changing);
    let is_told =
        |error: &Error| matches!(*error, Error::LockLost { page, found } if (page, found) == (at(leaf), taken));
    assert!(matches!(&outcome, Err(Interrupt::Failed(error)) if is_told(error)), "{outcome:?}");
    assert_eq!(scene.lock(leaf), taken);
}

/// A change of an old copy loses to whoever has changed the page, and is counted, whoever carries it out.
#[test]
fn a_change_of_an_old_copy_is_a_conflict() {
    fn test<A: Access<Plugin = Tree>>(scene: &Scene, access: &A) {
        let leaf = scene.leaf(access, 0);
        let conflicts = scene.worker.counters().lock_conflicts;
        let outcome = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let old = access.open(Start::Page(leaf)).await?;
            let newer = access.open(Start::Page(leaf)).await?;
            access.change(as_read(newer), |pages| pages.set(Slot::ONLY, PAGE_BYTES / 8 - 1, 7)).await?;
            access.change(as_read(old), |pages| pages.set(Slot::ONLY, PAGE_BYTES / 8 - 1, 8)).await.map(drop)
        });
        assert!(matches!(outcome, Err(Interrupt::Restart(Cause::Conflict))), "{outcome:?}");
        assert_eq!(scene.worker.counters().lock_conflicts, conflicts + 1);
    }
    for options in [FAST, WEAK] {
        let scene = Scene::new(options);
        test(&scene, &scene.one_sided(Proof::Checksum));
        let scene = Scene::new(options);
        test(&scene, &OneSided::within(&scene.worker, scene.structure.clone(), scene.memory.clone()));
    }
}

/// It costs a round trip, and one more if copies were old, as long as the window has room for all of them.
#[test]
fn old_copies_in_a_cache_are_renewed_together() {
    const SMALL_BYTES: usize = 256;
    let memory = Arc::new(in_process(1, 4 << 20, FAST).unwrap());
    let fabric: Arc<dyn Fabric> = memory.clone();
    let scene = Scene::of(&fabric, memory.memory(ServerId::new(0).unwrap()).unwrap(), SMALL_BYTES, 500);
    let shared = scene.cache().share(&scene.worker, scene.structure.clone(), Proof::Checksum).unwrap();
    let one_sided = scene.one_sided(Proof::Checksum);
    let outcome = scene.worker.block_on(async {
        let _pin = scene.worker.pin();
        let root = shared.open(Start::Root).await?;
        assert_eq!(root.level(), 2, "its children are cached");
        let links: Vec<Link> =
            root.read(|words| Tree::links(words).map(|index| Link::from_word(words.word(index))).collect())?;
        let mut held = vec![root];
        for &link in &links {
            held.push(shared.follow(&held[0], link, Hint::DOWN).await?);
        }
        assert!(links.len() > 2, "{links:?}");
        let validate = async || {
            let before = scene.worker.counters();
            let outcome = shared.validate(&held.iter().collect::<Vec<_>>()).await;
            let cost = scene.worker.counters() - before;
            (outcome, cost.reads as usize, cost.round_trips)
        };
        let (outcome, reads, trips) = validate().await;
        assert_eq!((outcome.is_ok(), reads, trips), (true, held.len(), 1));
        for &link in &links {
            let page = one_sided.read_page(link).await?;
            let last = SMALL_BYTES / 8 - 1;
            let word = page.read(|words| words[last])?;
            one_sided.change(as_read(page), |pages| pages.set(Slot::ONLY, last, word + 1)).await?;
        }
        let (outcome, reads, trips) = validate().await;
        assert!(matches!(outcome, Err(Interrupt::Restart(Cause::Stale { .. }))), "{outcome:?}");
        assert_eq!((reads, trips), (held.len() + links.len(), 2));
        Ok::<_, Interrupt>(())
    });
    outcome.unwrap();
}

/// Where an atomic may undo a WRITE, none is tried on a page of which the cached copy is old: it may be anybody's by now.
#[test]
fn an_old_copy_in_a_cache_leads_to_no_atomic() {
    let scene = Scene::new(MemOptions { atomic_against_writes: false, ..FAST });
    let shared = scene.cache().share(&scene.worker, scene.structure.clone(), Proof::Checksum).unwrap();
    let one_sided = scene.one_sided(Proof::Checksum);
    let outcome = scene.worker.block_on(async {
        let _pin = scene.worker.pin();
        shared.open(Start::Root).await?;
        let root = one_sided.open(Start::Root).await?;
        one_sided.change(as_read(root), |pages| pages.set(Slot::ONLY, PAGE_BYTES / 8 - 1, 7)).await?;
        let old = shared.open(Start::Root).await?;
        let atomics = scene.worker.counters().atomics;
        let outcome = shared.change(as_read(old), |pages| pages.set(Slot::ONLY, PAGE_BYTES / 8 - 1, 8)).await;
        assert!(matches!(outcome, Err(Interrupt::Restart(Cause::Stale { .. }))), "it was not old");
        assert_eq!(scene.worker.counters().atomics, atomics);
        // That has told the cache, too.
        let root = shared.open(Start::Root).await?;
        shared.change(as_read(root), |pages| pages.set(Slot::ONLY, PAGE_BYTES / 8 - 1, 9)).await.map(drop)
    });
    outcome.unwrap();
}

#[test]
fn a_bad_request_is_never_tried_again() {
    let scene = Scene::new(FAST);
    let nowhere = RemotePtr::new(ServerId::new(7).unwrap(), 4096).unwrap();
    let outcome = scene.worker.block_on(scene.worker.read(nowhere, 1));
    assert!(matches!(outcome.map_err(|error| *error), Err(Error::Fabric(FabricError::BadAddress { .. }))));
}
