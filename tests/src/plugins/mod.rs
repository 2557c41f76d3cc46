//! Structures that are there to be tested: what the ordered maps make no use of.

pub mod chains;
pub mod doubled;
pub mod mixed;
