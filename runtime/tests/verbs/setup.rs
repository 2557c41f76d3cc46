//! How connections are made: by the connection manager, and by hand.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Instant,
};

use farlink_runtime::{
    clock::Clock,
    error::Error,
    fabric::{
        Fabric, Verb,
        verbs::{ConnectBy, DeviceChoice, VerbsFabric, VerbsOptions, VerbsServer, knock},
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
        let options = VerbsOptions { connect_by, ..scene::options_to(&[&server]) };
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

/// Who has listened in knows an invitation and its proof; both are good for one queue pair, which is not his.
#[test]
fn an_invitation_that_was_overheard_is_worth_nothing() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let Some(manager) = server.manager() else { return };
    let fabric = connect(&[&server]);
    let overheard = fabric.overhear().unwrap();
    let (invitation, proof) = overheard.split_at(16);
    let without_proof = [invitation, &[0; 32]].concat();
    let cut_short = [invitation, &proof[..31]].concat();
    let mut changed = overheard.clone();
    changed[47] ^= 1;
    for greeting in [&without_proof, &cut_short, &changed, &overheard] {
        let error = knock(&DeviceChoice::default(), manager, greeting).unwrap_err();
        assert!(matches!(error, Error::NotAdmitted { .. }) && error.to_string().contains("refused"), "{error}");
        assert_eq!(server.queue_pairs(), 0);
    }
    Wire::new(&fabric).write(at(0, FREE), &[1]).unwrap();
}

/// A connection manager that nobody reaches: at a port where nobody listens, behind an address that no route leads to, and
/// behind one that never answers.
#[test]
fn a_manager_that_does_not_connect_is_done_without_unless_it_is_asked_for() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let Some(manager) = server.manager() else { return };
    let silent = match manager.ip() {
        IpAddr::V4(ip) => Ipv4Addr::from_bits(ip.to_bits() ^ 0x40).into(),
        ip => ip,
    };
    let elsewhere = [(manager.ip(), 1), (Ipv4Addr::new(192, 0, 2, 1).into(), manager.port()), (silent, manager.port())];
    for place in elsewhere {
        server.announce_manager(place.into());
        let fabric = connect(&[&server]);
        let begun = Instant::now();
        Wire::new(&fabric).write(at(0, FREE), &[1]).unwrap();
        println!("{place:?}: by hand after {:?}", begun.elapsed());
        // The next one does not wait for it again, whatever it waited for the first time.
        let mut wires = [(); 3].map(|()| Wire::new(&fabric));
        wires.iter_mut().for_each(|wire| wire.write(at(0, FREE), &[2]).unwrap());
    }
    server.announce_manager(elsewhere[0].into());
    let options = VerbsOptions { connect_by: ConnectBy::Manager, ..scene::options_to(&[&server]) };
    let fabric = VerbsFabric::connect(&options).unwrap();
    let error = fabric.endpoint(0, Clock::monotonic()).unwrap_err();
    assert!(matches!(error, Error::NotAdmitted { .. }) && error.to_string().contains("--setup tcp"), "{error}");
}
