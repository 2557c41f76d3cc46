use std::{sync::Arc, time::Duration};

use super::*;
use crate::{
    compute::{ComputeOptions, ComputeServer, Maintenance},
    fabric::{
        Fabric,
        mem::MemOptions,
        mortal::{MortalFabric, Order},
    },
};

fn join(fabric: &Arc<dyn Fabric>, lock_wait: Option<Duration>) -> ComputeServer {
    let options = ComputeOptions { maintenance: Maintenance::Manual, lock_wait, ..ComputeOptions::default() };
    ComputeServer::join(Arc::clone(fabric), options).unwrap()
}

fn in_process() -> Arc<dyn Fabric> {
    Arc::new(crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap())
}

/// A compute server that has done this, and died; its incarnation.
fn dead(fabric: &Arc<dyn Fabric>, act: impl AsyncFnOnce(&Handle)) -> OwnerId {
    let mortal = MortalFabric::new(Arc::clone(fabric), Order::Posted, false);
    let compute = join(&(Arc::new(mortal.clone()) as _), None);
    let worker = compute.worker().unwrap();
    worker.block_on(act(&worker));
    mortal.dies_after(0);
    compute.owner()
}

#[test]
fn a_wait_without_end_is_one() {
    let fabric = in_process();
    let owner = dead(&fabric, async |_| ());
    let survivor = join(&fabric, Some(Duration::MAX));
    let worker = survivor.worker().unwrap();
    worker.block_on(take_over(&worker, owner)).unwrap();
}
