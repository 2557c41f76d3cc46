//! A worker's endpoint: one completion queue, and a link to every memory server.

use std::ptr::NonNull;

use super::{
    connecting::ConnectBy,
    control::Secret,
    ib::{Access, Atomics, CompletionQueue, Domain, Local, QueuePair, QueuePairOptions, Registered, Reliability},
    link::{Link, link_of},
    session::{Losses, Session},
};
use crate::{
    error::Error,
    fabric::{Capabilities, Completion, Endpoint, LocalKey, Request, Verb},
    ptr::RemotePtr,
    sync::{Arc, Ordering},
};

/// What all links of an endpoint share.
#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) domain: Arc<Domain>,
    pub(super) local: Local,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) reliability: Reliability,
    pub(super) connect_by: ConnectBy,
    pub(super) secret: Secret,
    /// Requests in a queue pair.
    pub(super) depth: u32,
    pub(super) inline_bytes: u32,
    pub(super) gather_max: u32,
}

impl Setup {
    pub(super) fn queue_pair(&self) -> Result<QueuePair, Error> {
        let options = QueuePairOptions {
            send_depth: self.depth,
            inline_bytes: self.inline_bytes,
            gather_max: self.gather_max,
            receive: None,
        };
        QueuePair::new(&self.domain, &self.completions, &self.completions, options)
    }
}

#[derive(Debug)]
pub(super) struct VerbsEndpoint {
    // Before the registrations: no queue pair uses memory that is not registered any more.
    links: Vec<Link>,
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
        self.unsettled = !self.links.iter().all(Link::is_settled);
    }
}

fn outside(at: RemotePtr, verb: &Verb) -> Box<Error> {
    let why = "the address is not inside the memory server's region, or not aligned to 8 bytes".into();
    Box::new(Error::Fabric { what: verb.name(), at, why })
}

impl Endpoint for VerbsEndpoint {
    fn capabilities(&self) -> Capabilities {
        let device = self.setup.domain.device().info();
        let global = device.atomics == Atomics::Global;
        Capabilities {
            // A reliable connection, and memory registered without relaxed ordering.
            ordered_writes: true,
            atomic_against_writes: global,
            atomic_against_cpu: global,
            inline_bytes: self.setup.inline_bytes as usize,
            gather_max: self.setup.gather_max as usize,
            works_in_doorbell: device.is_software,
        }
    }

    fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until the endpoint is dropped, as the trait demands.
        let registered = unsafe { self.setup.domain.register(base, words, Access::Local) }?;
        let key = registered.local_key();
        self.registered.push(registered);
        Ok(key)
    }

    #[inline]
    fn ring(&mut self, requests: &mut Vec<Request>) {
        for request in requests.drain(..) {
            let at = request.at;
            match self.links.get_mut(at.server().index()) {
                Some(link) if link.holds(at, request.verb.bytes()) => link.push(request),
                // The card would break the connection over it.
                _ => {
                    let outcome = Err(outside(at, &request.verb));
                    self.early.push(Completion { ticket: request.ticket, outcome });
                }
            }
        }
        for link in &mut self.links {
            link.ring(&self.setup, &mut self.early);
            self.unsettled |= !link.is_settled();
        }
    }

    #[inline]
    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if !self.early.is_empty() {
            completions.append(&mut self.early);
        }
        let (links, setup, unsettled) = (&mut self.links, &self.setup, &mut self.unsettled);
        setup.completions.poll(|finished| {
            if let Some(link) = links.get_mut(link_of(finished.id)) {
                *unsettled |= !finished.status.is_success();
                link.finished(setup, finished, completions);
            }
        });
        if self.unsettled || self.losses.load(Ordering::Relaxed) != self.losses_seen {
            self.tend(completions);
        }
    }
}

impl Drop for VerbsEndpoint {
    fn drop(&mut self) {
        let setup = &self.setup;
        let closing: Vec<_> = self.links.iter_mut().filter_map(|link| link.close(setup)).collect();
        for answer in closing {
            // A memory server that is lost has destroyed its queue pairs.
            let _ = answer.wait();
        }
    }
}
