//! What an operation has under way is on its way while it looks at what has come, and only an operation that is alone pays a doorbell
//! for that.

use std::{future::pending, sync::Arc};

use farlink_runtime::{
    access::UnderWay,
    fabric::{Fabric, mem::MemOptions},
    ptr::{RemotePtr, ServerId},
    server,
};
use farlink_tests::{bounded, cluster};

use super::LATENCY_NS;

/// When three reads have come of which the third follows from the first, if what has come is looked at for a round trip each.
fn time_of_three(is_alone: bool) -> u64 {
    let options = MemOptions { latency_ns: LATENCY_NS, ..MemOptions::default() };
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 8 << 20, options).unwrap());
    let compute = cluster::join_manual(&fabric, 1).unwrap();
    let worker = bounded::worker(&compute).unwrap();
    let at = RemotePtr::new(ServerId::new(0).unwrap(), 4096).unwrap();
    let _other = (!is_alone).then(|| worker.spawn(pending::<()>()));
    bounded::block_on(&worker, async {
        let (handle, begun) = ((*worker).clone(), worker.clock().now_ns());
        let look = || worker.clock().skip_to(worker.clock().now_ns() + LATENCY_NS);
        let mut under_way = UnderWay::new(&handle);
        for _ in 0..2 {
            under_way.push(async { handle.read(at, 1).await.map(drop) });
        }
        under_way.next().await.unwrap().unwrap();
        under_way.push(async { handle.read(at, 1).await.map(drop) });
        under_way.next().await.unwrap().unwrap();
        look();
        under_way.next().await.unwrap().unwrap();
        assert!(under_way.is_empty() && under_way.next().await.is_none());
        worker.clock().now_ns() - begun
    })
}

#[test]
fn reads_of_one_operation_are_on_their_way_while_it_looks_at_what_has_come() {
    assert_eq!(time_of_three(true), 2 * LATENCY_NS);
    assert_eq!(time_of_three(false), 3 * LATENCY_NS);
}
