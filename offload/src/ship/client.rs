//! The worker's side: operations go out, answers come back.

use std::{cell::RefCell, fmt, marker::PhantomData, rc::Rc};

use farlink_runtime::{
    access::{InPieces, Link, Operation, Plugin, Structure},
    error::Error,
    fabric::Error as FabricError,
    fencing::Sender,
    messaging::{Channel, Error as MessagingError, Load, Priority, Refusal, Reply},
    one_sided::ownership::SharedUser,
    operation::Code,
    ptr::ServerId,
    wire::{Wire, decode_all},
    worker::Handle,
};

use super::{
    Decline,
    layout::{At, CallHeader, ReplyHeader, SHIP, not_begun},
};

/// Where a shipped operation begins.
#[derive(Debug, Clone)]
pub enum From<'a, R> {
    /// At the root, on the server where that is. For structures that compute servers leave to the memory servers: nobody has
    /// newer pages in a cache.
    Root,
    /// At the root, to search the inner levels on the server where that is; it says from where to go on.
    Above,
    /// At this page, on its server. Whoever sends it owns the page, and what is below it in remote memory is current.
    Page {
        /// The page.
        page: Link,
        /// Its level.
        level: u8,
        /// What the sender owns. The page must lie inside.
        owned: &'a R,
    },
}

/// What became of a shipped operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer<T> {
    /// It was carried out.
    Done(Shipped<T>),
    /// It has had no effect that others see (an operation makes its one change last) and is for the compute server to do. Only if it began at a page; and from the root, if the compute server is
    /// [fenced off](Decline::FencedOff).
    Declined(Decline),
    /// The rest is to be done from this page on. Only if it was to search.
    GoOn(Link),
}

/// An operation that a memory server has carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shipped<T> {
    /// What it answers.
    pub output: T,
    /// The pages that it has changed; copies of them are old.
    pub changed: Vec<Link>,
    /// Of an operation that began at a page: the first page that it has read of each level below that one, down to where it
    /// ended.
    pub path: Vec<Link>,
    /// How many pages it has read below the one where it began that are not of the path, once nothing was in the way any more.
    pub beside: u16,
    /// How many pages it has read.
    pub pages_read: u32,
}

/// Sends operations on one structure to the memory servers. Cheap to clone; belongs to one worker.
pub struct Shipper<P> {
    worker: Handle,
    shared: Rc<Shared>,
    /// Whether reading asks for no right.
    beside_owners: bool,
    of: PhantomData<P>,
}

/// What clones share.
struct Shared {
    structure: Structure,
    /// By server.
    channels: RefCell<Vec<Option<Channel>>>,
    /// Memory for the words of a request.
    spare: RefCell<Vec<u64>>,
    /// Memory servers use the structure on behalf of the sender.
    user: SharedUser,
}

impl<P> Clone for Shipper<P> {
    fn clone(&self) -> Self {
        let Self { worker, shared, beside_owners, of } = self;
        Self { worker: worker.clone(), shared: Rc::clone(shared), beside_owners: *beside_owners, of: *of }
    }
}

impl<P> fmt::Debug for Shipper<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shipper").field("structure", &self.shared.structure.name).finish_non_exhaustive()
    }
}

/// Names the operation, not the kind of the message.
fn unknown<O: Operation>(error: MessagingError) -> Error {
    match error {
        MessagingError::Refused { server, why: Refusal::UnknownKind, .. } => {
            Error::UnknownOperation { server, plugin: O::Plugin::NAME, operation: O::NAME }
        }
        error => error.into(),
    }
}

/// Whether a memory server may still carry out what was sent there and failed so.
fn may_go_on(error: &MessagingError) -> bool {
    match error {
        MessagingError::Refused { why, .. } => *why == Refusal::Unanswered,
        MessagingError::BadSize { .. } | MessagingError::Fabric(FabricError::ServerMissing { .. }) => false,
        _ => true,
    }
}

/// What a reply says.
fn answer<T: Wire>(server: ServerId, reply: &Reply) -> Result<Answer<T>, Error> {
    let mut words = reply.words();
    match ReplyHeader::decode(&mut words)? {
        (ReplyHeader::Done { changed, path, beside }, pages_read) => {
            Ok(Answer::Done(Shipped { output: decode_all(words)?, changed, path, beside, pages_read }))
        }
        (ReplyHeader::Declined(why), _) => Ok(Answer::Declined(why)),
        (ReplyHeader::GoOn(page), _) => Ok(Answer::GoOn(page)),
        (ReplyHeader::NotOwned(_), _) => Err(Error::Malformed("a memory server answered as an owner would")),
        (ReplyHeader::Failed(failure), _) => Err(failure.into_error(|why| Error::OnServer { server, why })),
        (ReplyHeader::NotBegun(failure), _) => Err(not_begun(server, failure)),
    }
}

