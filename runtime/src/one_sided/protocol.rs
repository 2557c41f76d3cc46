//! The remote steps of a change, each of which copes with requests that fail.
//!
//! The owner of a change takes all buffers that it needs before its first compare-and-swap. From then on a request that
//! failed is *settled*: once the failure is known, nothing of the request arrives any more (the [fabric](crate::fabric)'s
//! contract), so the page's lock word says what came of it.
//!
//! - A compare-and-swap that failed has the lock if the word is ours. Nobody else writes our word: local slots keep other
//!   changes of this compute server away.
//! - An unlock that failed took effect if the word is not ours any more. Then so did the WRITEs before it.
//! - The record of a change is in front of its locks: a lock that was had has its record. The mark, where there is one, is in
//!   front of the words of its memory server, and is written again before they are.
//! - While the word is ours, the WRITEs of the change may be repeated; they are, one word at a time, which takes no buffers.
//! - A new page that is linked with the doorbell that writes it may be read, unlinked and freed by others before it is known that
//!   its WRITE failed. So its body may be written again, for it is not used again meanwhile; its lock word only if it is
//!   the one from before.
//!
//! That goes on until all is done or a memory server is lost. What is on the others is finished even then: no page stays
//! locked by a compute server that lives.

use smallvec::SmallVec;

use super::{
    change::PreparedChange,
    pages::{Added, Changed, Runs},
};
use crate::{
    buffer::Buffer,
    error::Error,
    layout::Records,
    lock::LockWord,
    page::{LOCK, has_words},
    ptr::{RemotePtr, ServerId},
    redo::{Body, Evidence, Recording},
    worker::remote::{Count, Payload, Remote, release_word, settle_claim, write_words},
};

type Failure = Box<Error>;

/// What a change is going to write, in memory that it has already.
pub(super) struct ChangeBuffers {
    /// By the index of the changed page.
    writes: SmallVec<[(usize, RemotePtr, Payload); 4]>,
    /// The bodies of the new pages: all words but the lock word.
    bodies: Vec<Buffer>,
    /// None if no page is locked, or the change needs none.
    pub(super) recording: Option<Recording>,
}

impl ChangeBuffers {
    /// # Errors
    /// If a buffer cannot be had.
    pub(super) fn new(
        remote: &impl Remote,
        PreparedChange { changed, relied_on, added }: &PreparedChange,
    ) -> Result<Self, Error> {
        let recording = record(remote, changed, relied_on.len(), added)?;
        Ok(Self { recording, ..Self::unrecorded(remote, changed, added)? })
    }

    /// Has the record of an attempt that has failed mean nothing, where a later change of one of its pages may have none: who repairs
    /// that page would take this for it. Before the local slots of the pages are free.
    ///
    /// # Errors
    /// If a memory server is lost.
    pub(super) async fn void_record(&self, remote: &impl Remote) -> Result<(), Failure> {
        match &self.recording {
            Some(recording) if remote.records() == Records::SeveralPages => recording.void(remote).await,
            _ => Ok(()),
        }
    }

    /// The same of a change that has its record already.
    ///
    /// # Errors
    /// If a buffer cannot be had.
    pub(super) fn unrecorded(remote: &impl Remote, changed: &[Changed], added: &[Added]) -> Result<Self, Error> {
        let copied = |words: &[u64]| {
            let mut buffer = remote.buffer(words.len())?;
            buffer.copy_from_slice(words);
            Ok::<_, Error>(buffer)
        };
        let mut writes = SmallVec::new();
        for (index, page) in changed.iter().enumerate().filter(|(_, page)| !page.free) {
            for run in page.dirty.runs() {
                let at = page.at.word(run.start);
                let payload = match &page.image[run] {
                    &[word] => Payload::Word(word),
                    words => Payload::Words(copied(words)?),
                };
                writes.push((index, at, payload));
            }
        }
        let bodies = added.iter().map(|added| copied(&added.image[LOCK + 1..])).collect::<Result<_, _>>()?;
        Ok(Self { writes, bodies, recording: None })
    }
}

