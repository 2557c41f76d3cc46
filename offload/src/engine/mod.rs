//! The engine: on a miss it decides whether an operation goes on here or is shipped to the memory server (DEX, VLDB 2024,
//! section 6).
//!
//! An [`Engine`] runs operations over [`Cached`] access. When one needs a page that is not cached, a
//! [policy](crate::policy) is asked, if the operation can be shipped at all:
//!
//! - The page that the link is in lies inside what this compute server owns, so all below it is this server's own; and the
//!   missing page is on a level whose subtrees are each on one memory server, as the catalog says of the structure
//!   ([`EngineOptions::level_max`]).
//! - The memory server has the newest version of the missing page and of all below: nothing of it is in the cache, which
//!   [`CacheHandle::exclude`](farlink_cache::CacheHandle::exclude) finds out, and sees to until the answer is there.
//!
//! Then the operation's attempt ends, and the same operation begins on the memory server, at the missing page. Pages that it
//! has changed there are dropped from the cache, if an old version of one still cools in it. An operation that would change
//! more than one page, or goes beyond the subtree, comes back and takes the normal path. From the moment that it is sent it
//! runs as a task of the worker: who drops it abandons only its result.

mod attempt;

use std::{future::Future, rc::Rc, time::Duration};

use farlink_runtime::{
    access::{Access, Interrupt, Link, Operation, Plugin, Structure},
    error::Error,
    fencing,
    messaging::Error as MessagingError,
    operation::{Code, Restarts, Run, hold, settled},
    ptr::ServerId,
};

use self::attempt::{Attempt, Missing};
use crate::{
    cached::Cached,
    policies::{Chooser, OffloadCounts, Policies},
    ship::{Answer, Decline, From, Shipped},
    store::page_id,
};

/// How long a change of which nobody can say what became of it may go on at a memory server; and at one that stands still, which was waited for already.
const UNKNOWN_WAIT: Duration = Duration::from_secs(5);
const SILENT_WAIT: Duration = Duration::from_millis(100);

/// How an engine ships.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineOptions {
    /// The highest level from which operations are shipped. If not said, the highest whose subtrees are each on one memory
    /// server, by what the catalog says of the structure
    /// ([`Structure::colocated_level_max`](farlink_runtime::structure::Structure::colocated_level_max)). A subtree that is on several all the
    /// same costs a message, nothing else.
    pub level_max: Option<u8>,
}

/// What the clones of an engine share.
#[derive(Debug)]
pub(crate) struct Shared<P: Plugin> {
    pub(crate) cached: Cached<P>,
    pub(crate) level_max: u8,
    pub(crate) chooser: Chooser<P>,
}

/// Runs operations over [`Cached`] access, and ships those that a policy says to ship. Belongs to one worker; cheap to clone.
///
/// ```
/// use std::sync::Arc;
/// use farlink_offload::{
///     CacheOptions, ComputeCache, Engine, EngineOptions, Policies,
///     policy::{CostAware, Never}, ship::{Registry, ShipOptions, ShipServer},
/// };
/// use farlink_runtime::{
///     compute::{ComputeOptions, ComputeServer},
///     fabric::{listener::ListenOptions, mem::MemOptions},
///     operation::Code, ptr::ServerId, server,
/// };
/// use farlink_structures::{btree::{BTree, BTreeOptions, KeyRange, Tree}, map::ops::Scan};
///
/// let fabric = Arc::new(server::in_process(1, 16 << 20, MemOptions::default())?);
/// let registry = Registry::new().with::<Tree>();
/// // In a cluster of processes, each memory server does this for itself.
/// let (server, joining) = (ServerId::new(0).unwrap(), Arc::clone(&fabric));
/// let _serving = ShipServer::start(
///     fabric.listen(server, &ListenOptions::default())?, fabric.memory(server)?, registry, &ShipOptions::default(),
///     move || Ok(Arc::new(ComputeServer::join(joining.clone(), ComputeOptions::default())?)),
/// )?;
///
/// let compute = ComputeServer::join(fabric, ComputeOptions::default())?;
/// let mut options = CacheOptions::new(64 << 10);
/// options.excludes_subtrees = true;
/// let cache = ComputeCache::<Tree>::new(options)?;
/// let worker = compute.worker()?;
/// worker.block_on(async {
///     let tree = BTree::create(&worker, "ages", BTreeOptions::default()).await?;
///     tree.bulk_load((0..20_000).map(|key| (key, key)), 0.8).await?;
///     let owned = cache.own(&worker, tree.structure().clone(), KeyRange::ALL).await?;
///     // Scans read their own pages; all else goes where it is cheaper.
///     let policies = Policies::new(CostAware::default()).with(Code::of::<Scan<Tree>>(), Never);
///     let engine = Engine::new(owned, policies, EngineOptions::default())?;
///     let tree = BTree::over(engine.clone());
///     for key in (0..20_000).step_by(50) {
///         assert_eq!(tree.get(key).await?, Some(key));
///     }
///     assert!(engine.counts().asked > 0);
///     engine.cached().flush().await
/// })?;
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Engine<P: Plugin>(Rc<Shared<P>>);

