//! Has operations done by the owners of what they are about.

use std::{cell::RefCell, future::Future, pin::Pin, rc::Rc, time::Duration};

use farlink_runtime::{
    access::{Operation, Overlap, Plugin, Region, Shards, Structure},
    error::Error,
    fabric::Error as FabricError,
    lock::OwnerId,
    messaging::{Channel, Error as MessagingError, Priority},
    operation::{Code, Run},
    versioned::VersionedReader,
    wire::{Wire, decode_all},
    worker::Handle,
};

use super::{
    LOOKS_AT_NOBODY, LOOKS_AT_OTHERS, LOOKS_MIN, PATIENCE_NS, ROUTE,
    holdings::{Here, rest},
    routes::{RouteMap, Routes},
};
use crate::ship::{At, CallHeader, ReplyHeader};

/// Has each operation done by the owner of what it is about: this compute server, or another one. See the [module](super). Cheap to
/// clone; belongs to one worker.
#[derive(Debug)]
pub struct Router<P: Plugin>(Rc<Inner<P>>);

#[derive(Debug)]
pub(super) struct Inner<P: Plugin> {
    pub(super) worker: Handle,
    pub(super) routes: Routes<P>,
    pub(super) map: VersionedReader<RouteMap<P::Region>>,
    pub(super) here: Option<Here<P>>,
    channels: RefCell<Vec<(OwnerId, Channel)>>,
    /// Memory for the words of a request.
    spare: RefCell<Vec<u64>>,
}

impl<P: Plugin> Clone for Router<P> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<P: Plugin> Router<P> {
    /// For a compute server that owns nothing.
    pub fn to_owners(worker: &Handle, routes: &Routes<P>) -> Self {
        Self::with(worker, routes, None)
    }

    /// For one that has a way of its own to what it owns, and [listens](super::OwnerServer).
    pub fn new(worker: &Handle, routes: &Routes<P>, here: Here<P>) -> Self {
        Self::with(worker, routes, Some(here))
    }

    fn with(worker: &Handle, routes: &Routes<P>, here: Option<Here<P>>) -> Self {
        let (channels, spare) = (RefCell::default(), RefCell::default());
        let (worker, routes, map) = (worker.clone(), routes.clone(), routes.reader());
        Self(Rc::new(Inner { worker, routes, map, here, channels, spare }))
    }

    /// The map that it knows.
    pub fn routes(&self) -> &Routes<P> {
        &self.0.routes
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        self.0.routes.structure()
    }

