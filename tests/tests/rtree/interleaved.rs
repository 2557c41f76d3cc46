//! Searches, a delete, and operations that change the tree, all under way at the same time, one step of any of them after the other at
//! random: a search lives through many changes, and parts of it are done elsewhere, as a memory server does them.

use std::{collections::BTreeMap, rc::Rc, sync::Arc, time::Duration};

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::{Access, Region},
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    server,
};
use farlink_structures::rtree::{Entry, RTree, Rect, Tree};
use farlink_tests::bounded::Watchdog;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    entries::{Key, a_rect, key},
    faults::{Fault, Steps},
    scene::create,
    stepped::{Driven, Gate, Stepped, StepsAt},
    steps::{Answer, Ask, Expected, Op, assert_caught, in_rows, seeds},
};

const STEPS: usize = 25_000;
/// What they take at most on an idle machine.
const LIMIT: Duration = Duration::from_secs(30);
/// Searches at a time.
const SEARCHES: usize = 8;
/// The tree grows up to the second of these, and shrinks down to the first.
const SIZES: [usize; 2] = [40, 220];

struct Search<const D: usize> {
    ask: Ask<D>,
    driven: Driven<'static, Answer<D>>,
    expected: Expected<D>,
}

/// An operation under way, and what comes with it.
struct Change<const D: usize> {
    op: Op<D>,
    driven: Driven<'static, Result<bool, Error>>,
    gate: Rc<Gate>,
}

struct Interleaved<A, const D: usize> {
    access: A,
    fault: Fault,
    /// Whether a page is as it is, and no copy. A delete that has had a part of it done elsewhere relies on that.
    is_in_place: bool,
    rng: SmallRng,
    /// All that is there, and that no operation under way is about.
    there: BTreeMap<Key, Entry<D>>,
    searches: Vec<Search<D>>,
    /// One takes its changes as steps, the other, a delete, its reads.
    changes: [Option<Change<D>>; 2],
    next: u64,
    grows: bool,
    judged: u64,
    steps: Steps,
}

impl<A: Access<Plugin = Tree<D>> + Clone + 'static, const D: usize> Interleaved<A, D> {
    fn stepped(&mut self, steps_at: StepsAt, ships: bool) -> (RTree<Stepped<A>, D>, Rc<Gate>) {
        let (stepped, gate) = Stepped::new(self.access.clone(), self.fault, steps_at);
        let seed = self.rng.random();
        (RTree::over(if ships { stepped.shipping(seed) } else { stepped }), gate)
    }

    async fn search(&mut self) -> Result<(), String> {
        let number = self.rng.random_range(0..SEARCHES);
        if let Some(search) = self.searches.get_mut(number) {
            if let Some(answer) = search.driven.step().await {
                let Search { ask, expected, .. } = self.searches.swap_remove(number);
                self.judged += 1;
                expected.judge_answer(ask, answer)?;
            }
            return Ok(());
        }
        let ask = if self.rng.random() { Ask::All } else { Ask::other(self.rng.random()) };
        let (tree, gate) = self.stepped(StepsAt::Reads, true);
        let mut expected = Expected { lasting: self.there.clone(), touched: Vec::new() };
        self.changes.iter().flatten().for_each(|change| expected.touch(change.op.gone_and_come()));
        let mut driven = Driven::new(&gate, ask.answer(tree));
        driven.next_step().await;
        self.searches.push(Search { ask, driven, expected });
        Ok(())
    }

    fn a_rect(&mut self) -> Rect<D> {
        if self.rng.random() { a_rect(&mut self.rng, 3) } else { in_rows(&mut self.rng, self.next as usize) }
    }

    async fn change(&mut self, which: usize) -> Result<(), String> {
        let (op, answer) = match &mut self.changes[which] {
            Some(change) => (change.op, change.driven.step().await),
            None => {
                let at = self.rng.random_range(0..self.there.len().max(1));
                let known = self.there.values().nth(at).copied();
                let op = match known {
                    Some(known) if which == 1 => Op::Delete(known),
                    Some(known) if self.rng.random_ratio(1, 6) => Op::Update(known, self.a_rect()),
                    Some(known) if self.rng.random_ratio(if self.grows { 1 } else { 9 }, 10) => Op::Delete(known),
                    _ => Op::Insert((self.a_rect(), self.next)),
                };
                self.next += 1;
                let (gone, come) = op.gone_and_come();
                if let Some(entry) = &gone {
                    self.there.remove(&key(entry));
                }
                self.searches.iter_mut().for_each(|search| search.expected.touch((gone, come)));
                let steps_at = if which == 1 { StepsAt::Reads } else { StepsAt::Changes };
                let (tree, gate) = self.stepped(steps_at, self.is_in_place);
                let mut driven = Driven::new(&gate, async move { op.run(&tree).await });
                let answer = driven.next_step().await;
                self.changes[which] = Some(Change { op, driven, gate });
                (op, answer)
            }
        };
        let Some(answer) = answer else { return Ok(()) };
        if !matches!(answer, Ok(true)) {
            return Err(format!("{op:?} has come to {answer:?}"));
        }
        self.there.extend(op.gone_and_come().1.map(|entry| (key(&entry), entry)));
        self.grows = if self.grows { self.there.len() < SIZES[1] } else { self.there.len() <= SIZES[0] };
        let done = self.changes[which].take().map(|change| change.gate.steps.get()).unwrap_or_default();
        self.steps.splits += done.splits;
        self.steps.reinsertions += done.reinsertions;
        self.steps.condensed += done.condensed;
        Ok(())
    }

    async fn run(&mut self, steps: usize) -> Result<(), String> {
        for step in 0..steps {
            let outcome = match self.rng.random_range(0..10) {
                0..3 => self.change(0).await,
                3 if self.there.len() > SIZES[0] / 2 => self.change(1).await,
                _ => self.search().await,
            };
            outcome.map_err(|what| format!("step {step}: {what}"))?;
        }
        Ok(())
    }
}

