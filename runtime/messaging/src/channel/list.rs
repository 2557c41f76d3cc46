//! The channels of a worker, and the connection of each: made, looked after, and made again when it is lost.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use super::{
    Host,
    core::{Core, Phase},
};
use crate::connection::{Broken, Connection, Sending};
use farlink_fabric::{Completion, Error as FabricError, connection::ConnectionState, ptr::ServerId};

/// A channel that waits asks what has become of its connection after so many exchanges without news, or after so long: where threads wait for
/// a core, an exchange takes milliseconds.
const IDLE_POLLS_MAX: u32 = 4096;
const IDLE_NS_MAX: u64 = 20_000_000;
/// One that does not wait asks so often: of a server that is gone it would keep the memory for ever.
const UNUSED_NS: u64 = 1_000_000_000;
/// One exchange without news in so many looks at the clock.
const CLOCK_EVERY: u32 = 16;
/// Connections that may be lost one after another without a single reply.
const FAILED_ATTEMPTS_MAX: u32 = 4;

/// What a worker keeps of a channel.
#[derive(Debug)]
pub(super) struct State {
    pub(super) server: ServerId,
    pub(super) core: RefCell<Core>,
}

/// The channels of a worker.
#[derive(Debug, Default)]
pub struct Channels {
    pub(super) list: RefCell<Vec<Rc<State>>>,
    pub(super) any: Cell<bool>,
    /// A message has been queued that had better not wait for others to come with it.
    pub(super) pressing: Cell<bool>,
}

impl Channels {
    /// Whether none has been opened.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any.get()
    }

    /// Takes what has come and posts what is to be sent; false if there was neither. Before the `last` exchange of a turn
    /// it does so only if something presses: the more comes together, the less each message costs.
    pub fn turn(&self, host: &dyn Host, last: bool) -> bool {
        if !self.pressing.replace(false) && !last {
            return false;
        }
        let mut progress = false;
        for index in 0.. {
            let Some(state) = self.list.borrow().get(index).cloned() else { break };
            progress |= state.turn(host);
        }
        progress
    }

    /// Takes a completion of a connection's request.
    pub fn complete(&self, completion: Completion) {
        let server = Connection::other_of(completion.ticket);
        let list = self.list.borrow();
        let Some(state) = list.iter().find(|state| state.server == server) else { return };
        let core = &mut *state.core.borrow_mut();
        core.dirty = true;
        if let Some(connection) = &mut core.connection {
            connection.complete(completion);
        }
    }

    /// The worker ends: closes all connections.
    pub fn close(&self, host: &dyn Host) {
        for state in self.list.take() {
            state.fail(host, "its worker has ended");
        }
        self.any.set(false);
    }
}

impl State {
    fn turn(&self, host: &dyn Host) -> bool {
        let core = &mut *self.core.borrow_mut();
        let Some(connection) = &mut core.connection else { return false };
        let news = core.dirty || connection.has_news();
        if news {
            core.idle_polls = 0;
            core.dirty = false;
            match core.exchange(host) {
                // Nobody knows what it has said last.
                Err(Broken::Failed(error)) if core.connection.as_ref().is_some_and(Connection::is_lost) => {
                    self.connect_again(core, host, &error.to_string())
                }
                // Each exchange takes some of the best-effort replies that came before it.
                Ok(()) | Err(Broken::Failed(_)) if core.has_goodbye && core.has_messages() => core.dirty = true,
                Ok(()) | Err(Broken::Failed(_)) if core.has_goodbye => core.leave(host),
                Ok(()) => {}
                Err(Broken::Protocol(error)) => {
                    core.fail(host, &format!("the memory server broke the protocol: {error}"))
                }
                Err(Broken::Failed(error)) => self.connect_again(core, host, &error.to_string()),
            }
        } else {
            core.idle_polls += 1;
            if !core.idle_polls.is_multiple_of(CLOCK_EVERY) {
                return false;
            }
            let now_ns = host.now_ns();
            if core.idle_polls == CLOCK_EVERY {
                core.idle_since_ns = now_ns;
            }
            if core.idle_polls < IDLE_POLLS_MAX && now_ns - core.idle_since_ns < IDLE_NS_MAX {
                return false;
            }
            // The next time, too, waits from now on.
            (core.idle_polls, core.idle_since_ns) = (CLOCK_EVERY, now_ns);
            self.check_connection(core, host, now_ns);
        }
        if core.phase == Phase::Down && core.connection.take().is_some() {
            self.disconnect(host);
        }
        news
    }