impl<P: Plugin> Shipper<P> {
    /// A way to ship operations on this structure.
    ///
    /// # Panics
    /// If the structure is one of another plug-in.
    pub fn new(worker: &Handle, structure: Structure) -> Self {
        let Structure { name, kind, .. } = &structure;
        assert!(kind == P::NAME, "{name:?} is a structure of {kind}, and was taken for one of {}", P::NAME);
        let (channels, spare, user) = (RefCell::default(), RefCell::default(), SharedUser::default());
        let shared = Rc::new(Shared { structure, channels, spare, user });
        Self { worker: worker.clone(), shared, beside_owners: false, of: PhantomData }
    }

    /// The same; operations from the root that only read ask nobody, nor keep anybody from owning the structure. Beside an owner
    /// they answer what that one has written back, which may be old, and not of one moment.
    pub fn beside_owners(self) -> Self {
        Self { beside_owners: true, ..self }
    }

    /// Takes the right to use the structure, which the first operation from the root would do otherwise: a round trip to read its partition
    /// map, and two to change it.
    ///
    /// # Errors
    /// [`Error::Owned`] if somebody owns some of the structure and lives; if the fabric fails.
    pub async fn enter(&self) -> Result<(), Error> {
        self.shared.user.enter(&self.worker, &self.shared.structure).await
    }

    /// Has memory servers read from the root, until what that comes to counts, by the sender's right.
    async fn read<T>(
        &self,
        beside_owners: bool,
        mut attempt: impl AsyncFnMut() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let Shared { structure, user, .. } = &*self.shared;
        if beside_owners {
            return attempt().await;
        }
        loop {
            let Some(right) = user.right(structure) else {
                Box::pin(self.enter()).await?;
                continue;
            };
            let answer = attempt().await;
            if user.stands(structure, right, true) {
                return answer;
            }
        }
    }

    /// The worker that it belongs to.
    pub fn worker(&self) -> &Handle {
        &self.worker
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        &self.shared.structure
    }

    /// What a memory server last said of its load; none if nothing was sent there yet.
    pub fn load(&self, server: ServerId) -> Option<Load> {
        self.shared.channels.borrow().get(server.index())?.as_ref()?.load()
    }

