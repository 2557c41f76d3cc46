//! Operations that memory servers carry out.

mod coarse;
mod owned;
