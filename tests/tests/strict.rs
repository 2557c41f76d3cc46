//! [`Strict`] finds what is wrong with a structure, and nothing wrong with the same one where it is right: bounding boxes in
//! a root, points in the pages below.

use std::{
    collections::BTreeSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use farlink_runtime::{
    access::*,
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, OneSidedPages, Proof},
    operation::Run,
    page::{HEADER_WORDS, SizeClass},
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::{DecodeError, Wire, wire},
    worker::Worker,
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    cluster, settings,
    strict::{Counts, Rules, Strict, sent},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

const CHILDREN: usize = 4;
const LINKS: usize = HEADER_WORDS;
const LOWS: usize = LINKS + CHILDREN;
const HIGHS: usize = LOWS + CHILDREN;
const NUMBER: usize = HEADER_WORDS;
const COUNT: usize = NUMBER + 1;
const POINTS: usize = COUNT + 1;
const CLASS_BYTES: usize = 256;
const DOMAIN: u64 = 64;

/// What is wrong with an operation.
const NOTHING: u64 = 0;
/// It descends to one child after another.
const DESCENDS: u64 = 1;
/// It does not ask whether the boxes that it went by are the newest.
const TRUSTS: u64 = 2;
/// Having had its effect, it goes on and hands on what interrupts it.
const GOES_ON: u64 = 3;
/// It does not look whether a page is the one that its link promised.
const BELIEVES: u64 = 4;
/// It has a part of it run below, which does what [`GOES_ON`] says.
const PART_GOES_ON: u64 = 5;
/// Where it was shipped to, changes what nobody sees, and then wants a page of another server's.
const TIDIES: u64 = 6;

/// Points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Boxes;

/// Adds a point; whether it was new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Add {
    point: u64,
    wrong: u64,
}

/// Whether a point is there; takes it away if so, and if that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Find {
    point: u64,
    takes: bool,
    wrong: u64,
}

/// Has two children change places: their pages, with what is in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Exchange {
    first: u64,
    second: u64,
}

/// All points. Says that it only reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct All {
    changes: bool,
}

wire! {
    struct Add { point, wrong }
    struct Find { point, takes, wrong }
    struct Exchange { first, second }
    struct All { changes }
}

fn points(page: &(impl Words + ?Sized)) -> Vec<u64> {
    let count = (page.word(COUNT) as usize).min(page.count() - POINTS);
    (POINTS..POINTS + count).map(|index| page.word(index)).collect()
}

fn set_points(pages: &mut impl PagesMut, slot: Slot, points: &[u64]) {
    pages.set(slot, COUNT, points.len() as u64);
    pages.fill(slot, POINTS, points);
}

/// The links to the children and their boxes.
fn children(root: &(impl Words + ?Sized)) -> [(Link, u64, u64); CHILDREN] {
    std::array::from_fn(|child| {
        (Link::from_word(root.word(LINKS + child)), root.word(LOWS + child), root.word(HIGHS + child))
    })
}

/// Which child a point belongs to.
fn child_of(point: u64) -> u64 {
    point % CHILDREN as u64
}

/// Adds a point to a page of points, or takes it away; whether that changed anything. The page is that of a child, if one is
/// named.
async fn set_point<'a, A: Access<Plugin = Boxes>>(
    access: &'a A,
    page: A::Page<'a>,
    child: Option<u64>,
    point: u64,
    is_there: bool,
) -> Result<bool, Interrupt> {
    let at = page.at();
    let set = |pages: &mut A::PagesMut<'a>| {
        if child.is_some_and(|child| pages.page(Slot::ONLY).word(NUMBER) != child) {
            return None;
        }
        let mut all = points(&pages.page(Slot::ONLY));
        let was_there = all.contains(&point);
        all.retain(|&other| other != point);
        all.extend(is_there.then_some(point));
        set_points(pages, Slot::ONLY, &all);
        Some(was_there != is_there)
    };
    access.change(Pages::current(page), set).await?.0.ok_or(Interrupt::stale(at, "it is another child"))
}

