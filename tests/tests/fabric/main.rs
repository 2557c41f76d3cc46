//! What every fabric owes, on every backend: each verb does what it says and completes once; what the capabilities promise
//! about order and atomicity holds; a bad request is an error and harms nothing; who is alive is known.
//!
//! One test is a promise, and runs on each backend there is (`farlink_tests::backend`), `mem` in each of its profiles.

mod order;
mod owners;
mod requests;
mod timed;

use std::time::Duration;

use farlink_runtime::ptr::{RemotePtr, ServerId};
use farlink_tests::{
    backend::{Backend, Cluster, FabricProfile},
    bounded::Watchdog,
};

const SERVERS: usize = 2;
const SERVER_BYTES: u64 = 2 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `test` on a cluster of each backend that there is here.
fn on_each(what: &str, test: impl Fn(&Cluster)) {
    for backend in Backend::each() {
        let profile = match backend {
            Backend::Verbs => &[FabricProfile::Fast][..],
            _ => &[FabricProfile::Fast, FabricProfile::Nasty, FabricProfile::Weak],
        };
        for &profile in profile {
            let what = format!("{what} on {backend}, {profile:?}");
            let _watchdog = Watchdog::start(&what, LIMIT);
            println!("{what}");
            test(&Cluster::start(backend, SERVERS, SERVER_BYTES, profile).unwrap());
        }
    }
}

/// The `word`th word of memory that nothing else uses, on this server.
fn at(cluster: &Cluster, server: u16, word: u64) -> RemotePtr {
    let server = ServerId::new(server).unwrap();
    RemotePtr::new(server, cluster.region_bytes(server) / 2 + word * 8).unwrap()
}