impl<P: Plugin> Clone for Engine<P> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<P: Plugin> Engine<P> {
    /// An engine over this access.
    ///
    /// # Errors
    /// [`Error::BadOption`] if the cache was not made with
    /// [`CacheOptions::excludes_subtrees`](farlink_cache::CacheOptions::excludes_subtrees).
    pub fn new(cached: Cached<P>, policies: Policies, options: EngineOptions) -> Result<Self, Error> {
        if !cached.excludes_subtrees() {
            let why = "it is not set; an engine needs it".into();
            return Err(Error::BadOption { option: "excludes_subtrees", why });
        }
        let structure = cached.context().structure.clone();
        let usual = structure.colocated_level_max(cached.worker().servers());
        let chooser = Chooser::new(cached.worker(), structure, policies);
        let told = Rc::downgrade(&chooser.policies);
        cached.observe_reads(move |server, took_ns| {
            let policies = told.upgrade();
            policies.map(|policies| policies.borrow_mut().fetched(server, took_ns)).is_some()
        });
        Ok(Self(Rc::new(Shared { level_max: options.level_max.unwrap_or(usual), chooser, cached })))
    }

    /// The access through the cache.
    pub fn cached(&self) -> &Cached<P> {
        &self.0.cached
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        &self.0.cached.context().structure
    }

    /// What it has counted.
    pub fn counts(&self) -> OffloadCounts {
        self.0.chooser.counts()
    }

    async fn run<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        let worker = self.0.cached.worker();
        let _pin = worker.pin();
        let mut from = match operation.try_sync(&self.0.cached) {
            Ok(output) => return Ok(output),
            Err(from) => from,
        };
        let attempt = Attempt::new(&self.0, Code::of::<O>());
        let mut restarts = Restarts::from_root(self.structure().root);
        loop {
            let held = match restarts.loses_pages(O::READS_ONLY) {
                true => hold(&attempt, operation, from, &restarts).await,
                false => None,
            };
            let outcome = match held {
                Some(outcome) => outcome,
                None => operation.run(&attempt, from).await,
            };
            let interrupt = match outcome {
                Ok(output) => {
                    attempt.unshipped().into_iter().for_each(|miss| self.0.chooser.done_here::<O>(miss));
                    return settled(&self.0.cached, operation, output).await;
                }
                Err(interrupt) => interrupt,
            };
            from = restarts.start_after(&interrupt);
            match (interrupt, attempt.take_missing()) {
                (Interrupt::Ship(_), Some(missing)) => {
                    if let Some(output) = Shared::ship(&self.0, operation, missing).await? {
                        attempt.unshipped().into_iter().for_each(|miss| self.0.chooser.done_here::<O>(miss));
                        return Ok(output);
                    }
                    // The normal path, this time.
                    attempt.ship_no_more();
                }
                (interrupt, _) => restarts.back_off(worker, interrupt).await?,
            }
        }
    }
}

impl<P: Plugin> Shared<P> {
    /// Ships an operation to the memory server of a missing page; `None` if it comes back undone.
    pub(crate) async fn ship<O: Operation<Plugin = P>>(
        engine: &Rc<Self>,
        operation: &O,
        missing: Missing<P>,
    ) -> Result<Option<O::Output>, Error> {
        let (engine, operation) = (Rc::clone(engine), operation.clone());
        let worker = engine.cached.worker().clone();
        // Here, where parts that are shipped together are one trip: each task would count its own.
        worker.count_round_trip();
        worker.spawn_to_end(async move { engine.shipped(&operation, missing).await }).await
    }

