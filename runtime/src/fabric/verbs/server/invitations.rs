//! Which invitations a memory server has handed out.

use hashbrown::HashMap;

use super::owners::SessionId;
use crate::fabric::verbs::control::Invitation;

/// Invitations that were not used yet.
#[derive(Debug, Default)]
pub(super) struct Invitations(HashMap<Invitation, SessionId>);

impl Invitations {
    /// Hands one out.
    pub(super) fn issue(&mut self, session: SessionId) -> Invitation {
        let invitation = Invitation::random();
        self.0.insert(invitation, session);
        invitation
    }

    /// Whose it is. It is used up.
    pub(super) fn redeem(&mut self, invitation: Invitation) -> Option<SessionId> {
        self.0.remove(&invitation)
    }

    /// How many of a session's are not used yet.
    pub(super) fn open(&self, session: SessionId) -> usize {
        self.0.values().filter(|&&of_session| of_session == session).count()
    }

    /// A session is over, and so are its invitations.
    pub(super) fn end(&mut self, session: SessionId) {
        self.0.retain(|_, of_session| *of_session != session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_good_for_once_and_not_beyond_its_session() {
        let mut invitations = Invitations::default();
        let (used, kept) = (invitations.issue(1), invitations.issue(1));
        let other = invitations.issue(2);
        assert_eq!(invitations.redeem(used), Some(1));
        assert_eq!(invitations.redeem(used), None);
        assert_eq!(invitations.redeem(Invitation::random()), None);
        assert_eq!((invitations.open(1), invitations.open(2)), (1, 1));
        invitations.end(1);
        assert_eq!(invitations.redeem(kept), None);
        assert_eq!(invitations.redeem(other), Some(2));
    }
}
