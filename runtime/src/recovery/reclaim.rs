//! What dead compute servers held, taken back: pages that their own lock words call free. Pages that they have locked for one word, of
//! which no record tells, are finished on the way.
//!
//! A compute server that dies, or leaves before the grace of its last pages is over, leaves its incarnation in its slot. Who finds
//! it there and has finished its changes ([`sweep`](super::sweep)) looks through all chunks for its pages
//! ([`Chunk::take_from_dead`]), and then frees the slot. It goes by what is dead, never by time, so it may be begun again by others at
//! any point, and several may do it at once.

use smallvec::SmallVec;

use crate::{
    error::Error,
    lock::OwnerId,
    page::SizeClass,
    pages::{self, Chunk, ChunkState, OfDead, count_return},
    ptr::ServerId,
    redo::finish_word,
    worker::Handle,
};

/// Tries for a chunk that somebody else changes.
const ATTEMPTS_MAX: u32 = 100;

/// Takes back what those held who are dead, and of whose changes nothing is left to finish that has to do with a chunk: `is_dead` says so
/// of a holder, for a chunk of a memory server. False if somebody else was busy with a chunk for too long.
///
/// # Errors
/// If a memory server is lost, or no buffers can be had. What was not done is left to the next time.
pub(crate) async fn reclaim(worker: &Handle, is_dead: impl Fn(OwnerId, ServerId, u64) -> bool) -> Result<bool, Error> {
    let compute = worker.compute();
    let (mut is_complete, mut count) = (true, 0);
    for geometry in &compute.geometry {
        let mut classes: SmallVec<[SizeClass; 8]> = SmallVec::new();
        for (number, entry) in (0..).zip(pages::directory(worker, geometry).await?) {
            let Some(state) = ChunkState::from_word(entry[0]) else { continue };
            let chunk = Chunk::new(geometry, number, state.class);
            if !classes.contains(&state.class) {
                classes.push(state.class);
            }
            let is_dead = |owner| is_dead(owner, geometry.server, number);
            let mut attempt = 0;
            loop {
                let taken = {
                    let _turn = worker.take_turn_at(chunk.entry).await;
                    let taken = chunk.take_from_dead(worker, &is_dead).await?;
                    // Before another sweep of this compute server comes here, finds none, and says that none is under way.
                    taken.map(|OfDead { free, locked }| {
                        count += free.len();
                        compute.pages.reclaim(free);
                        locked
                    })
                };
                if let Some(locked) = taken {
                    for (at, lock) in locked {
                        finish_word(worker, at, state.class, lock).await?;
                    }
                    break;
                }
                attempt += 1;
                if attempt > ATTEMPTS_MAX {
                    is_complete = false;
                    break;
                }
                worker.back_off(attempt).await;
            }
        }
        // Somebody may have died between a return and its count.
        for class in classes {
            count_return(worker, geometry, class).await;
        }
    }
    tracing::debug!(pages = count, "took back what dead compute servers held");
    Ok(is_complete)
}
