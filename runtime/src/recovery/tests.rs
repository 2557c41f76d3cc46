use std::{
    pin::pin,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::{Either, select};

use super::*;
use crate::{
    buffer::LocalKey,
    catalog,
    clock::Clock,
    compute::{self, ComputeOptions, ComputeServer, Maintenance},
    fabric::{
        Capabilities, Completion, Endpoint, Error as FabricError, Fabric, OwnerClaim, Request,
        mem::MemOptions,
        mortal::{MortalFabric, Order},
    },
    layout::{CATALOG_CLASS, catalog_page_at},
    page::{self, Identity},
    pages::allocate,
    ptr::Link,
    redo::{Body, Evidence, RING_FIRST},
    remote::write_words,
    structure::Placement,
    sync::AtomicBool,
};

fn join(fabric: &Arc<dyn Fabric>, lock_wait: Option<Duration>) -> ComputeServer {
    let options = ComputeOptions { maintenance: Maintenance::Manual, lock_wait, ..ComputeOptions::default() };
    ComputeServer::join(Arc::clone(fabric), options).unwrap()
}

fn in_process() -> Arc<dyn Fabric> {
    Arc::new(crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap())
}

/// A compute server that has done this, and died; its incarnation.
fn dead(fabric: &Arc<dyn Fabric>, act: impl AsyncFnOnce(&Handle)) -> OwnerId {
    let mortal = MortalFabric::new(Arc::clone(fabric), Order::Posted, false);
    let compute = join(&(Arc::new(mortal.clone()) as _), None);
    let worker = compute.worker().unwrap();
    worker.block_on(act(&worker));
    mortal.dies_after(0);
    compute.owner()
}

/// Somebody who lives holds a chunk with pages of a dead one: what was not taken back counts as left.
#[test]
fn what_was_not_taken_back_is_left() {
    let fabric = in_process();
    dead(&fabric, async |worker| drop(allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await.unwrap()));
    let (holder, survivor) = (join(&fabric, None), join(&fabric, None));
    let worker = survivor.worker().unwrap();
    let entry = survivor.geometry()[0].directory_at(1);
    let free = worker.block_on(worker.load(entry)).unwrap();
    let held = free | u64::from(holder.owner().incarnation()) << 32;
    worker.block_on(write_words(&*worker, vec![(entry, held)])).unwrap();
    assert_eq!(worker.block_on(sweep(&worker, catalog::free_unfinished)).unwrap(), 1);
    worker.block_on(write_words(&*worker, vec![(entry, free)])).unwrap();
    drop(holder);
    assert!(worker.block_on(survivor.settle(&worker)).unwrap());
    assert_eq!(worker.block_on(sweep(&worker, catalog::free_unfinished)).unwrap(), 0);
    assert_eq!(worker.block_on(worker.load(entry.word(1))).unwrap(), 1);
}

/// Somebody who lives holds the chunk to which a page of a dead one is to go back: that is waited for.
#[test]
fn what_was_not_returned_is_not_settled() {
    let fabric = in_process();
    dead(&fabric, async |worker| drop(allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await.unwrap()));
    let survivor = join(&fabric, None);
    let worker = survivor.worker().unwrap();
    assert_eq!(worker.block_on(sweep(&worker, catalog::free_unfinished)).unwrap(), 0);
    let holder = OwnerId::new(1000).unwrap();
    let _lives = fabric.claim(holder).unwrap();
    let entry = survivor.geometry()[0].directory_at(1);
    worker.block_on(async {
        let free = worker.load(entry).await.unwrap();
        let held = free | u64::from(holder.incarnation()) << 32;
        write_words(&*worker, vec![(entry, held)]).await.unwrap();
        let mut settling = pin!(survivor.settle(&worker));
        let while_held = pin!(worker.sleep_until(worker.clock().now_ns() + 100_000_000));
        if let Either::Left((settled, _)) = select(settling.as_mut(), while_held).await {
            panic!("{settled:?}, and the page is not returned");
        }
        write_words(&*worker, vec![(entry, free)]).await.unwrap();
        assert!(settling.await.unwrap());
        assert_eq!(worker.load(entry.word(1)).await.unwrap(), 1);
    });
}

/// Who joins slowly may have an earlier incarnation than one that had a slot before it, and would be fenced off there.
#[test]
fn a_slot_is_not_taken_by_who_is_fenced_off_there() {
    let fabric = in_process();
    let first = join(&fabric, None);
    let worker = first.worker().unwrap();
    let fence = layout::fence_at(ServerId::new(0).unwrap(), 1);
    let later = u64::from(first.owner().incarnation()) + 10;
    worker.block_on(write_words(&*worker, vec![(fence, later)])).unwrap();
    let second = join(&fabric, None);
    assert_eq!(worker.block_on(slot_of(&worker, second.owner())).unwrap(), Some(2));
    assert_eq!(worker.block_on(worker.load(layout::slot_at(1))).unwrap(), 0, "it is free for others");
}

/// A sweep fails because of one that is dead. The name of another one that is dead, and left its slot and no rings, is free all the same.
#[test]
fn a_name_is_free_of_who_has_left_its_slot_though_a_sweep_fails() {
    let fabric = in_process();
    let survivor = join(&fabric, None);
    let worker = survivor.worker().unwrap();
    let gone = dead(&fabric, async |worker| {
        catalog::reserve(worker, "a name", "a kind").await.unwrap();
    });
    let in_the_way = dead(&fabric, async |_| ());
    worker.block_on(async {
        let slot = slot_of(&worker, gone).await.unwrap().unwrap();
        free_rings(&worker, gone).await.unwrap();
        write_words(&*worker, vec![(layout::slot_at(slot), 0)]).await.unwrap();
        // Something that it has shipped to a memory server which lives is still under way.
        let slot = slot_of(&worker, in_the_way).await.unwrap().unwrap();
        let running = layout::fence_at(ServerId::new(0).unwrap(), slot).word(1);
        let under_way = u64::from(survivor.owner().incarnation()) << 32 | 1;
        write_words(&*worker, vec![(running, under_way)]).await.unwrap();
        let swept = sweep(&worker, catalog::free_unfinished).await;
        assert!(matches!(swept, Err(Error::ServerStalled { .. })), "{swept:?}");
        catalog::reserve(&worker, "a name", "a kind").await.unwrap();
    });
}

#[test]
fn a_wait_without_end_is_one() {
    let fabric = in_process();
    let owner = dead(&fabric, async |_| ());
    let survivor = join(&fabric, Some(Duration::MAX));
    let worker = survivor.worker().unwrap();
    worker.block_on(take_over(&worker, owner)).unwrap();
}

/// Records of a dead one that name what is no page, or none of that size: nothing of that is freed, or given to anybody.
#[test]
fn forged_records_free_no_page() {
    let small = CATALOG_CLASS;
    let fabric = in_process();
    let before = join(&fabric, None);
    let keeper = before.worker().unwrap();
    let large = keeper.block_on(allocate(&keeper, SizeClass::of_bytes(4096).unwrap(), Placement::RoundRobin)).unwrap();
    let inside = large.at().add(1024).unwrap();
    dead(&fabric, async |worker| {
        let ring = another_ring(worker, ServerId::new(0).unwrap(), RingUse::Records).await.unwrap();
        let mut place = ring.word(RING_FIRST);
        for (sequence, at) in [(1, catalog_page_at(3)), (2, inside)] {
            let identity = Identity { structure: StructureId(0), level: 0, class: small, kind: 0xca, is_words: false };
            let lock = LockWord::unlocked(0);
            if at == inside {
                let mut words = vec![0; small.words()];
                page::seal(&mut words, at, identity, lock.version());
                worker.write_words(at, &words).await.unwrap();
            }
            let mut body = Body::new(1, 0, Evidence::Lock);
            body.page(at, small, lock, true);
            let mut part = vec![0; body.parts().next().unwrap()];
            body.seal(worker.owner(), sequence, [(place, &mut part[..])].into_iter());
            worker.write_words(place, &part).await.unwrap();
            place = place.word(part.len());
            write_words(worker, vec![(at, lock.locked_by(worker.owner()).word())]).await.unwrap();
        }
        // The same of a page that its change was to publish.
        let mut body = Body::new(1, 1, Evidence::Mark);
        let lock = LockWord::unlocked(0);
        body.page(catalog_page_at(5), small, lock, false);
        let wrong = LockWord::unlocked(0);
        write_words(worker, vec![(catalog_page_at(5), lock.locked_by(worker.owner()).word())]).await.unwrap();
        // It would be free at the version that is two before.
        body.new_page(Link::to(catalog_page_at(4), small), wrong.version().wrapping_sub(2));
        let mut part = vec![0; body.parts().next().unwrap()];
        body.seal(worker.owner(), 3, [(place, &mut part[..])].into_iter());
        worker.write_words(place, &part).await.unwrap();
    });
    {
        let survivor = join(&fabric, None);
        let worker = survivor.worker().unwrap();
        for _ in 0..8 {
            // The page that is locked inside another one is nobody's to unlock.
            let _ = worker.block_on(survivor.maintain(&worker));
            let _ = keeper.block_on(before.maintain(&keeper));
        }
        assert!(worker.block_on(catalog::list(&worker)).unwrap().is_empty());
    }
    drop(before);
    let member = join(&fabric, None);
    let worker = member.worker().unwrap();
    worker.block_on(async {
        assert!(catalog::list(&worker).await.unwrap().is_empty());
        let mut pages = Vec::new();
        while let Ok(page) = allocate(&worker, small, Placement::RoundRobin).await {
            let (chunk, _) = member.geometry()[0].locate(page.at(), small).expect("it is no page of a chunk");
            let (of_large, _) = member.geometry()[0].locate(large.at(), large.class()).unwrap();
            assert_ne!(chunk, of_large, "it lies inside another page");
            pages.push(page);
        }
        assert!(!pages.is_empty());
    });
}

/// Registers no more than so many words for each endpoint, and keeps back what is asked of pages from an address on, as long as it is told to.
#[derive(Debug, Clone)]
struct Narrow {
    inner: Arc<dyn Fabric>,
    words_max: usize,
    from: RemotePtr,
    keeps: Arc<AtomicBool>,
    has_kept: Arc<AtomicBool>,
}

impl Narrow {
    fn new(inner: &Arc<dyn Fabric>, words_max: usize, from: RemotePtr) -> Self {
        Self { inner: Arc::clone(inner), words_max, from, keeps: Arc::default(), has_kept: Arc::default() }
    }
}

impl Fabric for Narrow {
    fn servers(&self) -> usize {
        self.inner.servers()
    }

    fn region_bytes(&self, server: ServerId) -> u64 {
        self.inner.region_bytes(server)
    }

    fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, FabricError> {
        let inner = self.inner.endpoint(seed, clock)?;
        Ok(Box::new(NarrowEndpoint { inner, fabric: self.clone(), words: 0, kept: Vec::new() }))
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, FabricError> {
        self.inner.claim(owner)
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        self.inner.liveness(owner)
    }
}

#[derive(Debug)]
struct NarrowEndpoint {
    inner: Box<dyn Endpoint>,
    fabric: Narrow,
    words: usize,
    kept: Vec<Request>,
}

impl Endpoint for NarrowEndpoint {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, FabricError> {
        self.words += words;
        if self.words > self.fabric.words_max {
            let (bytes, device) = (words as u64 * 8, "a narrow one".into());
            let (cause, remedy) = (std::io::ErrorKind::OutOfMemory.into(), String::new());
            return Err(FabricError::RegistrationRefused { bytes, device, cause, remedy });
        }
        // SAFETY: the caller keeps the memory until this endpoint is dropped, and the wrapped one with it.
        unsafe { self.inner.register(base, words) }
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        if self.fabric.keeps.load(Ordering::Acquire) {
            let of_pages = |request: &Request| request.at.offset() >= self.fabric.from.offset();
            self.kept.extend(requests.extract_if(.., |request| of_pages(request)));
            self.fabric.has_kept.fetch_or(!self.kept.is_empty(), Ordering::AcqRel);
        }
        self.inner.ring(requests);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if !self.kept.is_empty() && !self.fabric.keeps.load(Ordering::Acquire) {
            self.inner.ring(&mut self.kept);
        }
        self.inner.poll(completions);
    }
}

/// Sets a flag to this when it is dropped: a test that fails ends, though somebody waits for that.
struct AtEnd<'a>(&'a AtomicBool, bool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(self.1, Ordering::Release);
    }
}

