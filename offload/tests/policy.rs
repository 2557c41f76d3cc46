//! The policies that come with the crate, on misses made up.

use std::{cell::Cell, time::Duration};

use farlink_offload::policy::{
    Always, BackOff, BackOffOptions, Choice, Cold, CostAware, CostOptions, Miss, MovingAverage, Never, Policy,
    RARER_MAX, SAMPLES,
};
use farlink_runtime::{
    messaging::{Load, ServeMessages},
    ptr::ServerId,
};

const SERVER: ServerId = ServerId::new(0).unwrap();

/// A miss at a level, with random numbers that count up.
fn ask(policy: &mut impl Policy, level: u8, load: Option<Load>, random: &Cell<u64>) -> Choice {
    let random = || random.replace(random.get() + 1);
    policy.choose(&Miss { server: SERVER, level, load, random: &random, hot: &|| false })
}

fn load(report: u16, busy_permille: u16) -> Option<Load> {
    Some(Load { report, busy_permille, threads: 1, peers: 1 })
}

/// A policy that knows what both ways take.
fn informed(options: CostOptions, fetch_ns: u64, rpc_ns: u64) -> CostAware {
    let mut policy = CostAware::new(options);
    for _ in 0..SAMPLES {
        policy.fetched(SERVER, fetch_ns);
        policy.shipped(SERVER, rpc_ns);
    }
    policy
}

#[test]
fn the_constant_ones_are_constant() {
    let random = Cell::new(0);
    for level in 0..4 {
        assert_eq!(ask(&mut Never, level, load(1, 0), &random), Choice::FETCH);
        assert_eq!(ask(&mut Always, level, load(1, 1000), &random), Choice::SHIP);
    }
}

#[test]
fn the_cold_one_ships_what_would_not_be_kept() {
    let miss = |hot| Cold.choose(&Miss { server: SERVER, level: 0, load: None, random: &|| 0, hot });
    assert_eq!((miss(&|| true), miss(&|| false)), (Choice::FETCH, Choice::SHIP));
}

#[test]
fn an_average_forgets_what_is_old_and_bounds_what_is_odd() {
    let mut average = MovingAverage::default();
    assert_eq!(average.get(), None);
    (0..SAMPLES).for_each(|_| average.add(100));
    assert_eq!(average.get(), Some(100));
    // An outlier counts as ten averages.
    average.add(1_000_000_000);
    assert_eq!(average.get(), Some((100 * 49 + 1000) / 50));
    (0..SAMPLES).for_each(|_| average.add(300));
    assert_eq!(average.get(), Some(300));
    let mut huge = MovingAverage::default();
    (0..200).for_each(|_| huge.add(u64::MAX));
    assert!(huge.get().is_some());
}

#[test]
fn the_cost_aware_one_compares_with_the_rest_of_the_path() {
    let options = CostOptions { search_ns: 100, factor: 1.0, contrary_one_in: 0 };
    let mut policy = informed(options, 900, 2500);
    let random = Cell::new(0);
    let choices: Vec<bool> = (0..4).map(|level| ask(&mut policy, level, None, &random).ships).collect();
    // 2500 against 1000, 2000, 3000, 4000.
    assert_eq!(choices, [false, false, true, true]);
    let mut dear = informed(CostOptions { factor: 1.3, ..options }, 900, 2500);
    assert!(ask(&mut dear, 1, None, &random).ships, "2500 against 2600");
    assert_eq!(dear.averages(SERVER), (Some(900), Some(2500)));
}

/// What an adaptive client fetches are whole operations, searches included.
#[test]
fn an_operation_done_here_costs_by_default_what_it_took() {
    let options = CostOptions { contrary_one_in: 0, ..CostOptions::default() };
    let random = Cell::new(0);
    for (rpc_ns, ships) in [(999, true), (1001, false), (1150, false)] {
        assert_eq!(ask(&mut informed(options, 1000, rpc_ns), 0, None, &random).ships, ships, "{rpc_ns}");
    }
}

