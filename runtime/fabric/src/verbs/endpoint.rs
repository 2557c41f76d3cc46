//! A worker's endpoint: one completion queue, a link to every memory server, and a message link to those it asks for one.

use std::ptr::NonNull;

use super::{
    ib::{
        Access, Atomics, CompletionQueue, DeviceInfo, Domain, Local, QueuePair, QueuePairOptions, Registered,
        Reliability,
    },
    lane::lane_of,
    link::Link,
    session::{Losses, Session},
    talk::Talk,
};
use crate::{
    buffer::LocalKey,
    connection::{ConnectionState, OpenMemory, PeerId},
    endpoint::{Capabilities, Completion, Endpoint, Request, Verb},
    error::Error,
    ptr::{RemotePtr, ServerId},
    sync::{Arc, Ordering},
};

/// The eager limit, 8 KiB. Measured on SoftRoCE: one message at a time is faster by the ring up to 32 KiB, because rendezvous
/// adds a round trip; of 16 at a time, those of more than 4 KiB are faster by rendezvous. At 8 KiB either way loses about as much
/// where the other one is better. Not measured on a card.
const EAGER_WORDS: usize = 1024;

/// What all links of an endpoint share.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) domain: Arc<Domain>,
    pub(super) local: Local,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) reliability: Reliability,
    /// Requests in a queue pair.
    pub(super) depth: u32,
    pub(super) inline_bytes: u32,
    pub(super) gather_max: u32,
}

impl Setup {
    /// A queue pair for so many requests.
    pub(super) fn queue_pair(&self, depth: u32) -> Result<QueuePair, Error> {
        let options = QueuePairOptions {
            send_depth: depth,
            inline_bytes: self.inline_bytes,
            gather_max: self.gather_max,
            receive: None,
        };
        QueuePair::new(&self.domain, &self.completions, &self.completions, options)
    }
}

/// What a device guarantees.
pub(super) fn capabilities(device: &DeviceInfo, inline_bytes: u32, gather_max: u32) -> Capabilities {
    let global = device.atomics == Atomics::Global;
    Capabilities {
        // A reliable connection, and memory registered without relaxed ordering.
        ordered_writes: true,
        atomic_against_writes: global,
        atomic_against_cpu: global,
        inline_bytes: inline_bytes as usize,
        gather_max: gather_max as usize,
        eager_words: EAGER_WORDS,
    }
}

#[derive(Debug)]
pub(super) struct VerbsEndpoint {
    // Before the registrations: no queue pair uses memory that is not registered any more.
    links: Vec<Link>,
    /// By memory server; their lanes are numbered after those of `links`.
    talks: Vec<Option<Talk>>,
    sessions: Vec<Arc<Session>>,
    /// Counts message links.
    generation: u16,
    setup: Setup,
    registered: Vec<Registered>,
    losses: Losses,
    losses_seen: u64,
    /// Completions that did not come from the card.
    early: Vec<Completion>,
    /// Links that have something to tend to.
    unsettled: bool,
}

impl VerbsEndpoint {
    /// Connects to all memory servers. Blocks.
    pub(super) fn connect(setup: Setup, sessions: &[Arc<Session>], losses: &Losses) -> Result<Self, Error> {
        // All are asked before any is waited for.
        let begin = |(number, session): (usize, &Arc<Session>)| {
            Link::begin(u16::try_from(number).unwrap_or(u16::MAX), Arc::clone(session), &setup)
        };
        let links = sessions.iter().enumerate().map(begin).collect::<Result<Vec<_>, Error>>()?;
        // Whole from here on: if one cannot be connected, the others are closed again.
        let mut endpoint = Self {
            links,
            talks: Vec::new(),
            sessions: sessions.to_vec(),
            generation: 0,
            setup,
            registered: Vec::new(),
            losses: Arc::clone(losses),
            // What was lost before is noticed at the first poll.
            losses_seen: 0,
            early: Vec::new(),
            unsettled: false,
        };
        let Self { links, setup, .. } = &mut endpoint;
        links.iter_mut().try_for_each(|link| link.finish(setup))?;
        Ok(endpoint)
    }

    #[cold]
    fn tend(&mut self, completions: &mut Vec<Completion>) {
        let losses = self.losses.load(Ordering::Acquire);
        if losses != self.losses_seen {
            self.losses_seen = losses;
            self.links.iter_mut().for_each(|link| link.check_control(&self.setup, completions));
        }
        self.links.iter_mut().for_each(|link| link.tend(&self.setup, completions));
        self.talks.iter_mut().flatten().for_each(|talk| talk.tend(completions));
        self.unsettled = !self.links.iter().all(Link::is_settled) || !self.talks.iter().flatten().all(Talk::is_settled);
    }

