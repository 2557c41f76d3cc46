//! The suite itself: whoever is to die does, in each order, however few requests there are; and a death can be had again.

use std::{
    cell::{Cell, RefCell},
    env,
    process::Command,
};

use farlink_runtime::{error::Error, report::Report, worker::Worker};
use farlink_structures::btree::Tree;
use farlink_tests::{
    cluster::FAST,
    crash::{Death, Scene, enumerate_every, enumerate_one_in, enumerate_resumed, enumerate_sweepers, stop_again},
    settings,
};

use crate::maps::{Op, Opened, Script};

/// More than any victim makes.
const SELDOM: u64 = 1_000_000;

fn script() -> Script<Tree> {
    Script::new([10, 20, 30], [], Op::Insert(15))
}

#[test]
fn somebody_dies_in_each_order_however_seldom() {
    assert_eq!(enumerate_every(SELDOM, FAST, &script()), 3);
}

/// Played by the test below, too.
#[test]
fn one_in_so_many_dies() {
    assert!(enumerate_one_in(SELDOM, FAST, &script()) > 0);
}

#[test]
fn all_deaths_are_played_where_all_are_asked_for() {
    let this = env::current_exe().unwrap();
    let mut command = Command::new(this);
    command.args(["--exact", "deaths::one_in_so_many_dies", "--nocapture"]);
    command.env("FARLINK_CRASH_EVERY", "1").env_remove("FARLINK_CRASH_DEATH");
    let out = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let numbers = |line: &str| -> Option<[u64; 2]> {
        let (before, deaths) = line.strip_suffix(" deaths")?.rsplit_once(" requests, ")?;
        let requests = before.rsplit_once(' ')?.1;
        Some([requests.parse().ok()?, deaths.parse().ok()?])
    };
    let [requests, deaths] = out.lines().find_map(numbers).unwrap_or_else(|| panic!("{out}"));
    assert!(requests > 3 && deaths == 3 * requests, "{out}");
}

#[test]
fn a_death_can_be_had_again() {
    for text in ["posted,whole,0", "lower,5,17", "higher,whole,3,18446744073709551614"] {
        assert_eq!(text.parse::<Death>().unwrap().to_string(), text);
    }
    for wrong in ["", "posted", "posted,whole", "latest,whole,1", "lower,yes,1", "lower,5,x", "lower,whole,1,2,3"] {
        assert!(wrong.parse::<Death>().is_err(), "{wrong:?}");
    }
}

/// A script whose victim does nothing but the first time.
#[derive(Debug)]
struct OnlyOnce(Script<Tree>, Cell<bool>);

impl Scene for OnlyOnce {
    type Open = Opened<Tree>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.0.prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        self.0.open(worker).await
    }

    async fn act(&self, map: &Self::Open) -> Result<(), Error> {
        if self.1.replace(true) { Ok(()) } else { self.0.act(map).await }
    }

    async fn verify(&self, worker: &Worker, _: bool) -> Result<(), Error> {
        self.0.verify(worker, false).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.0.check(worker).await
    }
}

fn only_once() -> OnlyOnce {
    OnlyOnce(script(), Cell::new(false))
}

#[test]
#[should_panic(expected = "nobody has died")]
fn control_a_victim_that_never_dies_is_noticed() {
    enumerate_every(SELDOM, FAST, &only_once());
}

#[test]
#[should_panic(expected = "nobody who sweeps has died")]
fn control_a_sweeper_without_a_victim_is_noticed() {
    enumerate_sweepers(FAST, &only_once(), 1);
}

/// A script, and the ways that others have taken.
#[derive(Debug)]
struct Ways(Script<Tree>, RefCell<Vec<bool>>);

impl Scene for Ways {
    type Open = Opened<Tree>;

    fn take_way(&self, is_other: bool) {
        self.1.borrow_mut().push(is_other);
    }

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.0.prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        self.0.open(worker).await
    }

    async fn act(&self, map: &Self::Open) -> Result<(), Error> {
        self.0.act(map).await
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        self.0.verify(worker, acknowledged).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.0.check(worker).await
    }
}

/// Has a scene played until others have taken both ways in each of so many plays: that fails by chance less than once in 2^60 times.
fn takes_both_ways(plays: usize, play: impl Fn(&Ways)) {
    let asked = ["FARLINK_TEST_SEED", "FARLINK_CRASH_DEATH", "FARLINK_CRASH_STOP"];
    if asked.iter().any(|name| settings::asked_for::<String>(name).is_some()) {
        return println!("skipped: what is had again goes the same ways each time");
    }
    let mut taken = vec![[false; 2]; plays];
    for _ in 0..64 {
        let scene = Ways(script(), RefCell::default());
        play(&scene);
        let ways = scene.1.into_inner();
        assert_eq!(ways.len(), plays);
        taken.iter_mut().zip(ways).for_each(|(taken, is_other)| taken[usize::from(is_other)] = true);
        if taken.iter().all(|ways| *ways == [true; 2]) {
            return;
        }
    }
    panic!("the ways that others have taken in each play: {taken:?}");
}

#[test]
fn after_each_death_others_take_either_way() {
    // One without a death, and one in each order.
    takes_both_ways(4, |scene| _ = enumerate_every(SELDOM, FAST, scene));
    takes_both_ways(2, |scene| _ = enumerate_resumed(SELDOM, FAST, scene));
}

#[test]
fn a_stop_that_is_had_again_is_followed_by_both_ways() {
    let scene = Ways(script(), RefCell::default());
    assert_eq!(stop_again(FAST, &scene, 0), 2);
    assert_eq!(scene.1.into_inner(), [false, true]);
}
