//! Who decides whether an operation goes on here or is shipped to the memory server.
//!
//! A [`Policy`] is asked by the one worker that it belongs to, and told what fetches and shipped operations took. An
//! [`Engine`](crate::Engine) asks on misses only; an [`Adaptive`](crate::Adaptive) client asks before each operation. Those that come with the crate: [`Never`], [`Always`], [`Cold`], [`CostAware`] (DEX, VLDB 2024, section 6.1)
//! and [`BackOff`] (Catfish, ICDCS 2019, algorithm 1). One of your own:
//!
//! ```
//! use farlink_offload::policy::{Choice, Miss, Policy};
//!
//! /// Ships what would take two fetches or more.
//! #[derive(Debug)]
//! struct Deep;
//!
//! impl Policy for Deep {
//!     fn choose(&mut self, miss: &Miss<'_>) -> Choice {
//!         if miss.level > 0 { Choice::SHIP } else { Choice::FETCH }
//!     }
//! }
//! ```

use std::fmt;

use farlink_runtime::{messaging::Load, ptr::ServerId};

/// A page that an operation needs and that is not cached; or a whole operation, as one miss of level 0.
#[derive(Clone, Copy)]
pub struct Miss<'a> {
    /// The memory server that has the page, and all below it.
    pub server: ServerId,
    /// The page's level: so many more pages are below it on the way to a leaf.
    pub level: u8,
    /// What the memory server last reported of its load, if it has.
    pub load: Option<Load>,
    /// The worker's random source.
    pub random: &'a dyn Fn() -> u64,
    /// [`Miss::is_hot`].
    pub hot: &'a dyn Fn() -> bool,
}

impl fmt::Debug for Miss<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, level, load, .. } = self;
        f.debug_struct("Miss").field("server", server).field("level", level).field("load", load).finish_non_exhaustive()
    }
}

impl Miss<'_> {
    /// Whether the cache would keep the page if it were fetched; false where there is no cache.
    pub fn is_hot(&self) -> bool {
        (self.hot)()
    }

    /// True once in `count` times, at random; never if that is 0.
    pub fn one_in(&self, count: u32) -> bool {
        count != 0 && (self.random)().is_multiple_of(u64::from(count))
    }
}

/// What is done about a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The operation is shipped; else the page is fetched.
    pub ships: bool,
    /// Chosen to learn what it takes, not because it is thought cheaper.
    pub is_contrary: bool,
}

impl Choice {
    /// Fetch the page.
    pub const FETCH: Self = Self { ships: false, is_contrary: false };
    /// Ship the operation.
    pub const SHIP: Self = Self { ships: true, is_contrary: false };

    /// The other way, to learn what it takes.
    #[must_use]
    pub const fn contrary(self) -> Self {
        Self { ships: !self.ships, is_contrary: true }
    }
}

/// Decides about the misses of one worker. What it says to a miss that cannot be shipped is not heeded; it need not have a
/// reply for every ship or a page for every fetch that it chose, and need not have chosen what it is told of.
pub trait Policy: fmt::Debug {
    /// Whether the operation is shipped.
    fn choose(&mut self, miss: &Miss<'_>) -> Choice;

    /// Whether an operation that was shipped from a page would have gone on here, had that page been cached, and so many pages below it
    /// read that the cache would not keep. If not, the page would have saved nothing, and the use does not count for it: see
    /// [`Miss::is_hot`].
    fn would_go_on(&mut self, _server: ServerId, _pages: usize) -> bool {
        true
    }

    /// A page was read from a memory server, and took so long; or an operation that could have been shipped whole.
    fn fetched(&mut self, _server: ServerId, _took_ns: u64) {}

    /// An operation was shipped to a memory server, and its reply took so long.
    fn shipped(&mut self, _server: ServerId, _took_ns: u64) {}

    /// An operation was shipped to a memory server from a page of this level and came back undone, after so long: it is done here now.
    fn came_back(&mut self, _server: ServerId, _level: u8, _took_ns: u64) {}

    /// An operation had a page fetched where it could have been shipped. Of its first such miss: the page's server and level, and how
    /// long it was until what lies below the page was done.
    fn done_here(&mut self, _server: ServerId, _level: u8, _took_ns: u64) {}
}

/// Fetches every page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Never;

impl Policy for Never {
    fn choose(&mut self, _: &Miss<'_>) -> Choice {
        Choice::FETCH
    }
}

/// Ships whatever can be shipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Always;

impl Policy for Always {
    fn choose(&mut self, _: &Miss<'_>) -> Choice {
        Choice::SHIP
    }
}

/// Fetches what the cache would keep, and ships the rest: a page that would be read and dropped costs a message at most, with all
/// that is below it. Looks at no times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cold;

impl Policy for Cold {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        if miss.is_hot() { Choice::FETCH } else { Choice::SHIP }
    }

