use super::{
    cells::{KIND_DONE, KIND_INVOKED, seal},
    *,
};
use proptest::prelude::*;

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        any::<u64>().prop_map(|key| Op::Get { key }),
        any::<(u64, u64)>().prop_map(|(key, value)| Op::Insert { key, value }),
        any::<(u64, u64)>().prop_map(|(key, value)| Op::Upsert { key, value }),
        any::<(u64, u64)>().prop_map(|(key, value)| Op::Update { key, value }),
        any::<u64>().prop_map(|key| Op::Remove { key }),
        any::<(u64, u32, bool)>().prop_map(|(from, limit, descending)| Op::Scan { from, limit, descending }),
    ]
}

/// An operation with an outcome that it can have.
fn call() -> impl Strategy<Value = (Op, Outcome)> {
    let result = (any::<Option<u64>>(), any::<bool>(), prop::collection::vec(any::<(u64, u64)>(), 0..8), 0..5);
    (op(), result).prop_map(|(op, (value, inserted, entries, lost))| {
        let outcome = match op {
            _ if lost == 0 => Outcome::Unknown,
            Op::Insert { .. } => Outcome::Inserted(inserted),
            Op::Scan { .. } => Outcome::Entries(entries.into()),
            _ => Outcome::Value(value),
        };
        (op, outcome)
    })
}

fn record_all(calls: &[(Op, Outcome)], flush: Flush) -> Vec<u8> {
    let recorder = Recorder::new(Vec::new(), 7, flush).unwrap();
    for (op, outcome) in calls {
        let ticket = recorder.begin(*op).unwrap();
        recorder.end(ticket, outcome.clone()).unwrap();
    }
    recorder.finish().unwrap()
}

proptest! {
    #[test]
    fn what_is_written_is_read(calls in prop::collection::vec(call(), 0..20), kill_proof: bool) {
        let bytes = record_all(&calls, if kill_proof { Flush::Invocations } else { Flush::WhenFull });
        let history = History::decode(&bytes).unwrap();
        let read: Vec<_> = history.records().iter().map(|r| (r.op, r.outcome.clone())).collect();
        prop_assert_eq!(read, calls);
        prop_assert!(history.records().iter().all(|r| r.client == 7 && r.is_well_formed()));
    }

    #[test]
    fn a_torn_tail_loses_results_but_no_invocation(
        calls in prop::collection::vec(call(), 1..10),
        cut: prop::sample::Index,
    ) {
        let bytes = record_all(&calls, Flush::Invocations);
        let whole = History::decode(&bytes).unwrap();
        let kept = CELL_BYTES + cut.index(bytes.len() - CELL_BYTES + 1);
        let torn = History::decode(&bytes[..kept]).unwrap();
        let (cells, _) = bytes[CELL_BYTES..kept].as_chunks::<CELL_BYTES>();
        let invoked = cells.iter().filter(|cell| cell[0] == KIND_INVOKED).count();
        prop_assert_eq!(torn.len(), invoked);
        for (at, record) in torn.records().iter().enumerate() {
            let full = &whole.records()[at];
            prop_assert_eq!(record.op, full.op);
            prop_assert!(record == full || (record.outcome == Outcome::Unknown && at + 1 == torn.len()));
        }
    }

    #[test]
    fn a_damaged_byte_is_noticed(
        calls in prop::collection::vec(call(), 2..6),
        at: prop::sample::Index,
        flip in 1u8..,
    ) {
        let mut bytes = record_all(&calls, Flush::WhenFull);
        let whole = History::decode(&bytes).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        match History::decode(&bytes) {
            Err(HistoryError::Header) => prop_assert!(at < CELL_BYTES),
            Err(HistoryError::Damaged { offset, .. }) => {
                prop_assert_eq!(offset, at / CELL_BYTES * CELL_BYTES);
                prop_assert!(offset + CELL_BYTES < bytes.len(), "a damaged last cell is a torn one");
            }
            Err(error) => prop_assert!(false, "{}", error),
            Ok(history) => {
                prop_assert!(at / CELL_BYTES == bytes.len() / CELL_BYTES - 1, "damage at {} went unnoticed", at);
                prop_assert_eq!(history.records(), &whole.records()[..history.len()]);
            }
        }
    }

    #[test]
    fn random_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = History::decode(&bytes);
    }

    /// Cells whose checksum is right and whose contents are not reach the decoder proper.
    #[test]
    fn wrong_contents_do_not_panic(
        calls in prop::collection::vec(call(), 1..12),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0..56usize, any::<u8>(), 0..4u8), 1..4),
    ) {
        let mut bytes = record_all(&calls, Flush::Invocations);
        let (cells, _) = bytes.as_chunks_mut::<CELL_BYTES>();
        for (at, byte, random, small) in changes {
            let cells = &mut cells[1..];
            let cell = &mut cells[at.index(calls.len())];
            // Most of what is decided on is in the first bytes, and small.
            let (byte, new) = if small < 3 { (byte % 4, small * 2 + random % 2) } else { (byte, random) };
            cell[byte] = new;
            *cell = seal(*cell);
        }
        if let Ok(history) = History::decode(&bytes) {
            prop_assert!(history.records().iter().all(Record::is_well_formed));
        }
    }
}

