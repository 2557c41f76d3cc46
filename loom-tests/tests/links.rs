//! The link word of a cached page: swizzle against unswizzle against follow.
//!
//! A link leads to a page in remote memory or, swizzled, to a local frame. Whoever loads a page fills a frame and swizzles
//! the link to it ([`AtomicLink::swizzle`]); whoever evicts it writes the page back and unswizzles
//! ([`AtomicLink::unswizzle`]); both are compare-and-swaps from the state they expect. Asserted: a follower of a swizzled
//! link sees the filled frame; a follower that finds the link unswizzled again sees the page written back; of two loaders
//! one wins, and no swizzled link is overwritten by an unswizzling that expected another frame.
//!
//! Broken variants: without *release* a follower meets an empty frame; an unswizzling that stores blindly throws away
//! a link to a newer frame.
#![cfg(loom)]

use std::sync::Arc;

use farlink_loom_tests::{Plain, Running, Seen, explore, refuse, run};
use farlink_runtime::{
    ptr::{AtomicLink, Link, RemotePtr, ServerId, Target},
    sync::{AtomicU64, Ordering},
};

/// What the models need of a link word.
trait LinkWord: Send + Sync + 'static {
    fn new(link: Link) -> Self;
    fn load(&self) -> Link;
    fn swizzle(&self, page: RemotePtr, address: u64) -> Result<(), Link>;
    fn unswizzle(&self, address: u64, page: RemotePtr) -> Result<(), Link>;
}

impl LinkWord for AtomicLink {
    fn new(link: Link) -> Self {
        Self::new(link)
    }

    fn load(&self) -> Link {
        self.load()
    }

    fn swizzle(&self, page: RemotePtr, address: u64) -> Result<(), Link> {
        self.swizzle(page, address)
    }

    fn unswizzle(&self, address: u64, page: RemotePtr) -> Result<(), Link> {
        self.unswizzle(address, page)
    }
}

/// A link word, the two frames it may lead to, and the page's copy in remote memory.
struct Cache<L> {
    link: L,
    frames: [Plain; 2],
    remote: AtomicU64,
}

const CONTENT: u64 = 7;

fn page() -> RemotePtr {
    RemotePtr::new(ServerId::new(1).expect("1 is a server id"), 4096).expect("not null")
}

fn address(frame: usize) -> u64 {
    0x1000 * (frame as u64 + 1)
}

fn frame_at(address: u64) -> usize {
    (address / 0x1000 - 1) as usize
}

impl<L: LinkWord> Cache<L> {
    fn unloaded() -> Arc<Self> {
        let frames = [Plain::new(0), Plain::new(0)];
        Arc::new(Self { link: L::new(Link::remote(page())), frames, remote: AtomicU64::new(0) })
    }

    /// Fills a frame of the caller's own and swizzles the link to it; true if it was first.
    fn load(&self, frame: usize) -> bool {
        self.frames[frame].write(CONTENT);
        self.link.swizzle(page(), address(frame)).is_ok()
    }

    fn read_frame(&self, address: u64) -> u64 {
        self.frames[frame_at(address)].read()
    }

    /// Writes back what the link leads to, if it is a frame, and unswizzles the link; true if it did.
    fn evict(&self) -> bool {
        let Target::Local(address) = self.link.load().target() else { return false };
        self.remote.store(self.read_frame(address), Ordering::Relaxed);
        self.link.unswizzle(address, page()).is_ok()
    }

    /// Follows the link: the content of the frame, if it leads to one.
    fn follow(&self) -> Option<u64> {
        match self.link.load().target() {
            Target::Local(address) => Some(self.read_frame(address)),
            Target::Remote(_) => None,
            Target::Null => panic!("the link was lost"),
        }
    }
}

/// Runs `step` on a thread of its own.
fn start<L: LinkWord, T: 'static>(cache: &Arc<Cache<L>>, step: impl FnOnce(&Cache<L>) -> T + 'static) -> Running<T> {
    let cache = Arc::clone(cache);
    run(move || step(&cache))
}

/// A loader, an evictor, and a follower that looks twice.
fn load_evict_follow<L: LinkWord>(local: &Seen, evicted: &Seen) {
    let cache = Cache::<L>::unloaded();
    let loader = start(&cache, |cache| cache.load(0));
    let evictor = start(&cache, Cache::evict);
    let follower = start(&cache, |cache| {
        let looks = [cache.follow(), cache.follow()];
        let seen = looks[0].or(looks[1]);
        assert_eq!(seen.unwrap_or(CONTENT), CONTENT, "what was in the frame before it was linked");
        if let [Some(_), None] = looks {
            let remote = cache.remote.load(Ordering::Relaxed);
            assert_eq!(remote, CONTENT, "the page was written back before it was unlinked");
        }
        looks
    });
    let looks = follower.join();
    assert!(loader.join(), "nobody else swizzles");
    assert_linked(&cache, 1, u32::from(evictor.join()));
    if looks.contains(&Some(CONTENT)) {
        local.mark();
    }
    if looks == [Some(CONTENT), None] {
        evicted.mark();
    }
}