#[test]
fn the_cost_aware_one_goes_by_what_operations_took_below_a_miss() {
    let options = CostOptions { search_ns: 100, factor: 1.0, contrary_one_in: 0 };
    let mut policy = informed(options, 900, 2500);
    let random = Cell::new(0);
    // Scans: five leaves below a page of level 1. Of level 3, all but one page is cached.
    for _ in 0..2 {
        policy.done_here(SERVER, 1, 6000);
        policy.done_here(SERVER, 3, 1000);
    }
    let choices: Vec<bool> = (0..5).map(|level| ask(&mut policy, level, None, &random).ships).collect();
    // 2500 against 1000, 6000, 3000, 1000, 5000.
    assert_eq!(choices, [false, true, true, false, true]);
}

#[test]
fn the_cost_aware_one_fetches_what_the_cache_would_keep_if_others_save_by_it() {
    let options = CostOptions { search_ns: 0, factor: 1.0, contrary_one_in: 0 };
    let mut policy = informed(options, 1000, 2500);
    let mut ships = |level, is_hot| {
        let (random, hot) = (|| 0, || is_hot);
        policy.choose(&Miss { server: SERVER, level, load: None, random: &random, hot: &hot }).ships
    };
    // 2500 against 3000 and 4000, of which 1000 are left.
    assert_eq!([(2, false), (2, true), (3, true)].map(|(level, is_hot)| ships(level, is_hot)), [true, false, false]);
    // And against 6000, of which 4000 are left: what goes on to other leaves.
    for _ in 0..2 {
        policy.done_here(SERVER, 2, 6000);
    }
    let (random, hot) = (|| 0, || true);
    assert!(policy.choose(&Miss { server: SERVER, level: 2, load: None, random: &random, hot: &hot }).ships);
}

#[test]
fn operations_go_on_where_that_is_cheaper_than_a_message() {
    assert!(Cold.would_go_on(SERVER, 0) && !Cold.would_go_on(SERVER, 1));
    assert!(Always.would_go_on(SERVER, 9), "each use counts for those who do not say");
    let mut policy = CostAware::default();
    assert!(policy.would_go_on(SERVER, 9), "nothing is known yet");
    policy = informed(CostOptions { search_ns: 100, ..CostOptions::default() }, 900, 2500);
    assert_eq!([0, 2, 3].map(|pages| policy.would_go_on(SERVER, pages)), [true, true, false]);
}

#[test]
fn the_cost_aware_one_first_learns_what_it_does_not_know() {
    let (mut policy, random) = (CostAware::default(), Cell::new(1));
    // The first of each opens what stays open: only the second is believed.
    for took_ns in [90_000, 1000] {
        assert_eq!(ask(&mut policy, 2, None, &random), Choice { ships: false, is_contrary: true });
        policy.fetched(SERVER, took_ns);
    }
    for took_ns in [10_000, 20_000] {
        assert_eq!(ask(&mut policy, 2, None, &random), Choice { ships: true, is_contrary: true });
        policy.shipped(SERVER, took_ns);
    }
    assert_eq!(policy.averages(SERVER), (Some(1000), Some(10_000)));
    assert_eq!(ask(&mut policy, 2, None, &random), Choice::FETCH);
    // Another server is another matter.
    let draw = || 1;
    let other = Miss { server: ServerId::new(3).unwrap(), level: 2, load: None, random: &draw, hot: &|| false };
    assert!(policy.choose(&other).is_contrary);
}

