use std::{sync::Arc, time::Duration};

use super::*;
use crate::{
    catalog,
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

/// Somebody who lives holds a chunk with pages of a dead one: what was not taken back counts as left.
#[test]
fn what_was_not_taken_back_is_left() {
    let fabric = in_process();
    dead(&fabric, async |worker| drop(allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await.unwrap()));
    let (holder, survivor) = (join(&fabric, None), join(&fabric, None));
    let worker = survivor.worker().unwrap();
    let entry = survivor.geometry()[0].directory_at(0);
    let free = worker.block_on(worker.load(entry)).unwrap();
    let held = free | u64::from(holder.owner().incarnation()) << 32;
    worker.block_on(write_words(&*worker, vec![(entry, held)])).unwrap();
    assert_eq!(worker.block_on(sweep(&worker, catalog::free_unfinished)).unwrap(), 1);
    worker.block_on(write_words(&*worker, vec![(entry, free)])).unwrap();
    drop(holder);
    assert!(worker.block_on(survivor.settle(&worker)).unwrap());
    assert_eq!(worker.block_on(sweep(&worker, catalog::free_unfinished)).unwrap(), 0);
    assert_eq!(worker.block_on(worker.load(survivor.geometry()[0].directory_at(0).word(1))).unwrap(), 1);
}

#[test]
fn a_wait_without_end_is_one() {
    let fabric = in_process();
    let owner = dead(&fabric, async |_| ());
    let survivor = join(&fabric, Some(Duration::MAX));
    let worker = survivor.worker().unwrap();
    worker.block_on(take_over(&worker, owner)).unwrap();
}
