//! A port of a memory server: the links that one of its threads serves.

use std::{ptr::NonNull, time::Duration};

use super::{
    door::{Arrival, Door, End, Entrance, PORT_DEPTH, Place, Record},
    serving::Serving,
};
use crate::{
    buffer::LocalKey,
    clock::Clock,
    endpoint::{Capabilities, Completion, Endpoint, Request},
    error::Error,
    listener::{Change, Listener, Port, PortWaker},
    ptr::{SERVERS_MAX, ServerId},
    sync::{Arc, Ordering, lock},
    verbs::{
        endpoint::{capabilities, outside},
        ib::{Access, Finished, Registered},
        lane::{Failed, Lane, lane_of},
        opened::Opening,
    },
};

/// A memory server that takes messages. Dropping it shuts the door.
#[derive(Debug)]
pub(super) struct VerbsListener {
    serving: Arc<Serving>,
    door: Arc<Door>,
}

impl VerbsListener {
    pub(super) fn new(serving: &Arc<Serving>, door: Arc<Door>) -> Self {
        Self { serving: Arc::clone(serving), door }
    }
}

impl Listener for VerbsListener {
    fn server(&self) -> ServerId {
        self.serving.place.server
    }

    fn ports(&self) -> usize {
        self.door.entrances.len()
    }

    fn port(&self, number: usize, _seed: u64, _clock: Clock) -> Result<Box<dyn Port>, Error> {
        let entrance = self.door.entrances.get(number);
        if entrance.is_none_or(|entrance| entrance.taken.swap(true, Ordering::AcqRel)) {
            return Err(Error::BadOption { option: "port", why: format!("there is no port {number}, or it is taken") });
        }
        Ok(Box::new(VerbsPort {
            peers: Vec::new(),
            registered: Vec::new(),
            door: Arc::clone(&self.door),
            number,
            generation: 0,
            early: Vec::new(),
            news: 0,
            unsettled: false,
        }))
    }

    fn shut(&self) {
        let mut hangs = lock(&self.serving.door);
        if hangs.as_ref().is_some_and(|door| Arc::ptr_eq(door, &self.door)) {
            *hangs = None;
        }
        drop(hangs);
        self.door.shut();
    }
}

impl Drop for VerbsListener {
    fn drop(&mut self) {
        self.shut();
    }
}

/// A worker's link.
#[derive(Debug)]
struct LinkedPeer {
    // Before the memory that the worker may write to.
    lane: Lane,
    _opening: Opening,
    record: Arc<Record>,
    _place: Place,
}

#[derive(Debug)]
struct VerbsPort {
    // Before the registrations: no queue pair uses memory that is not registered any more.
    peers: Vec<Option<LinkedPeer>>,
    registered: Vec<Registered>,
    door: Arc<Door>,
    number: usize,
    /// Counts links.
    generation: u16,
    /// Completions that did not come from the card.
    early: Vec<Completion>,
    /// The count of news that has been looked at.
    news: u64,
    /// Requests wait for room in a queue pair.
    unsettled: bool,
}

fn peer_id(index: usize) -> ServerId {
    u16::try_from(index).ok().and_then(ServerId::new).expect("a port has fewer peers than there are numbers")
}

impl LinkedPeer {
    /// Ends what is under way; the link is of no use any more.
    fn cut(&mut self, first: Option<Error>, why: &str, completions: &mut Vec<Completion>) {
        let error =
            |request: &Request| Error::RequestFailed { what: request.verb.name(), at: request.at, why: why.to_owned() };
        self.lane.cut(first, error, completions);
    }

    fn finished(&mut self, finished: Finished, completions: &mut Vec<Completion>) {
        if let Err(Failed { status, first }) = self.lane.finished(finished, completions) {
            self.cut(first, &status.why(), completions);
        }
    }
}

impl VerbsPort {
    fn entrance(&self) -> &Entrance {
        &self.door.entrances[self.number]
    }

    fn join(&mut self, arrival: Arrival) -> Result<Option<Change>, Error> {
        let free = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
        if arrival.record.ended().is_some() || free >= SERVERS_MAX {
            return Ok(None);
        }
        let target = arrival.opened.target(self.door.connection_bytes as u64);
        self.generation = self.generation.wrapping_add(1);
        let lane = Lane::new(&self.entrance().domain, free as u16, PORT_DEPTH, target)?;
        let mut lane = lane.of_generation(self.generation);
        let Arrival { connection, opening, who, record, place, .. } = arrival;
        lane.connect(connection);
        let memory = opening.memory();
        if free == self.peers.len() {
            self.peers.push(None);
        }
        self.peers[free] = Some(LinkedPeer { lane, _opening: opening, record, _place: place });
        Ok(Some(Change::Joined { peer: peer_id(free), who, memory }))
    }