#[test]
fn cells_that_no_recorder_writes_are_refused() {
    let scan = Op::Scan { from: 1, limit: 9, descending: false };
    let bytes = record_all(&[(scan, Outcome::Entries([(1, 1), (2, 2), (3, 3), (4, 4)].into()))], Flush::WhenFull);
    assert_eq!(History::decode(&bytes).unwrap().len(), 1);
    let refused = |cell: usize, byte: usize, new: u8, expected: &str| {
        let mut bytes = bytes.clone();
        let cell = &mut bytes.as_chunks_mut::<CELL_BYTES>().0[cell];
        cell[byte] = new;
        *cell = seal(*cell);
        match History::decode(&bytes) {
            Err(HistoryError::Damaged { what, .. }) => assert_eq!(what, expected),
            other => panic!("{other:?} instead of {expected}"),
        }
    };
    refused(1, 0, 9, "unknown kind");
    refused(1, 1, 6, "unknown operation");
    refused(1, 2, 5, "unknown outcome");
    refused(1, 1, 0, "an outcome that its operation does not have, or a return before the invocation");
    refused(1, 39, 0xff, "an outcome that its operation does not have, or a return before the invocation");
    refused(1, 20, 1, "limit out of range");
    refused(1, 0, KIND_INVOKED, "an invocation with an outcome");
    refused(1, 24, 0, "entries without a scan");
    refused(1, 24, 3, "entries without a scan");
    refused(2, 0, KIND_DONE, "a scan lacks entries");
    refused(2, 1, 255, "wrong number of entries");
    refused(3, 1, 3, "wrong number of entries");
}

#[test]
fn an_operation_that_never_ends_is_unknown() {
    for flush in [Flush::WhenFull, Flush::Invocations] {
        let recorder = Recorder::new(Vec::new(), 1, flush).unwrap();
        let lost = recorder.begin(Op::Remove { key: 5 }).unwrap();
        let ended = recorder.begin(Op::Get { key: 6 }).unwrap();
        recorder.end(ended, Outcome::Value(None)).unwrap();
        drop(lost);
        let history = History::decode(&recorder.finish().unwrap()).unwrap();
        assert_eq!(history.len(), 2);
        let unknown: Vec<_> = history.records().iter().filter(|r| r.outcome == Outcome::Unknown).collect();
        assert_eq!((unknown.len(), unknown[0].op, unknown[0].returned_ns), (1, Op::Remove { key: 5 }, NEVER_NS));
    }
}

#[test]
fn files_of_a_directory_are_merged() {
    let directory = tempfile::tempdir().unwrap();
    for client in 0..3 {
        let recorder = Recorder::in_dir(directory.path(), client, Flush::WhenFull).unwrap();
        let ticket = recorder.begin(Op::Get { key: u64::from(client) }).unwrap();
        recorder.end(ticket, Outcome::Value(None)).unwrap();
        assert!(Recorder::in_dir(directory.path(), client, Flush::WhenFull).is_err(), "a file is never overwritten");
    }
    fs::write(directory.path().join("notes.txt"), "not a history").unwrap();
    fs::write(directory.path().join("killed-at-once.history"), "").unwrap();
    let history = History::read_dir(directory.path()).unwrap();
    assert_eq!(history.records().iter().map(|r| r.client).collect::<Vec<_>>(), [0, 1, 2]);
    fs::write(directory.path().join("z.history"), [1; 200]).unwrap();
    assert!(matches!(History::read_dir(directory.path()), Err(HistoryError::File { .. })));
}

#[test]
fn a_ticket_of_another_recorder_is_refused() {
    let one = Recorder::new(Vec::new(), 1, Flush::WhenFull).unwrap();
    let other = Recorder::new(Vec::new(), 2, Flush::WhenFull).unwrap();
    let ticket = one.begin(Op::Get { key: 1 }).unwrap();
    assert!(matches!(other.end(ticket, Outcome::Value(None)), Err(HistoryError::Append(_))));
}

#[test]
fn the_clock_is_shared_by_threads_and_goes_forward() {
    let before_ns = now_ns();
    let other_ns = std::thread::spawn(now_ns).join().unwrap();
    let after_ns = now_ns();
    assert!(before_ns <= other_ns && other_ns <= after_ns);
}