impl Operation for Add {
    type Output = bool;
    type Plugin = Boxes;
    const NAME: &'static str = "add";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Boxes>>(&self, access: &A, from: Start) -> Result<bool, Interrupt> {
        let page = access.open(from).await?;
        let promised = (self.wrong != BELIEVES).then(|| child_of(self.point));
        if page.level() == 0 {
            if self.wrong == TIDIES {
                let turn = |pages: &mut A::PagesMut<'_>| {
                    let all: Vec<_> = points(&pages.page(Slot::ONLY)).into_iter().rev().collect();
                    set_points(pages, Slot::ONLY, &all);
                };
                access.change(Pages::current(page), turn).await?;
                access.open(Start::Root).await?;
                return Err(Interrupt::above());
            }
            let added = set_point(access, page, promised, self.point, true).await?;
            if self.wrong == PART_GOES_ON {
                access.open(from).await?;
            }
            return Ok(added);
        }
        let child = child_of(self.point) as usize;
        let (link, low, high) = page.read(children)?[child];
        if low <= self.point && self.point <= high {
            if self.wrong == PART_GOES_ON {
                return match access.fork_one(&page, link, self).await? {
                    Forked::Done(added) => Ok(added),
                    Forked::Page(page) => set_point(access, page, promised, self.point, true).await,
                };
            }
            let page = access.descend(&page, link, Hint::DOWN).await?;
            let added = set_point(access, page, promised, self.point, true).await?;
            if self.wrong == GOES_ON {
                access.open(Start::Root).await?;
            }
            return Ok(added);
        }
        let below = access.follow(&page, link, Hint::DOWN).await?;
        // The root is one of the pages of the change: so the link that it has is the newest.
        let mut pages = Pages::new();
        let (root, below) = (pages.add(page), pages.add(below));
        let add = |pages: &mut A::PagesMut<'_>| {
            pages.set(root, LOWS + child, low.min(self.point));
            pages.set(root, HIGHS + child, high.max(self.point));
            let mut all = points(&pages.page(below));
            all.push(self.point);
            set_points(pages, below, &all);
        };
        access.change(pages, add).await?;
        Ok(true)
    }
}

impl Operation for Find {
    type Output = bool;
    type Plugin = Boxes;
    const NAME: &'static str = "find";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Boxes>>(&self, access: &A, from: Start) -> Result<bool, Interrupt> {
        let page = access.open(from).await?;
        if page.level() == 0 {
            return self.find_in(access, page, None).await;
        }
        let children = page.read(children)?;
        let candidates =
            children.into_iter().zip(0..).filter(|((_, low, high), _)| (*low..=*high).contains(&self.point));
        for ((link, ..), child) in candidates {
            let below = match self.wrong {
                DESCENDS => access.descend(&page, link, Hint::DOWN).await?,
                _ => access.follow(&page, link, Hint::DOWN).await?,
            };
            let promised = (self.wrong != BELIEVES).then_some(child);
            if self.find_in(access, below, promised).await? {
                return Ok(true);
            }
        }
        if self.wrong != TRUSTS {
            access.validate(&[&page]).await?;
        }
        Ok(false)
    }
}

impl Find {
    async fn find_in<'a, A: Access<Plugin = Boxes>>(
        &self,
        access: &'a A,
        page: A::Page<'a>,
        child: Option<u64>,
    ) -> Result<bool, Interrupt> {
        let (number, points) = page.read(|words| (words.word(NUMBER), points(words)))?;
        if child.is_some_and(|child| child != number) {
            return Err(Interrupt::stale(page.at(), "it is another child"));
        }
        let is_there = points.contains(&self.point);
        match is_there && self.takes {
            true => set_point(access, page, child, self.point, false).await,
            false => Ok(is_there),
        }
    }
}

impl Operation for Exchange {
    type Output = ();
    type Plugin = Boxes;
    const NAME: &'static str = "exchange";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Boxes>>(&self, access: &A, from: Start) -> Result<(), Interrupt> {
        let root = access.open(from).await?;
        if root.level() == 0 {
            return Err(Interrupt::above());
        }
        let [first, second] = [self.first, self.second].map(|child| (child % CHILDREN as u64) as usize);
        let children = root.read(children)?;
        let one = access.follow(&root, children[first].0, Hint::DOWN).await?;
        let other = access.follow(&root, children[second].0, Hint::DOWN).await?;
        let mut pages = Pages::new();
        let (root, one, other) = (pages.add(root), pages.add(one), pages.add(other));
        let exchange = |pages: &mut A::PagesMut<'_>| {
            let links = [first, second].map(|child| pages.page(root).word(LINKS + child));
            let all = [one, other].map(|slot| points(&pages.page(slot)));
            pages.set(root, LINKS + first, links[1]);
            pages.set(root, LINKS + second, links[0]);
            for (slot, child, points) in [(one, second, &all[1]), (other, first, &all[0])] {
                pages.set(slot, NUMBER, child as u64);
                set_points(pages, slot, points);
            }
        };
        access.change(pages, exchange).await.map(drop)
    }
}