    /// Closes a link; true if there was one.
    fn leave(&mut self, index: usize) -> bool {
        let Some(mut peer) = self.peers.get_mut(index).and_then(Option::take) else { return false };
        // First what has arrived: the device forgets it with the queue pair, and the receives that it has used up.
        peer.lane.fail();
        self.collect();
        peer.cut(None, "the link was closed", &mut self.early);
        true
    }

    /// Takes the notifications that have come; whether there were any. Each gives back the receive that it has used up.
    fn collect(&mut self) -> bool {
        let entrance = self.entrance();
        let mut any = false;
        entrance.received.poll(|_| {
            any = true;
            if let Err(error) = entrance.receives.post() {
                tracing::warn!(%error, "a receive is lost");
            }
        });
        any
    }

    fn post_waiting(&mut self, completions: &mut Vec<Completion>) {
        self.unsettled = false;
        for peer in self.peers.iter_mut().flatten() {
            if let Err(error) = peer.lane.post_waiting() {
                peer.cut(None, &error.to_string(), completions);
            }
            self.unsettled |= peer.lane.is_waiting();
        }
    }
}

impl Endpoint for VerbsPort {
    fn capabilities(&self) -> Capabilities {
        let entrance = self.entrance();
        capabilities(entrance.domain.device().info(), entrance.inline_bytes(), 1)
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until the endpoint is dropped, as the trait demands.
        let registered = unsafe { self.entrance().domain.register(base, words, Access::Local) }?;
        let key = registered.local_key();
        self.registered.push(registered);
        Ok(key)
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        for request in requests.drain(..) {
            let at = request.at;
            match self.peers.get_mut(at.server().index()) {
                Some(Some(peer)) if peer.lane.is_connected() && peer.lane.holds(at, request.verb.bytes()) => {
                    peer.lane.push(request);
                }
                _ => {
                    let outcome = Err(outside(at, &request.verb));
                    self.early.push(Completion { ticket: request.ticket, outcome });
                }
            }
        }
        for peer in self.peers.iter_mut().flatten() {
            if let Err(error) = peer.lane.ring() {
                peer.cut(None, &error.to_string(), &mut self.early);
            }
            self.unsettled |= peer.lane.is_waiting();
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        completions.append(&mut self.early);
        let (entrance, peers) = (&self.door.entrances[self.number], &mut self.peers);
        entrance.sent.poll(|finished| {
            if let Some(Some(peer)) = peers.get_mut(lane_of(finished.id)) {
                peer.finished(finished, completions);
            }
        });
        self.collect();
        if self.unsettled {
            self.post_waiting(completions);
        }
    }
}

impl Port for VerbsPort {
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>) {
        let news = self.entrance().news();
        if news == self.news && !thorough {
            return;
        }
        self.news = news;
        for index in 0..self.peers.len() {
            if let Some(Some(peer)) = self.peers.get(index)
                && let Some(end) = peer.record.ended()
            {
                self.leave(index);
                changes.push(Change::Left { peer: peer_id(index), in_order: end == End::Closed });
            }
        }
        for arrival in self.entrance().take_arrived() {
            let record = Arc::clone(&arrival.record);
            match self.join(arrival) {
                Ok(Some(joined)) => changes.push(joined),
                Ok(None) => record.dismiss(),
                Err(error) => {
                    tracing::warn!(%error, "a worker's link was closed at once");
                    record.dismiss();
                }
            }
        }
    }

    fn dismiss(&mut self, peer: ServerId) {
        if let Some(Some(linked)) = self.peers.get(peer.index()) {
            linked.record.dismiss();
            self.leave(peer.index());
        }
    }

    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool) {
        let entrance = &self.door.entrances[self.number];
        // What comes before this is seen by the looks that follow, what comes after it wakes.
        entrance.channel.drain();
        entrance.wake.drain();
        if let Err(error) = entrance.received.arm() {
            return tracing::warn!(%error, "a port cannot sleep");
        }
        if self.collect() || self.entrance().news() != self.news || has_news() {
            return;
        }
        let entrance = self.entrance();
        if let Err(error) = entrance.channel.wait(limit, Some(entrance.wake.end())) {
            tracing::warn!(%error, "a port cannot sleep");
        }
    }

    fn waker(&self) -> std::sync::Arc<dyn PortWaker> {
        Arc::clone(&self.entrance().wake) as std::sync::Arc<dyn PortWaker>
    }
}

impl Drop for VerbsPort {
    fn drop(&mut self) {
        self.peers.iter().flatten().for_each(|peer| peer.record.dismiss());
    }
}