fn first_chunk(compute: &ComputeServer) -> RemotePtr {
    compute.geometry()[0].chunk_at(0)
}

/// A dead one has left more rings than its heirs have registered memory for.
#[test]
fn of_many_rings_one_is_in_memory_at_a_time() {
    const RINGS: usize = 150;
    let fabric: Arc<dyn Fabric> = Arc::new(crate::server::in_process(1, 8 << 20, MemOptions::default()).unwrap());
    let keeper = join(&fabric, None);
    let owner = dead(&fabric, async |worker| {
        for _ in 0..RINGS {
            another_ring(worker, ServerId::new(0).unwrap(), RingUse::Records).await.unwrap();
        }
    });
    let narrow = Narrow::new(&fabric, RINGS * RING_CLASS.words() / 2, first_chunk(&keeper));
    let heir = join(&(Arc::new(narrow) as _), None);
    let worker = heir.worker().unwrap();
    assert_eq!(worker.block_on(sweep(&worker, catalog::free_unfinished)).unwrap(), 0);
    assert!(worker.block_on(is_finished(&worker, owner)).unwrap());
}

/// What a dead one held is looked for in all memory, which may take long. Meanwhile pages are reused.
#[test]
fn a_sweep_does_not_hold_up_the_epoch() {
    let fabric = in_process();
    let owner =
        dead(&fabric, async |worker| drop(allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await.unwrap()));
    let other = join(&fabric, None);
    let worker = other.worker().unwrap();
    let narrow = Narrow::new(&fabric, usize::MAX, first_chunk(&other));
    narrow.keeps.store(true, Ordering::Release);
    let sweeper = ComputeServer::join(Arc::new(narrow.clone()), ComputeOptions::default()).unwrap();
    let _goes_on = AtEnd(&narrow.keeps, false);
    let until = Instant::now() + Duration::from_secs(20);
    while !narrow.has_kept.load(Ordering::Acquire) {
        assert!(Instant::now() < until, "nobody looks for what the dead one held");
        std::thread::yield_now();
    }
    let mut graces = 0;
    let mut is_over = worker.compute().pages.begin_grace();
    while graces < 3 && Instant::now() < until {
        worker.block_on(compute::round(&worker, worker.compute())).unwrap();
        if is_over.load(Ordering::Acquire) {
            graces += 1;
            is_over = worker.compute().pages.begin_grace();
        }
        std::thread::yield_now();
    }
    let has_ended = worker.block_on(is_finished(&worker, owner)).unwrap();
    narrow.keeps.store(false, Ordering::Release);
    assert_eq!(graces, 3, "the epoch stands still");
    assert!(!has_ended, "the sweep was to be under way");
    let until = Instant::now() + Duration::from_secs(20);
    while !worker.block_on(is_finished(&worker, owner)).unwrap() {
        assert!(Instant::now() < until, "the sweep does not end");
        std::thread::yield_now();
    }
    drop(sweeper);
}