/// The record of a change, if it has one: one of a single word has none, and where not all changes are recorded, nor has one of
/// a single page.
pub(super) fn record(
    remote: &impl Remote,
    changed: &[Changed],
    relied_on: usize,
    added: &[Added],
) -> Result<Option<Recording>, Error> {
    let evidence = Evidence::of(changed.len(), relied_on, added.len());
    let is_needed = match changed {
        [] => false,
        [page] if page.is_one_word => false,
        _ => evidence != Evidence::Lock || remote.records() == Records::All,
    };
    if !is_needed {
        return Ok(None);
    }
    let runs: SmallVec<[Runs; 2]> =
        changed.iter().map(|page| if page.free { Runs::new() } else { page.dirty.runs() }).collect();
    let set = runs.iter().flatten().map(|run| 1 + run.len()).sum::<usize>();
    let mut body = Body::with_room(changed.len(), added.len(), evidence, set);
    for (page, runs) in changed.iter().zip(runs) {
        body.page(page.at, page.class(), page.lock, page.free);
        runs.into_iter().for_each(|run| body.run(run.start, &page.image[run]));
    }
    for Added { page, .. } in added {
        body.new_page(page.link(), page.free_version());
    }
    Recording::new(remote, body, evidence, servers_of(changed)).map(Some)
}

/// The record of locks under which a change is computed: what becomes of the pages is in the owner's log.
pub(super) fn record_locks(remote: &impl Remote, locked: &[Changed]) -> Result<Recording, Error> {
    let mut body = Body::new(locked.len(), 0, Evidence::Log);
    locked.iter().for_each(|page| body.page(page.at, page.class(), page.lock, false));
    Recording::new(remote, body, Evidence::Log, servers_of(locked))
}

fn servers_of(pages: &[Changed]) -> SmallVec<[ServerId; 4]> {
    let mut servers: SmallVec<[ServerId; 4]> = pages.iter().map(|page| page.at.server()).collect();
    servers.sort_unstable();
    servers.dedup();
    servers
}

/// Locks all pages, from the words that their copies were read under, or none of them; whether it did. The record of the change is
/// there before a lock is.
///
/// # Errors
/// If a memory server is lost. No other one's page is locked then.
pub(super) async fn lock_all<R: Remote>(
    remote: &R,
    pages: &[Changed],
    recording: Option<&mut Recording>,
) -> Result<bool, Failure> {
    if pages.is_empty() {
        return Ok(true);
    }
    remote.count(Count::RoundTrip);
    let mut recorded = SmallVec::new();
    match recording {
        Some(recording) if remote.capabilities().ordered_writes => recorded = recording.post(remote),
        Some(recording) => {
            recording.write(remote).await?;
            remote.count(Count::RoundTrip);
        }
        None => {}
    }
    let swap = |page: &Changed| remote.compare_swap(page.at, page.lock.word(), page.ours(remote.owner()).word());
    let posted: Vec<_> = pages.iter().map(swap).collect();
    // If one fails, so do the locks behind it, or they are there and so is it.
    for recorded in recorded {
        let _ = recorded.await;
    }
    let (mut had, mut lost) = (Vec::with_capacity(pages.len()), None);
    for (page, posted) in pages.iter().zip(posted) {
        let (before, ours) = (page.lock.word(), page.ours(remote.owner()).word());
        match settle_claim(remote, page.at, posted.await, before, ours).await {
            Ok(is_had) => had.push(is_had),
            Err(error) => {
                had.push(false);
                lost = Some(error);
            }
        }
    }
    if had.iter().all(|&had| had) {
        return Ok(true);
    }
    let held: Vec<&Changed> = pages.iter().zip(had).filter_map(|(page, had)| had.then_some(page)).collect();
    let unlocked = unlock_unchanged(remote, &held).await;
    lost.map_or(unlocked, Err).map(|()| false)
}

