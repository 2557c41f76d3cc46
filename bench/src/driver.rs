//! Runs the closed loop (`task.rs`) for all workers of one thread: a bench has one, figures that model several compute servers'
//! threads have more.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

use anyhow::Context as _;
use farlink_runtime::error::Error;
use farlink_runtime::worker::Worker;

use crate::queue::OperationQueue;
use crate::route::Opened;
use crate::subject::Subject;
use crate::tally::{CacheCounts, Counters, Tally};

/// A worker and its access to the structure.
#[derive(Debug)]
pub(crate) struct Client<S: Subject> {
    // Before the worker, to which it belongs.
    pub(crate) access: Opened<S>,
    pub(crate) worker: Worker,
}

/// What `f` comes to, with what these clients have counted meanwhile.
pub(crate) fn counted<S: Subject>(
    clients: &[Client<S>],
    f: impl FnOnce() -> anyhow::Result<Tally>,
) -> anyhow::Result<Tally> {
    let counts = || {
        clients.iter().fold((Counters::default(), CacheCounts::default()), |mut sum, Client { access, worker }| {
            let counters = Counters::from(worker.counters());
            sum.0 += counters;
            sum.1 += access.cache_counts(counters.reads);
            sum
        })
    };
    let before = counts();
    let mut tally = f()?;
    let after = counts();
    tally.counters += after.0 - before.0;
    tally.cache += after.1 - before.1;
    Ok(tally)
}

/// Runs a future of the first client's, and whatever tasks all of them have, until it is ready.
pub(crate) fn block_on<S: Subject, T>(clients: &[Client<S>], future: impl Future<Output = T>) -> anyhow::Result<T> {
    let (first, others) = clients.split_first().context("there are no workers")?;
    let mut future = pin!(future);
    Ok(first.worker.block_on(poll_fn(|cx| {
        if !others.is_empty() {
            for client in others {
                client.worker.turn();
            }
            cx.waker().wake_by_ref();
        }
        future.as_mut().poll(cx)
    })))
}

/// Runs the operations of each client's queue, so many in flight, until all queues have ended; answers what all did, and the
/// queues' sources.
pub(crate) fn run<S: Subject, I: Iterator<Item = S::Request> + 'static>(
    clients: &[Client<S>],
    queues: Vec<OperationQueue<I>>,
    in_flight: u32,
) -> anyhow::Result<(Tally, Vec<I>)> {
    let (tally, queues) = (Rc::default(), queues.into_iter().map(Rc::new).collect::<Vec<_>>());
    let mut tasks: Vec<_> = clients
        .iter()
        .zip(&queues)
        .flat_map(|(client, queue)| (0..in_flight).map(|_| client.access.spawn(&client.worker, queue, &tally)))
        .collect();
    let mut result: Result<(), Error> = Ok(());
    let all_end = poll_fn(|cx| {
        tasks.retain_mut(|task| match Pin::new(task).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(ended) => {
                if let Err(error) = ended {
                    queues.iter().for_each(|queue| queue.stop());
                    result = std::mem::replace(&mut result, Ok(())).and(Err(error));
                }
                false
            }
        });
        if tasks.is_empty() { Poll::Ready(std::mem::replace(&mut result, Ok(()))) } else { Poll::Pending }
    });
    let tally = counted(clients, || {
        block_on(clients, all_end)??;
        let tally: RefCell<Tally> = Rc::into_inner(tally).context("an operation outlived its phase")?;
        Ok(tally.into_inner())
    })?;
    let sources = queues.into_iter().filter_map(Rc::into_inner).map(OperationQueue::into_source);
    Ok((tally, sources.collect()))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use farlink_runtime::compute::{ComputeOptions, ComputeServer};
    use farlink_runtime::one_sided::{OneSided, Proof};
    use farlink_runtime::{fabric::mem::MemOptions, server::in_process};
    use farlink_structures::btree::{BTree, BTreeOptions, Tree};

    use super::*;
    use crate::maps::{MapData, MapRequest};
    use crate::queue::End;
    use crate::route::Route;
    use crate::subject::{AccessMode, Distribution, Job, Setting, WorkerId};

    const ONLY: WorkerId = WorkerId { index: 0, total: 1 };

    fn data(entries: u64) -> Arc<MapData> {
        let (keys_file, distribution) = (None, Distribution::Zipf(0.99));
        Arc::new(Tree::data(&Setting { entries, keys_file, distribution, scan_length: 10, seed: 1, run: 0 }).unwrap())
    }

    /// A client of a tree that holds these keys; and the compute server that it belongs to.
    fn client(data: &MapData) -> (Vec<Client<Tree>>, ComputeServer) {
        let fabric = Arc::new(in_process(1, 8 << 20, MemOptions::default()).unwrap());
        let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(BTree::create(&worker, "t", BTreeOptions::default())).unwrap();
        let route = Route::<Tree>::new(AccessMode::OneSided, tree.structure().clone(), Proof::Checksum);
        let access = route.open(&worker).unwrap();
        worker.block_on(route.bulk_load(&access, &worker, data, 0.9)).unwrap();
        (vec![Client { access, worker }], compute)
    }

    fn one_sided(clients: &[Client<Tree>]) -> BTree<OneSided<Tree>> {
        let Opened::OneSided(access) = &clients[0].access else { panic!("one-sided") };
        BTree::over(access.clone())
    }

    #[test]
    fn every_mix_runs_clean() {
        for name in Tree::WORKLOADS {
            for in_flight in [1, 16] {
                let data = data(1000);
                let (clients, _compute) = client(&data);
                let mut source = Tree::source(&data, ONLY);
                Tree::prepare(&mut source, Job::Workload { name, operations: Some(500) }, &|| Ok(())).unwrap();
                let (tally, _) =
                    run(&clients, vec![OperationQueue::new(source, End::Operations(2000))], in_flight).unwrap();
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
        let (clients, _compute) = client(&data);
        let (lost, spoiled) = (data.keys.loaded_key(1), data.keys.loaded_key(2));
        let tree = one_sided(&clients);
        clients[0].worker.block_on(async {
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
        ];
        let (tally, _) = run(&clients, vec![OperationQueue::new(requests.into_iter(), End::Source)], 1).unwrap();
        let seen = tally.outcomes;
        assert_eq!((seen.missing, seen.remove_missing, seen.duplicates, seen.wrong_values), (3, 1, 1, 2 + 1));
        let range = MapRequest::Range { low: 0, high: u64::MAX, count: 1000 };
        let (tally, _) = run(&clients, vec![OperationQueue::new([range].into_iter(), End::Source)], 1).unwrap();
        assert_eq!(tally.outcomes.wrong_scans, 1);
    }

    #[test]
    fn the_first_error_stops_all_tasks() {
        let data = data(10);
        let (clients, _compute) = client(&data);
        let drawn = Rc::new(Cell::new(0));
        let (worker, count) = (&clients[0].worker, Rc::clone(&drawn));
        let key = data.keys.loaded_key(0);
        let source = std::iter::repeat_with(move || {
            count.set(count.get() + 1);
            MapRequest::Get { key, latest: false }
        });
        let root = one_sided(&clients).structure().root;
        worker.block_on(worker.write_word(root, u64::MAX)).unwrap();
        assert!(run(&clients, vec![OperationQueue::new(source, End::Operations(1000))], 4).is_err());
        assert!(drawn.get() <= 4, "{drawn:?}");
    }
}
