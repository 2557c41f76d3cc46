//! What a search promises holds between any two steps of a change, and whatever changes between any two steps of a search: one
//! operation after the other is taken step by step, always in the same way. The same tells of each rule of the protocol when it
//! is broken.

use std::{collections::BTreeMap, fmt::Debug, ops::Range, rc::Rc, sync::Arc};

use farlink_runtime::{
    access::{Access, Hint, Link, Operation, PageRef, Start, Structure, Words},
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    server,
    worker::Handle,
};
use farlink_structures::rtree::{Entry, Query, RTree, Rect, Tree, ops::Delete};
use farlink_tests::settings;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    entries::{Key, a_rect, key},
    faults::{Children, Fault, Steps},
    kit::order,
    scene::{create, scene},
    stepped::{Driven, Gate, Stepped, StepsAt},
};

/// Of a tree of three dimensions, whose pages hold more than those of one of six.
const OPERATIONS: usize = 300;
/// Of one of six: each is looked at with all entries that there are.
const OPERATIONS_DEEP: usize = 190;
/// So often a tree grows and shrinks, at most.
const ROUNDS_MAX: usize = 8;
/// How it is told that a search has not kept its promise.
const NOT_AS_PROMISED: &str = "not as promised";

/// An operation, and the entries that come and go with it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Op<const D: usize> {
    Insert(Entry<D>),
    Delete(Entry<D>),
    Update(Entry<D>, Rect<D>),
}

impl<const D: usize> Op<D> {
    /// What goes with it, and what comes.
    pub(crate) fn gone_and_come(&self) -> (Option<Entry<D>>, Option<Entry<D>>) {
        match *self {
            Self::Insert(entry) => (None, Some(entry)),
            Self::Delete(entry) => (Some(entry), None),
            Self::Update(entry, to) => (Some(entry), Some((to, entry.1))),
        }
    }

    /// Whether it was done.
    pub(crate) async fn run(self, on: &RTree<impl Access<Plugin = Tree<D>>, D>) -> Result<bool, Error> {
        match self {
            Self::Insert((rect, payload)) => on.insert(rect, payload).await.map(|()| true),
            Self::Delete((rect, payload)) => on.delete(rect, payload).await,
            Self::Update((rect, payload), to) => on.update(rect, payload, to).await,
        }
    }
}

/// What a search has to find.
#[derive(Debug, Clone, Default)]
pub(crate) struct Expected<const D: usize> {
    /// All that is there all the time.
    pub(crate) lasting: BTreeMap<Key, Entry<D>>,
    /// What it may find, or not.
    pub(crate) touched: Vec<Entry<D>>,
}

/// A tree, and what it holds but for what an operation in between does.
struct Steppable<const D: usize> {
    worker: Handle,
    structure: Structure,
    fault: Fault,
    there: Expected<D>,
    searches: u64,
    steps: Steps,
}

/// What a search of everything asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ask<const D: usize> {
    All,
    /// So many, in the query's order.
    First(Query<D>, usize),
    /// One after the other, in parts.
    Each(Query<D>),
    Count,
}

impl<const D: usize> Ask<D> {
    /// One that is cut, or counts.
    pub(crate) fn other(number: u64) -> Self {
        let everything = Query::Intersects(Rect::EVERYTHING);
        match number % 4 {
            0 => Self::First(everything, 12),
            1 => Self::First(Query::Nearest([0.0; D]), 12),
            2 => Self::Each(Query::Nearest([0.0; D])),
            _ => Self::Count,
        }
    }

    /// The entries, or their number.
    pub(crate) async fn answer(self, tree: RTree<impl Access<Plugin = Tree<D>>, D>) -> Answer<D> {
        let entries = match self {
            Self::All => tree.search(Query::Intersects(Rect::EVERYTHING)).all().await?,
            Self::First(query, count) => tree.search(query).take(count).await?,
            Self::Each(query) => {
                let (mut cursor, mut all) = (tree.search(query), Vec::new());
                while let Some(entry) = cursor.next().await? {
                    all.push(entry);
                }
                all
            }
            Self::Count => return Ok((Vec::new(), tree.len().await?)),
        };
        Ok((entries, 0))
    }
}

