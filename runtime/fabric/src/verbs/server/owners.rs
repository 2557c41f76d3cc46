//! Which compute servers live, and where they listen, as far as one memory server knows.

use std::net::SocketAddr;

use hashbrown::{HashMap, HashSet, hash_map::Entry};

use crate::lock::OwnerId;

/// Names a control connection.
pub(super) type SessionId = u64;

/// The incarnations that were claimed here.
#[derive(Debug, Default)]
pub(super) struct Owners {
    alive: HashMap<OwnerId, SessionId>,
    /// Never to be claimed again: others may have concluded already that nothing of theirs can still land. An incarnation
    /// takes a few bytes, and a cluster has 2^23 of them at most.
    dead: HashSet<OwnerId>,
    /// Where those that live take control connections of others, if they do.
    listening: HashMap<OwnerId, SocketAddr>,
}

impl Owners {
    /// A session has this incarnation from now on.
    pub(super) fn claim(&mut self, owner: OwnerId, session: SessionId) -> Result<(), String> {
        if self.dead.contains(&owner) {
            return Err(format!("{owner} is counted as dead since its connection was lost; join anew"));
        }
        match self.alive.entry(owner) {
            Entry::Occupied(_) => Err(format!("the incarnation of {owner} was given out twice; it still runs")),
            Entry::Vacant(vacant) => {
                vacant.insert(session);
                Ok(())
            }
        }
    }

    /// It has ended in good order, if it is this session's.
    pub(super) fn release(&mut self, owner: OwnerId, session: SessionId) {
        if self.alive.get(&owner) == Some(&session) {
            self.alive.remove(&owner);
            self.listening.remove(&owner);
            self.dead.insert(owner);
        }
    }

    /// A session is over and its queue pairs are destroyed: what it had claimed is dead.
    pub(super) fn end(&mut self, session: SessionId) -> Vec<OwnerId> {
        let ended: Vec<OwnerId> =
            self.alive.extract_if(|_, &mut of_session| of_session == session).map(|(owner, _)| owner).collect();
        self.dead.extend(&ended);
        self.listening.retain(|owner, _| !ended.contains(owner));
        ended
    }

    /// This session's compute server listens here from now on, or nowhere.
    pub(super) fn listen(
        &mut self,
        owner: OwnerId,
        session: SessionId,
        address: Option<SocketAddr>,
    ) -> Result<(), String> {
        if self.alive.get(&owner) != Some(&session) {
            return Err(format!("the incarnation of {owner} was not claimed over this connection"));
        }
        if address.is_some() && self.listening.contains_key(&owner) {
            return Err(format!("{owner} listens already"));
        }
        match address {
            Some(address) => self.listening.insert(owner, address),
            None => self.listening.remove(&owner),
        };
        Ok(())
    }

    pub(super) fn listens_at(&self, owner: OwnerId) -> Option<SocketAddr> {
        self.listening.get(&owner).copied()
    }

    pub(super) fn lives(&self, owner: OwnerId) -> bool {
        self.alive.contains_key(&owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(number: u64) -> OwnerId {
        OwnerId::new(number).unwrap()
    }

    #[test]
    fn the_dead_stay_dead() {
        let mut owners = Owners::default();
        assert!(!owners.lives(owner(1)));
        owners.claim(owner(1), 10).unwrap();
        owners.claim(owner(2), 10).unwrap();
        owners.claim(owner(3), 11).unwrap();
        assert!(owners.claim(owner(1), 11).unwrap_err().contains("twice"));
        owners.release(owner(3), 10);
        assert!(owners.lives(owner(3)), "only who has claimed it releases it");
        owners.release(owner(2), 10);
        assert!(!owners.lives(owner(2)));
        assert_eq!(owners.end(10), [owner(1)]);
        for number in [1, 2] {
            assert!(owners.claim(owner(number), 12).unwrap_err().contains("dead"));
        }
        assert!(owners.lives(owner(3)));
    }

    #[test]
    fn only_the_living_listen_and_say_so_themselves() {
        let mut owners = Owners::default();
        let address = "10.0.0.1:99".parse().unwrap();
        assert!(owners.listen(owner(1), 10, Some(address)).is_err());
        for (number, session) in [(1, 10), (2, 11)] {
            owners.claim(owner(number), session).unwrap();
            owners.listen(owner(number), session, Some(address)).unwrap();
        }
        assert!(owners.listen(owner(1), 11, None).unwrap_err().contains("not claimed"));
        assert!(owners.listen(owner(1), 10, Some(address)).unwrap_err().contains("listens already"));
        assert_eq!(owners.listens_at(owner(1)), Some(address));
        owners.listen(owner(1), 10, None).unwrap();
        assert_eq!(owners.listens_at(owner(1)), None);
        owners.listen(owner(1), 10, Some(address)).unwrap();
        owners.release(owner(1), 10);
        owners.end(11);
        assert_eq!([1, 2].map(|number| owners.listens_at(owner(number))), [None, None]);
    }
}
