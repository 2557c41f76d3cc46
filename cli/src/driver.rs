//! Runs the closed loop (`task.rs`) for all workers of one thread: a bench has one, figures that model several compute servers'
//! threads have more.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

use anyhow::Context as _;
use farlink_runtime::error::Error;
use farlink_runtime::one_sided::OneSided;
use farlink_runtime::worker::Worker;
use farlink_structures::{BTree, btree};

use crate::feed::{Feed, Request};
use crate::reach::Tree;
use crate::tally::{CacheCounts, Counters, Tally};
use crate::trace::{Answer, Step};

/// A worker and its way to the tree.
#[derive(Debug)]
pub(crate) struct Client {
    // Before the worker, to which it belongs.
    pub(crate) tree: Tree,
    pub(crate) worker: Worker,
}

/// What `f` comes to, with what these clients have counted meanwhile.
pub(crate) fn counted(clients: &[Client], f: impl FnOnce() -> anyhow::Result<Tally>) -> anyhow::Result<Tally> {
    let counts = || {
        clients.iter().fold((Counters::default(), CacheCounts::default()), |mut sum, Client { tree, worker }| {
            let counters = Counters::from(worker.counters());
            sum.0 += counters;
            sum.1 += tree.cache_counts(counters.reads);
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
pub(crate) fn block_on<T>(clients: &[Client], future: impl Future<Output = T>) -> anyhow::Result<T> {
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

/// Runs the operations of each client's feed, so many in flight, until all feeds have ended; answers what all did, and the
/// feeds' sources.
pub(crate) fn run<I: Iterator<Item = Request> + 'static>(
    clients: &[Client],
    feeds: Vec<Feed<I>>,
    in_flight: u32,
) -> anyhow::Result<(Tally, Vec<I>)> {
    let (tally, feeds) = (Rc::default(), feeds.into_iter().map(Rc::new).collect::<Vec<_>>());
    let mut tasks: Vec<_> = clients
        .iter()
        .zip(&feeds)
        .flat_map(|(client, feed)| (0..in_flight).map(|_| client.tree.spawn(&client.worker, feed, &tally)))
        .collect();
    let mut result: Result<(), Error> = Ok(());
    let all_end = poll_fn(|cx| {
        tasks.retain_mut(|task| match Pin::new(task).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(ended) => {
                if let Err(error) = ended {
                    feeds.iter().for_each(|feed| feed.stop());
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
    let sources = feeds.into_iter().filter_map(Rc::into_inner).map(Feed::into_source);
    Ok((tally, sources.collect()))
}

/// Replays one step of a trace.
pub(crate) async fn replay(tree: &BTree<OneSided<btree::Tree>>, step: Step) -> Result<Answer, Error> {
    Ok(match step {
        Step::Get(key) => Answer::Value(tree.get(key).await?),
        Step::Put(key, value) => Answer::Value(tree.upsert(key, value).await?),
        Step::Del(key) => Answer::Value(tree.remove(key).await?),
        Step::Scan(from, limit) => Answer::Entries(tree.scan(from, limit as usize).await?),
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use farlink_offload::AccessMode;
    use farlink_runtime::compute::{ComputeOptions, ComputeServer};
    use farlink_runtime::one_sided::Proof;
    use farlink_runtime::{fabric::mem::MemOptions, server::in_process};
    use farlink_structures::btree::BTreeOptions;

    use super::*;
    use crate::feed::{End, Issue};
    use crate::keys::{Distribution, KeySpace, value_for};
    use crate::reach::Reach;
    use crate::stream::{self, Draw, Source, WorkerId};
    use crate::workload::Mix;

    const ONLY: WorkerId = WorkerId { index: 0, total: 1 };

    /// A client of a tree that holds these keys; and the compute server that it belongs to.
    fn client(keys: &KeySpace) -> (Vec<Client>, ComputeServer) {
        let fabric = Arc::new(in_process(1, 8 << 20, MemOptions::default()).unwrap());
        let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(BTree::create(&worker, "t", BTreeOptions::default())).unwrap();
        let tree = Reach::new(AccessMode::OneSided, tree.structure().clone(), Proof::Checksum).open(&worker).unwrap();
        let entries = keys.sorted().iter().map(|key| (*key, value_for(*key, 0))).collect::<Vec<_>>();
        worker.block_on(tree.bulk_load(entries, 0.9)).unwrap();
        (vec![Client { tree, worker }], compute)
    }

    fn run_stream(clients: &[Client], stream: Vec<Draw>, keys: &KeySpace, count: u64, in_flight: u32) -> (Tally, u64) {
        let issue = Issue::new(stream, keys.clone(), ONLY, 0);
        let (tally, sources) = run(clients, vec![Feed::new(issue, End::Operations(count))], in_flight).unwrap();
        (tally, sources[0].insert_turns())
    }

    #[test]
    fn every_mix_runs_clean() {
        for name in crate::workload::NAMES.split(", ") {
            for in_flight in [1, 16] {
                let keys = KeySpace::scrambled(1000).unwrap();
                let (clients, _compute) = client(&keys);
                let source = Source { keys: &keys, distribution: Distribution::Zipf(0.99), seed: 1, scan_length: 10 };
                let stream = stream::draw(&Mix::named(name).unwrap(), source, ONLY, 500, &|| Ok(())).unwrap();
                let (tally, inserted) = run_stream(&clients, stream, &keys, 2000, in_flight);
                let seen = tally.outcomes;
                assert_eq!((seen.ops, tally.latency.len(), seen.inserted), (2000, 2000, inserted), "{name}");
                let wrong = (seen.missing, seen.duplicates, seen.wrong_values, seen.wrong_scans);
                assert_eq!(wrong, (0, 0, 0, 0), "{name}");
                assert!(in_flight > 1 || seen.latest_missing == 0, "{name}");
            }
        }
    }

    #[test]
    fn lost_keys_wrong_values_and_wrong_ranges_are_seen() {
        let keys = KeySpace::scrambled(1000).unwrap();
        let (clients, _compute) = client(&keys);
        let (lost, spoiled) = (keys.loaded_key(1), keys.loaded_key(2));
        let Tree::OneSided(tree) = &clients[0].tree else { panic!("one-sided") };
        clients[0].worker.block_on(async {
            tree.remove(lost).await.unwrap();
            tree.upsert(spoiled, 0).await.unwrap();
        });
        let stream = vec![
            Draw::Read(lost),
            Draw::Update(lost),
            Draw::ReadModifyWrite(lost),
            Draw::Remove(lost),
            Draw::Read(spoiled),
            Draw::ReadModifyWrite(spoiled),
            Draw::Insert(spoiled),
        ];
        let seen = run_stream(&clients, stream, &keys, 7, 1).0.outcomes;
        assert_eq!((seen.missing, seen.remove_missing, seen.duplicates, seen.wrong_values), (3, 1, 1, 2 + 1));
        let range = Request::Range { low: 0, high: u64::MAX, count: 1000 };
        let (tally, _) = run(&clients, vec![Feed::new([range].into_iter(), End::Source)], 1).unwrap();
        assert_eq!(tally.outcomes.wrong_scans, 1);
    }

    #[test]
    fn the_first_error_stops_all_tasks() {
        let keys = KeySpace::scrambled(10).unwrap();
        let (clients, _compute) = client(&keys);
        let Tree::OneSided(tree) = &clients[0].tree else { panic!("one-sided") };
        let drawn = Rc::new(Cell::new(0));
        let (tree, worker, count) = (tree.clone(), &clients[0].worker, Rc::clone(&drawn));
        let key = keys.loaded_key(0);
        let source = std::iter::repeat_with(move || {
            count.set(count.get() + 1);
            Request::Get { key, latest: false }
        });
        let root = tree.structure().root;
        worker.block_on(worker.write_word(root, u64::MAX)).unwrap();
        assert!(run(&clients, vec![Feed::new(source, End::Operations(1000))], 4).is_err());
        assert!(drawn.get() <= 4, "{drawn:?}");
    }
}