/// Gives locks back under which nothing was written.
///
/// # Errors
/// If a memory server is lost. The other pages are unlocked then.
pub(super) async fn unlock_unchanged<R: Remote>(remote: &R, pages: &[&Changed]) -> Result<(), Failure> {
    if pages.is_empty() {
        return Ok(());
    }
    remote.count(Count::RoundTrip);
    let posted: Vec<_> = pages.iter().map(|page| unlock(remote, page, page.lock)).collect();
    let mut lost = Ok(());
    for (page, posted) in pages.iter().zip(posted) {
        let mut outcome = posted.await;
        let mut attempt = 0;
        while let Err(error) = outcome {
            outcome = match unlock_again(remote, page, error, &mut attempt).await {
                Ok(outcome) => outcome,
                Err(error) => {
                    lost = Err(error);
                    Ok(())
                }
            };
        }
    }
    lost
}

async fn unlock_again<R: Remote>(
    remote: &R,
    page: &Changed,
    error: Failure,
    attempt: &mut u32,
) -> Result<Result<(), Failure>, Failure> {
    remote.before_trying_again(error, attempt).await?;
    if remote.load(page.at).await? != page.ours(remote.owner()).word() {
        return Ok(Ok(()));
    }
    Ok(unlock(remote, page, page.lock).await)
}

/// Posts the request that replaces our lock by another word.
fn unlock<R: Remote>(remote: &R, page: &Changed, word: LockWord) -> impl Future<Output = Result<(), Failure>> {
    let (at, ours) = (page.at, page.ours(remote.owner()));
    let is_write = remote.capabilities().atomic_against_writes;
    let write = is_write.then(|| remote.write(at, Payload::Word(word.word())));
    let swap = (!is_write).then(|| remote.compare_swap(at, ours.word(), word.word()));
    async move {
        if let Some(write) = write {
            write.await?;
        }
        if let Some(swap) = swap {
            let found = LockWord::from_word(swap.await?);
            if found != ours {
                return Err(Box::new(Error::LockLost { page: at, found }));
            }
        }
        Ok(())
    }
}

/// Waits for the requests that write new pages, each with the index of its page, and writes again the bodies of those that have
/// failed.
async fn end_pages<R: Remote, F: Future<Output = Result<(), Failure>>>(
    remote: &R,
    added: &[Added],
    posted: Vec<(usize, F)>,
) -> Result<Failed, Failure> {
    let mut failed = Failed::new(added.len());
    for (index, posted) in posted {
        failed.note(index, posted.await)?;
    }
    for (_, added) in failed.of(added) {
        let body = (LOCK + 1..added.image.len()).map(|index| (added.page.at().word(index), added.image[index]));
        write_words(remote, body.collect()).await?;
    }
    Ok(failed)
}

fn lock_word(added: &Added) -> (RemotePtr, u64) {
    (added.page.at(), added.image[LOCK])
}

/// Sets the lock word of a page whose WRITE has failed, if that had no effect. If it had, others may have been led to the page and
/// have freed it since: then it stays free.
///
/// # Errors
/// If the memory server is lost.
async fn set_first_lock<R: Remote>(remote: &R, added: &Added) -> Result<(), Failure> {
    let ((at, lock), version) = (lock_word(added), added.page.free_version());
    release_word(remote, at, LockWord::free(version, Some(remote.owner())).word(), lock).await?;
    // A page that was never written.
    if version == 0 { release_word(remote, at, 0, lock).await } else { Ok(()) }
}

