//! Ways to prove a READ whole, under writers: the right ones and, as controls, two broken ones.
//!
//! One page, some writers and some readers, each a compute server of its own on a thread of its own. A writer locks the
//! page by compare-and-swap, sets every word to a function of the version that its unlock will set, and unlocks. A reader
//! reads by a scheme, and whatever the scheme accepts is held against that function: a copy that mixes two versions is a
//! torn one that was let through.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farlink_runtime::{
    buffer::Buffer,
    error::Error,
    lock::{LockState, LockWord},
    page::{self, HEADER_WORDS, Identity, LOCK, SizeClass, StructureId},
    pages,
    ptr::RemotePtr,
    structure::Placement,
    sync::yield_thread,
    worker::Handle,
};
use rand::RngExt;

use crate::{
    backend::{Cluster, FabricProfile},
    cluster,
    deadlines::PATIENCE,
};

/// READs by anybody that a writer lets pass between two changes, at most.
const REST_TRIES_MAX: u64 = 16;

/// How a reader decides whether its copy of the page is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// The lock word at the front is unlocked: it proves nothing.
    FrontOnly,
    /// The versions at the front and at the back of one READ agree: they may have come first and last, or both first.
    FrontBack,
    /// The checksum fits the version ([`page::is_whole`]).
    Checksum,
    /// The lock word before the body, then the body, then the lock word again, each after the completion of the other.
    LockBodyLock,
}

/// How long, and with how many.
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    /// Decides the disorder.
    pub seed: u64,
    /// How the fabric behaves.
    pub profile: FabricProfile,
    /// Bytes of the page.
    pub page_bytes: usize,
    /// How readers decide.
    pub scheme: Scheme,
    /// Readers, and as many writers.
    pub pairs: usize,
    /// The trial ends when so many copies have been accepted, and some refused as torn.
    pub accepted_min: u64,
    /// It also ends after this time; much later, if nothing has been accepted or changed by then, or refused on a fabric that tears.
    pub limit: Duration,
}

/// What became of the copies that were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verdict {
    /// Copies accepted, the torn ones included.
    pub accepted: u64,
    /// Copies accepted although they mix two versions.
    pub torn_accepted: u64,
    /// Copies of an unlocked page that were refused as torn.
    pub refused: u64,
    /// Changes of the page.
    pub changes: u64,
    /// How long the trial took: until the first torn copy was accepted, if one was.
    pub took: Duration,
}

#[derive(Debug, Default)]
struct Counts {
    accepted: AtomicU64,
    torn_accepted: AtomicU64,
    refused: AtomicU64,
    changes: AtomicU64,
    /// READs of the page, whatever became of them.
    tried: AtomicU64,
    over: AtomicBool,
}

/// Runs a trial. It ends as soon as a torn copy has been accepted.
///
/// # Errors
/// If the cluster cannot be made, or the fabric fails.
pub fn run(trial: &Trial) -> anyhow::Result<Verdict> {
    let fabric = Cluster::of_this_run(1, 2 << 20, trial.profile)?;
    let class = SizeClass::of_bytes(trial.page_bytes).ok_or_else(|| anyhow::anyhow!("no such page size"))?;
    let compute = cluster::join(&fabric, trial.seed)?;
    let worker = compute.worker()?;
    let page = worker.block_on(pages::allocate(&worker, class, Placement::RoundRobin))?;
    worker.block_on(worker.write_words(page.at(), &image(page.at(), class, 1)))?;
    let (counts, start) = (Counts::default(), Barrier::new(2 * trial.pairs));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2 * trial.pairs)
            .map(|index| {
                let (fabric, counts, start, at) = (&fabric, &counts, &start, page.at());
                scope.spawn(move || {
                    let _over = Over(counts);
                    let compute = cluster::join(fabric, trial.seed.wrapping_add(index as u64 + 1));
                    start.wait();
                    let compute = compute?;
                    let worker = compute.worker()?;
                    worker.block_on(async {
                        match index % 2 {
                            0 => write_until_over(&worker, at, class, counts).await,
                            _ => read_until_over(&worker, at, class, trial, counts, begun).await,
                        }
                    })
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread of a trial panics"))
    })?;
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    Ok(Verdict {
        accepted: count(&counts.accepted),
        torn_accepted: count(&counts.torn_accepted),
        refused: count(&counts.refused),
        changes: count(&counts.changes),
        took: begun.elapsed(),
    })
}

/// Ends the trial for all when one thread ends.
struct Over<'a>(&'a Counts);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

/// The page at a version. The last word is the version, for [`Scheme::FrontBack`].
fn image(at: RemotePtr, class: SizeClass, version: u64) -> Vec<u64> {
    let mut words = vec![0; class.words()];
    for (index, word) in words.iter_mut().enumerate().skip(HEADER_WORDS) {
        *word = pattern(index, class, version);
    }
    let identity = Identity { structure: StructureId(1), level: 0, class, kind: 1, is_words: false };
    page::seal(&mut words, at, identity, version);
    words
}

