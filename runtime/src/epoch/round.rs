//! A round of maintenance: what a compute server does now and then to keep the cluster's epoch moving.
//!
//! Every request of a round that fails is posted again or does not matter: what a compute server announces only it writes, and
//! a compare-and-swap of the epoch that took effect unnoticed is noticed in the next round.

use smallvec::SmallVec;

use crate::{
    error::Error,
    fabric::Liveness,
    free_pages::SharedPages,
    layout::{self, Dynamic, Geometry, SLOT_WORDS, SLOTS},
    lock::OwnerId,
    page::PAGE_WORDS_MAX,
    ptr::RemotePtr,
    remote::{Remote, write_words},
    sync::{AtomicBool, AtomicU64, Ordering},
};

/// Where the cluster's epoch and what compute servers announce stand.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Board {
    /// The epoch.
    pub(crate) epoch: RemotePtr,
    /// The slots, each of two words: an incarnation (0: nobody) and the epoch that it announces.
    pub(crate) slots: RemotePtr,
    /// How many slots there are.
    pub(crate) count: usize,
}

impl Board {
    /// That of the cluster whose first memory server this is.
    pub(crate) fn of(first: &Geometry) -> Self {
        Self { epoch: first.dynamic_at(Dynamic::Epoch), slots: layout::slot_at(0), count: SLOTS }
    }
}

/// The membership of one compute server.
#[derive(Debug)]
pub(crate) struct Member {
    slot: usize,
    announced: AtomicU64,
    in_round: AtomicBool,
}

struct InRound<'a>(&'a AtomicBool);

impl<'a> InRound<'a> {
    fn begin(flag: &'a AtomicBool) -> Option<Self> {
        // Not made in vain: dropped, it would end that of another.
        (!flag.swap(true, Ordering::Acquire)).then(|| Self(flag))
    }
}

impl Drop for InRound<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Member {
    /// The compute server that has this slot, in which it announces `epoch`.
    pub(crate) fn new(slot: usize, epoch: u64) -> Self {
        Self { slot, announced: AtomicU64::new(epoch), in_round: AtomicBool::new(false) }
    }

    /// Its slot.
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }

    /// One round; true if there is reason to come again soon. While another one of the same member runs it does nothing.
    /// `advance` is [`Epochs::advance`](super::Epochs::advance).
    ///
    /// # Errors
    /// If the memory server is lost, or no buffer can be had: what is deferred stays so.
    pub(crate) async fn round<R: Remote>(
        &self,
        remote: &R,
        board: &Board,
        advance: impl FnOnce(u64) -> u64,
        pages: &SharedPages,
    ) -> Result<bool, Error> {
        let Some(_in_round) = InRound::begin(&self.in_round) else { return Ok(true) };
        let unstamped = pages.take_deferred();
        // The epoch is read by an atomic: the next one is made from the word that this leaves, so who sees that one sees the
        // unlinking of what is stamped, too. What a READ returns may be older than the unlinking.
        let epoch = remote.load(board.epoch).await?;
        unstamped.stamp(epoch);
        let before = self.announced.load(Ordering::Relaxed);
        let announced = advance(epoch);
        if announced != before {
            let slot = board.slots.word(self.slot * SLOT_WORDS + 1);
            write_words(remote, vec![(slot, announced)]).await?;
            self.announced.store(announced, Ordering::Relaxed);
        }
        let is_waiting = pages.deferred() != 0;
        if is_waiting {
            let oldest = oldest_announced(remote, board, epoch).await?;
            if oldest >= epoch
                && let Err(error) = remote.compare_swap(board.epoch, epoch, epoch.saturating_add(1)).await
                && !error.may_be_tried_again()
            {
                return Err(error.into());
            }
            pages.release(oldest);
        }
        Ok(is_waiting || epoch != before)
    }
}

/// The least epoch that a live compute server has announced.
async fn oldest_announced<R: Remote>(remote: &R, board: &Board, epoch: u64) -> Result<u64, Error> {
    let slots = read_slots(remote, board).await?;
    let mut behind: SmallVec<[(u64, OwnerId); 8]> = slots
        .iter()
        .filter(|&&[_, announced]| announced < epoch)
        .filter_map(|&[incarnation, announced]| Some((announced, OwnerId::new(incarnation)?)))
        .collect();
    behind.sort_unstable_by_key(|&(announced, _)| announced);
    // To ask whether one lives costs system calls, and the first one that does is the answer.
    let oldest = behind.iter().find(|&&(_, owner)| remote.liveness(owner) == Liveness::Alive);
    Ok(oldest.map_or(epoch, |&(announced, _)| announced))
}

/// All slots, as they are at some moments of this call.
pub(crate) async fn read_slots<R: Remote>(remote: &R, board: &Board) -> Result<Vec<[u64; SLOT_WORDS]>, Error> {
    const PER_READ: usize = PAGE_WORDS_MAX / SLOT_WORDS;
    let mut slots = Vec::with_capacity(board.count);
    for first in (0..board.count).step_by(PER_READ) {
        let words = PER_READ.min(board.count - first) * SLOT_WORDS;
        let words = remote.read(board.slots.word(first * SLOT_WORDS), words).await?;
        slots.extend(words.chunks_exact(SLOT_WORDS).map(|slot| [slot[0], slot[1]]));
    }
    Ok(slots)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn who_finds_a_round_under_way_does_not_end_it() {
        let flag = AtomicBool::new(false);
        let round = InRound::begin(&flag).expect("there is none");
        assert!((0..3).all(|_| InRound::begin(&flag).is_none()));
        drop(round);
        assert!(InRound::begin(&flag).is_some());
    }
}
