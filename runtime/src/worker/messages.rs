//! A worker's channels to memory servers: see [`crate::messaging`].

use std::{cell::RefCell, rc::Rc, time::Duration};

use super::{Handle, Inner};
use crate::{
    buffer::Buffer,
    counters::{add, bump},
    error::Error,
    fabric::{Capabilities, Endpoint, Error as FabricError, Request, connection::PeerId},
    lock::OwnerId,
    messaging::{CONNECTION_TICKET, Channel, ChannelOptions, Channels, Host, Tasks},
    ptr::ServerId,
};

impl Handle {
    /// The channel to a memory server, opened if it is not.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use farlink_runtime::{
    ///     compute::{ComputeOptions, ComputeServer},
    ///     error::Error,
    ///     fabric::{listener::ListenOptions, mem::MemOptions},
    ///     messaging::{Kind, MessageServer, Priority, Refusal, Request, Responder, ServeMessages, Service},
    ///     ptr::ServerId, server,
    ///     wire::decode_all,
    /// };
    ///
    /// const ADD: Kind = Kind(1);
    ///
    /// // One for each thread of the server; it need not be Send.
    /// struct Adder;
    /// impl Service for Adder {
    ///     fn handle(&mut self, request: Request<'_>, reply: Responder) {
    ///         match request.kind() {
    ///             ADD => match decode_all::<(u64, u64)>(request.words()) {
    ///                 Ok((a, b)) => reply.send(&a.wrapping_add(b)),
    ///                 Err(_) => reply.refuse(Refusal::Malformed),
    ///             },
    ///             _ => reply.refuse(Refusal::UnknownKind),
    ///         }
    ///     }
    /// }
    ///
    /// # fn main() -> Result<(), Error> {
    /// let fabric = server::in_process(1, 16 << 20, MemOptions::default())?;
    /// let server = ServerId::new(0).unwrap();
    /// // Across processes: `MemoryServer::listen`, in the process that serves the region.
    /// let listener = fabric.listen(server, &ListenOptions::default())?;
    /// let messages = MessageServer::start(listener, &ServeMessages::default(), |_thread| Ok(Box::new(Adder)))?;
    ///
    /// let compute = ComputeServer::join(Arc::new(fabric), ComputeOptions::default())?;
    /// let worker = compute.worker()?;
    /// let sum = worker.block_on(async {
    ///     let channel = worker.channel(server).await?;
    ///     Ok::<u64, Error>(channel.request(ADD, &(2u64, 3u64), Priority::Latency).await?.decode()?)
    /// })?;
    /// assert_eq!(sum, 5);
    /// assert_eq!(worker.counters().two_sided, 1);
    /// drop(worker);
    /// assert_eq!(messages.counts().requests, 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ServerMissing`](FabricError::ServerMissing) if the memory server takes no messages.
    pub async fn channel(&self, server: ServerId) -> Result<Channel, Error> {
        self.channel_with(server, ChannelOptions::default()).await
    }

    /// The channel to a compute server that [listens](crate::compute::ComputeServer::listen), opened if it is not. It and its errors
    /// call the compute server by a number that is no memory server's.
    ///
    /// # Errors
    /// [`PeerMissing`](FabricError::PeerMissing) if it takes no messages, [`NoPeers`](FabricError::NoPeers) if the fabric carries
    /// none between compute servers.
    pub async fn channel_to(&self, owner: OwnerId) -> Result<Channel, Error> {
        let number = self.0.endpoint.borrow_mut().peer(owner)?;
        self.channel(number).await
    }

    /// The channel to a memory server, opened with these options if it is not open.
    ///
    /// # Errors
    /// As [`Handle::channel`].
    pub async fn channel_with(&self, server: ServerId, options: ChannelOptions) -> Result<Channel, Error> {
        let host: Rc<dyn Host> = Rc::clone(&self.0) as _;
        Ok(Channel::open(host, server, options).await?)
    }
}

impl Host for Inner {
    fn channels(&self) -> &Channels {
        &self.channels
    }

    fn peer_id(&self) -> PeerId {
        PeerId { owner: self.compute.owner, worker: self.number }
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn endpoint(&self) -> &RefCell<Box<dyn Endpoint>> {
        &self.endpoint
    }

    fn buffer(&self, words: usize) -> Result<Buffer, FabricError> {
        self.registered_buffer(words)
    }

    fn post(&self, request: Request) {
        self.outbox.borrow_mut().push(request);
    }

    fn withdraw(&self, server: ServerId) {
        let is_there = |request: &Request| request.ticket.0 & CONNECTION_TICKET != 0 && request.at.server() == server;
        self.outbox.borrow_mut().retain(|request| !is_there(request));
    }

    fn has_ended(&self) -> bool {
        self.ended.get()
    }

    fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    fn answer_wait(&self, server: ServerId) -> Option<Duration> {
        // One that is no memory server owns what it is asked for, as if it had locked it.
        if server.index() < self.compute.fabric.servers() {
            Some(self.compute.answer_wait)
        } else {
            self.compute.lock_wait
        }
    }

    fn tasks(&self) -> &dyn Tasks {
        &self.executor
    }

    fn message_begins(&self) -> u64 {
        bump(&self.counters.two_sided);
        if self.executor.trips.begins() {
            bump(&self.counters.round_trips);
        }
        self.executor.trips.depth()
    }

    fn message_ends(&self, begun: u64) {
        self.executor.trips.ends(begun);
    }

    fn count_bytes(&self, bytes: u64) {
        add(&self.counters.bytes, bytes);
    }
}
