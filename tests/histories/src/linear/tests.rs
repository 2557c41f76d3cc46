//! Controls, and comparisons with the definition.

use std::collections::{BTreeMap, HashSet};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::atomic_map::{Simulation, apply};
use crate::history::Op;
use crate::workload::{Mix, WorkloadSpec, spread_keys};

const KEY: u64 = 9;

fn record(op: Op, outcome: Outcome, times: (u64, u64)) -> Record {
    Record { client: 0, op, outcome, invoked_ns: times.0, returned_ns: times.1 }
}

fn get(found: Option<u64>, times: (u64, u64)) -> Record {
    record(Op::Get { key: KEY }, Outcome::Value(found), times)
}

fn insert(value: u64, inserted: bool, times: (u64, u64)) -> Record {
    record(Op::Insert { key: KEY, value }, Outcome::Inserted(inserted), times)
}

fn upsert(value: u64, found: Option<u64>, times: (u64, u64)) -> Record {
    record(Op::Upsert { key: KEY, value }, Outcome::Value(found), times)
}

fn update(value: u64, found: Option<u64>, times: (u64, u64)) -> Record {
    record(Op::Update { key: KEY, value }, Outcome::Value(found), times)
}

fn remove(found: Option<u64>, times: (u64, u64)) -> Record {
    record(Op::Remove { key: KEY }, Outcome::Value(found), times)
}

fn unknown(op: Op, invoked_ns: u64) -> Record {
    record(op, Outcome::Unknown, (invoked_ns, NEVER_NS))
}

