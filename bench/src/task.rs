//! One task of the closed loop: take an operation, run it, time it, check what it answered, record it.
//!
//! As many tasks as are in flight share a worker's queue and tally. A task reads the clock once an operation: the end of one is
//! the start of the next, so what lies between (settling a key, recording) is inside the measured time, and a latency includes
//! the time that the worker spent on other tasks.

use std::cell::RefCell;
use std::time::Instant;

use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;

use crate::queue::OperationQueue;
use crate::subject::Subject;
use crate::tally::Tally;

/// Runs operations from `queue` until it ends. The first error stops the queue for every task of the worker; operations
/// that are under way in other tasks still finish and are recorded.
pub(crate) async fn run_task<S: Subject, R: Run<Plugin = S>, I: Iterator<Item = S::Request>>(
    run: &R,
    queue: &OperationQueue<I>,
    tally: &RefCell<Tally>,
) -> Result<(), Error> {
    let mut start = Instant::now();
    while let Some(request) = queue.next(start) {
        // The outcome is settled first: the cell is never borrowed across an await.
        let outcomes = S::run(run, request).await.inspect_err(|_| queue.stop())?;
        let end = Instant::now();
        let mut tally = tally.borrow_mut();
        tally.outcomes += outcomes;
        tally.latency.record(u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX));
        start = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;
    use std::sync::Arc;

    use farlink_runtime::compute::{ComputeOptions, ComputeServer};
    use farlink_runtime::lock::{LockWord, OwnerId};
    use farlink_runtime::one_sided::OneSided;
    use farlink_runtime::worker::Worker;
    use farlink_runtime::{fabric::mem::MemOptions, server::in_process};
    use farlink_structures::btree::{BTree, BTreeOptions, Tree};
    use futures_util::future::try_join_all;

    use super::*;
    use crate::maps::{MapData, MapRequest};
    use crate::queue::End;
    use crate::subject::{Job, Setting, WorkerId};

    const ONLY: WorkerId = WorkerId { index: 0, total: 1 };

    fn data(entries: u64) -> Arc<MapData> {
        Arc::new(Tree::data(&Setting { scan_length: 10, ..Setting::of_entries(entries) }).unwrap())
    }

    /// A tree that holds these keys, and the worker and compute server that it belongs to.
    fn tree(data: &MapData) -> (BTree<OneSided<Tree>>, Worker, ComputeServer) {
        let fabric = Arc::new(in_process(1, 8 << 20, MemOptions::default()).unwrap());
        let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(BTree::create(&worker, "t", BTreeOptions::default())).unwrap();
        for &key in data.keys.sorted().iter() {
            worker.block_on(tree.insert(key, data.first_value(key))).unwrap();
        }
        (tree, worker, compute)
    }

    /// What tasks make of a queue, so many at a time.
    fn run<I: Iterator<Item = MapRequest>>(
        (tree, worker): (&BTree<OneSided<Tree>>, &Worker),
        queue: &OperationQueue<I>,
        in_flight: usize,
    ) -> Result<Tally, Error> {
        let tally = RefCell::default();
        worker.block_on(try_join_all((0..in_flight).map(|_| run_task::<Tree, _, _>(tree.access(), queue, &tally))))?;
        Ok(tally.into_inner())
    }

    #[test]
    fn every_mix_runs_clean() {
        for name in Tree::WORKLOADS {
            for in_flight in [1, 16] {
                let data = data(1000);
                let (tree, worker, _compute) = tree(&data);
                let mut source = Tree::source(&data, ONLY);
                Tree::prepare(&mut source, Job::Workload { name, operations: Some(500) }, &|| Ok(())).unwrap();
                let queue = OperationQueue::new(source, End::Operations(2000));
                let tally = run((&tree, &worker), &queue, in_flight).unwrap();
                let seen = tally.outcomes;
                assert_eq!((seen.ops, tally.latency.len()), (2000, 2000), "{name}");
                let wrong = (seen.missing, seen.duplicates, seen.wrong_values, seen.wrong_scans);
                assert_eq!(wrong, (0, 0, 0, 0), "{name}");
                assert!(in_flight > 1 || seen.latest_missing == 0, "{name}");
            }
        }
    }

    #[test]
    fn lost_keys_wrong_values_and_wrong_ranges_are_seen() {
        let data = data(1000);
        let (tree, worker, _compute) = tree(&data);
        let (lost, spoiled) = (data.keys.loaded_key(1), data.keys.loaded_key(2));
        worker.block_on(async {
            tree.remove(lost).await.unwrap();
            tree.upsert(spoiled, 0).await.unwrap();
        });
        let value = 1;
        let requests = [
            MapRequest::Get { key: lost, latest: false },
            MapRequest::Update { key: lost, value },
            MapRequest::ReadModifyWrite { key: lost, value },
            MapRequest::Remove { key: lost },
            MapRequest::Get { key: spoiled, latest: false },
            MapRequest::ReadModifyWrite { key: spoiled, value },
            MapRequest::Insert { key: spoiled, value },
            MapRequest::Scan { from: lost, limit: 5 },
            MapRequest::Scan { from: spoiled, limit: 1 },
        ];
        let queue = OperationQueue::new(requests.into_iter(), End::Source);
        let tally = run((&tree, &worker), &queue, 1).unwrap();
        let seen = tally.outcomes;
        assert_eq!((seen.missing, seen.remove_missing, seen.duplicates, seen.wrong_values), (3 + 1, 1, 1, 2 + 1 + 1));
        let range = MapRequest::Range { low: 0, high: u64::MAX, count: 1000 };
        let queue = OperationQueue::new([range].into_iter(), End::Source);
        let tally = run((&tree, &worker), &queue, 1).unwrap();
        assert_eq!(tally.outcomes.wrong_scans, 1);
    }

    #[test]
    fn the_first_error_stops_all_tasks() {
        let data = data(10);
        let (tree, worker, _compute) = tree(&data);
        let drawn = Rc::new(Cell::new(0));
        let count = Rc::clone(&drawn);
        let key = data.keys.loaded_key(0);
        let source = std::iter::repeat_with(move || {
            count.set(count.get() + 1);
            MapRequest::Get { key, latest: false }
        });
        let root = tree.structure().root;
        // Of nobody, at a version that the page has not.
        let lock = LockWord::unlocked(u64::MAX).locked_by(OwnerId::new(OwnerId::MAX.into()).unwrap());
        worker.block_on(worker.write_word(root, lock.word())).unwrap();
        assert!(run((&tree, &worker), &OperationQueue::new(source, End::Operations(1000)), 4).is_err());
        assert!(drawn.get() <= 4, "{drawn:?}");
    }
}