/// The entries that were found, or their number.
pub(crate) type Answer<const D: usize> = Result<(Vec<Entry<D>>, u64), Error>;

type Found<'a, const D: usize> = (Ask<D>, Driven<'a, Answer<D>>);

impl<const D: usize> Expected<D> {
    /// This goes meanwhile, and that comes.
    pub(crate) fn touch(&mut self, (gone, come): (Option<Entry<D>>, Option<Entry<D>>)) {
        if let Some(entry) = &gone {
            self.lasting.remove(&key(entry));
        }
        self.touched.extend(gone.into_iter().chain(come));
    }

    /// Each entry that is there all the time is among those found, once; any other one is one that may be there. Of those that
    /// are asked for, that is: `most`, in the query's order.
    fn judge(&self, query: &Query<D>, most: usize, found: Vec<Entry<D>>) -> Result<(), String> {
        let mut counts = BTreeMap::<Key, u64>::new();
        found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
        let last = found.last().filter(|_| found.len() >= most);
        for (key, entry) in self.lasting.iter().filter(|(_, (rect, _))| query.matches(rect)) {
            let count = counts.remove(key).unwrap_or(0);
            if count != 1 && (count > 1 || last.is_none_or(|last| order(query, entry, last).is_lt())) {
                return Err(format!("{NOT_AS_PROMISED}: {count} of {entry:?} in {query:?}, {most} at most"));
            }
        }
        for (other, count) in counts {
            if count != 1 || !self.touched.iter().any(|entry| key(entry) == other) {
                let what = format!("{count} of {other:?}, which is not there, in {query:?}, {most} at most");
                return Err(format!("{NOT_AS_PROMISED}: {what}"));
            }
        }
        Ok(())
    }

    /// The same of what was asked for.
    pub(crate) fn judge_answer(&self, ask: Ask<D>, answer: Answer<D>) -> Result<(), String> {
        let (found, count) = answer.map_err(|error| error.to_string())?;
        match ask {
            Ask::All => self.judge(&Query::Intersects(Rect::EVERYTHING), usize::MAX, found),
            Ask::First(query, most) => self.judge(&query, most, found),
            Ask::Each(query) => self.judge(&query, usize::MAX, found),
            Ask::Count => {
                let (least, touched) = (self.lasting.len() as u64, self.touched.len() as u64);
                match (least..=least + touched).contains(&count) {
                    true => Ok(()),
                    false => {
                        Err(format!("{NOT_AS_PROMISED}: {count} are counted, not {least} and up to {touched} more"))
                    }
                }
            }
        }
    }
}

impl<const D: usize> Steppable<D> {
    fn stepped(&self, steps_at: StepsAt) -> (RTree<Stepped<OneSided<Tree<D>>>, D>, Rc<Gate>) {
        let inner = OneSided::new(&self.worker, self.structure.clone(), Proof::Checksum);
        let (stepped, gate) = Stepped::new(inner, self.fault, steps_at);
        (RTree::over(stepped), gate)
    }

