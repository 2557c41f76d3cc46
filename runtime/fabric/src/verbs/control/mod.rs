//! The control connection: a TCP connection over which a compute server and a memory server prove to each other that
//! they know the cluster's secret, and then exchange what queue pairs need.
//!
//! ```text
//! compute server                          memory server
//!   hello, nonce of 32 bytes      ───►
//!                                 ◄───      hello, nonce of 32 bytes
//!   HMAC(secret, "compute", both) ───►      closes if it is wrong
//!                                 ◄───      HMAC(secret, "memory", both)
//!   frames, each sealed by a key  ◄──►      frames
//!   derived from secret and nonces
//! ```
//!
//! The memory server answers nothing to whoever does not know the secret. Every later frame carries an HMAC over its
//! number and contents, so a machine in between can neither add, change, repeat nor drop one unnoticed. Nothing here is
//! encrypted: neither is RDMA itself.

mod handshake;
mod message;
mod secret;
mod stream;

pub use self::secret::Secret;
pub(super) use self::{
    handshake::{accept, connect},
    message::{Answer, HelloAck, Opened, Question},
    stream::{Receiver, Sender, keep_alive},
};
