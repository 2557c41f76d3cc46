//! The cluster's secret, and what is derived from it.

use std::{fmt, fs, path::Path};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::error::Error;

/// Shorter ones can be guessed from one recorded handshake.
const BYTES_MIN: usize = 16;
const BYTES_MAX: usize = 1024;

pub(super) const TAG_BYTES: usize = 32;

/// What all servers of a cluster know and nobody else: 16 to 1024 bytes, best random.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Takes these bytes for the secret.
    ///
    /// # Errors
    /// If they are fewer than 16 or more than 1024.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, Error> {
        let bytes = bytes.into();
        if !(BYTES_MIN..=BYTES_MAX).contains(&bytes.len()) {
            let why = format!(
                "it has {} bytes; a secret has {BYTES_MIN} to {BYTES_MAX}, best random (`openssl rand -hex 32`)",
                bytes.len()
            );
            return Err(Error::BadOption { option: "secret", why });
        }
        Ok(Self(bytes))
    }

    /// Reads a file's contents without white space at its ends.
    ///
    /// # Errors
    /// If it cannot be read, or is too short or too long.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(Error::io(format!("reading the secret from {}", path.display())))?;
        Self::new(bytes.trim_ascii())
    }

    /// A new random one.
    pub fn random() -> Self {
        Self(hex(&rand::random::<[u8; 32]>()).into_bytes())
    }

    /// The secret itself, to hand it to whoever must know it.
    pub fn reveal(&self) -> &[u8] {
        &self.0
    }

    /// A cluster's id: all servers that have this secret have the same one.
    pub fn cluster(&self) -> u64 {
        let tag = self.tag("farlink cluster", &[]);
        u64::from_le_bytes(*tag.first_chunk().expect("a tag has 32 bytes"))
    }

    fn mac(&self) -> Hmac<Sha256> {
        Hmac::new_from_slice(&self.0).expect("HMAC takes keys of any length")
    }

    /// HMAC-SHA-256 over a purpose and parts of fixed lengths.
    pub(super) fn tag(&self, purpose: &str, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
        self.over(purpose, parts).finalize().into_bytes().into()
    }

    /// Whether `tag` is the one over these; takes the same time for every wrong one.
    pub(super) fn verify(&self, purpose: &str, parts: &[&[u8]], tag: &[u8; TAG_BYTES]) -> bool {
        self.over(purpose, parts).verify_slice(tag).is_ok()
    }

    fn over(&self, purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = self.mac();
        mac.update(&(purpose.len() as u64).to_le_bytes());
        mac.update(purpose.as_bytes());
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_enough_and_not_printed() {
        assert!(Secret::new("short").is_err());
        assert!(Secret::new(vec![0; 2000]).is_err());
        let secret = Secret::new("0123456789abcdef").unwrap();
        assert!(!format!("{secret:?}").contains("0123"));
        assert_ne!(Secret::random().reveal(), Secret::random().reveal());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        assert_eq!(Secret::read(&path).unwrap().cluster(), secret.cluster());
        assert!(Secret::read(&folder.path().join("absent")).is_err());
    }

    #[test]
    fn tags_depend_on_everything() {
        let secret = Secret::new("0123456789abcdef").unwrap();
        let tag = secret.tag("a", &[b"one", b"two"]);
        assert!(secret.verify("a", &[b"one", b"two"], &tag));
        assert!(!secret.verify("b", &[b"one", b"two"], &tag));
        assert!(!secret.verify("a", &[b"one", b"twx"], &tag));
        assert!(!Secret::new("0123456789abcdeF").unwrap().verify("a", &[b"one", b"two"], &tag));
    }

    #[test]
    fn every_bit_of_a_tag_counts() {
        let secret = Secret::random();
        let verify = |tag: &[u8; TAG_BYTES]| secret.verify("a", &[b"one"], tag);
        let tag = secret.tag("a", &[b"one"]);
        assert!(verify(&tag));
        for bit in 0..8 * TAG_BYTES {
            let mut changed = tag;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!verify(&changed), "bit {bit} does not count");
        }
        // A tag of which only the first bytes are right, filled up with zeros: with none of them right, zeros alone.
        for right in 0..TAG_BYTES {
            let mut cut = [0; TAG_BYTES];
            cut[..right].copy_from_slice(&tag[..right]);
            assert!(cut == tag || !verify(&cut), "{right} bytes are enough");
        }
        assert!(!verify(&[0xff; TAG_BYTES]));
    }
}
