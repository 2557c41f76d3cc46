//! A compute server's claim to its incarnation, and whether it still stands.
//!
//! A memory server counts an incarnation as dead once the control connection that claimed it is over; *dead* is what all of them
//! say. Who is lost to some of them only would be neither: no lock of its could be broken, and much of what it does fails. So who
//! has lost a memory server asks it anew, and if that one is there and has cut it off, ends the connections to all others, too.

use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::{
    control::{Answer, Question, Secret},
    session::{Anew, Awaited, Session},
};
use crate::{
    fabric::OwnerClaim,
    lock::OwnerId,
    ptr::ServerId,
    sync::{Arc, Mutex, lock},
};

/// How long a memory server may take to say whether it counts this compute server as dead, once its connections are lost.
const STANDING_LIMIT: Duration = Duration::from_millis(500);
/// For so long one that did not say it is not asked again, so that it does not hold up all that is done over and over.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct VerbsClaim {
    owner: OwnerId,
    sessions: Vec<Arc<Session>>,
    secret: Secret,
    standing: Mutex<Standing>,
}

/// What is known since a memory server is lost.
#[derive(Debug, Default)]
struct Standing {
    is_counted_dead: bool,
    /// What came of asking those that are lost.
    lost: HashMap<ServerId, Lost>,
}

#[derive(Debug, Clone, Copy)]
enum Lost {
    /// It did not say anything when it was asked then: it may be there.
    SilentAt(Instant),
    /// Its process has ended, and has taken nobody for dead.
    Gone,
}

impl VerbsClaim {
    /// A claim that no memory server knows of yet.
    pub(super) fn new(owner: OwnerId, secret: &Secret) -> Self {
        Self { owner, sessions: Vec::new(), secret: secret.clone(), standing: Mutex::default() }
    }

    /// This memory server has taken it.
    pub(super) fn taken_by(&mut self, session: &Arc<Session>) {
        self.sessions.push(Arc::clone(session));
    }

    fn holds_at(&self, now: Instant) -> bool {
        if !self.sessions.iter().any(|session| session.is_lost()) {
            return true;
        }
        let mut standing = lock(&self.standing);
        for lost in self.sessions.iter().filter(|session| session.is_lost()) {
            if standing.is_counted_dead {
                break;
            }
            let is_due = match standing.lost.get(&lost.server()) {
                Some(Lost::Gone) => false,
                Some(Lost::SilentAt(then)) => now.duration_since(*then) >= ASK_AGAIN_AFTER,
                None => true,
            };
            if !is_due || lost.is_given_up() {
                continue;
            }
            match lost.ask_anew(&self.secret, &Question::Lives(self.owner), STANDING_LIMIT) {
                Anew::Answered(Answer::Lives(false)) => {
                    standing.is_counted_dead = true;
                    // Then all count it as dead, and its locks can be broken.
                    let why = format!("memory server {} has cut this compute server off", lost.server());
                    self.sessions.iter().for_each(|session| session.give_up(&why));
                }
                // It is about to count it as dead.
                Anew::Answered(_) => drop(standing.lost.remove(&lost.server())),
                Anew::Silent => drop(standing.lost.insert(lost.server(), Lost::SilentAt(now))),
                Anew::Gone => drop(standing.lost.insert(lost.server(), Lost::Gone)),
            }
        }
        !standing.is_counted_dead
    }
}

impl OwnerClaim for VerbsClaim {
    /// Of the memory servers that are lost, those that are there say whether they have cut it off.
    fn holds(&self) -> bool {
        self.holds_at(Instant::now())
    }
}

impl Drop for VerbsClaim {
    fn drop(&mut self) {
        // A memory server that is lost has counted it as dead already.
        let released = |session: &Arc<Session>| session.ask(&Question::Release(self.owner)).ok();
        let asked: Vec<_> = self.sessions.iter().filter_map(released).collect();
        asked.into_iter().for_each(Awaited::wait_to_leave);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::{Fake, Served, eventually, secret};

    fn owner() -> OwnerId {
        OwnerId::new(5).unwrap()
    }

    /// A claim at these memory servers, and their ends of its connections.
    fn claimed(servers: &[&Fake]) -> (VerbsClaim, Vec<Served>) {
        let mut claim = VerbsClaim::new(owner(), &secret());
        let served = servers.iter().map(|server| {
            let (served, session) = server.meet();
            claim.taken_by(&Arc::new(session));
            served
        });
        let served = served.collect();
        (claim, served)
    }

    fn loses(claim: &VerbsClaim, server: usize) {
        eventually("the loss is known", || claim.sessions[server].is_lost());
    }

    /// Asks whether it holds while the memory server says this to who asks it anew.
    fn asked(claim: &VerbsClaim, now: Instant, server: &Fake, lives: bool) -> bool {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut served = server.accept();
                assert_eq!(served.next(), Some(Question::Lives(owner())));
                served.say(&Answer::Lives(lives));
                // Until the other side hangs up.
                assert_eq!(served.next(), None);
            });
            claim.holds_at(now)
        })
    }

    /// Else all others would wait for ever for locks that it holds.
    #[test]
    fn who_one_of_several_has_cut_off_ends_all() {
        let servers = [Fake::new(0, 2), Fake::new(1, 2)];
        let (claim, mut served) = claimed(&[&servers[0], &servers[1]]);
        assert!(claim.holds());
        drop(served.pop());
        loses(&claim, 1);
        let now = Instant::now();
        assert!(asked(&claim, now, &servers[1], true), "it was not yet cut off");
        assert!(!asked(&claim, now, &servers[1], false));
        assert_eq!(served[0].next(), None, "the other memory server keeps it alive");
        assert!(!claim.holds(), "it is for ever");
    }

    #[test]
    fn a_memory_server_that_is_gone_changes_nothing_for_the_others() {
        let [kept, gone] = [Fake::new(0, 2), Fake::new(1, 2)];
        let (claim, mut served) = claimed(&[&kept, &gone]);
        drop((served.pop(), gone));
        loses(&claim, 1);
        let now = Instant::now();
        assert!(claim.holds_at(now));
        assert!(claim.holds_at(now + ASK_AGAIN_AFTER));
        assert!(matches!(lock(&claim.standing).lost.get(&ServerId::new(1).unwrap()), Some(Lost::Gone)));
        assert!(!claim.sessions[0].is_lost());
        // What it is asked last, and not to be let go.
        std::thread::scope(|scope| {
            scope.spawn(|| drop(claim));
            assert_eq!(served[0].next(), Some(Question::Release(owner())));
            served[0].say(&Answer::Done);
        });
    }

    /// Its memory is new, and it knows nobody.
    #[test]
    fn another_memory_server_at_the_address_has_taken_nobody_for_dead() {
        let mut server = Fake::new(0, 1);
        let (claim, served) = claimed(&[&server]);
        drop(served);
        loses(&claim, 0);
        server.hello_ack.key += 1;
        std::thread::scope(|scope| {
            scope.spawn(|| while server.accept().next().is_some() {});
            assert!(claim.holds());
        });
        assert!(claim.holds());
    }

    #[test]
    fn who_did_not_answer_is_asked_again() {
        let server = Fake::new(0, 1);
        let (claim, served) = claimed(&[&server]);
        drop(served);
        loses(&claim, 0);
        let now = Instant::now();
        // It takes the connection and says nothing.
        assert!(claim.holds_at(now));
        drop(server.take());
        assert!(claim.holds_at(now), "asked again at once");
        assert!(!asked(&claim, now + ASK_AGAIN_AFTER, &server, false));
    }
}
