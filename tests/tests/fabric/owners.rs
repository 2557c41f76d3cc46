//! Who is alive.

use std::sync::Arc;

use farlink_runtime::{
    fabric::{Fabric, Liveness},
    lock::OwnerId,
};
use farlink_tests::backend::{Cluster, FabricProfile};

use crate::on_each;

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