    /// Sends an operation and waits for the answer. It is carried out once, or not at all; if the future is dropped, it goes
    /// its way, and nobody learns which pages it has changed.
    ///
    /// # Errors
    /// What the operation failed with; [`Error::NotBegun`] if the memory server could not even begin it; [`Error::Owned`] if it begins at
    /// [`From::Root`], and somebody owns some of the structure; [`Error::UnknownOperation`] if the memory server knows no such operation or structure;
    /// [`ServerMissing`](farlink_runtime::fabric::Error::ServerMissing) if it takes no messages;
    /// [`MessagingError::OutcomeUnknown`] if it was lost in mid-request.
    pub async fn ship<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        from: From<'_, P::Region>,
    ) -> Result<Answer<O::Output>, Error> {
        self.ship_as(operation, from, self.beside_owners).await
    }

    /// [`Shipper::ship`], where reading asks for no right if so.
    pub(crate) async fn ship_as<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        from: From<'_, P::Region>,
        beside_owners: bool,
    ) -> Result<Answer<O::Output>, Error> {
        match from {
            From::Root if O::READS_ONLY => {
                self.read(beside_owners, async || self.send(operation, From::Root).await).await
            }
            From::Root => {
                let (shipper, operation) = (self.clone(), operation.clone());
                // To its end: whoever becomes the owner waits for the answer, whether or not the caller still does.
                self.worker.spawn_to_end(async move { shipper.ship_change(&operation).await }).await
            }
            from => self.send(operation, from).await,
        }
    }

    /// Sends what changes nothing, or what the sender owns.
    async fn send<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        from: From<'_, P::Region>,
    ) -> Result<Answer<O::Output>, Error> {
        let (server, start, owned) = match from {
            From::Root => (self.structure().root.server(), At::Root, None),
            From::Above => (self.structure().root.server(), At::Above, None),
            From::Page { page, level, owned } => match page.remote() {
                Some((at, _)) => (at.server(), At::Page(page, level), Some(owned)),
                None => return Err(Error::BadPointer { word: page.word(), why: "it is no page".into() }),
            },
        };
        let channel = self.channel(server).await?;
        let reply = self.request(&channel, operation, start, |words| {
            if let Some(owned) = owned {
                Sender::of(&self.worker).encode(words);
                owned.encode(words);
            }
        });
        let reply = reply.await.map_err(|error| self.failed::<O>(error))?;
        answer(server, &reply)
    }

    /// Ships an operation from the root that may change something.
    async fn ship_change<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<Answer<O::Output>, Error> {
        let Shared { structure, user, .. } = &*self.shared;
        // Until it is answered: whoever becomes the owner meanwhile waits for it.
        let acting = match user.try_act() {
            None => Box::pin(user.act(&self.worker, structure)).await?,
            acting => acting,
        };
        let server = structure.root.server();
        let channel = self.channel(server).await?;
        let reply = self.request(&channel, operation, At::Root, |words| Sender::of(&self.worker).encode(words)).await;
        let reply = reply.map_err(|error| {
            if may_go_on(&error)
                && let Some(acting) = acting
            {
                acting.is_unsettled_at(server);
            }
            self.failed::<O>(error)
        })?;
        answer(server, &reply)
    }

    /// Sends an operation. `encode` appends what comes between the header and its parameters.
    async fn request<O: Operation<Plugin = P>>(
        &self,
        channel: &Channel,
        operation: &O,
        start: At,
        encode: impl FnOnce(&mut Vec<u64>),
    ) -> Result<Reply, MessagingError> {
        let mut words = self.shared.spare.take();
        words.clear();
        CallHeader { code: Code::of::<O>(), structure: self.structure().id, start }.encode(&mut words);
        encode(&mut words);
        operation.encode(&mut words);
        let reply = channel.request_words(SHIP, &words, Priority::Latency).await;
        self.shared.spare.replace(words);
        reply
    }

    /// Ships an operation from the root and has its answer sent in pieces, which it puts together here. Sent once more if it is lost
    /// with a server: another may have taken its place.
    ///
    /// # Errors
    /// As [`Shipper::ship`].
    pub async fn ship_in_pieces<O: InPieces<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        self.read(self.beside_owners, async || match self.attempt_in_pieces(operation).await {
            Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })) => self.attempt_in_pieces(operation).await,
            answer => answer,
        })
        .await
    }

    async fn attempt_in_pieces<O: InPieces<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        let server = self.structure().root.server();
        let channel = self.channel(server).await?;
        let mut words = self.shared.spare.take();
        words.clear();
        let structure = self.structure().id;
        CallHeader { code: Code::in_pieces::<O>(), structure, start: At::Root }.encode(&mut words);
        operation.encode(&mut words);
        let reply = channel.request_words(SHIP, &words, Priority::Latency).await;
        self.shared.spare.replace(words);
        let reply = reply.map_err(|error| self.failed::<O>(error))?;
        let mut words = reply.words();
        match ReplyHeader::decode(&mut words)?.0 {
            ReplyHeader::Done { .. } => Ok(operation.assemble(words)?),
            ReplyHeader::Failed(failure) => Err(failure.into_error(|why| Error::OnServer { server, why })),
            ReplyHeader::NotBegun(failure) => Err(not_begun(server, failure)),
            _ => Err(Error::Malformed("an operation that began at the root was declined")),
        }
    }

    /// [`Shipper::ship`] from the root, where nothing is declined but what a compute server sends that is fenced off. What only
    /// reads is sent once more if it is lost with a server: another may have taken its place.
    ///
    /// # Errors
    /// As [`Shipper::ship`]; [`Error::FencedOff`] if the memory server carries out no change of this compute server's any more.
    pub async fn ship_whole<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        let answer = match self.ship(operation, From::Root).await {
            Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })) if O::READS_ONLY => {
                self.ship(operation, From::Root).await
            }
            answer => answer,
        };
        match answer? {
            Answer::Done(shipped) => Ok(shipped.output),
            Answer::Declined(Decline::FencedOff) => Err(Error::FencedOff { server: self.structure().root.server() }),
            Answer::Declined(_) | Answer::GoOn(_) => {
                Err(Error::Malformed("an operation that began at the root was declined"))
            }
        }
    }

    /// Opens the way to a memory server, if it is not open: the first operation would do it otherwise. The first of a compute
    /// server takes some milliseconds.
    ///
    /// # Errors
    /// [`ServerMissing`](farlink_runtime::fabric::Error::ServerMissing) if it takes no messages.
    pub async fn connect(&self, server: ServerId) -> Result<(), Error> {
        self.channel(server).await.map(drop)
    }

    /// Why there was no answer.
    fn failed<O: Operation>(&self, error: MessagingError) -> Error {
        self.worker.check_standing().err().unwrap_or_else(|| unknown::<O>(error))
    }

    async fn channel(&self, server: ServerId) -> Result<Channel, Error> {
        if let Some(Some(channel)) = self.shared.channels.borrow().get(server.index()) {
            return Ok(channel.clone());
        }
        let channel = self.worker.channel(server).await?;
        let mut channels = self.shared.channels.borrow_mut();
        if channels.len() <= server.index() {
            channels.resize(server.index() + 1, None);
        }
        Ok(channels[server.index()].insert(channel).clone())
    }
}