fn reason(records: impl IntoIterator<Item = Record>) -> Option<Reason> {
    match check(&records.into_iter().collect()) {
        Ok(_) => None,
        Err(LinearError::Violation(violation)) => Some(violation.reason),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn control_stale_read() {
    let stale = [insert(1, true, (0, 1)), upsert(2, Some(1), (2, 3)), get(Some(1), (4, 5))];
    assert_eq!(reason(stale), Some(Reason::FoundAfterReplaced { value: 1 }));
    let in_time = [insert(1, true, (0, 1)), upsert(2, Some(1), (2, 4)), get(Some(1), (4, 5))];
    assert_eq!(reason(in_time), None);
    let absent = [insert(1, true, (0, 1)), get(None, (2, 3)), get(Some(1), (4, 5))];
    assert_eq!(reason(absent), Some(Reason::AbsentWhilePresent { value: 1 }));
    let removed = [insert(1, true, (0, 1)), remove(Some(1), (2, 3)), get(Some(1), (4, 5))];
    assert_eq!(reason(removed), Some(Reason::FoundAfterReplaced { value: 1 }));
}

#[test]
fn control_lost_update() {
    let lost = [insert(1, true, (0, 1)), update(2, Some(1), (2, 5)), update(3, Some(1), (2, 5))];
    assert_eq!(reason(lost), Some(Reason::ReplacedTwice { value: 1 }));
    let vanished = [insert(1, true, (0, 1)), update(2, Some(1), (2, 3)), remove(None, (4, 5))];
    assert!(reason(vanished).is_some());
    let in_order = [insert(1, true, (0, 1)), update(2, Some(1), (2, 5)), update(3, Some(2), (2, 5))];
    assert_eq!(reason(in_order), None);
}

#[test]
fn control_duplicate_insert() {
    let twice = [insert(1, true, (0, 5)), insert(2, true, (0, 5))];
    assert!(matches!(reason(twice), Some(Reason::NoOrder { .. })));
    let refused = [insert(1, true, (0, 5)), insert(2, false, (0, 5))];
    assert_eq!(reason(refused), None);
    let refused_by_nothing = [insert(2, false, (0, 5)), insert(1, true, (6, 7))];
    assert!(matches!(reason(refused_by_nothing), Some(Reason::NoOrder { placed: 0, total: 2, .. })));
}

#[test]
fn control_value_from_nowhere() {
    assert_eq!(reason([get(Some(3), (0, 1))]), Some(Reason::NeverWritten { value: 3 }));
    let early = [get(Some(3), (0, 1)), insert(3, true, (2, 3))];
    assert_eq!(reason(early), Some(Reason::FoundBeforeWritten { value: 3 }));
    let refused = [insert(1, true, (0, 1)), insert(3, false, (2, 3)), get(Some(3), (4, 5))];
    assert_eq!(reason(refused), Some(Reason::NeverWritten { value: 3 }));
}

#[test]
fn control_two_values_at_once() {
    // Two readers that each go back to the value that the other one has left.
    let records = [insert(1, true, (0, 1)), upsert(2, Some(1), (2, 20)), get(Some(2), (3, 4)), get(Some(1), (5, 6))];
    assert!(reason(records).is_some());
    let apart = [
        unknown(Op::Upsert { key: KEY, value: 1 }, 0),
        unknown(Op::Upsert { key: KEY, value: 2 }, 0),
        get(Some(1), (1, 2)),
        get(Some(2), (3, 4)),
        get(Some(1), (5, 6)),
        get(Some(2), (7, 8)),
    ];
    assert_eq!(reason(apart), Some(Reason::TwoValuesAtOnce { first: 1, second: 2 }));
}

#[test]
fn unknown_outcomes_take_effect_late_or_never() {
    let remove_lost = unknown(Op::Remove { key: KEY }, 2);
    let late = [insert(1, true, (0, 1)), remove_lost.clone(), get(Some(1), (4, 5)), get(None, (6, 7))];
    assert_eq!(reason(late), None);
    let never = [insert(1, true, (0, 1)), remove_lost.clone(), get(Some(1), (4, 5)), get(Some(1), (6, 7))];
    assert_eq!(reason(never), None);
    let twice = [insert(1, true, (0, 1)), remove_lost, get(None, (4, 5)), insert(2, true, (6, 7)), get(None, (8, 9))];
    assert!(reason(twice).is_some(), "one removal cannot take effect twice");
    let too_early = [insert(1, true, (0, 1)), get(None, (2, 3)), unknown(Op::Remove { key: KEY }, 4)];
    assert!(reason(too_early).is_some(), "it cannot take effect before it was invoked");
    let refused = [unknown(Op::Insert { key: KEY, value: 1 }, 0), insert(2, false, (3, 4)), get(None, (5, 6))];
    assert!(reason(refused).is_some(), "what refused the insert did not go away");
    let refused = [unknown(Op::Insert { key: KEY, value: 1 }, 0), insert(2, false, (3, 4))];
    assert_eq!(reason(refused), None);
}

#[test]
fn the_initial_entries_count() {
    let mut history: History = [get(Some(5), (1, 2)), remove(Some(5), (3, 4)), get(None, (5, 6))].into_iter().collect();
    assert!(check(&history).is_err());
    history.set_initial(BTreeMap::from([(KEY, 5)]));
    assert!(check(&history).is_ok());
    history.push(get(Some(5), (7, 8)));
    assert!(check(&history).is_err());
    let mut history: History = [get(None, (1, 2)), get(Some(5), (3, 4))].into_iter().collect();
    history.set_initial(BTreeMap::from([(KEY, 5)]));
    let Err(LinearError::Violation(violation)) = check(&history) else { panic!("not found") };
    assert_eq!(violation.reason, Reason::AbsentWhilePresent { value: 5 });
}

#[test]
fn a_malformed_record_is_an_error() {
    let wrong_kind = record(Op::Get { key: 1 }, Outcome::Inserted(true), (0, 1));
    let backwards = get(None, (5, 4));
    for record in [wrong_kind, backwards] {
        assert!(matches!(check(&[record].into_iter().collect()), Err(LinearError::Malformed(_))));
    }
}

#[test]
fn an_explanation_names_the_key_and_the_operations() {
    let records = [insert(0xa, true, (10, 20)), insert(0xb, true, (15, 30))];
    let error = check(&records.into_iter().collect()).unwrap_err().to_string();
    for part in ["key 9", "1 of 2", "insert(9, 0xa) -> true", "insert(9, 0xb) -> true", "[15 .. 30]"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

/// The definition itself: tries every order, and every subset of the operations with unknown outcomes.
fn has_an_order(
    records: &[Record],
    done: u32,
    map: &BTreeMap<u64, u64>,
    failed: &mut HashSet<(u32, Option<u64>)>,
) -> bool {
    let left = |at: usize| done & (1 << at) == 0;
    let is_unknown = |at: usize| records[at].outcome == Outcome::Unknown;
    let end = records.len();
    if (0..end).all(|at| !left(at) || is_unknown(at)) {
        return true;
    }
    if failed.contains(&(done, map.get(&KEY).copied())) {
        return false;
    }
    for at in (0..end).filter(|at| left(*at)) {
        let returned_before = |other: usize| records[other].returned_ns < records[at].invoked_ns;
        if (0..end).any(|other| left(other) && !is_unknown(other) && returned_before(other)) {
            continue;
        }
        let mut map = map.clone();
        let outcome = apply(&mut map, &records[at].op);
        if (is_unknown(at) || outcome == records[at].outcome) && has_an_order(records, done | (1 << at), &map, failed) {
            return true;
        }
    }
    failed.insert((done, map.get(&KEY).copied()));
    false
}

/// A small history whose outcomes come from a real order, with some of them changed.
fn small_history(random: &mut StdRng) -> History {
    let count = random.random_range(1..=14);
    // Few values, so that they repeat; or many, so that most writes are distinct.
    let values = if random.random() { 3 } else { 1000 };
    let kinds = if random.random() { 5 } else { 2 };
    let wrong = [0.0, 0.03, 0.1][random.random_range(0..3)];
    let lost = [0.0, 0.1, 0.3][random.random_range(0..3)];
    let before_ns = random.random_range(1..20);
    let after_ns = random.random_range(1..20);
    let mut map = BTreeMap::new();
    let mut history = History::new();
    if random.random_bool(0.3) {
        map.insert(KEY, random.random_range(1..=values));
        history.set_initial(map.clone());
    }
    for at in 0..count {
        let (key, value) = (KEY, random.random_range(1..=values));
        let op = match random.random_range(0..kinds) {
            0 => Op::Insert { key, value },
            1 => Op::Remove { key },
            2 => Op::Upsert { key, value },
            3 => Op::Update { key, value },
            _ => Op::Get { key },
        };
        let mut outcome = apply(&mut map, &op);
        if random.random_bool(wrong) {
            outcome = match outcome {
                Outcome::Inserted(inserted) => Outcome::Inserted(!inserted),
                _ if random.random() => Outcome::Value(None),
                _ => Outcome::Value(Some(random.random_range(1..=values))),
            };
        }
        let moment_ns = 20 + at * 3;
        let invoked_ns = moment_ns - random.random_range(0..before_ns);
        let mut returned_ns = moment_ns + random.random_range(0..after_ns);
        if random.random_bool(lost) {
            (outcome, returned_ns) = (Outcome::Unknown, NEVER_NS);
        }
        history.push(record(op, outcome, (invoked_ns, returned_ns)));
    }
    // Two operations exchange their outcomes: values that are there, at another time.
    if wrong > 0.0 && random.random() {
        let (one, other) = (random.random_range(0..history.len()), random.random_range(0..history.len()));
        let records = history.records_mut();
        let (a, b) = (records[one].outcome.clone(), records[other].outcome.clone());
        if matches!((&a, &b), (Outcome::Value(_), Outcome::Value(_))) {
            (records[one].outcome, records[other].outcome) = (b, a);
        }
    }
    history
}

/// How many times as many histories as are enough for every day: `FARLINK_CHECKER_ROUNDS`, or once.
fn rounds() -> u64 {
    std::env::var("FARLINK_CHECKER_ROUNDS")
        .map_or(1, |rounds| rounds.parse().expect("FARLINK_CHECKER_ROUNDS is no number"))
}

#[test]
fn small_histories_agree_with_the_definition() {
    let mut verdicts = BTreeMap::new();
    for seed in 0..30_000 * rounds() {
        let history = small_history(&mut StdRng::seed_from_u64(seed));
        let expected = has_an_order(history.records(), 0, history.initial(), &mut HashSet::new());
        let found = check(&history);
        let verdict = match &found {
            Ok(_) => "legal",
            Err(LinearError::Violation(violation)) => match violation.reason {
                Reason::NeverWritten { .. } => "never written",
                Reason::FoundBeforeWritten { .. } => "before written",
                Reason::ReplacedTwice { .. } => "replaced twice",
                Reason::FoundAfterReplaced { .. } => "after replaced",
                Reason::Vanished { .. } => "vanished",
                Reason::TwoValuesAtOnce { .. } => "two values",
                Reason::AbsentWhilePresent { .. } => "absent while present",
                Reason::NoOrder { .. } => "no order",
            },
            Err(error) => panic!("seed {seed}: {error}"),
        };
        *verdicts.entry(verdict).or_insert(0) += 1;
        assert_eq!(found.is_ok(), expected, "seed {seed}: {found:?}\n{history:#?}");
    }
    println!("{verdicts:?}");
    assert_eq!(verdicts.len(), 9, "every verdict occurs: {verdicts:?}");
    assert!(verdicts["legal"] > 5_000 * rounds() && verdicts["no order"] > 1_000 * rounds(), "{verdicts:?}");
}

fn simulation(seed: u64, keys: usize, operations: usize, unknown: f64, mix: Mix) -> Simulation {
    let workload = WorkloadSpec { seed, keys: spread_keys(keys), theta: 0.9, mix, scan_limit_max: 1 };
    Simulation { workload, clients: 8, in_flight: 16, operations, unknown }
}

#[test]
fn legal_histories_pass() {
    for seed in 0..60 {
        let keys = [1, 2, 10][seed as usize % 3];
        let unknown = [0.0, 0.001, 0.02][seed as usize / 3 % 3];
        let mix = [Mix::POINTS, Mix::CHURN][seed as usize % 2];
        let history = simulation(seed, keys, 4000, unknown, mix).run().unwrap();
        assert!(history.in_flight_max() > 100);
        if let Err(error) = check(&history) {
            panic!("seed {seed}, {keys} keys, {unknown} unknown: {error}");
        }
    }
}

/// What a broken map might do, once, in a long history that is legal otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Damage {
    /// A reader finds a value that was replaced long before.
    StaleRead,
    /// An insert says that it succeeded, and was refused.
    DuplicateInsert,
    /// A write says that it succeeded, and nobody sees its value.
    LostWrite,
    /// An insert is refused by nothing.
    RefusedInsert,
    /// Two operations find what the other one should have found.
    Exchange,
}

/// Returns false if the history has nothing to damage in this way.
fn damage(history: &mut History, how: Damage, random: &mut StdRng) -> bool {
    let records = history.records_mut();
    records.sort_by_key(|record| record.invoked_ns);
    let at = random.random_range(records.len() / 2..records.len() * 3 / 4);
    let key = records[at].op.key();
    let (early, late) = records.split_at_mut(at);
    let early = early[..at / 2].iter().rev().filter(|r| r.op.key() == key);
    let late = late.iter_mut().filter(|r| r.op.key() == key && r.outcome != Outcome::Unknown);
    match how {
        Damage::StaleRead => {
            let replaced = |r: &Record| match (r.op, &r.outcome) {
                (Op::Update { .. } | Op::Upsert { .. } | Op::Remove { .. }, Outcome::Value(value)) => *value,
                _ => None,
            };
            let stale = early.clone().find_map(replaced);
            let mut reads = late.filter(|r| matches!(r.op, Op::Get { .. }));
            let (Some(stale), Some(read)) = (stale, reads.next()) else { return false };
            read.outcome = Outcome::Value(Some(stale));
        }
        Damage::DuplicateInsert => {
            let mut refused = late.filter(|r| r.outcome == Outcome::Inserted(false));
            let Some(refused) = refused.next() else { return false };
            refused.outcome = Outcome::Inserted(true);
        }
        Damage::LostWrite => {
            let mut reads = late.filter(|r| matches!((r.op, &r.outcome), (Op::Get { .. }, Outcome::Value(_))));
            let Some(read) = reads.next() else { return false };
            read.op = Op::Upsert { key: key.unwrap_or_default(), value: 77 };
        }
        Damage::RefusedInsert => {
            let mut reads = late.filter(|r| matches!((r.op, &r.outcome), (Op::Get { .. }, Outcome::Value(None))));
            let Some(read) = reads.next() else { return false };
            read.op = Op::Insert { key: key.unwrap_or_default(), value: 77 };
            read.outcome = Outcome::Inserted(false);
        }
        Damage::Exchange => {
            let mut finders =
                late.filter(|r| matches!((r.op, &r.outcome), (Op::Remove { .. }, Outcome::Value(Some(_)))));
            let (Some(one), Some(other)) = (finders.next(), finders.nth(1)) else { return false };
            std::mem::swap(&mut one.outcome, &mut other.outcome);
        }
    }
    true
}

#[test]
fn damage_in_long_histories_is_decided() {
    let mut verdicts: BTreeMap<_, [usize; 3]> = BTreeMap::new();
    for seed in 0..180 * rounds() {
        let keys = [2, 10, 200][seed as usize % 3];
        let unknown = [0.0, 0.001, 0.05][seed as usize / 3 % 3];
        let mix = [Mix::POINTS, Mix::CHURN][seed as usize / 9 % 2];
        let how =
            [Damage::StaleRead, Damage::DuplicateInsert, Damage::LostWrite, Damage::RefusedInsert, Damage::Exchange]
                [seed as usize / 18 % 5];
        let mut history = simulation(seed, keys, 6000, unknown, mix).run().unwrap();
        if !damage(&mut history, how, &mut StdRng::seed_from_u64(seed)) {
            continue;
        }
        let verdict = match check(&history) {
            Ok(_) => 0,
            Err(LinearError::Violation(_)) => 1,
            Err(LinearError::Undecided { .. }) => 2,
            Err(error) => panic!("seed {seed}: {error}"),
        };
        verdicts.entry((how, (unknown * 1000.0) as u32)).or_default()[verdict] += 1;
    }
    println!("{verdicts:?}");
    for ((how, unknown), [legal, violations, undecided]) in verdicts {
        assert_eq!(undecided, 0, "{how:?}");
        // An operation with an unknown outcome may explain a lost write; and an insert may well be refused, and
        // values exchanged, in a history with as much concurrency as this.
        let certain = match how {
            Damage::StaleRead => true,
            Damage::DuplicateInsert | Damage::LostWrite => unknown == 0,
            Damage::RefusedInsert | Damage::Exchange => false,
        };
        assert!(violations > 0 && (legal == 0 || !certain), "{how:?}: {violations} found, {legal} not");
    }
}

#[test]
fn a_limit_ends_the_search() {
    // Every value is written twice, so few short cuts apply, and the two inserts at the end make all orders fail.
    let twice = |values: u64| -> History {
        let values = (0..values * 2).map(|i| 100 + i / 2);
        let pairs = values.flat_map(|value| [insert(value, true, (0, 900)), remove(Some(value), (0, 900))]);
        pairs.chain([insert(1, true, (950, 960)), insert(2, true, (955, 970))]).collect()
    };
    let limits = Limits { configurations_max: 1000 };
    let result = check_with(&twice(12), limits);
    assert!(matches!(result, Err(LinearError::Undecided { key: KEY, operations: 50, .. })), "{result:?}");
    let result = check(&twice(4));
    assert!(matches!(result, Err(LinearError::Violation(_))), "{result:?}");
}
