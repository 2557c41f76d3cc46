//! A cluster and a worker.

use std::sync::Arc;

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    one_sided::OneSided,
    worker::{Handle, Worker},
};
use farlink_structures::rtree::{RTree, RTreeOptions, Tree};
use farlink_tests::backend::{Cluster, FabricProfile};

/// A worker, its compute server and its cluster, which go in this order.
pub(crate) struct Scene {
    pub(crate) worker: Worker,
    _compute: ComputeServer,
    _cluster: Cluster,
}

pub(crate) fn scene(server_bytes: u64) -> Scene {
    let cluster = Cluster::of_this_run(3, server_bytes, FabricProfile::Fast).unwrap();
    let compute = ComputeServer::join(Arc::clone(&cluster), ComputeOptions::default()).unwrap();
    Scene { worker: compute.worker().unwrap(), _compute: compute, _cluster: cluster }
}

pub(crate) async fn create<const D: usize>(worker: &Handle) -> Result<RTree<OneSided<Tree<D>>, D>, Error> {
    RTree::create(worker, "model", RTreeOptions::default()).await
}