    fn would_go_on(&mut self, _server: ServerId, pages: usize) -> bool {
        pages == 0
    }
}

/// Samples of an average.
pub const SAMPLES: usize = 50;
/// A sample counts as so many averages at most: a thread that lost its core for a while says nothing of the network, and
/// would be in the average for as long as it takes to have [`SAMPLES`] others, at one in a hundred.
const OUTLIER: u64 = 10;
/// What takes less than the average divided by this says that the average is of another time: its samples are forgotten. Far more than operations of one
/// kind differ.
const FAR_BELOW: u64 = 50;
/// A sample counts no more than this: thirteen days.
const SAMPLE_MAX: u64 = 1 << 50;

/// The average of the last [`SAMPLES`] samples.
#[derive(Debug, Clone)]
pub struct MovingAverage {
    samples: Box<[u64; SAMPLES]>,
    count: usize,
    next: usize,
    sum: u64,
}

impl Default for MovingAverage {
    fn default() -> Self {
        Self { samples: Box::new([0; SAMPLES]), count: 0, next: 0, sum: 0 }
    }
}

impl MovingAverage {
    /// The average, if there is a sample.
    pub fn get(&self) -> Option<u64> {
        self.sum.checked_div(self.count as u64)
    }

    /// Adds a sample, of which the oldest makes room. One far above the average counts as ten averages; one far below has all others forgotten.
    pub fn add(&mut self, sample: u64) {
        let average = self.get();
        if average.is_some_and(|average| sample.saturating_mul(FAR_BELOW) < average) {
            self.samples.fill(0);
            (self.count, self.next, self.sum) = (0, 0, 0);
        }
        let limit = average.map_or(SAMPLE_MAX, |average| (average * OUTLIER).clamp(1, SAMPLE_MAX));
        let sample = sample.min(limit);
        self.sum -= std::mem::replace(&mut self.samples[self.next], sample);
        self.sum += sample;
        self.next = (self.next + 1) % SAMPLES;
        self.count = (self.count + 1).min(SAMPLES);
    }
}

/// Something for each memory server.
#[derive(Debug, Clone)]
struct PerServer<T>(Vec<T>);

impl<T> Default for PerServer<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Default> PerServer<T> {
    fn of(&mut self, server: ServerId) -> &mut T {
        if self.0.len() <= server.index() {
            self.0.resize_with(server.index() + 1, T::default);
        }
        &mut self.0[server.index()]
    }
}

/// How many times rarer contrary choices become at most, where they are dear: what is never tried is never known to be cheap again.
pub const RARER_MAX: u32 = 16;

/// What [`CostAware`] is told at the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostOptions {
    /// Nanoseconds that a search in a cached page takes, counted until two operations have told what they took below a miss. By default 0:
    /// a search is little beside a fetch, and what an [`Adaptive`](crate::Adaptive) client fetches are whole operations, searches included.
    pub search_ns: u64,
    /// What is fetched costs so many times what is thought (making room, above all): a factor of about 1, *c*.
    pub factor: f64,
    /// One choice in so many is the contrary one, so that both averages stay true; 0 for none. If the other way is thought *t*
    /// times as dear, one in *t* times as many, up to [`RARER_MAX`] times: all of them together then cost about one part in
    /// so many.
    pub contrary_one_in: u32,
}

impl Default for CostOptions {
    fn default() -> Self {
        Self { search_ns: 0, factor: 1.0, contrary_one_in: 100 }
    }
}

