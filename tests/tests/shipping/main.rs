//! Operations that memory servers carry out.

mod coarse;
mod hybrid;
mod models;
mod owned;
mod panics;
mod pieces;
mod sent_scans;
mod whole;
mod words;
