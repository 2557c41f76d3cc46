//! Operation shipping: an operation is sent to a memory server and runs there, in local memory.
//!
//! A memory server registers the operations that it knows ([`Registry`]) and serves them ([`ShipServer`]); a worker sends them
//! with a [`Shipper`]. What is sent are an operation's own parameters and where to begin, as fixed layouts of words, which the
//! server checks like everything that comes from afar; what runs there is the very same
//! [`Operation::run`](farlink_runtime::access::Operation::run), over an access whose pages are local memory.
//!
//! An operation begins either at the root of a structure that compute servers leave to the memory servers ([`From::Root`]), or
//! at the page where a compute server, which owns and caches the path there, has had to stop ([`From::Page`]). In the latter
//! case it is checked before it runs that the page is on this server, live, of the level it was sent as, one where the operation
//! can begin, and inside what the sender owns. Then single pages are changed at most: an operation that splits or merges, or
//! leaves the pages below, comes back [declined](Answer::Declined), without any effect, and is for the compute server to do.
//!
//! The answer names the pages that were changed, so that the sender drops its copies of them, and the path below the page where the
//! operation began, so that the sender's cache knows what was used. Messages are carried out exactly
//! once: see [`farlink_runtime::messaging`]. A server that is lost in mid-request gives
//! [`Error::OutcomeUnknown`](farlink_runtime::messaging::Error::OutcomeUnknown).

mod client;
mod joining;
mod layout;
mod registry;
mod serve;

pub use self::{
    client::{Answer, From, Shipped, Shipper},
    layout::{At, CallHeader, SHIP, read_reply},
    registry::Registry,
    serve::{HoldReply, ManualShipServer, ShipCounts, ShipOptions, ShipServer},
};
pub(crate) use self::{
    layout::ReplyHeader,
    registry::{malformed, unpanicked, unpanicked_now},
};
pub use crate::on_server::Decline;
