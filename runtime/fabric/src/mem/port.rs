//! A port of a memory server on the `mem` fabric, and the listener that gives them out.

use std::{ptr::NonNull, time::Duration};

use super::{
    MemOptions,
    door::{Door, Doors, ServerEnd},
    endpoint::MemEndpoint,
};
use crate::{
    buffer::LocalKey,
    clock::Clock,
    endpoint::{Capabilities, Completion, Endpoint, Request},
    error::Error,
    listener::{Change, Listener, Port, PortWaker},
    ptr::{SERVERS_MAX, ServerId},
    sync::{Arc, AtomicBool, Ordering, lock},
};

/// Where the workers of a cluster knock. Dropping it, and its ports, shuts the door.
#[derive(Debug)]
pub(crate) struct MemListener {
    door: Arc<Door>,
    taken: Vec<AtomicBool>,
    options: MemOptions,
    /// Where the door hangs, in one process.
    doors: Option<Doors>,
}

impl MemListener {
    pub(crate) fn new(door: Door, options: MemOptions, doors: Option<Doors>) -> Self {
        let taken = (0..door.ports()).map(|_| AtomicBool::new(false)).collect();
        let door = Arc::new(door);
        if let Some(doors) = &doors {
            lock(doors)[door.server().index()] = Some(Arc::clone(&door));
        }
        Self { door, taken, options, doors }
    }
}

impl Listener for MemListener {
    fn server(&self) -> ServerId {
        self.door.server()
    }

    fn ports(&self) -> usize {
        self.door.ports()
    }

    fn port(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn Port>, Error> {
        if self.taken.get(number).is_none_or(|taken| taken.swap(true, Ordering::AcqRel)) {
            return Err(Error::BadOption { option: "port", why: format!("there is no port {number}, or it is taken") });
        }
        let endpoint = MemEndpoint::new(Arc::default(), self.options, seed, clock);
        let door = Arc::clone(&self.door);
        Ok(Box::new(MemPort { door, number, endpoint, peers: Vec::new(), news: 0 }))
    }

    fn shut(&self) {
        if let Some(doors) = &self.doors {
            let mut doors = lock(doors);
            let hangs = &mut doors[self.door.server().index()];
            if hangs.as_ref().is_some_and(|door| Arc::ptr_eq(door, &self.door)) {
                *hangs = None;
            }
        }
        self.door.shut();
    }
}

impl Drop for MemListener {
    fn drop(&mut self) {
        self.shut();
    }
}

#[derive(Debug)]
struct MemPort {
    door: Arc<Door>,
    number: usize,
    endpoint: MemEndpoint,
    peers: Vec<Option<ServerEnd>>,
    /// The count of news that has been looked at.
    news: u64,
}

impl MemPort {
    fn leave(&mut self, index: usize) {
        self.peers[index] = None;
        self.endpoint.forget(peer_id(index));
    }
}

fn peer_id(index: usize) -> ServerId {
    u16::try_from(index).ok().and_then(ServerId::new).expect("a port has fewer peers than there are numbers")
}

impl Endpoint for MemPort {
    fn capabilities(&self) -> Capabilities {
        self.endpoint.capabilities()
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until this port is dropped, and its endpoint with it.
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

impl Port for MemPort {
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>) {
        let news = self.door.news(self.number).load(Ordering::Acquire);
        if news == self.news && !thorough {
            return;
        }
        self.news = news;
        for index in 0..self.peers.len() {
            let Some(peer) = &self.peers[index] else { continue };
            let gone = peer.closed_in_order().or_else(|| (thorough && peer.is_abandoned()).then_some(false));
            if let Some(in_order) = gone {
                self.leave(index);
                changes.push(Change::Left { peer: peer_id(index), in_order });
            }
        }
        let peers = &self.peers;
        let arrived =
            self.door.arrived(self.number, |path| peers.iter().flatten().any(|peer| peer.path() == Some(path)));
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

    fn dismiss(&mut self, peer: ServerId) {
        if self.peers.get(peer.index()).is_some_and(Option::is_some) {
            self.leave(peer.index());
        }
    }

    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool) {
        let (news, seen) = (self.door.news(self.number), self.news);
        self.door.bell(self.number).sleep(limit, || news.load(Ordering::Acquire) != seen || has_news());
    }

    fn waker(&self) -> std::sync::Arc<dyn PortWaker> {
        std::sync::Arc::new(MemWaker(Arc::clone(&self.door), self.number))
    }
}

#[derive(Debug)]
struct MemWaker(Arc<Door>, usize);

impl PortWaker for MemWaker {
    fn wake(&self) {
        self.0.bell(self.1).ring();
    }
}