impl Operation for All {
    type Output = Vec<u64>;
    type Plugin = Boxes;
    const NAME: &'static str = "all";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Boxes>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        let page = access.open(from).await?;
        let mut all = Vec::new();
        for (link, ..) in page.read(children)? {
            let below = access.follow(&page, link, Hint::DOWN).await?;
            all.extend(below.read(points)?);
            if self.changes {
                set_point(access, below, None, 0, true).await?;
            }
        }
        all.sort_unstable();
        Ok(all)
    }
}

impl Plugin for Boxes {
    const NAME: &'static str = "boxes";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = CLASS_BYTES..=CLASS_BYTES;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        LINKS..LINKS + CHILDREN
    }

    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<()> {
        Some(())
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 1, 0);
        pages.fill(root, LOWS, &[u64::MAX; CHILDREN]);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Add>().add::<Find>().add::<Exchange>().add::<All>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

async fn create(worker: &Worker) -> Result<OneSided<Boxes>, Error> {
    let class = SizeClass::of_bytes(CLASS_BYTES).expect("a size class");
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    catalog::create_with(worker, "boxes", &options, Proof::Checksum, async move |access: &OneSided<Boxes>| {
        let mut pages = Pages::new();
        let root = pages.add(access.open(Start::Root).await.map_err(|_| Error::NotEmpty)?);
        let mut below = Vec::new();
        for _ in 0..CHILDREN {
            let page = access.allocate(class, Placement::RoundRobin).await?;
            below.push((page.link(), pages.add_new(page)));
        }
        let fill = |pages: &mut OneSidedPages| {
            for (child, &(link, slot)) in below.iter().enumerate() {
                pages.describe(slot, 0, 0);
                pages.set(slot, NUMBER, child as u64);
                pages.set(root, LINKS + child, link.word());
            }
        };
        access.change(pages, fill).await.map(drop).map_err(|_| Error::NotEmpty)
    })
    .await
}

/// Random operations with this fault over a strict access, against a set; what was found, if anything was.
fn run(wrong: u64, rules: Rules, looks: bool) -> Result<Counts, String> {
    let cluster = Cluster::of_this_run(2, 4 << 20, FabricProfile::Fast).unwrap();
    let compute = cluster::join(&Arc::clone(&cluster), 1).unwrap();
    let worker = compute.worker().unwrap();
    let mut rng = SmallRng::seed_from_u64(rules.seed);
    let all = async {
        let inner = create(&worker).await?;
        let mut strict = Strict::new(inner.clone(), rules);
        if looks {
            strict = strict.looking(move || {
                let inner = inner.clone();
                Box::pin(async move {
                    let points = inner.execute(&All { changes: false }).await?;
                    Ok(points.iter().fold(0, |sum, &point| sum | 1 << point))
                })
            });
        }
        let mut model = BTreeSet::new();
        for number in 0..300 {
            let point = rng.random_range(0..DOMAIN);
            if rng.random_ratio(1, 8) {
                let first = child_of(point);
                strict.execute(&Exchange { first, second: (first + 1) % CHILDREN as u64 }).await?;
            }
            let (what, found, expected) = match rng.random_range(0..4) {
                0 | 1 => ("add", strict.execute(&Add { point, wrong }).await?, model.insert(point)),
                2 => {
                    let taken = strict.execute(&Find { point, takes: true, wrong }).await?;
                    ("take", taken, model.remove(&point))
                }
                _ => {
                    let found = strict.execute(&Find { point, takes: false, wrong }).await?;
                    ("find", found, model.contains(&point))
                }
            };
            if found != expected {
                return Ok(Err(format!("{what} of {point}, operation {number}: {found}, not {expected}")));
            }
        }
        let found = strict.execute(&All { changes: false }).await?;
        assert_eq!(found, model.into_iter().collect::<Vec<_>>());
        Ok::<_, Error>(Ok(strict.counts()))
    };
    match catch_unwind(AssertUnwindSafe(|| worker.block_on(all))) {
        Ok(outcome) => outcome.unwrap_or_else(|error| Err(error.to_string())),
        Err(panic) => Err(panic.downcast_ref::<String>().cloned().unwrap_or_default()),
    }
}

