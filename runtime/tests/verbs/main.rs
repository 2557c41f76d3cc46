//! The verbs fabric on a real RDMA device. Without one every test says so and passes; with `FARLINK_REQUIRE_VERBS=1` it
//! fails instead.
#![cfg(feature = "verbs")]

mod connections;
mod control;
mod failing;
mod processes;
mod requests;
mod scene;
mod setup;
