//! Owners in this process, operations on what they own, and a region that goes from one to another meanwhile.
//!
//! Each owner has a worker; all of these take turns on one core. On another are the owners' threads that carry out what others send: a
//! move, for the most part. A worker's operations are those on the keys that its compute server owns, as in the paper. Once the region has moved, who issues operations learns it, and those on
//! the region are issued where it is then; until then they go there by messages.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use farlink_offload::route::move_region;
use farlink_offload::{ComputeCache, Holdings, OwnerServer, Router, Routes, Served, ShardKey, Sharded};
use farlink_runtime::access::{Access as _, NewPage};
use farlink_runtime::compute::ComputeServer;
use farlink_runtime::error::Error;
use farlink_runtime::fabric::listener::ListenOptions;
use farlink_runtime::messaging::{ServeMessages, Wait};
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::structure::{Placement, Structure};
use farlink_runtime::worker::Handle;
use farlink_structures::btree::{KeyRange, Tree};
use futures_util::future::try_join_all;

use super::key_set::{KeySet, PAGE_BYTES, WRITE_INTENSIVE};
use super::test_bed::{TestBed, stay_on_core};
use crate::driver::{self, Client};
use crate::maps::MapRequest;
use crate::maps::keys::value_for;
use crate::plan::AdmissionChoice;
use crate::route::Opened;
use crate::subject::{Outcomes, Subject as _};
use crate::tally::Counters;

/// Operations of all owners that are drawn before the clock starts; they are repeated with other values.
const DRAWN_MAX: u64 = 1 << 20;
/// Handles of a cache, beside one of its worker.
const HANDLES: usize = 8;
const PAGE_WORDS: usize = PAGE_BYTES as usize / 8;
/// Pages that a copy has on their way: as many as a flush.
const COPIED_AT_ONCE: usize = (256 << 10) / PAGE_BYTES as usize;

/// When what happens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    pub(super) warm_up: Duration,
    pub(super) before: Duration,
    pub(super) after: Duration,
    pub(super) slot: Duration,
}

/// What an owner's worker did in one slot of time.
#[derive(Debug, Clone, Default)]
pub(super) struct Slot {
    pub(super) ops: u64,
    pub(super) longest_ns: u64,
    pub(super) counters: Counters,
}

/// What was seen. Times are since the end of the warm-up.
#[derive(Debug)]
pub(super) struct Seen {
    /// Of each owner.
    pub(super) slots: Vec<Vec<Slot>>,
    pub(super) moved: KeyRange,
    pub(super) began: Duration,
    pub(super) ended: Duration,
    /// Pages that the owner wrote meanwhile.
    pub(super) pages: u64,
    /// Bytes of all that went over its connections for that, its log's among them.
    pub(super) bytes: u64,
    /// Until here it is counted: what comes then is disturbed by the copy.
    pub(super) until: Duration,
    /// A bare copy of as many pages.
    pub(super) copy: Duration,
}

/// A compute server that owns a part.
struct Owner {
    // In this order: threads that use the cache and the compute server go first.
    server: OwnerServer,
    holdings: Holdings<Tree>,
    compute: Arc<ComputeServer>,
}

impl Owner {
    fn start(bed: &TestBed, structure: &Structure, region: KeyRange, cache_bytes: u64) -> anyhow::Result<Self> {
        let compute = Arc::new(bed.join(region.low)?);
        let worker = compute.worker()?;
        let mut options = AdmissionChoice::Frequency.options(usize::try_from(cache_bytes)?);
        options.handles_max = 1 + HANDLES;
        let holdings = Holdings::new(structure, ComputeCache::<Tree>::new(options)?);
        worker.block_on(holdings.take(&worker, region))?;
        let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
        let listener = compute.listen(&ListenOptions::default())?;
        let server = OwnerServer::start(listener, &compute, vec![Served::new(&holdings)], &messages)?;
        Ok(Self { server, holdings, compute })
    }