/// Ships if that is expected to be faster than to fetch the rest of the path: if *rpc* < (*l* + 1) x (*fetch* + *search*) x
/// *c*, where *rpc* and *fetch* are the averages of the last 50 shipped operations and fetches (DEX, VLDB 2024, section
/// 6.1). Until it has tried both twice, it tries the one that it does not know. DEX tries the other way once in a hundred times,
/// whatever that costs; here it is the rarer, the dearer it is thought.
///
/// Two things are not as in DEX. A path is not all that an operation reads: a scan goes on to other leaves, and some of what it
/// reads is cached. So once two operations were done here after a miss of a level, the average of what such took below it, *rest*,
/// counts in place of (*l* + 1) x (*fetch* + *search*). And a page that the cache would keep is fetched if those who find it there
/// save by it: if *rest* - max(*l*, 1) x *fetch* < *rpc*, for the inner pages below come to be cached, too. A page that is shipped
/// from again and again would never be cached else.
#[derive(Debug, Clone, Default)]
pub struct CostAware {
    options: CostOptions,
    costs: PerServer<Costs>,
}

#[derive(Debug, Clone, Default)]
struct Costs {
    fetch: Cost,
    rpc: Cost,
    /// The rest of an operation after a miss, by its level.
    rest: Vec<Cost>,
}

/// What one way takes.
#[derive(Debug, Clone, Default)]
struct Cost {
    /// The first time may open a connection or ask the catalog: it counts only if the second takes no less.
    first: Option<u64>,
    later: MovingAverage,
}

impl Cost {
    fn add(&mut self, sample: u64) {
        match (self.first, self.later.get()) {
            (None, _) => self.first = Some(sample),
            (Some(first), None) => self.later.add(sample.min(first)),
            (Some(_), Some(_)) => self.later.add(sample),
        }
    }
}

impl CostAware {
    /// With these options.
    pub fn new(options: CostOptions) -> Self {
        Self { options, costs: PerServer::default() }
    }

    /// The averages of fetches and of shipped operations, in nanoseconds, once there were two.
    pub fn averages(&mut self, server: ServerId) -> (Option<u64>, Option<u64>) {
        let costs = self.costs.of(server);
        (costs.fetch.later.get(), costs.rpc.later.get())
    }

    /// What is thought to be left of an operation behind a miss of this level, in nanoseconds, if it is done here.
    fn rest(&mut self, server: ServerId, level: u8) -> Option<u64> {
        let search_ns = self.options.search_ns;
        let costs = self.costs.of(server);
        let seen = costs.rest.get(usize::from(level)).and_then(|rest| rest.later.get());
        let path = |fetch: u64| (u64::from(level) + 1).saturating_mul(fetch.saturating_add(search_ns));
        seen.or_else(|| costs.fetch.later.get().map(path))
    }
}

impl Policy for CostAware {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        let CostOptions { factor, contrary_one_in, .. } = self.options;
        let (fetch, rpc) = match self.averages(miss.server) {
            (Some(fetch), Some(rpc)) => (fetch, rpc),
            (None, _) => return Choice::SHIP.contrary(),
            (_, None) => return Choice::FETCH.contrary(),
        };
        let rest = self.rest(miss.server, miss.level).unwrap_or(fetch);
        let (rest, rpc) = (rest as f64 * factor, rpc as f64);
        // The inner pages below come to be cached, too.
        let kept = f64::from(miss.level.max(1)) * fetch as f64 * factor;
        let saves_later = || rest - kept < rpc && miss.is_hot();
        let cheaper = if rpc < rest && !saves_later() { Choice::SHIP } else { Choice::FETCH };
        let times = (rpc.max(rest) / rpc.min(rest).max(1.0)).ceil() as u32;
        if miss.one_in(contrary_one_in.saturating_mul(times.clamp(1, RARER_MAX))) {
            cheaper.contrary()
        } else {
            cheaper
        }
    }

    fn would_go_on(&mut self, server: ServerId, pages: usize) -> bool {
        let CostOptions { search_ns, factor, .. } = self.options;
        match self.averages(server) {
            (Some(fetch), Some(rpc)) => pages as f64 * fetch.saturating_add(search_ns) as f64 * factor < rpc as f64,
            _ => true,
        }
    }

    fn fetched(&mut self, server: ServerId, took_ns: u64) {
        self.costs.of(server).fetch.add(took_ns);
    }

    fn shipped(&mut self, server: ServerId, took_ns: u64) {
        self.costs.of(server).rpc.add(took_ns);
    }

    // It costs a message, and what is to be done here all the same.
    fn came_back(&mut self, server: ServerId, level: u8, took_ns: u64) {
        let rest = self.rest(server, level).unwrap_or(0);
        self.costs.of(server).rpc.add(took_ns.saturating_add(rest));
    }

    fn done_here(&mut self, server: ServerId, level: u8, took_ns: u64) {
        let rest = &mut self.costs.of(server).rest;
        if rest.len() <= usize::from(level) {
            rest.resize_with(usize::from(level) + 1, Cost::default);
        }
        rest[usize::from(level)].add(took_ns);
    }
}