#[test]
fn contrary_choices_cost_one_part_in_a_hundred_and_follow_a_change() {
    let mut policy = informed(CostOptions { search_ns: 200, ..CostOptions::default() }, 10_000, 5000);
    let random = Cell::new(0);
    let choices: Vec<Choice> = (0..10_000).map(|_| ask(&mut policy, 1, None, &random)).collect();
    let contrary = choices.iter().filter(|choice| choice.is_contrary).count();
    // One in 500: 20,400 against 5000, so four to five times as dear.
    assert_eq!(contrary, 20);
    assert!(choices.iter().all(|choice| choice.ships != choice.is_contrary));
    // The server is overloaded, then idle again: only contrary choices can tell.
    for (rpc_ns, ships) in [(200_000, false), (5000, true)] {
        for _ in 0..RARER_MAX as usize * 100 * SAMPLES {
            if ask(&mut policy, 1, None, &random).ships {
                policy.shipped(SERVER, rpc_ns);
            }
        }
        // 200,000 against 20,400: ten times as dear.
        let shipped = (0..10_000).filter(|_| ask(&mut policy, 1, None, &random).ships).count();
        assert_eq!(shipped, if ships { 9980 } else { 10 }, "{rpc_ns}");
    }
}

/// Whether each of `count` operations is shipped.
fn trace(policy: &mut BackOff, count: usize, load: Option<Load>, random: &Cell<u64>) -> String {
    (0..count).map(|_| if ask(policy, 1, load, random).ships { 'S' } else { '.' }).collect()
}

const FOUR: BackOffOptions = BackOffOptions { rounds: 4, threshold: 0.9 };

#[test]
fn back_off_is_as_in_the_paper_by_default() {
    assert_eq!(BackOffOptions::default(), BackOffOptions { rounds: 8, threshold: 0.95 });
    assert_eq!(ServeMessages::default().report_interval, Duration::from_millis(10));
    // Whoever does not choose gets that one: 950 of 1000 is not busy yet, and it keeps away for 7 of [0, 8) operations.
    let (mut policy, random) = (BackOff::default(), Cell::new(7));
    assert_eq!(trace(&mut policy, 9, load(1, 950), &random), "S".repeat(9));
    assert_eq!(trace(&mut policy, 7, load(2, 951), &random), ".".repeat(7));
    assert_eq!(trace(&mut policy, 1, load(3, 0), &random), "S");
}

#[test]
fn back_off_ships_until_the_server_is_busy() {
    let (mut policy, random) = (BackOff::new(FOUR), Cell::new(3));
    assert_eq!(trace(&mut policy, 5, None, &random), "SSSSS");
    assert_eq!(trace(&mut policy, 5, load(1, 900), &random), "SSSSS");
    // 3 of [0, 4); then, the last report being all that is known, 4 % 4 = 0 of [4, 8), 5 % 4 = 1 of [8, 12), 2 of [12, 16).
    assert_eq!(trace(&mut policy, 3, load(2, 901), &random), "...");
    assert_eq!(trace(&mut policy, 4, load(2, 901), &random), "....");
    assert_eq!(random.get(), 5);
    assert_eq!(trace(&mut policy, 9 + 14, load(2, 901), &random), ".".repeat(9 + 14));
    assert_eq!(random.get(), 7);
    // Not busy any more: all are shipped, and it begins at [0, 4) again. What was drawn is kept to.
    assert_eq!(trace(&mut policy, 3, load(3, 0), &random), "SSS");
    random.set(2);
    assert_eq!(trace(&mut policy, 1, load(4, 1000), &random), ".");
    assert_eq!(trace(&mut policy, 4, load(5, 100), &random), ".SSS");
}

#[test]
fn back_off_may_draw_nothing_and_goes_on_to_the_next_interval() {
    let (mut policy, random) = (BackOff::new(FOUR), Cell::new(0));
    // 0 of [0, 4): shipped all the same. Then 1 of [4, 8).
    assert_eq!(trace(&mut policy, 6, load(1, 1000), &random), "S.....");
}

#[test]
fn reports_extend_a_back_off_that_is_nearly_over() {
    let (mut policy, random) = (BackOff::new(FOUR), Cell::new(3));
    assert_eq!(trace(&mut policy, 1, load(1, 1000), &random), ".");
    // Two are left, up to 4 may be: [4, 8).
    assert_eq!(trace(&mut policy, 4, load(2, 1000), &random), "....");
    assert_eq!(random.get(), 5);
    // None is left: [8, 12), and further with each report.
    for report in 3..8 {
        assert_eq!(trace(&mut policy, 1, load(report, 1000), &random), ".");
    }
    assert_eq!(random.get(), 10);
    assert_eq!(trace(&mut policy, 100, load(8, 0), &random).matches('.').count(), 24);
}

