//! Loom models of farlink's concurrent protocols.
//!
//! Each file in `tests/` is one protocol; most have one. Its models run the code itself, whose atomics are loom's under `--cfg loom`, in
//! every interleaving of two or three threads that a bounded number of preemptions gives, and with every value that a relaxed load may
//! return. Beside them stand *broken variants*: copies of one step of the protocol
//! with one thing left out, which loom must refuse. They show that the model would notice.
//!
//! Four do a part of the protocol themselves: `log_arrivals`, who is polled and who leads, and `log_admission`, what is pending and which
//! segments are empty, because a log needs a worker; `message_ring`, in which order a connection posts, because that needs both ends of a
//! channel; `mapping`, what a Bw-tree puts into its entries, because no structure is built for loom. `cache_fetch` decides by a flag what
//! a store decides by what is owned.
//!
//! Run them with `cargo xtask loom`. Without `--cfg loom` this crate is empty.
//!
//! What loom does not see: stores that take effect before earlier loads of their thread (load buffering), more than
//! seven stores to one word, whatever needs more preemptions than the bound, and other orders of what follows in an execution in which
//! somebody has waited for some turns (`loom::skip_branch`).

#[cfg(loom)]
mod explore;
#[cfg(loom)]
mod pages;
#[cfg(loom)]
mod peer;
#[cfg(loom)]
mod plain;

#[cfg(loom)]
pub use self::{
    explore::{Running, Seen, explore, explore_long, refuse, run},
    pages::{CLASS, Handle, Pages, Tree, block_on, id, refuse_without},
    peer::{Breaks, BrokenRemote, Peer, SharedMemory, Sound, now, share},
    plain::Plain,
};
