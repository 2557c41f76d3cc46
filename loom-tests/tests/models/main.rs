//! Models of the protocols between threads. In one program, so that the short ones run beside the long one.
#![cfg(loom)]

mod cache_changes;
mod cache_cooling;
mod cache_exclusion;
mod cache_fetch;
mod cache_frames;
mod cache_invalidate;
mod cache_links;
mod cache_lock;
mod cache_write_back;
mod chunks;
mod epochs;
mod fencing;
mod gate;
mod last_out;
mod local_locks;
mod log_admission;
mod log_arrivals;
mod mapping;
mod message_eventcount;
mod message_ring;
mod publication;
mod ready_bits;
mod remote_lock;
mod versioned;
