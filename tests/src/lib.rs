//! What tests of concurrent maps need, across crates and processes.
//!
//! Judging what happened is a crate of its own, `farlink-histories`: [`workload`], [`history`], [`linear`], [`scans`], [`model`]
//! and [`atomic_map`] are its modules. Making it happen:
//!
//! - [`backend`]: on what a cluster runs: `mem` in one process or across processes, fast or nasty; or `verbs`.
//! - [`cluster`]: clusters joined, filled and checked.
//! - [`direct`]: an endpoint driven by hand.
//! - [`access_under_test`]: one-sided, or through a compute server's cache.
//! - [`here`]: memory servers of this process that take messages.
//! - [`fleet`]: clusters whose memory servers carry out operations.
//! - [`crash`]: a compute server dies after each of its requests in turn.
//! - [`drive`]: a worker that keeps many recorded operations in flight, and drops some of them.
//! - [`peer`]: compute servers in processes of their own: the `farlink-stress` program's other side.
//! - [`stress`]: the acceptance test: many workers in several processes on a few hot keys.
//! - [`raw`]: pages read, locked and damaged by hand.
//! - [`torn`]: ways to validate a READ, right ones and broken ones, under writers.
//! - [`fuzz`]: mutated inputs for whatever reads words of others.
//! - [`bounded`]: running an operation that must come to an end.
//! - [`mod@conformance`]: the tests that every structure has to pass, for structures of any crate.
//! - [`strict`]: an access that does everything to operations that it may.
//! - [`subject`]: the ordered maps under test.
//! - [`settings`]: seeds, durations and sizes from the environment or the command line.
//!
//! The head of [`mod@conformance`] has a structure under test, whole.

pub mod access_under_test;
pub mod backend;
pub mod bounded;
pub mod cluster;
pub mod conformance;
pub mod crash;
pub mod deadlines;
pub mod direct;
pub mod drive;
pub mod fuzz;
pub mod in_process;
pub mod peer;
pub mod plugins;
pub mod raw;
pub mod settings;
pub mod stress;
pub mod strict;
pub mod subject;
pub mod torn;

pub use backend::{fleet, here};
pub use farlink_histories::{atomic_map, history, linear, model, scans, workload};
