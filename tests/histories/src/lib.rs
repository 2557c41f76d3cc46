//! What was asked of a map and what it answered, and whether that can have happened. For maps of any kind: nothing here knows
//! of farlink.
//!
//! - [`workload`]: seeded streams of operations whose every write has a value of its own.
//! - [`history`]: recording what was invoked, when, and what it returned, in files that survive a killed process.
//! - [`linear`]: whether the point operations of a history are linearizable.
//! - [`scans`]: whether its scans keep the weaker promise that scans make.
//! - [`model`]: what one operation says of the state of its key.
//! - [`atomic_map`]: a simulated map whose histories are legal by construction, to check the checkers.

pub mod atomic_map;
pub mod history;
pub mod linear;
pub mod model;
pub mod scans;
pub mod workload;
