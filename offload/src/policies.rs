//! Which policy decides about which operation, and what came of it.

use std::{
    cell::{Cell, RefCell},
    fmt,
    rc::Rc,
};

use farlink_runtime::{
    access::{Operation, Plugin, Structure},
    error::Error,
    fabric::Error as FabricError,
    messaging::Error as MessagingError,
    operation::Code,
    ptr::ServerId,
    worker::Handle,
};

use crate::{
    policy::{Miss, Never, Policy},
    ship::Shipper,
};

type Make = Box<dyn Fn() -> Box<dyn Policy>>;

/// The policies of one worker for one structure, by kind of operation.
pub struct Policies {
    usual: Box<dyn Policy>,
    others: Vec<(Code, Box<dyn Policy>)>,
    /// Where each kind of operation has its own.
    make: Option<Make>,
}

impl fmt::Debug for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policies").field("usual", &self.usual).field("others", &self.others).finish_non_exhaustive()
    }
}

impl Policies {
    /// This one for all operations together.
    pub fn new(policy: impl Policy + 'static) -> Self {
        Self { usual: Box::new(policy), others: Vec::new(), make: None }
    }

    /// A copy of this one for each kind of operation: what one kind takes says little of what another takes.
    pub fn for_each_kind(policy: impl Policy + Clone + 'static) -> Self {
        let usual = Box::new(policy.clone());
        Self { usual, others: Vec::new(), make: Some(Box::new(move || Box::new(policy.clone()))) }
    }

    /// This one for operations of one kind: [`Code::of`].
    #[must_use]
    pub fn with(mut self, operation: Code, policy: impl Policy + 'static) -> Self {
        self.others.retain(|(code, _)| *code != operation);
        self.others.push((operation, Box::new(policy)));
        self
    }

    pub(crate) fn of(&mut self, operation: Code) -> &mut dyn Policy {
        match (self.others.iter().position(|(code, _)| *code == operation), &self.make) {
            (Some(found), _) => &mut *self.others[found].1,
            (None, None) => &mut *self.usual,
            (None, Some(make)) => {
                self.others.push((operation, make()));
                let (_, policy) = self.others.last_mut().expect("it was pushed just now");
                &mut **policy
            }
        }
    }

    pub(crate) fn fetched(&mut self, server: ServerId, took_ns: u64) {
        self.usual.fetched(server, took_ns);
        self.others.iter_mut().for_each(|(_, policy)| policy.fetched(server, took_ns));
    }
}

impl Default for Policies {
    fn default() -> Self {
        Self::new(Never)
    }
}

/// What an engine or an adaptive client has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OffloadCounts {
    /// Operations and misses about which a policy was asked.
    pub asked: u64,
    /// Operations carried out by a memory server.
    pub shipped: u64,
    /// Operations that a memory server has sent back undone.
    pub came_back: u64,
    /// Choices made to learn what the other way takes.
    pub contrary: u64,
    /// Operations that were to be shipped, and were not because something below the missing page is cached.
    pub cached_below: u64,
}

impl std::ops::AddAssign for OffloadCounts {
    fn add_assign(&mut self, other: Self) {
        self.asked += other.asked;
        self.shipped += other.shipped;
        self.came_back += other.came_back;
        self.contrary += other.contrary;
        self.cached_below += other.cached_below;
    }
}

/// A miss at which an operation could have been shipped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unshipped {
    pub(crate) server: ServerId,
    pub(crate) level: u8,
    pub(crate) began_ns: u64,
    /// When it went beyond the pages below, if it did: a shipped one would have come back there.
    pub(crate) left_ns: Option<u64>,
}

/// What decides, ships and counts, for an engine or an adaptive client.
#[derive(Debug)]
pub(crate) struct Chooser<P> {
    pub(crate) shipper: Shipper<P>,
    pub(crate) policies: Rc<RefCell<Policies>>,
    counts: Cell<OffloadCounts>,
    /// Memory servers that carry out no operations, or none of this compute server.
    without: RefCell<Vec<ServerId>>,
    /// By memory server, when the first answer came from there; 0 before.
    first_ns: RefCell<Vec<u64>>,
}

impl<P: Plugin> Chooser<P> {
    pub(crate) fn new(worker: &Handle, structure: Structure, policies: Policies) -> Self {
        Self {
            shipper: Shipper::new(worker, structure),
            policies: Rc::new(RefCell::new(policies)),
            counts: Cell::default(),
            without: RefCell::default(),
            first_ns: RefCell::default(),
        }
    }

