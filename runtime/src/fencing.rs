//! What an owner has shipped to memory servers ends before others take over from it.
//!
//! An owner ships operations on pages that it owns, and whoever changes a structure with others has changes made from its root. Who takes over, or becomes
//! the owner, caches those pages and writes them without locks, so by then no operation
//! of the dead one may be under way at a memory server, or begin. Each memory server has two words for each slot of a compute server:
//!
//! ```text
//! fence     this incarnation is fenced off, and all before it; 0: nobody was yet
//! running   the incarnation of the memory server's own membership:32 | operations of the slot's compute server that are under way:32
//! ```
//!
//! A thread of the memory server counts an operation in, and then looks at the fence ([`UnderWay::begin`]). Whoever finishes what a dead
//! compute server has left writes the fence, and then looks at the count ([`fence_off`]). So either the one sees that the sender is
//! fenced off and does nothing, or the other sees the operation and waits. What was counted for a membership that is dead itself has ended.
//!
//! A living owner that is not told what became of a change that it shipped does the same for itself ([`end_own`]), before it caches those pages
//! again. From then on it ships no changes to that memory server.
//!
//! The processor's instructions change only the count, requests of others only the fence: no atomic of the one kind meets the other. A slot
//! is not given to anybody else before its last holder is fenced off everywhere. What that one has sent may still lie in the queue of a memory
//! server that does not go on, while the next holder, or one after it, is fenced off there. So the fence only ever rises. Who has an earlier
//! incarnation than a holder before it, because it took long to find its slot, takes another slot (`is_fenced_off`).

use std::time::Duration;

use crate::{
    error::Error,
    fabric::{Liveness, memory::LocalMemory},
    layout::{self, FENCE_WORDS, Geometry, SLOTS},
    lock::OwnerId,
    ptr::{RemotePtr, ServerId},
    remote::{Remote, claim_word},
    sync::{AtomicU64, Ordering, fence},
    wire::{DecodeError, Wire},
    worker::Handle,
};

const RUNNING: usize = 1;

/// Who has shipped an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    /// Its incarnation.
    pub owner: OwnerId,
    /// Its slot.
    pub slot: u32,
}

impl Sender {
    /// The compute server of this worker.
    pub fn of(worker: &Handle) -> Self {
        Self { owner: worker.owner(), slot: worker.compute().member.slot() as u32 }
    }
}

impl Wire for Sender {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(u64::from(self.slot) << 32 | u64::from(self.owner.incarnation()));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let word = u64::decode(from)?;
        let slot = (word >> 32) as u32;
        match OwnerId::new(word & u64::from(u32::MAX)) {
            Some(owner) if (slot as usize) < SLOTS => Ok(Self { owner, slot }),
            _ => Err(DecodeError("a shipped operation names no compute server")),
        }
    }
}

/// An operation of an owner that a memory server carries out, until it [ends](UnderWay::end). One that is cut off instead, because the memory
/// server stops, may go on with a change: it counts for as long as the memory server's membership lasts.
#[derive(Debug)]
#[must_use = "it counts until it is ended"]
pub struct UnderWay {
    memory: LocalMemory,
    words: RemotePtr,
    member: OwnerId,
}

impl UnderWay {
    /// Begins one, for a memory server that is this member of the cluster; none if the sender is fenced off.
    pub fn begin(memory: &LocalMemory, member: OwnerId, sender: Sender) -> Option<Self> {
        Self::begin_at(memory, layout::fence_at(memory.server(), sender.slot as usize), member, sender.owner)
    }

    /// The same, where the words of the sender's slot are these.
    pub fn begin_at(memory: &LocalMemory, at: RemotePtr, member: OwnerId, sender: OwnerId) -> Option<Self> {
        let words = memory.words(at, FENCE_WORDS)?;
        let under_way = Self { memory: memory.clone(), words: at, member };
        count_in(words, member);
        if may_begin(words, sender) {
            return Some(under_way);
        }
        under_way.end();
        None
    }

    /// All that the operation does is done.
    pub fn end(self) {
        if let Some(words) = self.memory.words(self.words, FENCE_WORDS) {
            count_out(words, self.member);
        }
    }
}

const fn of_member(member: OwnerId) -> u64 {
    (member.incarnation() as u64) << 32
}

/// Counts an operation of a member in; what another one has left there is over.
pub fn count_in(words: &[AtomicU64], member: OwnerId) {
    let next = |found: u64| if found >> 32 == of_member(member) >> 32 { found + 1 } else { of_member(member) | 1 };
    let _ = words[RUNNING].fetch_update(Ordering::Relaxed, Ordering::Relaxed, |found| Some(next(found)));
    // Pairs with the fence in `fence_off`: the count is seen there, or what is written there is seen behind this.
    fence(Ordering::SeqCst);
}