    async fn shipped<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        missing: Missing<P>,
    ) -> Result<Option<O::Output>, Error> {
        let Missing { excluded, page, level } = missing;
        let _passage = match O::READS_ONLY {
            true => None,
            false => Some(self.cached.begin_change()?),
        };
        let Some((at, _)) = page.remote() else { return Ok(None) };
        let Some(owned) = self.cached.region_of(&operation.scope()) else { return Ok(None) };
        let clock = self.cached.worker().clock();
        let mut start_ns = clock.now_ns();
        // To open a connection is no part of what a message takes.
        if let Err(error) = self.chooser.shipper.connect(at.server()).await {
            return self.chooser.undone::<O>(at.server(), level, start_ns, error).map(|()| None);
        }
        start_ns = clock.now_ns();
        let answer = self.chooser.shipper.ship(operation, From::Page { page, level, owned: &owned }).await;
        match answer {
            Ok(Answer::Done(Shipped { output, changed, path, beside, .. })) => {
                self.chooser.done::<O>(at.server(), start_ns);
                self.count_uses(Code::of::<O>(), page, level, &path, beside.into());
                for page in changed.into_iter().filter(|page| page.remote().is_some()) {
                    excluded.drop_changed(page_id(page)).await;
                }
                Ok(Some(output))
            }
            Ok(Answer::Declined(why)) => {
                tracing::trace!(page = %at, ?why, "a shipped operation came back");
                self.chooser.came_back::<O>(at.server(), level, start_ns);
                if why == Decline::FencedOff {
                    self.chooser.ships_no_more_to(at.server());
                }
                Ok(None)
            }
            Ok(Answer::GoOn(_)) => Ok(None),
            Err(error) => match self.chooser.undone::<O>(at.server(), level, start_ns, error) {
                Ok(()) => Ok(None),
                Err(error) => {
                    let waited = match error {
                        Error::Messaging(MessagingError::OutcomeUnknown { .. }) => Some(UNKNOWN_WAIT),
                        Error::Messaging(MessagingError::NoAnswer { .. }) => Some(SILENT_WAIT),
                        _ => None,
                    };
                    if let Some(waited) = waited {
                        self.end_shipped(at.server(), waited).await;
                    }
                    // Who knows what it has done.
                    excluded.drop_all().await;
                    Err(error)
                }
            },
        }
    }
}

impl<P: Plugin> Shared<P> {
    /// Counts what a shipped operation would have used here: the lowest page of its path, and each one above if the operation would
    /// have gone on from there. If it would have been shipped all the same, the page would have saved nothing; and been in the way, if
    /// pages beside the path were read: they would have been several messages.
    fn count_uses(&self, operation: Code, start: Link, level: u8, path: &[Link], beside: usize) {
        let mut left = beside;
        let server = start.remote().map(|(at, _)| at.server());
        for below in (0..=path.len()).rev() {
            let page = if below == 0 { start } else { path[below - 1] };
            let (Some((at, _)), Some(level)) = (page.remote(), usize::from(level).checked_sub(below)) else { return };
            if Some(at.server()) != server {
                return;
            }
            let goes_on = below == path.len() || self.chooser.would_go_on(operation, at.server(), left);
            left += usize::from(!self.cached.is_hot(page, level as u8));
            match (goes_on, beside) {
                (true, _) => self.cached.count_absent(page),
                (false, 0) => return,
                (false, _) => self.cached.discount_absent(page),
            }
        }
    }

    /// A change of which nobody can say what became of it may still be under way at the memory server, or begin there: until that is over, or this compute
    /// server owns nothing any more.
    async fn end_shipped(&self, server: ServerId, waited: Duration) {
        self.chooser.ships_no_more_to(server);
        if let Err(error) = fencing::end_own(self.cached.worker(), server, waited).await {
            // Then nothing there is cached any more.
            tracing::debug!(%server, %error, "what was shipped there was not ended");
        }
    }
}

impl<P: Plugin> Run for Engine<P> {
    type Plugin = P;

    fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        self.run(operation)
    }
}
