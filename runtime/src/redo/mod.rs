//! Redo records: a change whose compute server dies in the middle of it is finished by whoever meets it, or was never begun.
//!
//! # The record
//! A change writes down what it is going to do before it does it: the pages that it locks, with the versions that they have and
//! the words that they get, and the new pages that it publishes. The record goes to *each memory server on which it locks a
//! page*, into a ring of the worker's there, with one WRITE for each of them; where the fabric keeps the order it goes out with the
//! doorbell of the locks and in front of them, so it costs no round trip. Where it does not, the locks wait for the record.
//! Either way:
//!
//! > **A page that is locked by an owner has the record of that change on its own memory server.** Of the owner's records
//! > that name the page at the version in its lock word it is the one with the highest sequence number: an attempt that
//! > failed leaves a record that means nothing, and takes its number under the page's local slot, as the next one does.
//!
//! A change of one word of one page, and of nothing else, has no record: it locks the page *for one word*, and the lock word says so. Then
//! the word is there or it is not, and so is the checksum: whoever repairs the page sets the checksum that goes with what is there.
//!
//! A cluster may go without records of changes of several words of one page ([`Records::SeveralPages`](crate::layout::Records)). Then
//! the newest record that names a locked page could be that of an attempt that failed, at the same version; so that is made void before
//! the page's local slot is free. A lock without a record is given back only if the page is whole, at that version or the next.
//!
//! A sum over the words, the owner's incarnation, the number and the place says whether a record is whole. So nothing is ever
//! cleared: what is left of an earlier one in its place does not fit.
//!
//! # The evidence
//! No word of a page is written before the record is there, all locks are had, and pages that are relied on have been looked at.
//! Who finds a lock of a dead owner has to know whether that point had been reached; the locks do not say so: a page that is
//! not locked by the owner any more may have been finished, or never have been locked because somebody else was first, and its version
//! tells neither. What says so is the *evidence*, which exists before the first word is written:
//!
//! - A change of one page, that relies on no others, needs none: its lock is all that it needs.
//! - A change with new pages publishes them when it has all its locks, and waits: once all of them have left the version
//!   at which they were free, it had come so far.
//! - Any other change sets a *mark* behind the record, on each memory server of its pages in front of the first word that it
//!   writes there: one small WRITE more in a doorbell that it rings anyway.
//!
//! - A change of a cached owner, of pages that it shares with others together with its own, is computed under the locks. Its record names
//!   the locks alone; what becomes of its pages is in one batch of the owner's [log](crate::write_ahead), which is evidence and record in
//!   one. Who finds such a lock replays the log, and unlocks as they were what it did not change.
//!
//! With the evidence, every page of the record that its owner still holds is *rolled forward*: it gets its words and its new
//! lock word. Without, nothing was written: new pages that were published are freed, and then every page that the owner still holds is
//! unlocked as it was. What the owner does not hold any more is left alone. A dead owner writes nothing, so this decision is the same for all who
//! take it, at any time until the last page of the record is repaired.
//!
//! # Repair
//! Several may repair one page, and each may die of it. To unlock a page is one compare-and-swap. To roll one forward is a
//! change of one page by the repairer: it writes a record of its own, takes the lock over by a compare-and-swap from the
//! dead owner's word to its own, writes the words, unlocks. If it dies, the next one finds its record.
//! Who has unlocked a page that the change frees, or swapped it to free, owns the free page.
//!
//! # Rings
//! A ring is a page of [`RING_CLASS`], in the common page format and under the structure id [`RINGS`]. Rings of a compute server on a
//! memory server form a list, whose head is the word of its slot in the memory server's table of rings. Nobody clears it: what it leads to that is no ring of that one ends
//! the list:
//!
//! ```text
//! word 4     the owner's incarnation
//! word 5     link to the next ring
//! word 6     sequence number: parts with a lower one say nothing any more
//! word 8..   parts of records:
//!            magic:32 | words of the part, mark included:32
//!            sequence number
//!            incarnation:32 | part:16 | parts:16
//!            sum
//!            a share of the record's words
//!            mark: the sequence number once all locks are had
//! ```
//!
//! The [log](crate::write_ahead) of a cached owner has rings of its own, with batches in parts of the same form.
//!
//! A record that is too long for a ring has several parts. Its words:
//!
//! ```text
//! pages:16 | new pages:16 | 0:30 | evidence:2
//! for each page      link, lock word before, frees:1 | runs:63, and for each run: first word:32 | words:32, the words
//! for each new page  link, version at which it is free
//! ```
//!
//! Rings are made when a worker first needs them, where memory is full of pages that are kept for that (see [`crate::layout`]), grow in number with long records, and outlive the worker: the next one of the
//! compute server uses them. When it leaves, they are freed, unless a structure
//! that it was making or dropping is left: by them others find that. Those of a dead compute server are freed when none of its locks is
//! left (`recovery`), the last of a list first, so that whoever dies of that leaves a shorter list.

mod batch;
mod record;
mod recording;
mod repair;
mod replay;
mod ring;

pub use self::{
    batch::{PageRecord, Recorded, WordRun},
    repair::{Recover, Room},
    ring::{Places, RingSpace},
};
pub(crate) use self::{
    batch::{seal_batch, words_of},
    record::{Body, Evidence, OVERHEAD, SHARE_WORDS_MAX},
    recording::Recording,
    repair::{Newest, finish_page, finish_word, is_ring_of, read_rings, take_alone},
    replay::{logged, replay},
    ring::WorkerRings,
};
pub use crate::layout::RING_CLASS;
use crate::page::StructureId;

/// The structure id of rings.
pub const RINGS: StructureId = StructureId(u32::MAX);
/// The word of a ring that holds its owner's incarnation.
pub(crate) const RING_OWNER: usize = 4;
/// The word of a ring that links to the next one.
pub(crate) const RING_NEXT: usize = 5;
/// The word of a ring that makes parts void: those with lower sequence numbers.
pub(crate) const RING_FROM: usize = 6;
/// The first word of a ring that parts of records use.
pub(crate) const RING_FIRST: usize = 8;
