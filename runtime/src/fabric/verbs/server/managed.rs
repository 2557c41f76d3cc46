//! Connections that compute servers ask the connection manager for.

use std::{
    os::unix::net::UnixStream,
    thread::{self, JoinHandle},
    time::Duration,
};

use super::serving::{QUEUE_PAIRS_MAX, Served, Serving};
use crate::{
    error::Error,
    fabric::verbs::{
        ConnectBy,
        control::{Answer, Invitation},
        ib::{Asked, Device, Listener, Local, obstacle},
    },
    sync::Arc,
};

/// Listens, if it should and can.
pub(super) fn listen(by: ConnectBy, device: &Device, local: &Local) -> Result<Option<Listener>, Error> {
    let listener = match (by, obstacle(local)) {
        (ConnectBy::Hand, _) => return Ok(None),
        (_, None) => Listener::new(device, local),
        (_, Some(why)) => Err(Error::NoDevice { wanted: "connection manager".into(), why }),
    };
    match (by, listener) {
        (ConnectBy::Auto, Err(error)) => {
            tracing::info!(%error, "connections are made by hand");
            Ok(None)
        }
        (_, listener) => listener.map(Some),
    }
}

/// The thread that looks at who asks. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Doorkeeper {
    end: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Doorkeeper {
    pub(super) fn start(serving: &Arc<Serving>, listener: Listener) -> Result<Self, Error> {
        let failed = || Error::io("starting the thread that looks at who asks for a connection");
        let (end, of_thread) = UnixStream::pair().map_err(failed())?;
        let serving = Arc::clone(serving);
        let thread = thread::Builder::new()
            .name("farlink-doorkeeper".into())
            .spawn(move || keep_door(&serving, &listener, &of_thread))
            .map_err(failed())?;
        Ok(Self { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Doorkeeper {
    fn drop(&mut self) {
        // Closes the thread's end, too.
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn keep_door(serving: &Serving, listener: &Listener, end: &UnixStream) {
    loop {
        match listener.next(end) {
            Ok(Some(asked)) => {
                if let Err(why) = serving.let_in(asked) {
                    tracing::info!(why, "a connection was refused");
                }
            }
            Ok(None) => return,
            Err(error) => {
                // Out of descriptors or memory. Others may let some go.
                tracing::warn!(%error, "the connection manager failed");
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

impl Serving {
    /// Hands out an invitation, after the end of an earlier connection.
    pub(super) fn invite(&self, id: u64) -> Answer {
        let mut state = self.state();
        let Some(held) = state.sessions.get(&id) else { return Answer::Refused("the memory server stops".into()) };
        if held.queue_pairs.len() + state.invitations.open(id) >= QUEUE_PAIRS_MAX {
            return Answer::Refused(too_many());
        }
        match self.manager {
            Some(_) => Answer::Invited(state.invitations.issue(id)),
            None => Answer::Refused("it has no connection manager".into()),
        }
    }

    /// Lets somebody in who has an invitation; whoever has none is refused and told nothing.
    fn let_in(&self, asked: Asked) -> Result<(), String> {
        let invitation = Invitation::of_greeting(&self.secret, &asked.greeting, asked.queue_pair)
            .ok_or("it does not know the cluster's secret")?;
        let session = self.state().invitations.redeem(invitation).ok_or("its invitation was used, or has ended")?;
        let queue_pair = self.queue_pair().map_err(|error| error.to_string())?;
        asked.prepare(&queue_pair, self.reliability).map_err(|error| error.to_string())?;
        // Under the lock: once its owner knows of it, it must be there to be destroyed.
        let mut state = self.state();
        let Some(held) = state.sessions.get_mut(&session) else { return Err("it has hung up".into()) };
        let id = asked.accept(&queue_pair, self.reliability).map_err(|error| error.to_string())?;
        held.queue_pairs.insert(queue_pair.number(), Served { _queue_pair: queue_pair, _id: Some(id) });
        Ok(())
    }
}

pub(super) fn too_many() -> String {
    format!("one compute server has at most {QUEUE_PAIRS_MAX} connections; use fewer workers")
}