/// Writes new pages. Their lock words say *free* until the bodies are there, to those who still have links from an earlier use.
///
/// # Errors
/// If a memory server is lost.
pub(super) async fn publish<R: Remote>(
    remote: &R,
    added: &[Added],
    prepared: &mut ChangeBuffers,
) -> Result<(), Failure> {
    if added.is_empty() {
        return Ok(());
    }
    remote.count(Count::RoundTrip);
    let ordered = remote.capabilities().ordered_writes;
    let mut posted = Vec::with_capacity(2 * added.len());
    for (index, (added, body)) in added.iter().zip(prepared.bodies.drain(..)).enumerate() {
        posted.push((index, remote.write(added.page.at().word(LOCK + 1), Payload::Words(body))));
        if ordered {
            posted.push((index, remote.write(added.page.at(), Payload::Word(added.image[LOCK]))));
        }
    }
    let failed = end_pages(remote, added, posted).await?;
    if !ordered {
        remote.count(Count::RoundTrip);
        return write_words(remote, added.iter().map(lock_word).collect()).await;
    }
    write_words(remote, failed.of(added).map(|(_, added)| lock_word(added)).collect()).await
}

/// What became of an install.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Installed {
    Yes,
    /// The word was this one.
    No(u64),
    /// The answer was lost. The word is this one now: others have replaced `old`, or ours.
    Unknown(u64),
}

/// The images of new pages, for [`install`].
///
/// # Errors
/// If a buffer cannot be had.
pub(super) fn images(remote: &impl Remote, added: &[Added]) -> Result<Vec<Buffer>, Error> {
    let copied = |added: &Added| {
        let mut buffer = remote.buffer(added.image.len())?;
        buffer.copy_from_slice(&added.image);
        Ok(buffer)
    };
    added.iter().map(copied).collect()
}

/// Writes new pages, and replaces a word by `to` if it is `old`, where nobody else writes `to`.
///
/// # Errors
/// If a memory server is lost.
pub(super) async fn install<R: Remote>(
    remote: &R,
    added: &[Added],
    images: Vec<Buffer>,
    (word, old, to): (RemotePtr, u64, u64),
) -> Result<Installed, Failure> {
    let in_order = remote.capabilities().ordered_writes;
    remote.count(Count::RoundTrip);
    // One WRITE for each page: nobody looks at its lock word before something leads to it.
    let write = |(added, image): (&Added, Buffer)| remote.write(added.page.at(), Payload::Words(image));
    let posted: Vec<_> = added.iter().zip(images).map(write).enumerate().collect();
    let written = async |posted| {
        let failed = end_pages(remote, added, posted).await?;
        for (_, added) in failed.of(added) {
            set_first_lock(remote, added).await?;
        }
        Ok::<_, Failure>(())
    };
    // Words that others swap as soon as something leads to them are not to be written again then.
    let at_once = |added: &Added| added.page.at().server() == word.server() && !has_words(&added.image);
    let swapped = if in_order && added.iter().all(at_once) {
        // With one doorbell. If a WRITE fails and the swap does not, the word leads to a page that is still free to readers:
        // they begin anew until it is there.
        let swapped = remote.compare_swap(word, old, to);
        let written = written(posted).await;
        let swapped = swapped.await;
        written?;
        swapped
    } else {
        written(posted).await?;
        if !added.is_empty() {
            remote.count(Count::RoundTrip);
        }
        remote.compare_swap(word, old, to).await
    };
    match swapped {
        Ok(found) if found == old => Ok(Installed::Yes),
        Ok(found) => Ok(Installed::No(found)),
        Err(error) if error.may_be_tried_again() => Ok(match remote.load(word).await? {
            found if found == to => Installed::Yes,
            found if found == old => Installed::No(found),
            found => Installed::Unknown(found),
        }),
        Err(error) => Err(error),
    }
}

