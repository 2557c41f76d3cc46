//! An endpoint of a memory server: the connections that one of its threads serves.

use std::{ptr::NonNull, time::Duration};

use super::{
    acceptor::{Acceptor, Arrival, ENDPOINT_DEPTH, End, EndpointDomain, Record},
    serving::Serving,
};
use crate::{
    buffer::LocalKey,
    clock::Clock,
    connection::ListenerId,
    endpoint::{Capabilities, Completion, Endpoint, Request},
    error::Error,
    listener::{Change, EndpointWaker, Listener, ServerEndpoint},
    memory::LocalMemory,
    ptr::{SERVERS_MAX, ServerId},
    sync::{Arc, Ordering, lock},
    verbs::{
        endpoint::{capabilities, outside},
        ib::{Access, Finished, Registered, sleep},
        opened::Opening,
        queue::{Failed, RequestQueue, queue_of},
    },
};

/// A memory server that takes messages. Dropping it closes the acceptor.
#[derive(Debug)]
pub(super) struct VerbsListener {
    serving: Arc<Serving>,
    acceptor: Arc<Acceptor>,
}

impl VerbsListener {
    pub(super) fn new(serving: &Arc<Serving>, acceptor: Arc<Acceptor>) -> Self {
        Self { serving: Arc::clone(serving), acceptor }
    }
}

impl Listener for VerbsListener {
    fn listens_as(&self) -> ListenerId {
        self.serving.place.whose
    }

    fn endpoints(&self) -> usize {
        self.acceptor.domains.len()
    }

    fn endpoint(&self, number: usize, _seed: u64, _clock: Clock) -> Result<Box<dyn ServerEndpoint>, Error> {
        let domain = self.acceptor.domains.get(number);
        if domain.is_none_or(|domain| domain.taken.swap(true, Ordering::AcqRel)) {
            return Err(Error::BadOption {
                option: "endpoint",
                why: format!("there is no endpoint {number}, or it is taken"),
            });
        }
        Ok(Box::new(VerbsServerEndpoint {
            peers: Vec::new(),
            registered: Vec::new(),
            acceptor: Arc::clone(&self.acceptor),
            number,
            ordered: self.acceptor.ordered,
            generation: 0,
            early: Vec::new(),
            news: 0,
            has_pending: false,
            is_deaf: false,
        }))
    }

    fn shut(&self) {
        let mut hangs = lock(&self.serving.acceptor);
        if hangs.as_ref().is_some_and(|acceptor| Arc::ptr_eq(acceptor, &self.acceptor)) {
            *hangs = None;
        }
        drop(hangs);
        self.acceptor.shut();
    }
}

impl Drop for VerbsListener {
    fn drop(&mut self) {
        self.shut();
    }
}

/// A worker's connection.
#[derive(Debug)]
struct AttachedPeer {
    // Before the memory that the worker may write to.
    queue: RequestQueue,
    _opening: Opening,
    record: Arc<Record>,
}

#[derive(Debug)]
struct VerbsServerEndpoint {
    // Before the registrations: no queue pair uses memory that is not registered any more.
    peers: Vec<Option<AttachedPeer>>,
    registered: Vec<Registered>,
    acceptor: Arc<Acceptor>,
    number: usize,
    /// Whether WRITEs are placed in the order of their posting, as far as this side and all workers that came were told.
    ordered: bool,
    /// Counts connections.
    generation: u16,
    /// Completions that did not come from the card.
    early: Vec<Completion>,
    /// The count of news that has been looked at.
    news: u64,
    /// Requests wait for room in a queue pair.
    has_pending: bool,
    /// The device wakes it no more, and would keep it from sleeping.
    is_deaf: bool,
}

fn peer_id(index: usize) -> ServerId {
    u16::try_from(index).ok().and_then(ServerId::new).expect("an endpoint has fewer peers than there are numbers")
}

impl AttachedPeer {
    /// Ends what is under way; the connection is of no use any more.
    fn abort(&mut self, first: Option<Error>, why: &str, completions: &mut Vec<Completion>) {
        let error =
            |request: &Request| Error::RequestFailed { what: request.verb.name(), at: request.at, why: why.to_owned() };
        self.queue.abort(first, error, completions);
    }

    fn finished(&mut self, finished: Finished, completions: &mut Vec<Completion>) {
        if let Err(Failed { status, first }) = self.queue.finished(finished, completions) {
            self.abort(first, &status.why(), completions);
        }
    }
}

impl VerbsServerEndpoint {
    fn domain(&self) -> &EndpointDomain {
        &self.acceptor.domains[self.number]
    }

    fn join(&mut self, arrival: Arrival) -> Result<Option<Change>, Error> {
        let free = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
        if arrival.record.ended().is_some() || free >= SERVERS_MAX {
            return Ok(None);
        }
        let target = arrival.opened.target(self.acceptor.connection_bytes as u64);
        self.generation = self.generation.wrapping_add(1);
        let queue = RequestQueue::new(&self.domain().domain, free as u16, ENDPOINT_DEPTH, target)?;
        let mut queue = queue.of_generation(self.generation).gathering_from(self.domain().source.clone());
        let Arrival { connection, opening, who, record, ordered, .. } = arrival;
        self.ordered &= ordered;
        queue.connect(connection);
        let memory = opening.memory();
        if free == self.peers.len() {
            self.peers.push(None);
        }
        self.peers[free] = Some(AttachedPeer { queue, _opening: opening, record });
        Ok(Some(Change::Joined { peer: peer_id(free), who, memory }))
    }