fn pattern(index: usize, class: SizeClass, version: u64) -> u64 {
    if index + 1 == class.words() { version } else { version.wrapping_mul(index as u64) }
}

fn is_torn(copy: &[u64], class: SizeClass) -> bool {
    let version = LockWord::from_word(copy[LOCK]).version();
    (HEADER_WORDS..copy.len()).any(|index| copy[index] != pattern(index, class, version))
}

async fn write_until_over(worker: &Handle, at: RemotePtr, class: SizeClass, counts: &Counts) -> Result<(), Error> {
    let can = worker.capabilities();
    while !counts.over.load(Ordering::Relaxed) {
        let before = LockWord::from_word(worker.read(at, 1).await?[0]);
        let ours = before.locked_by(worker.owner());
        let is_free = before.state() == LockState::Unlocked;
        if !is_free || worker.compare_swap(at, before.word(), ours.word()).await? != before.word() {
            worker.back_off(1).await;
            continue;
        }
        let after = LockWord::unlocked(before.next_version());
        let body = worker.write_words(at.add(8)?, &image(at, class, after.version())[1..]);
        if !can.ordered_writes {
            body.await?;
            unlock(worker, at, ours, after, can.atomic_against_writes).await?;
        } else {
            let unlocked = unlock(worker, at, ours, after, can.atomic_against_writes);
            body.await?;
            unlocked.await?;
        }
        counts.changes.fetch_add(1, Ordering::Relaxed);
        // Some rest, or no reader would ever meet a whole page: until readers have tried a few times more.
        let tried = counts.tried.load(Ordering::Relaxed) + worker.random(|rng| rng.random_range(0..=REST_TRIES_MAX));
        while counts.tried.load(Ordering::Relaxed) < tried && !counts.over.load(Ordering::Relaxed) {
            yield_thread();
        }
    }
    Ok(())
}

/// Posts the unlock at once; the future waits for its end.
fn unlock(
    worker: &Handle,
    at: RemotePtr,
    ours: LockWord,
    after: LockWord,
    by_write: bool,
) -> impl Future<Output = Result<(), Error>> + use<> {
    let write = by_write.then(|| worker.write_word(at, after.word()));
    let swap = (!by_write).then(|| worker.compare_swap(at, ours.word(), after.word()));
    async move {
        if let Some(write) = write {
            write.await?;
        }
        if let Some(swap) = swap {
            let found = swap.await?;
            assert_eq!(found, ours.word(), "somebody broke the lock");
        }
        Ok(())
    }
}

async fn read_until_over(
    worker: &Handle,
    at: RemotePtr,
    class: SizeClass,
    trial: &Trial,
    counts: &Counts,
    begun: Instant,
) -> Result<(), Error> {
    let add = |count: &AtomicU64| count.fetch_add(1, Ordering::Relaxed) + 1;
    let is_in_time = || {
        let (took, has_tried) = (begun.elapsed(), |count: &AtomicU64| count.load(Ordering::Relaxed) > 0);
        let has_refused = || trial.profile == FabricProfile::Fast || has_tried(&counts.refused);
        let has_all = || has_tried(&counts.accepted) && has_tried(&counts.changes) && has_refused();
        took < trial.limit || took < trial.limit + PATIENCE && !has_all()
    };
    while !counts.over.load(Ordering::Relaxed) && is_in_time() {
        let copy = read(worker, at, class, trial.scheme).await?;
        add(&counts.tried);
        match copy {
            Copy::Locked => {}
            Copy::Refused => drop(add(&counts.refused)),
            Copy::Accepted(copy) => {
                let accepted = add(&counts.accepted);
                if is_torn(&copy, class) {
                    add(&counts.torn_accepted);
                    return Ok(());
                }
                if accepted >= trial.accepted_min && counts.refused.load(Ordering::Relaxed) > 0 {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

enum Copy {
    Locked,
    Refused,
    Accepted(Buffer),
}

async fn read(worker: &Handle, at: RemotePtr, class: SizeClass, scheme: Scheme) -> Result<Copy, Error> {
    let before = match scheme {
        Scheme::LockBodyLock => Some(worker.read(at, 1).await?[0]),
        _ => None,
    };
    if before.is_some_and(|word| LockWord::from_word(word).state() != LockState::Unlocked) {
        return Ok(Copy::Locked);
    }
    let mut copy = worker.read(at, class.words()).await?;
    let lock = LockWord::from_word(copy[LOCK]);
    let whole = match scheme {
        _ if scheme != Scheme::LockBodyLock && lock.state() != LockState::Unlocked => return Ok(Copy::Locked),
        Scheme::FrontOnly => true,
        Scheme::FrontBack => copy[copy.len() - 1] == lock.version(),
        Scheme::Checksum => page::is_whole(&copy),
        Scheme::LockBodyLock => {
            let after = worker.read(at, 1).await?[0];
            // The lock word in the copy is part of what the other two vouch for, so it need not be looked at.
            copy[LOCK] = after;
            before == Some(after)
        }
    };
    Ok(if whole { Copy::Accepted(copy) } else { Copy::Refused })
}