    /// A search, at its first step.
    async fn begin(&mut self, ask: Ask<D>) -> Found<'static, D> {
        self.searches += 1;
        let (tree, gate) = self.stepped(StepsAt::Reads);
        let mut search = Driven::new(&gate, ask.answer(tree));
        search.next_step().await;
        (ask, search)
    }

    /// Searches of everything, of which each has taken one step more than the one before.
    async fn begin_many(&mut self, ask: Ask<D>) -> Vec<Found<'static, D>> {
        let mut searches = Vec::new();
        for steps in 0.. {
            let mut search = self.begin(ask).await;
            for _ in 0..steps {
                if search.1.step().await.is_some() {
                    return searches;
                }
            }
            searches.push(search);
        }
        searches
    }

    async fn finish(&self, searches: impl IntoIterator<Item = Found<'static, D>>) -> Result<(), String> {
        for (ask, search) in searches {
            self.there.judge_answer(ask, search.finish().await)?;
        }
        Ok(())
    }

    /// Looks for every entry by itself, with all that is as it is.
    async fn look(&mut self) -> Result<(), String> {
        let (tree, _) = self.stepped(StepsAt::Nothing);
        let rects: Vec<_> = self.there.lasting.values().chain(&self.there.touched).map(|(rect, _)| *rect).collect();
        for rect in rects {
            let query = Query::Within(rect);
            let found = tree.search(query).all().await.map_err(|error| error.to_string())?;
            self.searches += 1;
            self.there.judge(&query, usize::MAX, found)?;
        }
        Ok(())
    }

    /// Takes an operation step by step.
    async fn take(&mut self, op: Op<D>) -> Result<(), String> {
        let (tree, gate) = self.stepped(StepsAt::Changes);
        let (gone, come) = op.gone_and_come();
        self.there.touched.clear();
        self.there.touch((gone, come));
        let mut change = Driven::new(&gate, async move { op.run(&tree).await });
        // Some searches see one step of the change, others all that are left of it.
        let mut longer = Vec::new();
        let mut is_done = change.next_step().await;
        while is_done.is_none() {
            self.look().await?;
            let mut shorter = self.begin_many(Ask::All).await;
            longer.extend(self.begin_many(Ask::All).await);
            let other = Ask::other(self.steps.all.into());
            shorter.extend(self.begin_many(other).await);
            is_done = change.step().await;
            self.finish(shorter).await?;
        }
        self.finish(longer).await?;
        if !matches!(is_done, Some(Ok(true))) {
            return Err(format!("{op:?} has come to {is_done:?}"));
        }
        self.there.touched = come.into_iter().collect();
        self.there.lasting.extend(come.map(|entry| (key(&entry), entry)));
        self.look().await?;
        let steps = gate.steps.get();
        self.steps.all += steps.all;
        self.steps.splits += steps.splits;
        self.steps.reinsertions += steps.reinsertions;
        self.steps.condensed += steps.condensed;
        Ok(())
    }
}

/// Mostly to the right of what came before: pages at the edge of a row have entries that suit those of another row better.
pub(crate) fn in_rows<const D: usize>(rng: &mut SmallRng, number: usize) -> Rect<D> {
    let rect = a_rect::<D>(rng, 3);
    if rng.random_ratio(1, 4) {
        return rect;
    }
    let (mut low, mut high) = (rect.low(), rect.high());
    let right = (number % 40) as f64 - 20.0 - low[0];
    (low[0], high[0]) = (low[0] + right, high[0] + right);
    Rect::new(low, high).unwrap()
}

/// Inserts, moves and deletes, one after the other: the tree grows and then shrinks. What is wrong, if anything is.
fn run<const D: usize>(seed: u64, operations: usize, fault: Fault) -> Result<(u64, Steps), String> {
    run_until::<D>(seed, operations, fault, |_| true)
}

/// [`run`], and then the tree grows and shrinks again, until enough has happened.
fn run_until<const D: usize>(
    seed: u64,
    operations: usize,
    fault: Fault,
    is_enough: impl Fn(&Steps) -> bool,
) -> Result<(u64, Steps), String> {
    let cluster = server::in_process(2, 16 << 20, MemOptions::default()).unwrap();
    let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions { seed, ..ComputeOptions::default() });
    let compute = compute.unwrap();
    let worker = compute.worker().unwrap();
    let mut rng = SmallRng::seed_from_u64(seed);
    worker.block_on(async {
        let structure = create::<D>(&worker).await.unwrap().access().context().structure.clone();
        let (there, steps) = (Expected::default(), Steps::default());
        let mut tree = Steppable::<D> { worker: Handle::clone(&worker), structure, fault, there, searches: 0, steps };
        for number in 0..operations * ROUNDS_MAX {
            if number >= operations && is_enough(&tree.steps) {
                break;
            }
            let grows = number % operations < operations * 3 / 5;
            let (new, at) = (in_rows(&mut rng, number), rng.random_range(0..tree.there.lasting.len().max(1)));
            let op = match tree.there.lasting.values().nth(at).copied() {
                Some(known) if rng.random_ratio(1, 6) => Op::Update(known, new),
                Some(known) if rng.random_ratio(if grows { 1 } else { 9 }, 10) => Op::Delete(known),
                _ => Op::Insert((new, number as u64)),
            };
            tree.take(op).await.map_err(|what| format!("operation {number}, {op:?}: {what}"))?;
        }
        Ok((tree.searches, tree.steps))
    })
}