    fn leave(self) -> anyhow::Result<()> {
        let worker = self.compute.worker()?;
        Ok(worker.block_on(self.holdings.give_up_all(&worker))?)
    }
}

/// What workers do now.
#[derive(Debug, Default)]
struct Stage(AtomicU8);

impl Stage {
    const MOVED: u8 = 1;
    const OVER: u8 = 2;

    fn is(&self, stage: u8) -> bool {
        self.0.load(Ordering::Relaxed) == stage
    }

    fn begin(&self, stage: u8) {
        self.0.store(stage, Ordering::Relaxed);
    }
}

/// The operations of one worker, by stage.
struct Requests([Vec<MapRequest>; 2]);

impl Requests {
    /// Those of all servers before a region moves from the first to the second, and after.
    fn draw(key_set: &Arc<KeySet>, region: &KeyRange, seed: u64) -> Vec<Self> {
        let draws = (4 * key_set.keys).min(DRAWN_MAX);
        let of = |server| key_set.operations(server, draws, WRITE_INTENSIVE, seed, 0).collect::<Vec<_>>();
        let mut all: Vec<Self> = (0..key_set.servers()).map(of).map(|own| Self([own.clone(), own])).collect();
        let moves = |request: &MapRequest| {
            let key = key_of(request);
            region.low <= key && region.high.is_none_or(|high| key < high)
        };
        let moved: Vec<_> = all[0].0[1].extract_if(.., |request| moves(request)).collect();
        let own = std::mem::take(&mut all[1].0[1]);
        // One of these, one of those.
        let (mut own, mut moved) = (own.into_iter(), moved.into_iter());
        let both =
            std::iter::from_fn(|| Some([own.next(), moved.next()]).filter(|pair| pair.iter().any(Option::is_some)));
        all[1].0[1] = both.flatten().flatten().collect();
        all
    }
}

fn key_of(request: &MapRequest) -> u64 {
    match *request {
        MapRequest::Update { key, .. } | MapRequest::Get { key, .. } => key,
        _ => 0,
    }
}

/// What one worker writes down.
struct Tape {
    zero: Instant,
    slot: Duration,
    slots: Vec<Slot>,
    /// Operations that were begun.
    begun: u32,
    counted: Counters,
    outcomes: Outcomes,
}

impl Tape {
    fn new(zero: Instant, slot: Duration) -> Self {
        let (counted, outcomes) = (Counters::default(), Outcomes::default());
        Self { zero, slot, slots: Vec::new(), begun: 0, counted, outcomes }
    }

    /// The number of an operation that begins.
    fn begin(&mut self) -> u32 {
        self.begun = self.begun.wrapping_add(1);
        self.begun
    }

    /// An operation has ended.
    fn record(&mut self, (start, end): (Instant, Instant), outcomes: Outcomes, counters: impl FnOnce() -> Counters) {
        self.outcomes += outcomes;
        let Some(since) = end.checked_duration_since(self.zero) else { return };
        let number = (since.as_nanos() / self.slot.as_nanos().max(1)) as usize;
        if number >= self.slots.len() {
            let now = counters();
            if let Some(last) = self.slots.last_mut() {
                last.counters += now.clone() - std::mem::take(&mut self.counted);
            }
            self.counted = now;
            self.slots.resize(number + 1, Slot::default());
        }
        let slot = &mut self.slots[number];
        slot.ops += 1;
        slot.longest_ns = slot.longest_ns.max((end - start).as_nanos() as u64);
    }
}

/// A run: half of what the first of three owners and more has moves to the second.
#[derive(Debug)]
pub(super) struct Trial<'a> {
    pub(super) bed: &'a TestBed,
    pub(super) structure: &'a Structure,
    pub(super) key_set: &'a Arc<KeySet>,
    pub(super) cache_bytes: u64,
    pub(super) in_flight: u32,
    pub(super) schedule: Schedule,
    pub(super) seed: u64,
}