    /// Takes a request that is for no region: for what a message link has opened, or for nothing.
    #[cold]
    fn push_elsewhere(&mut self, request: Request) {
        let at = request.at;
        match self.talks.get_mut(at.server().index()) {
            Some(Some(talk)) if talk.takes(at, request.verb.bytes()) => talk.push(request),
            // The card would break the connection over it.
            _ => {
                let outcome = Err(outside(at, &request.verb));
                self.early.push(Completion { ticket: request.ticket, outcome });
            }
        }
    }

    /// Closes the message link to a memory server, if there is one.
    fn unlink(&mut self, server: ServerId, in_order: bool) {
        if !matches!(self.talks.get(server.index()), Some(Some(_))) {
            return;
        }
        // Completions that have come are of requests that were carried out.
        let mut completions = Vec::new();
        self.poll(&mut completions);
        self.early.append(&mut completions);
        if let Some(talk) = self.talks[server.index()].take() {
            // The memory server hears of it in its own time.
            drop(talk.close(in_order, &mut self.early));
        }
    }
}

pub(super) fn outside(at: RemotePtr, verb: &Verb) -> Box<Error> {
    let why = "the address is not inside the memory server's region or an open link, or not aligned to 8 bytes".into();
    Box::new(Error::BadAddress { what: verb.name(), at, why })
}

impl Endpoint for VerbsEndpoint {
    fn capabilities(&self) -> Capabilities {
        capabilities(self.setup.domain.device().info(), self.setup.inline_bytes, self.setup.gather_max)
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until the endpoint is dropped, as the trait demands.
        let registered = unsafe { self.setup.domain.register(base, words, Access::Local) }?;
        let key = registered.local_key();
        self.registered.push(registered);
        Ok(key)
    }

    #[inline]
    fn ring(&mut self, requests: &mut Vec<Request>) {
        let mut push = |request: Request| {
            let at = request.at;
            match self.links.get_mut(at.server().index()) {
                Some(link) if link.holds(at, request.verb.bytes()) => link.push(request),
                _ => self.push_elsewhere(request),
            }
        };
        match requests.len() {
            // Often; and a tenth fewer instructions than with the other way.
            1 => requests.pop().into_iter().for_each(&mut push),
            _ => requests.drain(..).for_each(push),
        }
        for link in &mut self.links {
            link.ring(&self.setup, &mut self.early);
            self.unsettled |= !link.is_settled();
        }
        for talk in self.talks.iter_mut().flatten() {
            talk.ring(&mut self.early);
            self.unsettled |= !talk.is_settled();
        }
    }

    #[inline]
    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if !self.early.is_empty() {
            completions.append(&mut self.early);
        }
        let (links, talks, setup, unsettled) = (&mut self.links, &mut self.talks, &self.setup, &mut self.unsettled);
        setup.completions.poll(|finished| {
            let lane = lane_of(finished.id);
            if let Some(link) = links.get_mut(lane) {
                link.finished(setup, finished, completions);
                *unsettled |= !link.is_settled();
            } else if let Some(Some(talk)) = talks.get_mut(lane - links.len()) {
                talk.finished(finished, completions);
            }
        });
        if self.unsettled || self.losses.load(Ordering::Relaxed) != self.losses_seen {
            self.tend(completions);
        }
    }

    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        self.unlink(server, false);
        let Some(session) = self.sessions.get(server.index()) else {
            return Err(Error::ServerMissing { server, why: "there is no such memory server".into() });
        };
        self.generation = self.generation.wrapping_add(1);
        // A number has 15 bits, so those of all lanes fit into 16.
        let number = self.links.len() as u16 + server.number();
        let (talk, memory) = Talk::open(&self.setup, session, (number, self.generation), who)?;
        if self.talks.len() <= server.index() {
            self.talks.resize_with(server.index() + 1, || None);
        }
        self.talks[server.index()] = Some(talk);
        Ok(memory)
    }

    fn disconnect(&mut self, server: ServerId) {
        self.unlink(server, true);
    }

    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        self.talks.get_mut(server.index()).and_then(Option::as_mut).map_or(ConnectionState::Dead, Talk::state)
    }
}

impl Drop for VerbsEndpoint {
    fn drop(&mut self) {
        let setup = &self.setup;
        let links = self.links.iter_mut().filter_map(|link| link.close(setup));
        let talks = self.talks.drain(..).flatten().filter_map(|talk| talk.close(true, &mut Vec::new()));
        let closing: Vec<_> = links.chain(talks).collect();
        for answer in closing {
            // A memory server that is lost has destroyed its queue pairs.
            let _ = answer.wait();
        }
    }
}