/// Whoever knows better what comes next than the last report does says so.
#[test]
fn back_off_asks_who_predicts_once_for_each_report() {
    let mut asked = Vec::new();
    let random = Cell::new(6);
    let mut policy = BackOff::new(FOUR).predicting(|server, load: Load| {
        asked.push((server, load.report));
        // Falling from 1000: it will be idle.
        if load.busy_permille < 1000 { 0.0 } else { 1.0 }
    });
    let mut story = String::new();
    for (report, busy_permille) in [(1, 1000), (1, 1000), (2, 950), (2, 950), (3, 1000)] {
        story.push(if ask(&mut policy, 1, load(report, busy_permille), &random).ships { 'S' } else { '.' });
    }
    assert_eq!(story, "..SS.");
    assert_eq!(asked, [(SERVER, 1), (SERVER, 2), (SERVER, 3)]);
}

/// The first samples were of operations that all waited for one thing: what is thought of a way is not kept for long if it is far off.
#[test]
fn what_was_thought_far_too_dear_is_soon_forgotten() {
    let (mut policy, random) = (CostAware::default(), Cell::new(1));
    (0..2).for_each(|_| policy.fetched(SERVER, 20_000));
    (0..8).for_each(|_| policy.shipped(SERVER, 5_000_000));
    let decisions = (0..100_000).find(|_| {
        let choice = ask(&mut policy, 0, None, &random);
        if choice.ships {
            policy.shipped(SERVER, 5_000);
        }
        choice == Choice::SHIP
    });
    // A contrary choice comes once in 1600.
    assert!(decisions.is_some_and(|decisions| decisions <= 2 * 100 * RARER_MAX as usize), "{decisions:?}");
    // What is a little cheaper than before is an average of all.
    let mut average = MovingAverage::default();
    (0..SAMPLES).for_each(|_| average.add(1000));
    average.add(100);
    assert_eq!(average.get(), Some((1000 * 49 + 100) / 50));
    average.add(1);
    assert_eq!(average.get(), Some(1));
}

/// The second sample of an average is bounded by the first.
#[test]
fn the_second_sample_is_no_outlier_either() {
    let mut average = MovingAverage::default();
    average.add(1000);
    average.add(5_000_000);
    assert_eq!(average.get(), Some((1000 + 10_000) / 2));
}

/// A server that reports no more is tried again, as in Catfish, if not at once: between two reports the last one counts.
#[test]
fn back_off_ends_if_nothing_is_reported_any_more() {
    let (mut policy, random) = (BackOff::new(FOUR), Cell::new(3));
    assert_eq!(trace(&mut policy, 10_000, load(1, 1000), &random), ".".repeat(10_000));
    let story = trace(&mut policy, 100_000, load(1, 1000), &random);
    assert!(story.contains('S') && story.ends_with("SSSS"), "it never ships again");
    // Until it is told again.
    random.set(3);
    assert_eq!(trace(&mut policy, 3 + 4, load(2, 1000), &random), ".".repeat(7));
}

/// What comes back costs a message, and is to be done here all the same.
#[test]
fn what_comes_back_counts_as_a_message_and_what_is_left() {
    let options = CostOptions { search_ns: 100, factor: 1.0, contrary_one_in: 0 };
    let mut policy = informed(options, 900, 1500);
    let random = Cell::new(0);
    // 1500 against 2000.
    assert_eq!(ask(&mut policy, 1, None, &random), Choice::SHIP);
    (0..SAMPLES).for_each(|_| policy.came_back(SERVER, 1, 1500));
    assert_eq!(policy.averages(SERVER), (Some(900), Some(1500 + 2000)));
    assert_eq!(ask(&mut policy, 1, None, &random), Choice::FETCH);
}