impl Trial<'_> {
    fn range(&self, server: usize) -> KeyRange {
        let numbers = self.key_set.owned(server);
        let low = if server == 0 { 0 } else { KeySet::key(numbers.start) };
        KeyRange { low, high: (numbers.end < self.key_set.keys).then(|| KeySet::key(numbers.end)) }
    }

    pub(super) fn run(&self) -> anyhow::Result<Seen> {
        let start = |server| Owner::start(self.bed, self.structure, self.range(server), self.cache_bytes);
        let start_all = || (0..self.key_set.servers()).map(start).collect::<anyhow::Result<Vec<_>>>();
        let owners = on_core(1, start_all)?;
        let numbers = self.key_set.owned(0);
        let half = KeySet::key(numbers.start + (numbers.end - numbers.start) / 2);
        let region = KeyRange { low: half, high: self.range(0).high };
        let requests = Requests::draw(self.key_set, &region, self.seed);
        let (stage, zero) = (Stage::default(), Instant::now() + self.schedule.warm_up);
        let (slots, seen) = thread::scope(|scope| {
            let working = scope.spawn(|| {
                stay_on_core(0);
                self.work(&owners, &requests, &stage, zero).inspect_err(|_| stage.begin(Stage::OVER))
            });
            let seen = on_core(1, || self.lead(&owners, region, &stage, zero));
            stage.begin(Stage::OVER);
            (working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), seen)
        });
        let (slots, seen) = (slots?, seen?);
        owners.into_iter().try_for_each(Owner::leave)?;
        Ok(Seen { slots, ..seen })
    }

    /// Moves the region when it is time, and copies as many pages afterwards.
    fn lead(&self, owners: &[Owner], region: KeyRange, stage: &Stage, zero: Instant) -> anyhow::Result<Seen> {
        let compute = self.bed.join(self.seed)?;
        let worker = compute.worker()?;
        let [from, to, ..] = owners else { anyhow::bail!("a region moves between two owners at least") };
        let ids = [from, to].map(|owner| owner.compute.owner());
        sleep_until(zero + self.schedule.before);
        let written = || (from.holdings.counters().total().write_backs, from.server.counters().bytes);
        let (before, began) = (written(), zero.elapsed());
        let moved = worker.block_on(move_region(&worker, self.structure, &region, ids[0], ids[1]))?;
        let ended = zero.elapsed();
        let pages = written().0 - before.0;
        stage.begin(Stage::MOVED);
        sleep_until(zero + ended + self.schedule.after);
        let until = zero.elapsed();
        let copy = worker.block_on(BareCopy::prepare(&worker, self.structure, pages))?;
        let copy_began = Instant::now();
        worker.block_on(copy.run(&worker))?;
        Ok(Seen {
            slots: Vec::new(),
            moved: moved.context("the region was not moved: no leaf lies in it; give more --keys")?,
            began,
            ended,
            pages,
            // Published when the thread is idle: after the move, that is.
            bytes: written().1 - before.1,
            until,
            copy: copy_began.elapsed(),
        })
    }

    /// What all owners' workers do until it is over.
    fn work(
        &self,
        owners: &[Owner],
        requests: &[Requests],
        stage: &Stage,
        zero: Instant,
    ) -> anyhow::Result<Vec<Vec<Slot>>> {
        ensure!(
            requests.iter().flat_map(|of_one| &of_one.0).all(|requests| !requests.is_empty()),
            "an owner has nothing to do; give more --keys"
        );
        let client = |owner: &Owner| {
            let worker = owner.compute.worker()?;
            let routes = worker.block_on(Routes::read(&worker, self.structure.clone()))?;
            let router = Router::new(&worker, &routes, owner.holdings.here(&worker));
            Ok(Client { access: Opened::Routed(Sharded::new(vec![router], ShardKey::whole())?), worker })
        };
        let clients = owners.iter().map(client).collect::<anyhow::Result<Vec<Client<Tree>>>>()?;
        let tape = || RefCell::new(Tape::new(zero, self.schedule.slot));
        let tapes: Vec<_> = clients.iter().map(|_| tape()).collect();
        let lanes =
            clients.iter().zip(requests).zip(&tapes).zip(0u32..).flat_map(|(((client, requests), tape), number)| {
                (0..self.in_flight).map(move |_| lane(client, requests, (stage, number), tape))
            });
        driver::block_on(&clients, try_join_all(lanes))??;
        let mut outcomes = Outcomes::default();
        let slots = tapes.into_iter().map(RefCell::into_inner).map(|tape| {
            outcomes += tape.outcomes;
            tape.slots
        });
        let slots = slots.collect();
        let Outcomes { missing, wrong_values, .. } = outcomes;
        ensure!(
            missing + wrong_values == 0,
            "answers were wrong: {missing} loaded keys missing, {wrong_values} foreign values"
        );
        Ok(slots)
    }
}

