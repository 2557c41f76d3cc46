//! A compute server that listens: control connections as a memory server has them, without a region to reach over them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use super::{Accepting, Memory, Place, serving::Serving};
use crate::{
    clock::Clock,
    connection::ListenerId,
    error::Error,
    listener::{ListenOptions, Listener, ServerEndpoint},
    lock::OwnerId,
    sync::Arc,
    verbs::{
        Reliability, Secret,
        control::{Answer, Question},
        ib::{Domain, Local},
        session::{Awaited, Session},
    },
};

/// Where it takes messages. Dropping it closes all connections.
#[derive(Debug)]
pub(in super::super) struct PeerListener {
    // Before what accepts: its workers find it shut, not cut off.
    listener: Box<dyn Listener>,
    accepting: Accepting,
    owner: OwnerId,
    /// The memory servers, which say where it listens.
    sessions: Vec<Arc<Session>>,
}

impl PeerListener {
    /// Takes connections at a port that the system chooses, on every address of this machine: others find it by their memory servers.
    ///
    /// # Errors
    /// If an option cannot work, no port or nothing on the device is to be had, or a memory server refuses.
    pub(in super::super) fn start(
        owner: OwnerId,
        sessions: &[Arc<Session>],
        (secret, reliability): (&Secret, Reliability),
        (domain, local): (&Arc<Domain>, &Local),
        options: &ListenOptions,
    ) -> Result<Self, Error> {
        let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
        let listener = TcpListener::bind(&everywhere.map(|host| SocketAddr::new(host, 0))[..])
            .map_err(Error::io("listening for compute servers"))?;
        let place = Place { whose: ListenerId::Compute(owner), servers: 0, cluster: secret.cluster(), bytes: 0 };
        let serving = Serving::new((secret, reliability), place, Arc::clone(domain), local.clone(), Memory::none())?;
        let accepting = Accepting::start(serving, listener)?;
        let listener = accepting.listen(options)?;
        let started = Self { listener, accepting, owner, sessions: sessions.to_vec() };
        started.tell(started.accepting.address.port(), |asked| match asked.wait()? {
            Answer::Refused(why) => Err(Error::BadOption { option: "owner", why }),
            _ => Ok(()),
        })?;
        Ok(started)
    }

    /// Has all memory servers know the port.
    fn tell(&self, port: u16, wait: impl Fn(Awaited) -> Result<(), Error>) -> Result<(), Error> {
        let question = Question::Listen { owner: self.owner, port };
        let asked: Vec<_> = self.sessions.iter().map(|session| session.ask(&question)).collect();
        asked.into_iter().try_for_each(|asked| wait(asked?))
    }
}

impl Listener for PeerListener {
    fn listens_as(&self) -> ListenerId {
        self.listener.listens_as()
    }

    fn endpoints(&self) -> usize {
        self.listener.endpoints()
    }

    fn endpoint(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn ServerEndpoint>, Error> {
        self.listener.endpoint(number, seed, clock)
    }

    fn shut(&self) {
        // A memory server that is lost has forgotten it.
        let _ = self.tell(0, |asked| {
            asked.wait_to_leave();
            Ok(())
        });
        self.listener.shut();
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        self.shut();
    }
}
