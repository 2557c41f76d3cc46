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
            sum.0 += Counters::from(worker.counters());
            sum.1 += access.cache_counts();
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
    if others.is_empty() {
        return Ok(first.worker.block_on(future));
    }
    let (mut future, mut output) = (pin!(future), None);
    Ok(first.worker.block_on(poll_fn(|cx| {
        for client in others {
            client.worker.turn();
        }
        cx.waker().wake_by_ref();
        if output.is_none()
            && let Poll::Ready(ready) = future.as_mut().poll(cx)
        {
            output = Some(ready);
        }
        // What one worker has to finish may wait for another one.
        if clients.iter().any(|client| client.worker.is_unfinished()) {
            return Poll::Pending;
        }
        output.take().map_or(Poll::Pending, Poll::Ready)
    })))
}

/// Runs the operations of each client's queue, so many in flight, until all queues have ended; answers what all did, and the
/// queues' sources.
pub(crate) fn run<S: Subject, I: Iterator<Item = S::Request> + 'static>(
    clients: &[Client<S>],
    queues: Vec<OperationQueue<I>>,
    in_flight: u32,
) -> anyhow::Result<(Tally, Vec<I>)> {
    for Client { access, worker } in clients {
        worker.block_on(access.enter())?;
    }
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
    use std::sync::Arc;

    use farlink_offload::CacheOptions;
    use farlink_runtime::access::{Access as _, Region as _};
    use farlink_runtime::compute::{ComputeOptions, ComputeServer};
    use farlink_runtime::one_sided::{OneSided, Proof};
    use farlink_runtime::{fabric::mem::MemOptions, server::in_process};
    use farlink_structures::rtree::{RTree, RTreeOptions, Scope, Tree};

    use super::*;
    use crate::queue::End;
    use crate::rects::RectRequest;
    use crate::route::Route;
    use crate::subject::{AccessMode, Setting};

    const PAGE: u64 = 1024;

    /// A search of an R-tree validates the cached pages that it went by, one word of each.
    #[test]
    fn a_validation_is_no_miss_of_a_leaf() {
        let fabric = Arc::new(in_process(1, 8 << 20, MemOptions::default()).unwrap());
        let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
        let worker = compute.worker().unwrap();
        let data = Tree::data(&Setting::of_entries(2000)).unwrap();
        let options = RTreeOptions { page_bytes: PAGE as usize, ..RTreeOptions::default() };
        let tree: RTree<OneSided<Tree>> = worker.block_on(RTree::create(&worker, "t", options)).unwrap();
        worker.block_on(tree.bulk_load(data.entries.iter().copied(), 0.9)).unwrap();
        let mut options = CacheOptions::new(4 << 20);
        options.page_bytes = PAGE as usize;
        let structure = tree.access().context().structure.clone();
        let route = Route::<Tree>::new(AccessMode::CachedInner, structure, Proof::Checksum);
        let route = route.through(options, Scope::everything()).unwrap();
        let clients = [Client { access: route.open(&worker).unwrap(), worker }];
        let search = || {
            let points = data.entries.iter().take(100).map(|&entry| RectRequest::Point(entry)).collect::<Vec<_>>();
            run(&clients, vec![OperationQueue::new(points.into_iter(), End::Source)], 1).unwrap().0
        };
        search();
        let Tally { counters, cache, outcomes, .. } = search();
        assert_eq!((outcomes.found, cache.misses.total()), (100, cache.misses.leaf()));
        let words = counters.reads - cache.misses.leaf();
        assert!(words >= 100, "no search has validated what it went by");
        assert_eq!(counters.bytes, cache.misses.leaf() * PAGE + words * 8, "{counters:?}");
    }
}