/// Two loaders and an evictor: every frame that was linked is still linked or was unlinked by the evictor.
fn two_loaders<L: LinkWord>(both: &Seen) {
    let cache = Cache::<L>::unloaded();
    let loaders = [0, 1].map(|frame| start(&cache, move |cache| cache.load(frame)));
    let evictor = start(&cache, Cache::evict);
    let loaded = loaders.map(Running::join);
    assert!(loaded.contains(&true), "the first to swizzle succeeds");
    assert_linked(&cache, loaded.map(u32::from).iter().sum(), u32::from(evictor.join()));
    if loaded == [true, true] {
        both.mark();
    }
}

/// Two evictors of one frame, and a loader that links the next frame if there is room.
fn two_evictors<L: LinkWord>(again: &Seen) {
    let cache = Cache::<L>::unloaded();
    assert!(cache.load(0));
    let loader = start(&cache, |cache| cache.load(1));
    let evictors = [0, 1].map(|_| start(&cache, Cache::evict));
    let loaded = loader.join();
    let evicted = evictors.map(Running::join);
    assert_linked(&cache, 1 + u32::from(loaded), evicted.map(u32::from).iter().sum());
    if loaded && evicted != [true, true] {
        again.mark();
    }
}

fn assert_linked<L: LinkWord>(cache: &Cache<L>, linked: u32, unlinked: u32) {
    let still = u32::from(cache.link.load().is_swizzled());
    assert_eq!(linked, unlinked + still, "a linked frame was lost");
}

#[test]
fn a_follower_sees_the_frame_filled_or_the_page_written_back() {
    let (local, evicted) = (Seen::new(), Seen::new());
    let seen = (local.clone(), evicted.clone());
    explore("links, load against evict against follow", move || load_evict_follow::<AtomicLink>(&seen.0, &seen.1));
    local.require("the follower meets a frame");
    evicted.require("the follower meets a frame and then an evicted page");
}

#[test]
fn of_two_loaders_one_wins() {
    let both = Seen::new();
    let seen = both.clone();
    explore("links, two loaders", move || two_loaders::<AtomicLink>(&seen));
    both.require("a page is loaded, evicted and loaded again");
}

#[test]
fn an_evictor_never_unlinks_another_frame() {
    let again = Seen::new();
    let seen = again.clone();
    explore("links, two evictors", move || two_evictors::<AtomicLink>(&seen));
    again.require("the page is loaded again beside the evictors");
}

/// A link word with one thing left out.
struct Broken<const WHAT: u8>(AtomicU64);

const RELAXED: u8 = 0;
const BLIND: u8 = 1;

impl<const WHAT: u8> LinkWord for Broken<WHAT> {
    fn new(link: Link) -> Self {
        Self(AtomicU64::new(link.word()))
    }

    fn load(&self) -> Link {
        Link::from_word(self.0.load(Ordering::Acquire))
    }

    fn swizzle(&self, page: RemotePtr, address: u64) -> Result<(), Link> {
        let local = Link::swizzled(address).expect("frames have addresses");
        let order = if WHAT == RELAXED { Ordering::Relaxed } else { Ordering::AcqRel };
        let swapped = self.0.compare_exchange(Link::remote(page).word(), local.word(), order, Ordering::Acquire);
        swapped.map(drop).map_err(Link::from_word)
    }

    fn unswizzle(&self, address: u64, page: RemotePtr) -> Result<(), Link> {
        let local = Link::swizzled(address).expect("frames have addresses");
        if WHAT == BLIND {
            let found = self.load();
            if found != local {
                return Err(found);
            }
            self.0.store(page.raw(), Ordering::Release);
            return Ok(());
        }
        let swapped = self.0.compare_exchange(local.word(), page.raw(), Ordering::AcqRel, Ordering::Acquire);
        swapped.map(drop).map_err(Link::from_word)
    }
}

#[test]
fn broken_swizzling_without_release_shows_an_empty_frame() {
    refuse("links, swizzled relaxed", "Causality violation", || {
        load_evict_follow::<Broken<RELAXED>>(&Seen::new(), &Seen::new());
    });
}

#[test]
fn broken_unswizzling_by_a_store_loses_a_frame() {
    refuse("links, unswizzled blindly", "a linked frame was lost", || two_evictors::<Broken<BLIND>>(&Seen::new()));
}