    /// How it reaches what this compute server owns.
    pub fn here(&self) -> Option<&Here<P>> {
        self.0.here.as_ref()
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + 'a>>;

impl<P: Plugin> Inner<P> {
    async fn run<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        let map = self.map.get();
        let Some(&owner) = map.owner_of(&operation.scope()) else {
            return self.again(operation, None).await;
        };
        match self.at(owner, operation, map.epoch).await {
            Err(why) if is_to_be_sent_on::<O>(&why) => self.again(operation, Some((map.epoch, why))).await,
            outcome => outcome,
        }
    }

    /// Has an operation done that was not yet: nobody was asked, or whoever was by a map of this epoch did not do it.
    #[cold]
    fn again<'a, O: Operation<Plugin = P>>(
        &'a self,
        operation: &'a O,
        undone: Option<(u64, Error)>,
    ) -> Boxed<'a, O::Output> {
        Box::pin(async move {
            let mut undone = undone;
            let mut patience = Patience::default();
            loop {
                if let Some((epoch, why)) = undone.take() {
                    self.look_anew(epoch, why, &operation.scope(), &mut patience).await?;
                }
                let map = self.map.get();
                let asked_ns = self.worker.clock().now_ns();
                let outcome = match map.owner_of(&operation.scope()) {
                    Some(&owner) => self.at(owner, operation, map.epoch).await,
                    None if map.covers(&operation.scope()) => return operation.route(&Parts { of: self, map }).await,
                    None => Err(Error::NoOwner { name: self.routes.structure().name.clone() }),
                };
                match outcome {
                    Err(why @ Error::OwnerMissing { owner, .. })
                        if self.has_waited_since(asked_ns) && !self.worker.is_dead(owner) =>
                    {
                        return Err(why);
                    }
                    Err(why) if is_to_be_sent_on::<O>(&why) => undone = Some((map.epoch, why)),
                    outcome => return outcome,
                }
            }
        })
    }

    /// Whether an owner that has not answered since then is not to be asked again: it lives, and its process is stopped.
    fn has_waited_since(&self, asked_ns: u64) -> bool {
        let waited = Duration::from_nanos(self.worker.clock().now_ns().saturating_sub(asked_ns));
        self.worker.lock_wait_limit().is_some_and(|limit| waited >= limit)
    }

    /// Waits until the map has another epoch than this, for a while; then the operation is tried again. Has what a dead owner had taken.
    ///
    /// # Errors
    /// The error, if it takes too long, or if the owner is dead and nobody else can take what it had; what reading or changing the map
    /// failed with.
    async fn look_anew(&self, epoch: u64, why: Error, scope: &P::Region, patience: &mut Patience) -> Result<(), Error> {
        // Each change of the map gives hope: the next owner may be about to be what it says.
        if patience.epoch != epoch {
            *patience = Patience { epoch, ..Patience::default() };
        }
        while self.map.get().epoch <= epoch {
            let now_ns = self.worker.clock().now_ns();
            let until_ns = *patience.until_ns.get_or_insert(now_ns + PATIENCE_NS);
            if now_ns > until_ns && patience.attempt >= LOOKS_MIN {
                return Err(why);
            }
            let insists = insists(patience.attempt);
            let has_read = self.routes.renew(&self.worker, insists).await?;
            if self.map.get().epoch > epoch {
                break;
            }
            if has_read
                && let Error::OwnerMissing { owner, .. } = why
                && self.worker.is_dead(owner)
                && let Some(_turn) = self.routes.turn_to_take(insists)
            {
                if !self.take_from_dead(owner).await? {
                    // Somebody else was faster, perhaps.
                    let mut looks = 0;
                    while !self.routes.renew(&self.worker, self::insists(looks)).await? {
                        rest(&self.worker, looks).await;
                        looks += 1;
                    }
                    if self.map.get().epoch <= epoch {
                        return Err(why);
                    }
                }
                patience.attempt += 1;
                continue;
            }
            if patience.attempt > 0
                && (insists || patience.attempt.is_multiple_of(LOOKS_AT_NOBODY))
                && matches!(why, Error::NoOwner { .. })
                && let Some(_turn) = self.routes.turn_to_take(insists)
            {
                self.take_unowned(scope).await;
            }
            rest(&self.worker, patience.attempt).await;
            patience.attempt += 1;
            if has_read {
                // Whoever was asked may be about to be what the map says.
                break;
            }
        }
        Ok(())
    }

    /// Has an operation done by the owner that the map names for it.
    async fn at<O: Operation<Plugin = P>>(
        &self,
        owner: OwnerId,
        operation: &O,
        epoch: u64,
    ) -> Result<O::Output, Error> {
        if owner == self.worker.owner()
            && let Some(here) = &self.here
        {
            return match here.execute(operation).await {
                Err(Error::GivenUp { name }) => Err(Error::NotOwned { name, epoch }),
                outcome => outcome,
            };
        }
        self.send(owner, operation).await
    }

    async fn send<O: Operation<Plugin = P>>(&self, owner: OwnerId, operation: &O) -> Result<O::Output, Error> {
        let Structure { name, id, .. } = self.routes.structure();
        let channel = self.channel(owner).await.map_err(|error| self.not_sent(owner, error))?;
        let mut words = self.spare.take();
        words.clear();
        CallHeader { code: Code::of::<O>(), structure: *id, start: At::Root }.encode(&mut words);
        operation.encode(&mut words);
        let reply = channel.request_words(ROUTE, &words, Priority::Latency).await;
        self.spare.replace(words);
        let reply = reply.map_err(|error| match error {
            MessagingError::OutcomeUnknown { why, .. } => Error::OwnerLost { name: name.clone(), owner, why },
            MessagingError::NoAnswer { waited, .. } => Error::OwnerSilent { name: name.clone(), owner, waited },
            MessagingError::Refused { why, .. } => {
                Error::AtOwner { owner, why: format!("{why}: it was asked for {:?} of a {}", O::NAME, P::NAME) }
            }
            error => self.not_sent(owner, error.into()),
        })?;
        let mut words = reply.words();
        match ReplyHeader::decode(&mut words)?.0 {
            ReplyHeader::Done { .. } => Ok(decode_all(words)?),
            ReplyHeader::NotOwned(epoch) => Err(Error::NotOwned { name: name.clone(), epoch }),
            ReplyHeader::Failed(failure) => Err(failure.into_error(|why| Error::AtOwner { owner, why })),
            ReplyHeader::Declined(_) | ReplyHeader::GoOn(_) | ReplyHeader::NotBegun(_) => {
                Err(Error::Malformed("an owner answered as a memory server would"))
            }
        }
    }

    #[cold]
    fn not_sent(&self, owner: OwnerId, error: Error) -> Error {
        match error {
            Error::Fabric(FabricError::PeerMissing { why, .. } | FabricError::ServerMissing { why, .. }) => {
                // It may listen again, over another connection.
                self.channels.borrow_mut().retain(|(other, _)| *other != owner);
                Error::OwnerMissing { name: self.routes.structure().name.clone(), owner, why }
            }
            error => error,
        }
    }

    async fn channel(&self, owner: OwnerId) -> Result<Channel, Error> {
        if let Some((_, channel)) = self.channels.borrow().iter().find(|(other, _)| *other == owner) {
            return Ok(channel.clone());
        }
        let channel = self.worker.channel_to(owner).await?;
        self.channels.borrow_mut().push((owner, channel.clone()));
        Ok(channel)
    }
}

