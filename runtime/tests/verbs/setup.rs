//! How connections are made: by the connection manager, and by hand.

use farlink_runtime::{
    error::Error,
    fabric::{
        Verb,
        verbs::{ConnectBy, DeviceChoice, VerbsFabric, VerbsServer, knock},
    },
};

use crate::scene::{self, FREE, Wire, at, connect, eventually, serve, serve_options};

/// The ways that this machine has.
fn ways(server: &VerbsServer) -> Vec<ConnectBy> {
    let required = std::env::var_os("FARLINK_REQUIRE_VERBS").is_some_and(|value| value == "1");
    assert!(server.manager().is_some() || !required, "FARLINK_REQUIRE_VERBS is 1, and there is no connection manager");
    let all = [ConnectBy::Hand, ConnectBy::Auto, ConnectBy::Manager];
    all[..if server.manager().is_some() { 3 } else { 2 }].to_vec()
}

#[test]
fn each_way_connects_breaks_connects_again_and_leaves_nothing() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    for connect_by in ways(&server) {
        let options = farlink_runtime::fabric::verbs::VerbsOptions { connect_by, ..scene::options_to(&[&server]) };
        let fabric = VerbsFabric::connect(&options).unwrap();
        let mut wires = [(); 3].map(|()| Wire::new(&fabric));
        assert_eq!(server.queue_pairs(), 3, "{connect_by:?}");
        for (number, wire) in wires.iter_mut().enumerate() {
            let slot = at(0, FREE + number as u64 * 8);
            wire.write(slot, &[number as u64]).unwrap();
            assert_eq!(wire.compare_swap(slot, number as u64, 9).unwrap(), number as u64);
            assert_eq!(wire.read(slot, 1).unwrap(), [9]);
        }
        server.break_connections();
        let mut failures = 0;
        eventually("it connects again", || {
            let outcome = wires[0].one(at(0, FREE), Verb::WriteWord(7));
            failures += u32::from(outcome.is_err());
            outcome.is_ok()
        });
        assert!(failures > 0, "{connect_by:?}: the break went unnoticed");
        assert_eq!(wires[0].read(at(0, FREE), 1).unwrap(), [7]);
        drop(wires);
        assert_eq!(server.queue_pairs(), 0, "{connect_by:?}");
    }
}

#[test]
fn without_a_connection_manager_connections_are_made_by_hand() {
    if !scene::has_device() {
        return;
    }
    let mut by_hand = serve_options(0, 1);
    by_hand.connect_by = ConnectBy::Hand;
    let server = VerbsServer::start(&by_hand).unwrap();
    assert_eq!(server.manager(), None);
    Wire::new(&connect(&[&server])).write(at(0, FREE), &[1]).unwrap();
    let mut options = scene::options_to(&[&server]);
    options.connect_by = ConnectBy::Manager;
    let error = VerbsFabric::connect(&options).unwrap_err();
    assert!(matches!(error, Error::NoDevice { .. }) && error.to_string().contains("connection manager"), "{error}");
}

#[test]
fn who_was_not_invited_is_refused_and_disturbs_nobody() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let Some(manager) = server.manager() else { return };
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    let right_length: Vec<u8> = (0..48).collect();
    for greeting in [&[][..], &[0; 16], &right_length, &[0xff; 56]] {
        let error = knock(&DeviceChoice::default(), manager, greeting).unwrap_err();
        assert!(matches!(error, Error::NotAdmitted { .. }) && error.to_string().contains("refused"), "{error}");
        assert_eq!(server.queue_pairs(), 1);
        wire.write(at(0, FREE), &[1]).unwrap();
    }
    drop(wire);
    Wire::new(&fabric).write(at(0, FREE), &[1]).unwrap();
}
