//! The compute servers that listen, as a compute server reaches them: memory servers know where each is, and all workers of a process
//! share its control connection.

use std::net::SocketAddr;

use hashbrown::HashMap;

use super::{
    control::{Answer, Question, Secret},
    session::{Losses, Session},
};
use crate::{
    error::Error,
    lock::OwnerId,
    sync::{Arc, Mutex, lock},
};

#[derive(Debug)]
pub(super) struct Peers {
    /// To memory servers.
    memory: Vec<Arc<Session>>,
    secret: Secret,
    losses: Losses,
    /// Held while a connection is made, so that only one is: the other workers that ask then wait.
    known: Mutex<HashMap<OwnerId, Arc<Session>>>,
}

impl Peers {
    pub(super) fn new(memory: &[Arc<Session>], secret: &Secret, losses: &Losses) -> Self {
        Self { memory: memory.to_vec(), secret: secret.clone(), losses: Arc::clone(losses), known: Mutex::default() }
    }

    /// The control connection to a compute server, made if there is none. Blocks, for some seconds at most, where it or a memory server
    /// does not answer.
    ///
    /// # Errors
    /// [`Error::PeerMissing`] if it does not listen, or cannot be reached.
    pub(super) fn session(&self, peer: OwnerId) -> Result<Arc<Session>, Error> {
        let mut known = lock(&self.known);
        known.retain(|_, session| session.lost().is_none());
        if let Some(session) = known.get(&peer) {
            return Ok(Arc::clone(session));
        }
        let mut why = "no memory server knows where it listens".to_owned();
        for address in self.addresses(peer) {
            match Session::connect_peer(address, peer, &self.secret, &self.losses) {
                Ok(session) => return Ok(Arc::clone(known.entry(peer).insert(Arc::new(session)).get())),
                Err(Error::PeerMissing { why: found, .. }) => why = found,
                Err(error) => why = error.to_string(),
            }
        }
        Err(Error::PeerMissing { peer, why })
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