/// Whether an operation of `sender` that was counted in may begin.
pub fn may_begin(words: &[AtomicU64], sender: OwnerId) -> bool {
    words[0].load(Ordering::Relaxed) < u64::from(sender.incarnation())
}

/// Counts an operation out. Release: who sees that it is over sees what it has done.
pub fn count_out(words: &[AtomicU64], member: OwnerId) {
    let next = |found: u64| (found >> 32 == of_member(member) >> 32).then(|| found - 1);
    let _ = words[RUNNING].fetch_update(Ordering::Release, Ordering::Relaxed, next);
}

/// Fences a dead compute server off at the memory server of these `words`; the memory server's membership, if it still carries out an
/// operation of the dead one: then it is to be asked again. `has_slot` says whether the slot is still that one's. If not, others have
/// fenced it off.
///
/// # Errors
/// If the memory server is lost.
pub async fn fence_off<R: Remote>(
    remote: &R,
    words: RemotePtr,
    dead: OwnerId,
    has_slot: impl AsyncFn() -> Result<bool, Box<Error>>,
) -> Result<Option<OwnerId>, Box<Error>> {
    let ours = u64::from(dead.incarnation());
    loop {
        // In this order: who has the slot later changes the word before it is given on once more.
        let found = remote.load(words).await?;
        if !has_slot().await? {
            return Ok(None);
        }
        if found >= ours || claim_word(remote, words, found, ours).await? {
            break;
        }
    }
    // Pairs with the fence in `count_in`. Over RDMA it follows from the order of completions.
    fence(Ordering::SeqCst);
    // No atomic: the memory server's processor changes this one.
    let running = remote.read(words.word(RUNNING), 1).await?[0];
    let member = OwnerId::new(running >> 32).filter(|_| running as u32 != 0);
    Ok(member.filter(|&member| remote.liveness(member) != Liveness::Dead))
}

/// Whether somewhere a compute server is fenced off that has just taken this slot: a later one had that before.
///
/// # Errors
/// If a memory server is lost.
pub(crate) async fn is_fenced_off(
    worker: &Handle,
    geometry: &[Geometry],
    slot: usize,
    owner: OwnerId,
) -> Result<bool, Box<Error>> {
    for Geometry { server, .. } in geometry {
        if worker.read(layout::fence_at(*server, slot), 1).await?[0] >= u64::from(owner.incarnation()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// [`end_sent`]. If something is still under way then, this compute server has ended all that it had, as if it had been taken for dead: it must
/// not cache pages that the memory server may change later. Who takes over waits for that.
///
/// # Errors
/// As there.
pub async fn end_own(worker: &Handle, server: ServerId, waited: Duration) -> Result<(), Box<Error>> {
    let ended = end_sent(worker, server, waited).await;
    if ended.as_ref().is_err_and(|error| matches!(**error, Error::ServerStalled { .. })) {
        tracing::warn!(%server, owner = %worker.owner(), "an operation does not end; all that this compute server owns is given up");
        worker.compute().fall();
    }
    ended
}

/// Waits until nothing is under way at a memory server that this compute server has shipped there, for so long at most. Nothing that it ships
/// there and that would change something is carried out from then on.
///
/// # Errors
/// If the memory server is lost, and its memory with it; if this compute server was taken for dead: others have done this.
/// [`Error::ServerStalled`] if something is still under way.
pub async fn end_sent(worker: &Handle, server: ServerId, waited: Duration) -> Result<(), Box<Error>> {
    let until_ns = worker.clock().now_ns().saturating_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
    let own = Sender::of(worker);
    let slot = own.slot as usize;
    let has_slot = async || Ok(worker.load(layout::slot_at(slot)).await? == u64::from(own.owner.incarnation()));
    let mut attempt = 0;
    loop {
        match fence_off(worker, layout::fence_at(server, slot), own.owner, has_slot).await {
            Ok(None) => return Ok(()),
            Ok(Some(_)) if worker.clock().now_ns() >= until_ns => {
                return Err(Box::new(Error::ServerStalled { server, owner: own.owner, waited }));
            }
            Ok(Some(_)) => {
                worker.back_off(attempt).await;
                attempt = attempt.saturating_add(1);
            }
            Err(error) => {
                worker.check_standing()?;
                worker.before_trying_again(error, &mut attempt).await?;
            }
        }
    }
}