    /// Nothing has come for a while: asks what has become of the connection; seldom, if nobody waits.
    fn check_connection(&self, core: &mut Core, host: &dyn Host, now_ns: u64) {
        let is_sending = core.connection.as_ref().is_some_and(Connection::is_sending);
        if core.phase == Phase::Connecting || core.next != core.lowest || is_sending {
            let state = host.endpoint().borrow_mut().connection_state(self.server);
            match state {
                // It has said something before it ended.
                ConnectionState::Dismissed | ConnectionState::Dead if core.has_messages() => core.dirty = true,
                ConnectionState::Up => self.check_silence(core, host, now_ns),
                ConnectionState::Dismissed => {
                    self.connect_again(core, host, "the memory server has closed the connection")
                }
                ConnectionState::Dead => core.fail(host, "the memory server is gone"),
            }
        } else {
            core.silence.ends();
            if now_ns - core.asked_at_ns >= UNUSED_NS {
                core.asked_at_ns = now_ns;
                if host.endpoint().borrow_mut().connection_state(self.server) == ConnectionState::Dead {
                    core.fail(host, "the memory server is gone");
                }
            }
        }
    }

    fn check_silence(&self, core: &mut Core, host: &dyn Host, now_ns: u64) {
        let (Some(limit), Some(connection)) = (host.answer_wait(self.server), &core.connection) else { return };
        let sign = (connection.control_word(), connection.trace());
        let answers = host.endpoint().borrow().states_told(self.server);
        if core.silence.lasts(sign, answers, now_ns, limit) {
            tracing::warn!(server = %self.server, "who was asked gives no sign of life");
            core.fail_silent(host, limit);
        }
    }

    fn fail(&self, host: &dyn Host, why: &str) {
        let core = &mut *self.core.borrow_mut();
        core.fail(host, why);
        core.connection = None;
        self.disconnect(host);
    }

    fn disconnect(&self, host: &dyn Host) {
        host.withdraw(self.server);
        host.endpoint().borrow_mut().disconnect(self.server);
    }

    /// Opens a connection. What is unanswered stays in its slots.
    pub(super) fn connect(&self, core: &mut Core, host: &dyn Host) -> Result<(), FabricError> {
        let who = host.peer_id();
        host.withdraw(self.server);
        let memory = loop {
            core.failed_attempts += 1;
            if core.failed_attempts > FAILED_ATTEMPTS_MAX {
                let why = format!("{FAILED_ATTEMPTS_MAX} connections were lost without a single reply");
                return Err(FabricError::ServerMissing { server: self.server, why });
            }
            match host.endpoint().borrow_mut().connect(self.server, who) {
                Err(error) if error.may_be_tried_again() => {}
                connected => break connected?,
            }
        };
        core.generation = core.generation.wrapping_add(1);
        let sending = Sending {
            ordered: host.capabilities().ordered_writes,
            coalesce: core.options.coalesce,
            eager_words: core.eager_words,
            gather_max: 1,
        };
        let connection = Connection::new(memory, self.server, core.generation, sending);
        let Some(connection) = connection else {
            host.endpoint().borrow_mut().disconnect(self.server);
            let why = "it opens too little memory".into();
            return Err(FabricError::ServerMissing { server: self.server, why });
        };
        core.connection = Some(connection);
        core.phase = Phase::Connecting;
        core.dirty = true;
        core.has_goodbye = false;
        Ok(())
    }

    fn connect_again(&self, core: &mut Core, host: &dyn Host, why: &str) {
        tracing::debug!(server = %self.server, why, "lost a connection");
        if let Err(error) = self.connect(core, host) {
            core.fail(host, &format!("{why}, and: {error}"));
        }
    }
}
