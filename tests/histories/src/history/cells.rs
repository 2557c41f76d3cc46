//! History files.
//!
//! Every process appends to files of its own, and the parent merges them ([`History::read_dir`]). A file is a sequence
//! of 64-byte little-endian cells, the first of them a header:
//!
//! ```text
//! 0     1   2        3      4       8         16           24            32       40        48   56
//! kind  op  outcome  flags  client  key/from  value/limit  result/count  invoked  returned  seq  checksum
//! ```
//!
//! A `DONE` cell holds a whole operation. An `INVOKED` cell holds one whose outcome was not known when it was written;
//! a later `DONE` cell with the same `seq` supersedes it, and if none follows, the outcome is unknown. The entries that a
//! scan returned follow its `DONE` cell in `ENTRIES` cells, three to a cell.
//!
//! A process that is killed tears at most what it wrote last, so a short or damaged last cell is dropped, and so is a
//! scan whose entries are not all there. Damage anywhere else is an error. No input makes [`History::decode`] panic.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use super::{History, HistoryError, Op, Outcome, Record};

/// Bytes of one cell of a history file.
pub const CELL_BYTES: usize = 64;
pub(super) const MAGIC: [u8; 8] = *b"FLHIST01";
pub(super) const KIND_DONE: u8 = 1;
pub(super) const KIND_INVOKED: u8 = 2;
pub(super) const KIND_ENTRIES: u8 = 3;
pub(super) const FLAG_DESCENDING: u8 = 1;
pub(super) const ENTRIES_PER_CELL: usize = 3;

/// A strong 64-bit mix (the finaliser of SplitMix64).
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

pub(super) type Cell = [u8; CELL_BYTES];

pub(super) fn word(cell: &Cell, at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&cell[at..at + 8]);
    u64::from_le_bytes(bytes)
}

