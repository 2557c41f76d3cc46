//! An endpoint of a listener on the `mem` fabric, and the listener that gives them out.

use std::{ptr::NonNull, time::Duration};

use super::{
    MemOptions,
    acceptor::{Acceptor, AcceptorList, ServerEnd},
    endpoint::MemEndpoint,
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
    sync::{Arc, AtomicBool, Ordering, lock},
};

/// Where the workers of a cluster connect. Dropping it, and its endpoints, closes the acceptor.
#[derive(Debug)]
pub(crate) struct MemListener {
    acceptor: Arc<Acceptor>,
    memory: LocalMemory,
    taken: Vec<AtomicBool>,
    options: MemOptions,
    /// Where workers of the same process find the acceptor.
    acceptors: Option<AcceptorList>,
}

impl MemListener {
    /// `memory` is the region of the acceptor's memory server; a compute server has none.
    pub(crate) fn new(
        acceptor: Acceptor,
        memory: LocalMemory,
        options: MemOptions,
        acceptors: Option<AcceptorList>,
    ) -> Self {
        let taken = (0..acceptor.endpoints()).map(|_| AtomicBool::new(false)).collect();
        let acceptor = Arc::new(acceptor);
        if let Some(acceptors) = &acceptors {
            lock(acceptors).insert(acceptor.whose(), Arc::clone(&acceptor));
        }
        Self { acceptor, memory, taken, options, acceptors }
    }
}

impl Listener for MemListener {
    fn listens_as(&self) -> ListenerId {
        self.acceptor.whose()
    }

    fn endpoints(&self) -> usize {
        self.acceptor.endpoints()
    }

    fn endpoint(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn ServerEndpoint>, Error> {
        if self.taken.get(number).is_none_or(|taken| taken.swap(true, Ordering::AcqRel)) {
            return Err(Error::BadOption {
                option: "endpoint",
                why: format!("there is no endpoint {number}, or it is taken"),
            });
        }
        let endpoint = MemEndpoint::new(Arc::default(), self.options, seed, clock).gathering_from(self.memory.clone());
        let acceptor = Arc::clone(&self.acceptor);
        let memory = self.memory.clone();
        Ok(Box::new(MemServerEndpoint { acceptor, memory, number, endpoint, peers: Vec::new(), news: 0 }))
    }

    fn shut(&self) {
        if let Some(acceptors) = &self.acceptors {
            let mut acceptors = lock(acceptors);
            let whose = self.acceptor.whose();
            if acceptors.get(&whose).is_some_and(|acceptor| Arc::ptr_eq(acceptor, &self.acceptor)) {
                acceptors.remove(&whose);
            }
        }
        self.acceptor.shut();
    }
}

impl Drop for MemListener {
    fn drop(&mut self) {
        self.shut();
    }
}

#[derive(Debug)]
struct MemServerEndpoint {
    acceptor: Arc<Acceptor>,
    memory: LocalMemory,
    number: usize,
    endpoint: MemEndpoint,
    peers: Vec<Option<ServerEnd>>,
    /// The count of news that has been looked at.
    news: u64,
}

impl MemServerEndpoint {
    fn leave(&mut self, index: usize) {
        self.peers[index] = None;
        self.endpoint.forget(peer_id(index));
    }
}

fn peer_id(index: usize) -> ServerId {
    u16::try_from(index).ok().and_then(ServerId::new).expect("an endpoint has fewer peers than there are numbers")
}

impl Endpoint for MemServerEndpoint {
    fn capabilities(&self) -> Capabilities {
        self.endpoint.capabilities()
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until this endpoint is dropped, and its endpoint with it.
        unsafe { self.endpoint.register(base, words) }
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        self.endpoint.ring(requests);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.endpoint.poll(completions);
    }

    fn next_due_ns(&self) -> Option<u64> {
        self.endpoint.next_due_ns()
    }
}

impl ServerEndpoint for MemServerEndpoint {
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>) {
        let news = self.acceptor.news(self.number).load(Ordering::Acquire);
        if news == self.news && !thorough {
            return;
        }
        self.news = news;
        for index in 0..self.peers.len() {
            let Some(peer) = &self.peers[index] else { continue };
            let gone = peer.closed_in_order().or_else(|| if thorough { peer.is_lost() } else { None });
            if let Some(in_order) = gone {
                self.leave(index);
                changes.push(Change::Left { peer: peer_id(index), in_order });
            }
        }
        let peers = &self.peers;
        let arrived =
            self.acceptor.arrived(self.number, |path| peers.iter().flatten().any(|peer| peer.path() == Some(path)));
        for memory in arrived {
            let free = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
            let (Some(who), true) = (memory.who(), free < SERVERS_MAX) else { continue };
            let end = ServerEnd::new(memory);
            if end.closed_in_order().is_some() {
                continue;
            }
            let (peer, memory) = (peer_id(free), end.own());
            self.endpoint.attach(peer, end.far());
            if free == self.peers.len() {
                self.peers.push(None);
            }
            self.peers[free] = Some(end);
            changes.push(Change::Joined { peer, who, memory });
        }
    }

    fn memory(&self) -> &LocalMemory {
        &self.memory
    }

    fn dismiss(&mut self, peer: ServerId) {
        if self.peers.get(peer.index()).is_some_and(Option::is_some) {
            self.leave(peer.index());
        }
    }

    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool) {
        let (news, seen) = (self.acceptor.news(self.number), self.news);
        self.acceptor.eventcount(self.number).wait(limit, || news.load(Ordering::Acquire) != seen || has_news());
    }

    fn waker(&self) -> std::sync::Arc<dyn EndpointWaker> {
        std::sync::Arc::new(MemWaker(Arc::clone(&self.acceptor), self.number))
    }
}

#[derive(Debug)]
struct MemWaker(Arc<Acceptor>, usize);

impl EndpointWaker for MemWaker {
    fn wake(&self) {
        self.0.eventcount(self.1).end_sleep();
    }
}
