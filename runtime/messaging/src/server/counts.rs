//! What a message server counts.

use crate::connection::{Connection, Posted};

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a message server has counted since its start.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct ServerCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// One thread's counts, written by it alone.
        #[derive(Debug, Default)]
        pub(super) struct ThreadCounts {
            $(pub(super) $name: std::sync::atomic::AtomicU64,)*
            pub(super) busy_permille: std::sync::atomic::AtomicU64,
            pub(super) peers_now: std::sync::atomic::AtomicU64,
        }

        impl ThreadCounts {
            /// Takes what a connection has counted.
            pub(super) fn add_posted(&self, connection: &mut Connection) {
                let Posted { writes, gathers, pieces, copied_words } = std::mem::take(&mut connection.posted);
                bump(&self.writes, writes);
                bump(&self.gathers, gathers);
                bump(&self.gathered_pieces, pieces);
                bump(&self.copied_words, copied_words);
                bump(&self.message_words, std::mem::take(&mut connection.words_moved));
            }

            pub(super) fn add_to(&self, all: &mut ServerCounts) {
                $(all.$name += self.$name.load(RELAXED);)*
            }
        }
    };
}

pub(super) const RELAXED: std::sync::atomic::Ordering = std::sync::atomic::Ordering::Relaxed;

counts! {
    /// Requests handed to a service, each item of a batch for itself.
    requests,
    /// Messages that were answered from a kept reply, or whose first copy was still under way.
    repeats,
    /// Messages and requests that made no sense. Those of kinds that no service knows count among `refused`.
    malformed,
    /// Replies that are refusals.
    refused,
    /// Connections that were opened.
    joined,
    /// Connections that their workers closed, or that ended with their processes.
    left,
    /// Connections that were closed because the peer broke the protocol, was silent, or could not be reached.
    dropped,
    /// Times that a thread slept.
    sleeps,
    /// Replies whose pieces were sent from where they lie.
    gathered,
    /// WRITEs of one piece that were posted, those that publish a head or a tail among them.
    writes,
    /// WRITEs that gather.
    gathers,
    /// Pieces of those.
    gathered_pieces,
    /// Words that were copied to be sent.
    copied_words,
    /// Words of messages that came and went.
    message_words,
}

pub(super) fn bump(count: &std::sync::atomic::AtomicU64, by: u64) {
    // Only its thread writes it.
    count.store(count.load(RELAXED) + by, RELAXED);
}
