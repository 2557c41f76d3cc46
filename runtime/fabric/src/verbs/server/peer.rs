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
    _accepting: Accepting,
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
        common: (&Secret, Reliability, bool),
        (domain, local): (&Arc<Domain>, &Local),
        options: &ListenOptions,
    ) -> Result<Self, Error> {
        let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
        let listener = TcpListener::bind(&everywhere.map(|host| SocketAddr::new(host, 0))[..])
            .map_err(Error::io("listening for compute servers"))?;
        let place = Place { whose: ListenerId::Compute(owner), servers: 0, cluster: common.0.cluster(), bytes: 0 };
        let serving = Serving::new(common, place, Arc::clone(domain), local.clone(), Memory::none())?;
        let accepting = Accepting::start(serving, listener)?;
        let (port, listener) = (accepting.address.port(), accepting.listen(options)?);
        // The first of them says whether it listens already: there it is, before the others are told.
        let (first, others) = sessions.split_first().expect("a cluster has memory servers");
        listens(first, owner, port)?;
        let started = Self { listener, _accepting: accepting, owner, sessions: sessions.to_vec() };
        others.iter().try_for_each(|session| listens(session, owner, port))?;
        Ok(started)
    }
}

/// Has a memory server know the port.
fn listens(session: &Session, owner: OwnerId, port: u16) -> Result<(), Error> {
    let answer = session.ask(&Question::Listen { owner, port })?.wait().inspect_err(|_| {
        // It may carry that out yet, and nobody could ever listen again.
        drop(session.ask(&Question::Listen { owner, port: 0 }));
    })?;
    match answer {
        Answer::Refused(why) => Err(Error::BadOption { option: "owner", why }),
        _ => Ok(()),
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
        let question = Question::Listen { owner: self.owner, port: 0 };
        let asked: Vec<_> = self.sessions.iter().filter_map(|session| session.ask(&question).ok()).collect();
        asked.into_iter().for_each(Awaited::wait_to_leave);
        self.listener.shut();
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        self.shut();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::Fake;

    #[test]
    fn a_port_that_a_memory_server_notes_too_late_is_taken_back() {
        let (mut served, session) = Fake::new(0, 1).meet();
        let owner = OwnerId::new(5).unwrap();
        let listen = |port| Some(Question::Listen { owner, port });
        let error = listens(&session, owner, 7).unwrap_err();
        assert!(matches!(error, Error::ServerMissing { .. }), "{error}");
        for port in [7, 0] {
            assert_eq!(served.next(), listen(port));
            served.say(&Answer::Done);
        }
        drop(session);
        assert_eq!(served.next(), None);
    }
}