/// What [`BackOff`] is told at the start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackOffOptions {
    /// *N*: a worker that finds the server busy keeps away for 0 to N - 1 operations, then for N to 2N - 1, and so on.
    pub rounds: u32,
    /// *T*: a server is busy above this utilisation, 0 to 1.
    pub threshold: f64,
}

impl Default for BackOffOptions {
    fn default() -> Self {
        Self { rounds: 8, threshold: 0.95 }
    }
}

/// Ships until the memory server reports to be busy; then keeps away for a number of operations, drawn at random so that
/// not all workers come back at once, and for longer while it stays busy (Catfish, ICDCS 2019, algorithm 1; its *fast
/// messaging* is shipping, its *offloading* is the compute server reading the pages itself).
///
/// What a report says is compared as it is, unless [`BackOff::predicting`] names a better guess at what comes next.
///
/// As printed, the algorithm takes a server for idle whenever no report has come since the last operation, and so never
/// backs off twice. Here the last report counts until the next one comes. A worker looks at it when there is a new one,
/// and when it has kept away for as long as it was to. One that has heard nothing for [`SILENT_MAX`] times takes the server for
/// idle, too: reports cease with a connection, and nobody opens it again who never ships.
#[derive(Clone)]
pub struct BackOff<F = fn(ServerId, Load) -> f64> {
    options: BackOffOptions,
    predict: F,
    servers: PerServer<Busy>,
}

impl<F> fmt::Debug for BackOff<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, servers, predict: _ } = self;
        f.debug_struct("BackOff").field("options", options).field("servers", servers).finish_non_exhaustive()
    }
}

impl Default for BackOff {
    fn default() -> Self {
        Self::new(BackOffOptions::default())
    }
}

/// So many times in a row a worker keeps away from a server that has reported nothing new meanwhile. Between two reports a fast one does
/// so some dozens of times.
pub const SILENT_MAX: u32 = 100;

#[derive(Debug, Clone, Copy, Default)]
struct Busy {
    /// The last report seen.
    report: u16,
    is_busy: bool,
    /// How many times in a row the server was busy.
    times: u32,
    /// How many of them without a new report.
    silent: u32,
    /// For how many more operations to keep away.
    left: u64,
}

impl BackOff {
    /// With these options. A server is thought to stay as busy as its last report says.
    pub fn new(options: BackOffOptions) -> Self {
        Self { options, predict: |_, load| load.utilisation(), servers: PerServer::default() }
    }

    /// The same, where `predict` tells from each new report of a server how busy it will be, 0 to 1.
    pub fn predicting<F: FnMut(ServerId, Load) -> f64>(self, predict: F) -> BackOff<F> {
        BackOff { options: self.options, predict, servers: self.servers }
    }
}

impl<F: FnMut(ServerId, Load) -> f64> Policy for BackOff<F> {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        let BackOffOptions { rounds, threshold } = self.options;
        let rounds = u64::from(rounds.max(1));
        let busy = self.servers.of(miss.server);
        let news = miss.load.filter(|load| load.report != busy.report);
        if let Some(load) = news {
            (busy.report, busy.is_busy) = (load.report, (self.predict)(miss.server, load) > threshold);
            busy.silent = 0;
        }
        if !busy.is_busy {
            busy.times = 0;
        } else if busy.left == 0 && busy.silent == SILENT_MAX {
            (busy.is_busy, busy.times) = (false, 0);
        } else if (news.is_some() || busy.left == 0) && busy.left <= u64::from(busy.times) * rounds {
            busy.times = busy.times.saturating_add(1);
            busy.silent += 1;
            busy.left = (miss.random)() % rounds + u64::from(busy.times - 1) * rounds;
        }
        match busy.left.checked_sub(1) {
            Some(left) => {
                busy.left = left;
                Choice::FETCH
            }
            None => Choice::SHIP,
        }
    }
}
