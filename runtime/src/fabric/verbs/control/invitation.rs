//! What a compute server says to a memory server's connection manager, so that it is let in.
//!
//! The control connection hands out a random *invitation* for one connection. Whoever comes with it must prove, too, that it
//! knows the secret, and names the queue pair that it comes with: who has only overheard the invitation can do nothing with
//! it, and one that was used is worth nothing.
//!
//! ```text
//! [ invitation, 16 bytes | HMAC(secret, "farlink invitation", invitation, queue pair), 32 bytes ]
//! ```

use super::{Secret, secret::TAG_BYTES};
use crate::{error::Error, wire::Wire};

const NUMBER_BYTES: usize = 16;
/// Bytes of a greeting.
pub(in super::super) const GREETING_BYTES: usize = NUMBER_BYTES + TAG_BYTES;
const PURPOSE: &str = "farlink invitation";

/// The right to one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) struct Invitation([u8; NUMBER_BYTES]);

impl Invitation {
    /// A new one.
    pub(in super::super) fn random() -> Self {
        Self(rand::random())
    }

    /// What to say to use it for this queue pair.
    pub(in super::super) fn greeting(&self, secret: &Secret, queue_pair: u32) -> [u8; GREETING_BYTES] {
        let mut greeting = [0; GREETING_BYTES];
        greeting[..NUMBER_BYTES].copy_from_slice(&self.0);
        greeting[NUMBER_BYTES..].copy_from_slice(&secret.tag(PURPOSE, &[&self.0, &queue_pair.to_le_bytes()]));
        greeting
    }

    /// The invitation in a greeting, if whoever says it knows the secret and means this queue pair. What a connection manager
    /// delivers may be longer than what was said.
    pub(in super::super) fn of_greeting(secret: &Secret, greeting: &[u8], queue_pair: u32) -> Option<Self> {
        let (number, rest) = greeting.split_first_chunk::<NUMBER_BYTES>()?;
        let tag = rest.first_chunk::<TAG_BYTES>()?;
        secret.verify(PURPOSE, &[number, &queue_pair.to_le_bytes()], tag).then_some(Self(*number))
    }
}

impl Wire for Invitation {
    fn encode(&self, to: &mut Vec<u64>) {
        let (halves, _) = self.0.as_chunks();
        to.extend(halves.iter().map(|half| u64::from_le_bytes(*half)));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        let mut number = [0; NUMBER_BYTES];
        number[..8].copy_from_slice(&u64::decode(from)?.to_le_bytes());
        number[8..].copy_from_slice(&u64::decode(from)?.to_le_bytes());
        Ok(Self(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_knows_the_secret_can_use_it_and_only_for_its_queue_pair() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        let invitation = Invitation::random();
        let greeting = invitation.greeting(&secret, 17);
        // Connection managers fill up with zeros.
        let delivered = [&greeting[..], &[0; 8]].concat();
        assert_eq!(Invitation::of_greeting(&secret, &delivered, 17), Some(invitation));
        assert_eq!(Invitation::of_greeting(&secret, &greeting, 18), None);
        let other = Secret::new("0123456789abcdeF").unwrap();
        assert_eq!(Invitation::of_greeting(&other, &greeting, 17), None);
        for byte in 0..greeting.len() {
            let mut changed = greeting;
            changed[byte] ^= 1;
            assert_eq!(Invitation::of_greeting(&secret, &changed, 17), None);
            assert_eq!(Invitation::of_greeting(&secret, &greeting[..byte], 17), None);
        }
        assert_ne!(Invitation::random(), Invitation::random());
    }
}