/// Writes the changed words of locked pages, and unlocks them.
///
/// # Errors
/// If a memory server is lost. The pages of others are changed and unlocked then.
pub(super) async fn write_and_unlock<R: Remote>(
    remote: &R,
    changed: &[Changed],
    prepared: ChangeBuffers,
) -> Result<(), Failure> {
    if changed.is_empty() {
        return Ok(());
    }
    remote.count(Count::RoundTrip);
    let ordered = remote.capabilities().ordered_writes;
    let marks = prepared.recording.as_ref().map(Recording::marks).unwrap_or_default();
    let mut marked = Vec::new();
    if ordered {
        marked = marks.iter().map(|&(at, mark)| remote.write(at, Payload::Word(mark))).collect();
    } else if !marks.is_empty() {
        write_words(remote, marks.clone()).await?;
        remote.count(Count::RoundTrip);
    }
    let mut posted = Vec::with_capacity(prepared.writes.len());
    let mut unlocks = Vec::with_capacity(changed.len());
    let mut writes = prepared.writes.into_iter().peekable();
    for (index, page) in changed.iter().enumerate() {
        while let Some((_, at, payload)) = writes.next_if(|&(of, ..)| of == index) {
            posted.push((index, remote.write(at, payload)));
        }
        if ordered {
            unlocks.push((index, unlock(remote, page, page.after(remote.owner()))));
        }
    }
    let (mut failed, mut lost) = (Failed::new(changed.len()), None);
    let mut unmarked = Vec::new();
    for (&mark, marked) in marks.iter().zip(marked) {
        if marked.await.is_err() {
            unmarked.push(mark);
        }
    }
    for (index, posted) in posted {
        lost = failed.note(index, posted.await).err().or(lost);
    }
    if !ordered {
        for (index, page) in failed.take(changed) {
            lost = failed.note(index, write_words(remote, page.words_to_write()).await).err().or(lost);
        }
        remote.count(Count::RoundTrip);
        let intact = changed.iter().enumerate().filter(|&(index, _)| !failed.is_lost(index));
        unlocks.extend(intact.map(|(index, page)| (index, unlock(remote, page, page.after(remote.owner())))));
    }
    for (index, unlock) in unlocks {
        lost = failed.note(index, unlock.await).err().or(lost);
    }
    // Words are not written again before the mark of their server. If that is lost, so are the pages there.
    for mark in unmarked {
        lost = write_words(remote, vec![mark]).await.err().or(lost);
    }
    for (index, page) in failed.take(changed) {
        lost = failed.note(index, finish(remote, page).await).err().or(lost);
    }
    lost.map_or(Ok(()), Err)
}

/// Ends the change of a page of which requests have failed.
pub(super) async fn finish<R: Remote>(remote: &R, page: &Changed) -> Result<(), Failure> {
    let mut attempt = 0;
    loop {
        if remote.load(page.at).await? != page.ours(remote.owner()).word() {
            return Ok(());
        }
        write_words(remote, page.words_to_write()).await?;
        match unlock(remote, page, page.after(remote.owner())).await {
            Ok(()) => return Ok(()),
            Err(error) => remote.before_trying_again(error, &mut attempt).await?,
        }
    }
}

/// Pages of which a request has failed.
struct Failed(Vec<State>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Intact,
    ToSettle,
    /// With its memory server, or because its lock was taken away.
    Lost,
}

impl Failed {
    fn new(pages: usize) -> Self {
        Self(vec![State::Intact; pages])
    }

    /// Takes notice of how a request of a page ended; an error that cannot be settled comes back.
    fn note(&mut self, index: usize, outcome: Result<(), Failure>) -> Result<(), Failure> {
        match outcome {
            Ok(()) => Ok(()),
            Err(error) if error.may_be_tried_again() => {
                if self.0[index] == State::Intact {
                    self.0[index] = State::ToSettle;
                }
                Ok(())
            }
            Err(error) => {
                self.0[index] = State::Lost;
                Err(error)
            }
        }
    }

    fn is_lost(&self, index: usize) -> bool {
        self.0[index] == State::Lost
    }

    /// Those that are to be settled.
    fn of<'a, T>(&self, pages: &'a [T]) -> impl Iterator<Item = (usize, &'a T)> + use<'a, '_, T> {
        pages.iter().enumerate().filter(|&(index, _)| self.0[index] == State::ToSettle)
    }

    /// Those that are to be settled, which then count as intact.
    fn take<'a, T>(&mut self, pages: &'a [T]) -> Vec<(usize, &'a T)> {
        let taken: Vec<_> = self.of(pages).collect();
        taken.iter().for_each(|&(index, _)| self.0[index] = State::Intact);
        taken
    }
}