/// Whether an operation was not done, or may be done again, and may fare better with another map or later.
fn is_to_be_sent_on<O: Operation>(why: &Error) -> bool {
    match why {
        Error::NotOwned { .. } | Error::NoOwner { .. } | Error::OwnerMissing { .. } => true,
        Error::OwnerLost { .. } => O::READS_ONLY,
        _ => false,
    }
}

/// Whether who has looked so often does itself what another operation of the process seems to do.
fn insists(looks: u32) -> bool {
    looks > 0 && looks.is_multiple_of(LOOKS_AT_OTHERS)
}

/// With a map of this epoch.
#[derive(Default)]
struct Patience {
    epoch: u64,
    until_ns: Option<u64>,
    attempt: u32,
}

/// The parts of a structure that has owners for all that the operation is about.
struct Parts<'a, P: Plugin> {
    of: &'a Inner<P>,
    map: Rc<RouteMap<P::Region>>,
}

impl<P: Plugin> Shards for Parts<'_, P> {
    type Plugin = P;

    fn about(&self, region: &P::Region) -> Vec<usize> {
        let parts = self.map.parts.iter().enumerate();
        let about = parts.filter(|(_, (_, part))| region.overlap(part) != Overlap::Outside);
        about.map(|(number, _)| number).collect()
    }

    fn region(&self, part: usize) -> Option<&P::Region> {
        self.map.parts.get(part).map(|(_, region)| region)
    }

    async fn on<O: Operation<Plugin = P>>(&self, part: usize, operation: &O) -> Result<O::Output, Error> {
        let (owner, region) = &self.map.parts[part];
        let piece = operation.within(region);
        if piece.scope().overlap(region) != Overlap::Inside {
            return Err(Error::Malformed(
                "an operation does not say what of it is about a part: see `Operation::within`",
            ));
        }
        match self.of.at(*owner, &piece, self.map.epoch).await {
            Err(why) if is_to_be_sent_on::<O>(&why) => self.of.again(&piece, Some((self.map.epoch, why))).await,
            outcome => outcome,
        }
    }
}

impl<P: Plugin> Run for Router<P> {
    type Plugin = P;

    fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        self.0.run(operation)
    }
}
