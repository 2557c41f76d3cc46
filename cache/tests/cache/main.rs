//! The cache through its public API. Of one program, so that the generic code is built once.
#![cfg(not(loom))]

mod changes;
mod concurrent;
mod edges;
mod exclusion;
mod fetch;
mod flush;
mod frequency;
mod misuse;
mod model;
mod room;
mod support;
mod values;