    /// Closes a connection; true if there was one.
    fn leave(&mut self, index: usize) -> bool {
        let Some(mut peer) = self.peers.get_mut(index).and_then(Option::take) else { return false };
        peer.abort(None, "the connection was closed", &mut self.early);
        true
    }

    /// Takes the notifications that have come; whether there were any.
    fn collect(&self) -> Result<bool, Error> {
        let domain = self.domain();
        domain.receives.renew(&domain.received)
    }

    /// The device has failed: nothing completes, and nobody would be woken.
    #[cold]
    fn give_up(&mut self, error: &Error, completions: &mut Vec<Completion>) {
        if self.acceptor.is_open() {
            tracing::error!(%error, "no more messages are taken; see the system's log, and start this process anew");
            self.acceptor.shut();
        }
        self.is_deaf = true;
        for peer in self.peers.iter_mut().flatten() {
            peer.record.dismiss();
            peer.abort(None, &error.to_string(), completions);
        }
    }

    fn post_waiting(&mut self, completions: &mut Vec<Completion>) {
        self.has_pending = false;
        for peer in self.peers.iter_mut().flatten() {
            if let Err(error) = peer.queue.post_waiting() {
                peer.abort(None, &error.to_string(), completions);
            }
            self.has_pending |= peer.queue.is_waiting();
        }
    }
}

impl Endpoint for VerbsServerEndpoint {
    fn capabilities(&self) -> Capabilities {
        let domain = self.domain();
        let atomics = [domain.domain.device().info().atomics];
        capabilities(atomics, self.ordered, domain.inline_bytes(), domain.source.gather_max)
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until the endpoint is dropped, as the trait demands.
        let registered = unsafe { self.domain().domain.register(base, words, Access::Local) }?;
        let key = registered.local_key();
        self.registered.push(registered);
        Ok(key)
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        for request in requests.drain(..) {
            let at = request.at;
            match self.peers.get_mut(at.server().index()) {
                Some(Some(peer)) if peer.queue.is_connected() && peer.queue.takes(&request) => {
                    peer.queue.push(request);
                }
                _ => {
                    let outcome = Err(outside(at, &request.verb));
                    self.early.push(Completion { ticket: request.ticket, outcome });
                }
            }
        }
        for peer in self.peers.iter_mut().flatten() {
            if let Err(error) = peer.queue.ring() {
                peer.abort(None, &error.to_string(), &mut self.early);
            }
            self.has_pending |= peer.queue.is_waiting();
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        completions.append(&mut self.early);
        let (domain, peers) = (&self.acceptor.domains[self.number], &mut self.peers);
        let polled = domain.sent.poll(|finished| {
            if let Some(Some(peer)) = peers.get_mut(queue_of(finished.id)) {
                peer.finished(finished, completions);
            }
        });
        if let Err(error) = polled.and_then(|()| self.collect()) {
            self.give_up(&error, completions);
        }
        if self.has_pending {
            self.post_waiting(completions);
        }
    }
}

impl ServerEndpoint for VerbsServerEndpoint {
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>) {
        let news = self.domain().news();
        if news == self.news && !thorough {
            return;
        }
        self.news = news;
        // Before the look at who has left, whose places they may have.
        let arrived = self.domain().take_arrived();
        for index in 0..self.peers.len() {
            if let Some(Some(peer)) = self.peers.get(index)
                && let Some(end) = peer.record.ended()
            {
                self.leave(index);
                changes.push(Change::Left { peer: peer_id(index), in_order: end == End::Closed });
            }
        }
        for arrival in arrived {
            let record = Arc::clone(&arrival.record);
            match self.join(arrival) {
                Ok(Some(joined)) => changes.push(joined),
                Ok(None) => record.dismiss(),
                Err(error) => {
                    tracing::warn!(%error, "a worker's connection was closed at once");
                    record.dismiss();
                }
            }
        }
    }

    fn memory(&self) -> &LocalMemory {
        &self.domain().source.memory
    }

    fn dismiss(&mut self, peer: ServerId) {
        if let Some(Some(attached)) = self.peers.get(peer.index()) {
            attached.record.dismiss();
            self.leave(peer.index());
        }
    }

    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool) {
        let domain = &self.acceptor.domains[self.number];
        // What comes before this is seen by the looks that follow, what comes after it wakes.
        domain.channel.drain();
        domain.wake.drain();
        let armed = if self.is_deaf { Ok(()) } else { domain.received.arm() };
        if self.collect().unwrap_or(false) || self.domain().news() != self.news || has_news() {
            return;
        }
        let domain = self.domain();
        let channel = (!self.is_deaf && armed.is_ok()).then_some(&*domain.channel);
        if let Err(error) = armed.and(sleep(channel, limit, domain.wake.end())) {
            tracing::warn!(%error, "an endpoint is not woken by its device any more");
            self.is_deaf = true;
        }
    }

    fn waker(&self) -> std::sync::Arc<dyn EndpointWaker> {
        Arc::clone(&self.domain().wake) as std::sync::Arc<dyn EndpointWaker>
    }
}

impl Drop for VerbsServerEndpoint {
    fn drop(&mut self) {
        self.peers.iter().flatten().for_each(|peer| peer.record.dismiss());
    }
}
