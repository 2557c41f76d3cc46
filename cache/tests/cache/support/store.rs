//! A store in memory that misbehaves on demand and watches how it is used.

use std::{
    collections::{HashMap, HashSet},
    future::{Future, poll_fn},
    sync::{Arc, Mutex, MutexGuard},
    task::{Poll, Waker},
};

use farlink_cache::{PageId, SizeClass, Store, is_swizzled};

use super::{
    executor::{Executor, Random, lock, pause},
    page::image_links,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the disk is on fire: {0}")]
pub struct Refused(pub &'static str);

/// What the stores of all threads share.
#[derive(Debug, Default)]
pub struct World {
    pub pages: HashMap<u64, Vec<u64>>,
    pub reads: u64,
    /// How many pages were asked for at once, each time.
    pub batches: Vec<usize>,
    pub writes: u64,
    /// Reads that were dropped before they answered.
    pub reads_dropped: u64,
    /// At most so many polls of a read or write are pending.
    pub pending_max: u64,
    /// Reads, or writes, wait for as long as this holds: see [`MapStore::release`].
    pub holds_reads: bool,
    pub holds_writes: bool,
    held: Vec<Waker>,
    /// The read, or write, that fails: 1 is the next one.
    pub fail_read: Option<u64>,
    pub fail_write: Option<u64>,
    pub fails_all_reads: bool,
    pub fails_all_writes: bool,
    pub fails_buffers: bool,
    /// Buffers have so many words more than were asked for.
    pub buffer_words_off: isize,
    /// Whether tasks are dropped before they begin.
    pub drops_tasks: bool,
    /// Of a hundred reads and writes, so many fail.
    pub fail_percent: u64,
    /// Whether a page must not be written before the pages that it links to.
    pub checks_order: bool,
    writing: HashSet<u64>,
    reading: HashMap<u64, u32>,
    seed: u64,
}

impl World {
    fn draw(&mut self, bound: u64) -> u64 {
        self.seed += 1;
        Random(self.seed).below(bound)
    }

    fn fails(&mut self, is_write: bool) -> bool {
        let (countdown, all) = match is_write {
            true => (&mut self.fail_write, self.fails_all_writes),
            false => (&mut self.fail_read, self.fails_all_reads),
        };
        *countdown = countdown.and_then(|left| left.checked_sub(1));
        let is_due = *countdown == Some(0);
        all || is_due || (self.fail_percent != 0 && self.draw(100) < self.fail_percent)
    }
}

/// One thread's way to a world.
#[derive(Clone)]
pub struct MapStore {
    world: Arc<Mutex<World>>,
    executor: Executor,
}

/// A read under way, also if it is dropped.
struct Reading<'a> {
    store: &'a MapStore,
    page: u64,
    has_ended: bool,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut world = self.store.world();
        *world.reading.get_mut(&self.page).expect("its count was made when it began") -= 1;
        world.reads_dropped += u64::from(!self.has_ended);
    }
}

impl MapStore {
    pub fn new(world: &Arc<Mutex<World>>, executor: &Executor) -> Self {
        Self { world: Arc::clone(world), executor: executor.clone() }
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.world)
    }

    /// Lets held reads and writes go on.
    pub fn release(&self) {
        let held = {
            let mut world = self.world();
            (world.holds_reads, world.holds_writes) = (false, false);
            std::mem::take(&mut world.held)
        };
        held.into_iter().for_each(Waker::wake);
    }

    async fn travel(&self, is_held: impl Fn(&World) -> bool) {
        poll_fn(|cx| {
            let mut world = self.world();
            if !is_held(&world) {
                return Poll::Ready(());
            }
            world.held.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        let turns = {
            let mut world = self.world();
            let bound = world.pending_max + 1;
            world.draw(bound)
        };
        pause(turns).await;
    }

    async fn write_one(&self, page: u64, image: &[u64]) -> Result<(), Refused> {
        {
            let mut world = self.world();
            assert!(world.writing.insert(page), "page {page}: two writes at once");
            assert_eq!(world.reading.get(&page).copied().unwrap_or(0), 0, "page {page}: written while it is read");
            assert_eq!(image[3], page, "page {page}: another page's image");
            for link in image_links(image) {
                assert!(!is_swizzled(link), "page {page}: a swizzled link in the store");
                let is_below = !world.checks_order || world.pages.contains_key(&link);
                assert!(is_below, "page {page}: written before page {link} below it");
            }
        }
        self.travel(|world| world.holds_writes).await;
        let mut world = self.world();
        world.writing.remove(&page);
        let fails = world.fails(true);
        // A write that failed may have taken effect.
        if !fails || world.draw(2) == 0 {
            world.pages.insert(page, image.to_vec());
        }
        if fails {
            return Err(Refused("write"));
        }
        world.writes += 1;
        Ok(())
    }
}

impl Store for MapStore {
    type Buffer = Vec<u64>;
    type Error = Refused;

    fn buffer(&self, words: usize) -> Result<Vec<u64>, Refused> {
        let world = self.world();
        let words = words.checked_add_signed(world.buffer_words_off).expect("a page has more words");
        if world.fails_buffers { Err(Refused("no buffer")) } else { Ok(vec![!0; words]) }
    }

    async fn read(&self, page: PageId, _class: SizeClass) -> Result<Vec<u64>, Refused> {
        let page = page.get();
        {
            let mut world = self.world();
            assert!(!world.writing.contains(&page), "page {page}: read while it is written");
            *world.reading.entry(page).or_default() += 1;
            assert_eq!(world.reading[&page], 1, "page {page}: two reads at once");
        }
        let mut reading = Reading { store: self, page, has_ended: false };
        self.travel(|world| world.holds_reads).await;
        reading.has_ended = true;
        let mut world = self.world();
        if world.fails(false) {
            return Err(Refused("read"));
        }
        world.reads += 1;
        world.pages.get(&page).cloned().ok_or(Refused("no such page"))
    }

    async fn read_many(&self, pages: &[(PageId, SizeClass)]) -> Vec<Result<Vec<u64>, Refused>> {
        self.world().batches.push(pages.len());
        let mut answers = Vec::new();
        for &(page, class) in pages {
            answers.push(self.read(page, class).await);
        }
        answers
    }

    async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<Result<(), Refused>> {
        let mut answers = Vec::new();
        for (page, image) in pages {
            answers.push(self.write_one(page.get(), &image).await);
        }
        answers
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        if !self.world().drops_tasks {
            self.executor.spawn(task);
        }
    }
}