    pub(crate) fn counts(&self) -> OffloadCounts {
        self.counts.get()
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut OffloadCounts)) {
        let mut counts = self.counts.get();
        count(&mut counts);
        self.counts.set(counts);
    }

    /// Whether the memory server may carry out operations.
    pub(crate) fn may_serve(&self, server: ServerId) -> bool {
        !self.without.borrow().contains(&server)
    }

    pub(crate) fn ships_no_more_to(&self, server: ServerId) {
        let mut without = self.without.borrow_mut();
        if !without.contains(&server) {
            without.push(server);
        }
    }

    /// Asks the policy whether an operation is shipped. `hot`: whether the cache would keep the page.
    pub(crate) fn choose(&self, operation: Code, server: ServerId, level: u8, hot: &dyn Fn() -> bool) -> bool {
        let worker = self.shipper.worker();
        let random = || worker.random(rand::RngExt::random);
        let miss = Miss { server, level, load: self.shipper.load(server), random: &random, hot };
        let choice = self.policies.borrow_mut().of(operation).choose(&miss);
        self.count(|counts| {
            counts.asked += 1;
            counts.contrary += u64::from(choice.is_contrary);
        });
        choice.ships
    }

    /// [`Policy::would_go_on`].
    pub(crate) fn would_go_on(&self, operation: Code, server: ServerId, pages: usize) -> bool {
        self.policies.borrow_mut().of(operation).would_go_on(server, pages)
    }

    /// An operation that was sent at this time was carried out by a memory server.
    pub(crate) fn done<O: Operation>(&self, server: ServerId, start_ns: u64) {
        if let Some(took_ns) = self.took_ns(server, start_ns) {
            self.policies.borrow_mut().of(Code::of::<O>()).shipped(server, took_ns);
        }
        self.count(|counts| counts.shipped += 1);
    }

    /// An operation that was sent from a page of this level at this time has come back undone.
    pub(crate) fn came_back<O: Operation>(&self, server: ServerId, level: u8, start_ns: u64) {
        if let Some(took_ns) = self.took_ns(server, start_ns) {
            self.policies.borrow_mut().of(Code::of::<O>()).came_back(server, level, took_ns);
        }
        self.count(|counts| counts.came_back += 1);
    }

    /// What an exchange took that is over now. None if it began before the first one there was over: that waited for the same, a memory server that
    /// joins or looks for the structure, and only the first is known to be one that says little.
    fn took_ns(&self, server: ServerId, start_ns: u64) -> Option<u64> {
        let now_ns = self.shipper.worker().clock().now_ns();
        let mut first_ns = self.first_ns.borrow_mut();
        if first_ns.len() <= server.index() {
            first_ns.resize(server.index() + 1, 0);
        }
        let first_ns = &mut first_ns[server.index()];
        let is_first = *first_ns == 0;
        if is_first {
            // Also in a clock that begins at 0.
            *first_ns = now_ns.max(1);
        }
        (is_first || start_ns >= *first_ns).then(|| now_ns - start_ns)
    }

    /// An operation is over that was not shipped at a miss.
    pub(crate) fn done_here<O: Operation>(&self, miss: Unshipped) {
        let Unshipped { server, level, began_ns, left_ns } = miss;
        let took_ns = left_ns.unwrap_or_else(|| self.shipper.worker().clock().now_ns()) - began_ns;
        self.policies.borrow_mut().of(Code::of::<O>()).done_here(server, level, took_ns);
    }

    /// An operation could not be shipped, of which that began at `start_ns`. If it has had no effect, it is to be done here.
    ///
    /// # Errors
    /// The error, if it may have had one.
    pub(crate) fn undone<O: Operation>(
        &self,
        server: ServerId,
        level: u8,
        start_ns: u64,
        error: Error,
    ) -> Result<(), Error> {
        match error {
            Error::Fabric(FabricError::ServerMissing { .. }) | Error::UnknownOperation { .. } => {
                tracing::warn!(%server, %error, "no operations are shipped there any more");
                self.ships_no_more_to(server);
                Ok(())
            }
            // The memory server does not join the cluster, for example.
            Error::NotBegun { .. } => {
                tracing::debug!(%server, %error, "an operation that a memory server could not begin is done here instead");
                self.came_back::<O>(server, level, start_ns);
                Ok(())
            }
            // Or it gets no memory.
            Error::OnServer { .. } | Error::OutOfMemory { .. } if O::READS_ONLY => {
                tracing::debug!(%server, %error, "an operation that only reads is done here instead");
                self.came_back::<O>(server, level, start_ns);
                Ok(())
            }
            Error::Messaging(MessagingError::OutcomeUnknown { .. }) if O::READS_ONLY => {
                tracing::debug!(%server, %error, "an operation that only reads is done here instead");
                Ok(())
            }
            Error::Messaging(MessagingError::NoAnswer { .. }) if O::READS_ONLY => {
                tracing::warn!(%server, %error, "no operations are shipped there any more");
                self.ships_no_more_to(server);
                Ok(())
            }
            error => Err(error),
        }
    }
}
