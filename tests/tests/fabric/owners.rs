//! Who is alive.

use std::sync::Arc;

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{Error as FabricError, Fabric, Liveness, mem::MemFabric},
    lock::OwnerId,
    ptr::{RemotePtr, ServerId},
    server::{MemoryServer, ServeOptions},
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::Watchdog,
    cluster::{self, FAST},
};

use crate::{LIMIT, SERVER_BYTES, on_each};

fn owner(incarnation: u64) -> OwnerId {
    OwnerId::new(incarnation).unwrap()
}

/// Another compute server's way to the cluster, where there is one.
fn another_way(cluster: &Cluster) -> Arc<dyn Fabric> {
    match cluster.place() {
        Ok(place) => place.open(FabricProfile::Fast).unwrap(),
        Err(_) => Arc::clone(cluster),
    }
}

/// That it is dead, at once or soon: its end may have to travel. The watchdog bounds the wait.
fn wait_until_dead(fabric: &Arc<dyn Fabric>, owner: OwnerId) {
    while fabric.liveness(owner) == Liveness::Alive {
        std::thread::yield_now();
    }
}

#[test]
fn who_holds_a_claim_is_alive() {
    on_each("claims", |cluster| {
        let other = another_way(cluster);
        let first = cluster.claim(owner(7)).unwrap();
        let second = other.claim(owner(8)).unwrap();
        for fabric in [&**cluster, &other] {
            assert_eq!(fabric.liveness(owner(7)), Liveness::Alive);
            assert_eq!(fabric.liveness(owner(8)), Liveness::Alive);
            assert_eq!(fabric.liveness(owner(6)), Liveness::Dead, "never claimed");
            assert!(fabric.claim(owner(7)).is_err(), "an incarnation was claimed twice");
            assert!(fabric.claim(owner(8)).is_err(), "an incarnation was claimed twice");
        }
        drop(first);
        for fabric in [&**cluster, &other] {
            wait_until_dead(fabric, owner(7));
            assert_eq!(fabric.liveness(owner(8)), Liveness::Alive, "another's end ended it");
        }
        drop(second);
        wait_until_dead(cluster, owner(8));
        // Whoever was dead stays so, whatever happens to others.
        let _third = cluster.claim(owner(9)).unwrap();
        assert_eq!(cluster.liveness(owner(7)), Liveness::Dead);
    });
}

#[test]
fn many_are_alive_at_once() {
    on_each("many claims", |cluster| {
        let claims: Vec<_> = (100..164).map(|incarnation| cluster.claim(owner(incarnation)).unwrap()).collect();
        assert!((100..164).all(|incarnation| cluster.liveness(owner(incarnation)) == Liveness::Alive));
        drop(claims);
        (100..164).for_each(|incarnation| wait_until_dead(cluster, owner(incarnation)));
    });
}

/// Nobody has taken it for dead: there is nobody.
#[test]
fn the_end_of_a_cluster_is_told_as_its_end() {
    let _watchdog = Watchdog::start("the end of a cluster", LIMIT);
    let scratch = cluster::scratch().unwrap();
    let dir = scratch.path().join("cluster");
    let options = ServeOptions { ephemeral: true, ..cluster::serve_options(&dir, 0, 1, SERVER_BYTES) };
    let server = MemoryServer::start(&options).unwrap();
    let fabric = Arc::new(MemFabric::open(&dir, FAST).unwrap());
    let options = ComputeOptions { maintenance: Maintenance::Manual, ..ComputeOptions::default() };
    let compute = ComputeServer::join(Arc::clone(&fabric) as _, options).unwrap();
    let worker = compute.worker().unwrap();
    drop(server);
    assert!(!dir.exists());
    worker.check_standing().unwrap();
    // Whoever asks whether somebody lives, to wait for him, finds that the memory is gone; looks are some milliseconds apart.
    let other = OwnerId::new(7).unwrap();
    assert_eq!(fabric.liveness(other), Liveness::Alive);
    let is_lost = || worker.block_on(worker.read(RemotePtr::new(ServerId::new(0).unwrap(), 64).unwrap(), 1)).is_err();
    while !is_lost() {
        assert_eq!(fabric.liveness(other), Liveness::Alive);
        std::thread::yield_now();
    }
    let error = worker.block_on(worker.read(RemotePtr::new(ServerId::new(0).unwrap(), 64).unwrap(), 1)).unwrap_err();
    assert!(matches!(*error, Error::Fabric(FabricError::ServerLost { .. })), "{error}");
}
