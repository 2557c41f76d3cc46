//! Messages between workers and memory servers, in one process and several, on a good fabric and a bad one.

mod basics;
mod end;
mod faults;
mod pieces;
mod processes;
mod rogue;
mod scene;
