//! Where TCP works and RDMA does not: whoever asks is told, sooner or later, and is not asked for more than that.

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use farlink_runtime::{
    catalog,
    compute::{ComputeOptions, ComputeServer},
    error::Error as RuntimeError,
    fabric::{
        Error, Fabric, Liveness,
        verbs::{VerbsFabric, VerbsServer},
    },
};

use crate::scene::{self, FREE, PATIENCE, Wire, at, connect, eventually, serve};

/// Gives a memory server up after this time.
fn impatient(server: &VerbsServer, give_up_after: Duration) -> Arc<VerbsFabric> {
    let mut options = scene::options_to(&[server]);
    options.give_up_after = give_up_after;
    Arc::new(VerbsFabric::connect(&options).unwrap())
}

/// What comes of it, on a thread that is left behind if nothing ever does.
fn ends<T: Send + 'static>(what: &str, f: impl FnOnce() -> T + Send + 'static) -> T {
    let (said, hears) = mpsc::channel();
    std::thread::spawn(move || said.send(f()));
    hears.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{what}: {error}"))
}

#[test]
fn who_joins_is_told_why_nothing_gets_through() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    server.withdraw_memory();
    let joined = ends("joining ends", move || ComputeServer::join(fabric, ComputeOptions::default()).map(drop));
    let error = joined.unwrap_err();
    let is_typed = matches!(error, RuntimeError::Fabric(Error::RequestFailed { what: "READ", .. }));
    assert!(is_typed && error.to_string().contains("refused the access"), "{error}");
}

/// Each of its failures takes no time, and makes a queue pair at both ends.
#[test]
fn nothing_but_failures_are_few_and_then_the_end() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = impatient(&server, Duration::from_secs(1));
    let mut wire = Wire::new(&fabric);
    server.withdraw_memory();
    // Rests of 1, 2, 4 ms and so on, then of 100 ms: nobody fits more failures into a second.
    let mut errors = (0..18).map(|_| wire.read(at(0, FREE), 1).unwrap_err());
    let lost = errors.find(|error| {
        assert!(error.to_string().contains("refused the access"), "{error}");
        !error.may_be_tried_again()
    });
    assert!(matches!(lost.as_deref(), Some(Error::ServerLost { .. })), "{lost:?}");
    assert!(matches!(fabric.check_servers(), Err(Error::ServerLost { .. })));
}

/// What it asks for ends, and others may take over.
#[test]
fn who_has_joined_is_given_up_and_comes_to_its_end() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let (watcher, fabric) = (connect(&[&server]), impatient(&server, Duration::from_millis(300)));
    let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
    let owner = compute.owner();
    assert_eq!(watcher.liveness(owner), Liveness::Alive);
    server.withdraw_memory();
    let listed = ends("a list of structures", move || {
        let worker = compute.worker().unwrap();
        let listed = worker.block_on(catalog::list(&worker)).map(drop);
        drop((worker, compute));
        listed
    });
    let error = listed.unwrap_err();
    let is_typed = matches!(error, RuntimeError::Fabric(Error::ServerLost { .. } | Error::TakenForDead { .. }));
    assert!(is_typed, "{error}");
    eventually("it counts as dead", || watcher.liveness(owner) == Liveness::Dead);
}