const SEEDS: u64 = 8;

/// What is found with at least one of many seeds.
fn found(wrong: u64, rules: impl Fn(u64) -> Rules, looks: bool) -> String {
    let first = settings::seed("strict");
    let mut all = (0..100).filter_map(|seed| run(wrong, rules(first.wrapping_add(seed)), looks).err());
    all.next().unwrap_or_else(|| panic!("fault {wrong} is not found"))
}

/// Only this.
fn calm(seed: u64) -> Rules {
    Rules { old_copies: false, ships: false, conflicts: false, ..Rules::alone(seed) }
}

#[test]
fn what_is_right_passes_and_has_met_everything() {
    let first = settings::seed("strict");
    let mut all = Counts::default();
    for seed in 0..SEEDS {
        let counts = run(NOTHING, Rules::alone(first.wrapping_add(seed)), true).unwrap();
        all.old_copies += counts.old_copies;
        all.shipped += counts.shipped;
        all.conflicts += counts.conflicts;
        all.pages_held = all.pages_held.max(counts.pages_held);
    }
    assert!(all.old_copies > 100 && all.shipped > 50 && all.conflicts > 100, "{all:?}");
    assert_eq!(all.pages_held, 3, "{all:?}");
}

#[test]
fn an_answer_that_is_cut_short_by_shipping_is_found() {
    let what = found(DESCENDS, |seed| Rules { ships: true, ..calm(seed) }, false);
    assert!(what.contains("false, not true"), "{what}");
}

#[test]
fn an_answer_by_old_boxes_is_found() {
    let what = found(TRUSTS, |seed| Rules { old_copies: true, ..calm(seed) }, false);
    assert!(what.contains("false, not true"), "{what}");
}

#[test]
fn a_promise_that_is_not_looked_at_is_found() {
    let what = found(BELIEVES, |seed| Rules { old_copies: true, ..calm(seed) }, false);
    assert!(what.contains("true, not false") || what.contains("false, not true"), "{what}");
}

#[test]
fn an_attempt_that_ends_behind_its_effect_is_found() {
    let what = found(GOES_ON, |seed| Rules { conflicts: true, ..calm(seed) }, true);
    assert!(what.contains("behind an effect that others can see"), "{what}");
}

#[test]
fn a_part_that_ends_behind_its_effect_is_found() {
    let what = found(PART_GOES_ON, |seed| Rules { conflicts: true, ships: true, ..calm(seed) }, true);
    assert!(what.contains("behind an effect that others can see"), "{what}");
}

#[test]
fn what_comes_back_behind_a_change_is_found() {
    let what = found(TIDIES, |seed| Rules { ships: true, ..calm(seed) }, true);
    assert!(what.contains("and came back"), "{what}");
}

#[test]
fn faults_that_a_calm_access_hides_it_hides() {
    for wrong in [DESCENDS, TRUSTS, GOES_ON, BELIEVES] {
        run(wrong, calm(1), true).unwrap();
    }
}

fn with_strict(rules: Rules, f: impl AsyncFn(Strict<OneSided<Boxes>>) -> Result<(), Error>) {
    let cluster = Cluster::of_this_run(2, 4 << 20, FabricProfile::Fast).unwrap();
    let compute = cluster::join(&Arc::clone(&cluster), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async { f(Strict::new(create(&worker).await?, rules)).await }).unwrap();
}

#[test]
#[should_panic(expected = "all: says that it only reads, and changes pages")]
fn a_change_by_what_only_reads_is_refused() {
    with_strict(calm(1), async |strict| strict.execute(&All { changes: true }).await.map(drop));
}

#[test]
#[should_panic(expected = "all: holds 2 pages at a time, of 1 at most")]
fn more_pages_than_are_allowed_are_refused() {
    let rules = Rules { pages_max: 1, ..calm(1) };
    with_strict(rules, async |strict| strict.execute(&All { changes: false }).await.map(drop));
}

#[test]
#[should_panic(expected = "add does not survive being sent")]
fn what_is_not_the_same_at_the_other_end_is_refused() {
    struct Lost;
    impl Wire for Lost {
        fn encode(&self, _to: &mut Vec<u64>) {}
        fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
            u64::decode(from).map(|_| Self)
        }
    }
    sent(&Lost, "add");
}