/// One operation after the other until it is over.
async fn lane(
    client: &Client<Tree>,
    requests: &Requests,
    (stage, number): (&Stage, u32),
    tape: &RefCell<Tape>,
) -> Result<(), Error> {
    let Opened::Routed(router) = &client.access else { return Ok(()) };
    while !stage.is(Stage::OVER) {
        let count = tape.borrow_mut().begin();
        let requests = &requests.0[usize::from(stage.is(Stage::MOVED))];
        let request = match requests[count as usize % requests.len()] {
            // Others than the last time.
            MapRequest::Update { key, .. } => MapRequest::Update { key, value: value_for(key, number << 28 ^ count) },
            request => request,
        };
        let start = Instant::now();
        let outcomes = Tree::run(router, request).await?;
        tape.borrow_mut().record((start, Instant::now()), outcomes, || client.worker.counters().into());
        // One that finds all in the cache lets nobody else run.
        client.worker.yield_now().await;
    }
    Ok(())
}

/// On a thread that stays on one core, as those do that it starts.
fn on_core<T: Send>(number: usize, run: impl FnOnce() -> T + Send) -> T {
    let pinned = || {
        stay_on_core(number);
        run()
    };
    thread::scope(|scope| scope.spawn(pinned).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

fn sleep_until(time: Instant) {
    thread::sleep(time.saturating_duration_since(Instant::now()));
}

/// Copies so many pages to remote memory, each from a place of its own to another one, as many at a time as a flush does.
struct BareCopy {
    places: Vec<NewPage>,
    images: Vec<u64>,
}

impl BareCopy {
    async fn prepare(worker: &Handle, structure: &Structure, pages: u64) -> Result<Self, Error> {
        let access = OneSided::<Tree>::new(worker, structure.clone(), Proof::Checksum);
        let mut places = Vec::new();
        for _ in 0..pages {
            places.push(access.allocate(structure.class, Placement::RoundRobin).await?);
        }
        let words = places.len() * PAGE_WORDS;
        let copy = Self { places, images: (1..=words as u64).collect() };
        // Memory that was never touched is slow the first time.
        copy.run(worker).await?;
        Ok(copy)
    }

    async fn run(&self, worker: &Handle) -> Result<(), Error> {
        let pages: Vec<_> = self.places.iter().zip(self.images.chunks(PAGE_WORDS)).collect();
        for together in pages.chunks(COPIED_AT_ONCE) {
            let write = |&(place, image): &(&NewPage, &[u64])| {
                let mut buffer = worker.buffer(image.len())?;
                buffer.copy_from_slice(image);
                Ok(worker.write(place.at(), buffer))
            };
            let posted = together.iter().map(write).collect::<Result<Vec<_>, Error>>()?;
            for posted in posted {
                posted.await?;
            }
        }
        Ok(())
    }
}