/// Who settles may have to look at all memory for longer than it waits for others.
#[test]
fn a_long_sweep_is_no_wait_for_others() {
    let fabric = in_process();
    dead(&fabric, async |worker| drop(allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await.unwrap()));
    let narrow = Narrow::new(&fabric, usize::MAX, Geometry::superblock_at(ServerId::new(0).unwrap()));
    let settler = join(&(Arc::new(narrow.clone()) as _), None);
    let worker = settler.worker().unwrap();
    narrow.keeps.store(true, Ordering::Release);
    let settled = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(2100));
            narrow.keeps.store(false, Ordering::Release);
        });
        worker.block_on(settler.settle(&worker))
    });
    assert!(settled.unwrap(), "nobody was in the way");
}

/// Pages that a dead one has recorded are somebody else's by now, who writes all of such a page. Whoever looks at them, to finish what the
/// dead one has left, undoes none of that.
#[test]
fn who_looks_at_pages_of_others_undoes_no_write() {
    const WRITES: u64 = 10_000;
    let options = MemOptions { nasty: true, atomic_against_writes: false, ..MemOptions::default() };
    let fabric: Arc<dyn Fabric> = Arc::new(crate::server::in_process(1, 4 << 20, options).unwrap());
    let owner = join(&fabric, None);
    let worker = owner.worker().unwrap();
    let page = worker.block_on(allocate(&worker, SizeClass::SMALLEST, Placement::RoundRobin)).unwrap();
    let (at, class) = (page.at(), page.class());
    let mut lock = page.first_lock();
    page.publish();
    let gone = dead(&fabric, async |worker| {
        let ring = another_ring(worker, ServerId::new(0).unwrap(), RingUse::Records).await.unwrap();
        let place = ring.word(RING_FIRST);
        let mut body = Body::new(1, 0, Evidence::Lock);
        body.page(at, class, lock, false);
        let mut part = vec![0; body.parts().next().unwrap()];
        body.seal(worker.owner(), 1, [(place, &mut part[..])].into_iter());
        worker.write_words(place, &part).await.unwrap();
    });
    let is_done = AtomicBool::new(false);
    let undone = std::thread::scope(|scope| {
        scope.spawn(|| {
            let survivor = join(&fabric, None);
            let worker = survivor.worker().unwrap();
            while !is_done.load(Ordering::Relaxed) {
                worker.block_on(finish_changes(&worker, gone)).unwrap();
            }
        });
        let _is_done = AtEnd(&is_done, true);
        let identity = Identity { structure: StructureId(0), level: 0, class, kind: 0xca, is_words: false };
        let undone = worker.block_on(async {
            for number in 0..WRITES {
                lock = LockWord::unlocked(lock.next_version());
                let mut words = worker.buffer(class.words())?;
                words.fill(0);
                page::seal(&mut words, at, identity, lock.version());
                worker.write_private(at, words).await?;
                if worker.read(at, class.words()).await?[page::LOCK] != lock.word() {
                    return Ok(Some(number));
                }
            }
            Ok::<_, Failure>(None)
        });
        undone.unwrap()
    });
    assert_eq!(undone, None, "a WRITE was undone");
}