/// Whoever plants an error is to see searches that break their promise, and not a tree that fails otherwise.
pub(crate) fn assert_caught<T: Debug>(outcome: Result<T, String>) {
    let why = outcome.expect_err("searches answer as promised in spite of it");
    assert!(why.contains(NOT_AS_PROMISED), "{why}");
    println!("{why}");
}

pub(crate) fn seeds() -> Range<u64> {
    let (first, seeds) = (settings::from_env("FARLINK_TEST_SEED", 0), settings::from_env("FARLINK_STEP_SEEDS", 1));
    first..first + seeds
}

#[test]
fn between_any_two_steps_a_search_of_a_wide_tree_finds_what_is_there() {
    for seed in seeds() {
        println!("FARLINK_TEST_SEED={seed}");
        // Reinsertions are rare, and the run of this seed has some.
        let is_enough = |wide: &Steps| wide.condensed > 4 && (seed != 0 || wide.reinsertions > 2);
        let (searches, wide) = run_until::<3>(seed, OPERATIONS, Fault::Nothing, is_enough).unwrap();
        println!("{searches} searches between {wide:?}");
        assert!(is_enough(&wide), "too little has happened");
    }
}

#[test]
fn between_any_two_steps_a_search_of_a_deep_tree_finds_what_is_there() {
    for seed in seeds() {
        println!("FARLINK_TEST_SEED={seed}");
        let operations = settings::from_env("FARLINK_STEP_OPERATIONS", OPERATIONS_DEEP);
        let is_enough = |deep: &Steps| deep.splits > 20 && deep.condensed > 4;
        let (searches, deep) = run_until::<6>(seed, operations, Fault::Nothing, is_enough).unwrap();
        println!("{searches} searches between {deep:?}");
        assert!(is_enough(&deep), "too little has happened");
    }
}

#[test]
fn a_search_that_drops_right_links_is_caught() {
    assert_caught(run::<6>(0, OPERATIONS_DEEP, Fault::DropsRightLinks));
}

#[test]
fn condensing_by_delete_and_then_insert_is_caught() {
    assert_caught(run::<6>(0, OPERATIONS_DEEP, Fault::CondensesInTwo));
}

#[test]
fn reinsertion_by_delete_and_then_insert_is_caught() {
    assert_caught(run::<3>(0, OPERATIONS, Fault::ReinsertsInTwo));
}

#[test]
fn a_box_that_shrinks_before_its_entries_have_moved_is_caught() {
    assert_caught(run::<6>(0, OPERATIONS_DEEP, Fault::ShrinksFirst));
    assert_caught(run::<3>(0, OPERATIONS, Fault::ShrinksFirst));
}

/// What a delete from below the root would have to change above is left, and not tried again and again.
#[test]
fn behind_a_delete_from_below_the_root_nothing_is_tried_in_vain() {
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        let tree = create::<2>(&scene.worker).await.unwrap();
        let point = |at: u32| Rect::point([f64::from(at); 2]).unwrap();
        tree.bulk_load((0..1000).map(|at| (point(at), u64::from(at))), 0.9).await.unwrap();
        let access = tree.access();
        let root = access.open(Start::Root).await.unwrap();
        let below = root.read(|words| (0..words.count()).map(|at| words.word(at)).collect::<Vec<_>>()).unwrap();
        let below = Link::from_word(Children::<2>::of(&below).link(0));
        assert_eq!(access.follow(&root, below, Hint::DOWN).await.unwrap().level(), 1);
        let inner = OneSided::new(&scene.worker, access.context().structure.clone(), Proof::Checksum);
        let (stepped, gate) = Stepped::new(inner, Fault::IsBelow, StepsAt::Nothing);
        let mut gone = 0;
        for at in 0..1000 {
            let delete = Delete { rect: point(at), payload: u64::from(at) };
            gone += u32::from(delete.run(&stepped, Start::Page(below)).await.is_ok_and(|is_gone| is_gone));
        }
        assert!(gone > 50, "{gone} are gone");
        assert_eq!(gate.steps.get().anew, 0);
    });
}
