//! The compute servers that listen, as a compute server reaches them: memory servers know where each is, and all workers of a process
//! share its control connection.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use hashbrown::HashMap;

use super::{
    control::{Answer, Question, Secret},
    session::{Losses, SILENCE_LIMIT, Session},
};
use crate::{
    error::Error,
    lock::OwnerId,
    sync::{Arc, Mutex, lock},
};

/// For so long a compute server that could not be reached is not called again: it takes as long to find that out, and all workers ask.
const MISSING_FOR: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Peers {
    /// To memory servers.
    memory: Vec<Arc<Session>>,
    secret: Secret,
    losses: Losses,
    /// How long a compute server may take to prove itself.
    proof_limit: Duration,
    missing_for: Duration,
    known: Mutex<HashMap<OwnerId, Arc<Called>>>,
}

/// What came of calling a compute server. Locked while it is called, so that only one connection is made: the other workers that ask
/// for it then wait, and those that ask for others do not.
type Called = Mutex<Option<Outcome>>;

#[derive(Debug)]
enum Outcome {
    Connected(Arc<Session>),
    Missing { why: String, since: Instant },
}

impl Peers {
    pub(super) fn new(memory: &[Arc<Session>], secret: &Secret, losses: &Losses) -> Self {
        Self {
            memory: memory.to_vec(),
            secret: secret.clone(),
            losses: Arc::clone(losses),
            proof_limit: SILENCE_LIMIT,
            missing_for: MISSING_FOR,
            known: Mutex::default(),
        }
    }

    /// The control connection to a compute server, made if there is none. Blocks, for some seconds at most, where it or a memory server
    /// does not answer.
    ///
    /// # Errors
    /// [`Error::PeerMissing`] if it does not listen, or cannot be reached.
    pub(super) fn session(&self, peer: OwnerId) -> Result<Arc<Session>, Error> {
        let called = {
            let mut known = lock(&self.known);
            // Whoever is about to call one has it, too.
            known.retain(|_, called| Arc::strong_count(called) > 1 || self.stands(lock(called).as_ref()));
            Arc::clone(known.entry(peer).or_default())
        };
        let mut outcome = lock(&called);
        if !self.stands(outcome.as_ref()) {
            *outcome = self.call(peer);
        }
        match &*outcome {
            Some(Outcome::Connected(session)) => Ok(Arc::clone(session)),
            Some(Outcome::Missing { why, .. }) => Err(Error::PeerMissing { peer, why: why.clone() }),
            None => Err(Error::PeerMissing { peer, why: "no memory server knows where it listens".into() }),
        }
    }

    /// Whether who asks now is to be told this.
    fn stands(&self, outcome: Option<&Outcome>) -> bool {
        match outcome {
            Some(Outcome::Connected(session)) => !session.is_lost(),
            Some(Outcome::Missing { since, .. }) => since.elapsed() < self.missing_for,
            None => false,
        }
    }

    /// None if it does not listen, which is soon found out, and may change at any time.
    fn call(&self, peer: OwnerId) -> Option<Outcome> {
        let mut missing = None;
        for address in self.addresses(peer) {
            let why = match Session::connect_peer(address, peer, &self.secret, &self.losses, self.proof_limit) {
                Ok(session) => return Some(Outcome::Connected(Arc::new(session))),
                Err(Error::PeerMissing { why, .. }) => why,
                Err(error) => error.to_string(),
            };
            missing = Some(Outcome::Missing { why, since: Instant::now() });
        }
        missing
    }

    /// Where memory servers say that it listens, each once. One that sees it at its own machine's loopback sees what is on its machine:
    /// which is at the address at which it is itself.
    fn addresses(&self, peer: OwnerId) -> Vec<SocketAddr> {
        let ask =
            |session: &Arc<Session>| Some((Arc::clone(session), session.ask(&Question::WhereListens(peer)).ok()?));
        let asked: Vec<_> = self.memory.iter().filter_map(ask).collect();
        let mut addresses = Vec::new();
        for (session, asked) in asked {
            let Ok(Answer::ListensAt(address)) = asked.wait() else { continue };
            let hosts = if address.ip().is_loopback() { session.hosts() } else { vec![address.ip()] };
            for host in hosts {
                let address = SocketAddr::new(host, address.port());
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
        }
        addresses
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::{Fake, PATIENCE, Served, losses, secret};

    fn owner(number: u64) -> OwnerId {
        OwnerId::new(number).unwrap()
    }

    /// A memory server says where these listen, until nobody asks any more.
    fn tell(mut served: Served, listening: &[(OwnerId, SocketAddr)]) {
        while let Some(question) = served.next() {
            let Question::WhereListens(asked) = question else { panic!("{question:?}") };
            let known = listening.iter().find(|(owner, _)| *owner == asked);
            served.say(&known.map_or(Answer::Refused("no".into()), |(_, address)| Answer::ListensAt(*address)));
        }
    }

    #[test]
    fn one_that_does_not_answer_holds_up_nobody_who_asks_for_another() {
        let [memory, silent, other] = [Fake::new(0, 1), Fake::new(0, 0), Fake::new(0, 0)];
        let (served, session) = memory.meet();
        let peers = Peers {
            proof_limit: PATIENCE,
            missing_for: PATIENCE,
            ..Peers::new(&[Arc::new(session)], &secret(), &losses())
        };
        let listening = [(owner(1), silent.address()), (owner(2), other.address())];
        std::thread::scope(|scope| {
            scope.spawn(move || tell(served, &listening));
            std::thread::scope(|scope| {
                let ask = || peers.session(owner(1)).unwrap_err().to_string();
                let first = scope.spawn(ask);
                let called = silent.take();
                let answers = scope.spawn(|| {
                    let mut served = other.accept();
                    assert_eq!(served.next(), Some(Question::Lives(owner(2))));
                    served.say(&Answer::Lives(true));
                    served
                });
                let connected = peers.session(owner(2)).unwrap();
                assert!(!first.is_finished(), "it had to wait for the other one");
                // As before, and nobody is called.
                assert!(Arc::ptr_eq(&connected, &peers.session(owner(2)).unwrap()));
                let second = scope.spawn(ask);
                drop(called);
                // One attempt is for all who ask meanwhile or soon after.
                let why = first.join().unwrap();
                assert_eq!(second.join().unwrap(), why);
                assert_eq!(ask(), why);
                assert!(!silent.is_called());
                let unknown = peers.session(owner(3)).unwrap_err().to_string();
                assert!(unknown.contains("where it listens"), "{unknown}");
                drop(answers.join().unwrap());
            });
            drop(peers);
        });
    }
}
