//! The worker's side: operations go out, answers come back.

use std::{cell::RefCell, fmt, rc::Rc};

use farlink_runtime::{
    error::Error,
    messaging::{Channel, Error as MessagingError, Load, Priority},
    operation::Operation,
    ptr::{RemotePtr, ServerId},
    structure::{Layout, Structure},
    wire::{Wire, decode_all},
    worker::Handle,
};

use super::{
    Decline,
    layout::{CallHeader, ReplyHeader, SHIP},
};

/// Where a shipped operation begins.
#[derive(Debug, Clone)]
pub enum From<'a, R> {
    /// At the root, on the server where that is. For structures that compute servers leave to the memory servers: nobody has
    /// newer pages in a cache.
    Root,
    /// At this page, on its server. Whoever sends it owns the page, and what is below it in remote memory is current.
    Page {
        /// The page.
        page: RemotePtr,
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
    /// It has had no effect and is for the compute server to do. Only if it began at a page.
    Declined(Decline),
}

/// An operation that a memory server has carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shipped<T> {
    /// What it answers.
    pub output: T,
    /// The pages that it has changed; copies of them are old.
    pub changed: Vec<RemotePtr>,
    /// How many pages it has read.
    pub pages_read: u32,
}

/// Sends operations on one structure to the memory servers. Cheap to clone; belongs to one worker.
pub struct Shipper {
    worker: Handle,
    structure: Structure,
    shared: Rc<Shared>,
}

/// What clones share.
#[derive(Default)]
struct Shared {
    /// By server.
    channels: RefCell<Vec<Option<Channel>>>,
    /// Memory for the words of a request.
    spare: RefCell<Vec<u64>>,
}

impl Clone for Shipper {
    fn clone(&self) -> Self {
        Self { worker: self.worker.clone(), structure: self.structure.clone(), shared: Rc::clone(&self.shared) }
    }
}

impl fmt::Debug for Shipper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shipper").field("structure", &self.structure.name).finish_non_exhaustive()
    }
}

impl Shipper {
    /// A way to ship operations on this structure.
    pub fn new(worker: &Handle, structure: Structure) -> Self {
        Self { worker: worker.clone(), structure, shared: Rc::default() }
    }

    /// The worker that it belongs to.
    pub fn worker(&self) -> &Handle {
        &self.worker
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        &self.structure
    }

    /// What a memory server last said of its load; none if nothing was sent there yet.
    pub fn load(&self, server: ServerId) -> Option<Load> {
        self.shared.channels.borrow().get(server.index())?.as_ref()?.load()
    }

    /// Sends an operation and waits for the answer. It is carried out once, or not at all; if the future is dropped, it goes
    /// its way, and nobody learns which pages it has changed.
    ///
    /// # Errors
    /// What the operation failed with; [`MessagingError::Refused`] if the memory server knows no such operation or structure;
    /// [`ServerMissing`](farlink_runtime::fabric::Error::ServerMissing) if it takes no messages; [`MessagingError::OutcomeUnknown`] if it was lost in mid-request.
    pub async fn ship<O: Operation>(
        &self,
        operation: &O,
        from: From<'_, <O::Layout as Layout>::Region>,
    ) -> Result<Answer<O::Output>, Error> {
        let (server, start, owned) = match from {
            From::Root => (self.structure.root.server(), None, None),
            From::Page { page, level, owned } => (page.server(), Some((page, level)), Some(owned)),
        };
        let channel = self.channel(server).await?;
        let mut words = self.shared.spare.take();
        words.clear();
        CallHeader { code: O::CODE, structure: self.structure.id, start }.encode(&mut words);
        if let Some(owned) = owned {
            owned.encode(&mut words);
        }
        operation.encode(&mut words);
        let reply = channel.request_words(SHIP, &words, Priority::Latency).await;
        self.shared.spare.replace(words);
        let reply = reply?;
        let mut words = reply.words();
        match ReplyHeader::decode(&mut words)? {
            (ReplyHeader::Done { changed }, pages_read) => {
                Ok(Answer::Done(Shipped { output: decode_all(words)?, changed, pages_read }))
            }
            (ReplyHeader::Declined(why), _) => Ok(Answer::Declined(why)),
            (ReplyHeader::Failed(failure), _) => Err(failure.into_error(server)),
        }
    }

    /// [`Shipper::ship`] from the root, where nothing is declined. What only reads is sent once more if it is lost with a server:
    /// another may have taken its place.
    ///
    /// # Errors
    /// As [`Shipper::ship`].
    pub async fn ship_whole<O: Operation>(&self, operation: &O) -> Result<O::Output, Error> {
        let answer = match self.ship(operation, From::Root).await {
            Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })) if O::READS_ONLY => {
                self.ship(operation, From::Root).await
            }
            answer => answer,
        };
        match answer? {
            Answer::Done(shipped) => Ok(shipped.output),
            Answer::Declined(_) => Err(Error::Malformed("an operation that began at the root was declined")),
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