async fn interleaved<A: Access<Plugin = Tree<D>> + Clone + 'static, const D: usize>(
    (access, is_in_place): (&A, bool),
    (seed, fault): (u64, Fault),
) -> Result<(u64, Steps), String> {
    let mut all = Interleaved {
        access: access.clone(),
        fault,
        is_in_place,
        rng: SmallRng::seed_from_u64(seed),
        there: BTreeMap::new(),
        searches: Vec::new(),
        changes: [None, None],
        next: 0,
        grows: true,
        judged: 0,
        steps: Steps::default(),
    };
    all.run(STEPS).await?;
    println!("{} searches between {:?}", all.judged, all.steps);
    Ok((all.judged, all.steps))
}

fn one_sided<const D: usize>(seed: u64, fault: Fault) -> Result<(u64, Steps), String> {
    let _watch = Watchdog::start(format!("one-sided, FARLINK_TEST_SEED={seed}"), LIMIT);
    let cluster = server::in_process(2, 32 << 20, MemOptions::default()).unwrap();
    let options = ComputeOptions { seed, ..ComputeOptions::default() };
    let compute = ComputeServer::join(Arc::new(cluster), options).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let structure = create::<D>(&worker).await.unwrap().access().context().structure.clone();
        let access = OneSided::<Tree<D>>::new(&worker, structure, Proof::Checksum);
        interleaved((&access, false), (seed, fault)).await
    })
}

fn owned<const D: usize>(seed: u64) -> Result<(u64, Steps), String> {
    let _watch = Watchdog::start(format!("owned, FARLINK_TEST_SEED={seed}"), LIMIT);
    let cluster = server::in_process(2, 32 << 20, MemOptions::default()).unwrap();
    let options = ComputeOptions { seed, ..ComputeOptions::default() };
    let compute = ComputeServer::join(Arc::new(cluster), options).unwrap();
    let worker = compute.worker().unwrap();
    let cache = ComputeCache::<Tree<D>>::new(CacheOptions::new(1 << 20)).unwrap();
    worker.block_on(async {
        let structure = create::<D>(&worker).await.unwrap().access().context().structure.clone();
        let access = cache.own(&worker, structure, Region::everything()).await.unwrap();
        let outcome = interleaved((&access, true), (seed, Fault::Nothing)).await;
        access.close().await.unwrap();
        outcome
    })
}

#[test]
fn searches_beside_many_changes_of_a_deep_tree_find_what_is_there() {
    for seed in seeds() {
        println!("FARLINK_TEST_SEED={seed}");
        let (judged, steps) = one_sided::<6>(seed, Fault::Nothing).unwrap();
        assert!(judged > 100 && steps.splits > 100 && steps.condensed > 100, "{judged} between {steps:?}");
    }
}

#[test]
fn searches_beside_many_changes_of_an_owned_tree_find_what_is_there() {
    for seed in seeds() {
        println!("FARLINK_TEST_SEED={seed}");
        let (judged, steps) = owned::<6>(seed).unwrap();
        assert!(judged > 100 && steps.splits > 100 && steps.condensed > 100, "{judged} between {steps:?}");
    }
}

#[test]
fn pages_that_keep_their_right_links_are_caught() {
    assert_caught(one_sided::<6>(0, Fault::KeepsRightLinks));
}