pub(super) fn set_word(cell: &mut Cell, at: usize, word: u64) {
    cell[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

fn checksum(cell: &Cell) -> u64 {
    (0..CELL_BYTES - 8).step_by(8).fold(0x6661_726c_696e_6b21, |sum: u64, at| mix(sum.rotate_left(9) ^ word(cell, at)))
}

pub(super) fn seal(mut cell: Cell) -> Cell {
    let sum = checksum(&cell);
    set_word(&mut cell, CELL_BYTES - 8, sum);
    cell
}

pub(super) fn header_cell() -> Cell {
    let mut cell = [0; CELL_BYTES];
    cell[..8].copy_from_slice(&MAGIC);
    seal(cell)
}

/// Writes the cells of one operation.
pub(super) fn encode_record(kind: u8, seq: u64, record: &Record, out: &mut impl Write) -> io::Result<()> {
    let (op, key, value, flags) = match record.op {
        Op::Get { key } => (0, key, 0, 0),
        Op::Insert { key, value } => (1, key, value, 0),
        Op::Upsert { key, value } => (2, key, value, 0),
        Op::Update { key, value } => (3, key, value, 0),
        Op::Remove { key } => (4, key, 0, 0),
        Op::Scan { from, limit, descending } => {
            (5, from, u64::from(limit), if descending { FLAG_DESCENDING } else { 0 })
        }
    };
    let (outcome, result) = match &record.outcome {
        Outcome::Unknown => (0, 0),
        Outcome::Value(None) => (1, 0),
        Outcome::Value(Some(value)) => (2, *value),
        Outcome::Inserted(inserted) => (3, u64::from(*inserted)),
        Outcome::Entries(entries) => (4, entries.len() as u64),
    };
    let mut cell = [0; CELL_BYTES];
    cell[..4].copy_from_slice(&[kind, op, outcome, flags]);
    cell[4..8].copy_from_slice(&record.client.to_le_bytes());
    for (at, word) in
        [(8, key), (16, value), (24, result), (32, record.invoked_ns), (40, record.returned_ns), (48, seq)]
    {
        set_word(&mut cell, at, word);
    }
    out.write_all(&seal(cell))?;
    if let Outcome::Entries(entries) = &record.outcome {
        for chunk in entries.chunks(ENTRIES_PER_CELL) {
            let mut cell = [0; CELL_BYTES];
            cell[0] = KIND_ENTRIES;
            cell[1] = chunk.len() as u8;
            for (at, (key, value)) in chunk.iter().enumerate() {
                set_word(&mut cell, 8 + at * 16, *key);
                set_word(&mut cell, 16 + at * 16, *value);
            }
            out.write_all(&seal(cell))?;
        }
    }
    Ok(())
}

pub(super) struct Decoder {
    done: Vec<Record>,
    /// Invoked and not yet done, in the order of their sequence numbers so that decoding is deterministic.
    invoked: BTreeMap<u64, Record>,
    /// A scan that still lacks entries.
    scan: Option<OpenScan>,
}

struct OpenScan {
    record: Record,
    seq: u64,
    entries: Vec<(u64, u64)>,
    left: u64,
}

impl Decoder {
    pub(super) fn new() -> Self {
        Self { done: Vec::new(), invoked: BTreeMap::new(), scan: None }
    }

    pub(super) fn run(mut self, bytes: &[u8]) -> Result<History, HistoryError> {
        let (cells, _torn) = bytes.as_chunks::<CELL_BYTES>();
        let Some((header, cells)) = cells.split_first() else {
            // Killed before the header was out. Anything else that is this short is not a history either, but empty.
            return Ok(History::new());
        };
        if *header != header_cell() {
            return Err(HistoryError::Header);
        }
        for (at, cell) in cells.iter().enumerate() {
            let damaged = |what| HistoryError::Damaged { offset: (at + 1) * CELL_BYTES, what };
            if word(cell, CELL_BYTES - 8) != checksum(cell) {
                if at + 1 == cells.len() {
                    break; // Torn when its process was killed.
                }
                return Err(damaged("wrong checksum"));
            }
            self.cell(cell).map_err(damaged)?;
        }
        let Self { mut done, invoked, .. } = self;
        done.extend(invoked.into_values());
        Ok(History { records: done, initial: BTreeMap::new() })
    }

    fn cell(&mut self, cell: &Cell) -> Result<(), &'static str> {
        match (cell[0], self.scan.is_some()) {
            (KIND_ENTRIES, true) => self.entries(cell),
            (KIND_ENTRIES, false) => Err("entries without a scan"),
            (_, true) => Err("a scan lacks entries"),
            (KIND_INVOKED, false) => {
                let (record, seq, _) = decode_record(cell)?;
                if record.outcome != Outcome::Unknown {
                    return Err("an invocation with an outcome");
                }
                self.invoked.insert(seq, record);
                Ok(())
            }
            (KIND_DONE, false) => {
                let (record, seq, entries_left) = decode_record(cell)?;
                if entries_left > 0 {
                    self.scan = Some(OpenScan { record, seq, entries: Vec::new(), left: entries_left });
                } else {
                    self.finish(record, seq);
                }
                Ok(())
            }
            _ => Err("unknown kind"),
        }
    }

    fn entries(&mut self, cell: &Cell) -> Result<(), &'static str> {
        let Some(mut scan) = self.scan.take() else { return Err("entries without a scan") };
        let count = usize::from(cell[1]);
        if count as u64 != scan.left.min(ENTRIES_PER_CELL as u64) {
            return Err("wrong number of entries");
        }
        scan.entries.extend((0..count).map(|at| (word(cell, 8 + at * 16), word(cell, 16 + at * 16))));
        scan.left -= count as u64;
        if scan.left > 0 {
            self.scan = Some(scan);
        } else {
            let outcome = Outcome::Entries(scan.entries.into());
            self.finish(Record { outcome, ..scan.record }, scan.seq);
        }
        Ok(())
    }

    fn finish(&mut self, record: Record, seq: u64) {
        self.invoked.remove(&seq);
        self.done.push(record);
    }
}

/// The record of a `DONE` or `INVOKED` cell, its sequence number, and how many entries are to follow.
pub(super) fn decode_record(cell: &Cell) -> Result<(Record, u64, u64), &'static str> {
    let [key, value, result, invoked_ns, returned_ns, seq] = [8, 16, 24, 32, 40, 48].map(|at| word(cell, at));
    let mut client = [0; 4];
    client.copy_from_slice(&cell[4..8]);
    let op = match cell[1] {
        0 => Op::Get { key },
        1 => Op::Insert { key, value },
        2 => Op::Upsert { key, value },
        3 => Op::Update { key, value },
        4 => Op::Remove { key },
        5 => {
            let limit = u32::try_from(value).map_err(|_| "limit out of range")?;
            Op::Scan { from: key, limit, descending: cell[3] & FLAG_DESCENDING != 0 }
        }
        _ => return Err("unknown operation"),
    };
    let (outcome, entries_left) = match cell[2] {
        0 => (Outcome::Unknown, 0),
        1 => (Outcome::Value(None), 0),
        2 => (Outcome::Value(Some(result)), 0),
        3 => (Outcome::Inserted(result != 0), 0),
        4 => (Outcome::Entries(Box::default()), result),
        _ => return Err("unknown outcome"),
    };
    let record = Record { client: u32::from_le_bytes(client), op, outcome, invoked_ns, returned_ns };
    if !record.is_well_formed() {
        return Err("an outcome that its operation does not have, or a return before the invocation");
    }
    Ok((record, seq, entries_left))
}
