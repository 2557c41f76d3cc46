//! What a repairer does with what a dead owner has left.

use std::{collections::HashSet, future::ready};

use super::{
    RING_CLASS, RING_NEXT, RING_OWNER, RINGS,
    record::{Evidence, NewPage, PartOf, Record, RecordedPage, scan},
    recording::Recording,
    ring::Places,
};
use crate::{
    error::Error,
    local_locks::SlotGuard,
    lock::{LockState, LockWord, OwnerId},
    page::{self, CHECKSUM, IDENTITY, Identity, LOCK, SELF, SizeClass},
    ptr::{Link, RemotePtr, ServerId},
    remote::{Remote, read_lock, release_word, take_word, write_words},
};

type Failure = Box<Error>;

/// Room for a record about one page, which no other task of the compute server changes while this exists.
#[derive(Debug)]
pub struct Room {
    pub(crate) places: Places,
    pub(crate) _slot: Option<SlotGuard>,
}

/// What repairs need of whoever does them.
pub trait Recover: Remote {
    /// Where the list of `owner`'s rings on a memory server begins: the word that links to the first; none if the compute server
    /// has no slot any more.
    fn rings_of(&self, owner: OwnerId, server: ServerId) -> impl Future<Output = Result<Option<RemotePtr>, Failure>>;

    /// What `take` takes from the rings of `owner` on a memory server: see `read_rings`.
    ///
    /// # Errors
    /// If the memory server is lost, or no buffer can be had.
    fn rings<T>(
        &self,
        owner: OwnerId,
        server: ServerId,
        take: impl Fn(RemotePtr, &[u64], &mut Vec<T>),
    ) -> impl Future<Output = Result<Vec<T>, Failure>>
    where
        Self: Sized,
    {
        async move {
            match self.rings_of(owner, server).await? {
                Some(head) => read_rings(self, head, owner, RING_CLASS.words(), take).await,
                None => Ok(Vec::new()),
            }
        }
    }

    /// Takes the local slot of a page and, on its memory server, room for a record with parts of these lengths.
    fn reserve(&self, page: RemotePtr, parts: &[usize]) -> impl Future<Output = Result<Room, Failure>>;

    /// The next number of a record.
    fn next_sequence(&self) -> u64;

    /// Whether a page of this class can stand there.
    fn holds_page(&self, at: RemotePtr, class: SizeClass) -> bool;

    /// Whether a page of this class stands there that can be freed, as all pages of structures can.
    ///
    /// # Errors
    /// If the memory server is lost.
    fn can_free(&self, _at: RemotePtr, _class: SizeClass) -> impl Future<Output = Result<bool, Failure>> {
        ready(Ok(true))
    }

    /// The page is free, and belongs to this compute server.
    fn retire(&self, at: RemotePtr, class: SizeClass, version: u64);

    /// Has a page repaired that is locked by a dead owner: afterwards its lock word is another one.
    ///
    /// # Errors
    /// [`Error::PageDamaged`] if it cannot be: it is half-written, and no record tells the rest; if a memory server is lost, or there is
    /// no room for a record.
    fn repair(
        &self,
        page: RemotePtr,
        class: SizeClass,
        lock: LockWord,
        owner: OwnerId,
    ) -> impl Future<Output = Result<(), Failure>>;

    /// Replays the logs of a dead owner.
    ///
    /// # Errors
    /// If a memory server is lost, or there is no memory for records.
    fn replay_logs(&self, owner: OwnerId) -> impl Future<Output = Result<(), Failure>>;
}

/// What `take` takes from the first `words` of each ring in a list, the first one first. One ring at a time: there may be as many as a log
/// has, and the memory that they are read into is registered.
///
/// # Errors
/// If the memory server is lost, or no buffer can be had.
pub(crate) async fn read_rings<R: Recover, T>(
    remote: &R,
    head: RemotePtr,
    owner: OwnerId,
    words: usize,
    take: impl Fn(RemotePtr, &[u64], &mut Vec<T>),
) -> Result<Vec<T>, Failure> {
    let (mut taken, mut known) = (Vec::new(), HashSet::new());
    let mut next = Link::from_word(remote.load(head).await?);
    while let Some((at, RING_CLASS)) = next.remote().filter(|&(at, class)| remote.holds_page(at, class)) {
        let ring = remote.read(at, words).await?;
        // Rings are freed from the last one on: what is none any more ends the list.
        if !is_ring_of(&ring, at, owner) || !known.insert(at) {
            break;
        }
        next = Link::from_word(ring[RING_NEXT]);
        take(at, &ring, &mut taken);
    }
    Ok(taken)
}

/// Whether these are the first words of a ring of this owner.
pub(crate) fn is_ring_of(ring: &[u64], at: RemotePtr, owner: OwnerId) -> bool {
    let is_ring = Identity::from_word(ring[IDENTITY]).is_some_and(|identity| identity.structure == RINGS);
    ring[SELF] == at.raw() && is_ring && ring[RING_OWNER] == u64::from(owner.incarnation())
}

/// All whole records of an owner on one memory server.
///
/// # Errors
/// As [`read_rings`].
async fn records_on<R: Recover>(remote: &R, owner: OwnerId, server: ServerId) -> Result<Vec<Record>, Failure> {
    let parts = remote.rings(owner, server, |at, words, parts| scan(PartOf::Change, at, words, owner, parts)).await?;
    let mut records = Vec::new();
    for record in Record::all_of(parts, |at, class| remote.holds_page(at, class)) {
        // Nobody has recorded one that would free what is no page: what it says of others is worth nothing either.
        match are_pages(remote, record.may_be_freed()).await? {
            true => records.push(record),
            false => tracing::warn!(%owner, %server, record.sequence, "a record is damaged, and left alone"),
        }
    }
    Ok(records)
}

/// Whether all of these are pages that can be freed.
///
/// # Errors
/// If the memory server is lost.
pub(super) async fn are_pages<R: Recover>(
    remote: &R,
    pages: impl IntoIterator<Item = (RemotePtr, SizeClass)>,
) -> Result<bool, Failure> {
    for (at, class) in pages {
        if !remote.can_free(at, class).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The records of a dead owner on one memory server.
#[derive(Debug)]
pub(crate) struct Newest {
    owner: OwnerId,
    server: ServerId,
    records: Vec<Record>,
}

impl Newest {
    /// Reads them.
    ///
    /// # Errors
    /// As [`read_rings`].
    pub(crate) async fn read<R: Recover>(remote: &R, owner: OwnerId, server: ServerId) -> Result<Self, Failure> {
        Ok(Self { owner, server, records: records_on(remote, owner, server).await? })
    }

    /// The record of the change for which its owner has locked the page at this version.
    pub(crate) fn of(&self, page: RemotePtr, version: u64) -> Option<&Record> {
        let names = |record: &&Record| record.pages.iter().any(|of| of.at == page && of.lock.version() == version);
        self.records.iter().filter(names).max_by_key(|record| record.sequence)
    }

    /// The pages on the memory server that the records name.
    pub(crate) fn pages(&self) -> impl Iterator<Item = &RecordedPage> {
        self.records.iter().flat_map(|record| &record.pages).filter(|page| page.at.server() == self.server)
    }

    /// All pages that the records name, wherever they are.
    pub(crate) fn named(&self) -> impl Iterator<Item = (RemotePtr, SizeClass)> {
        self.records.iter().flat_map(|record| {
            let old = record.pages.iter().map(|page| (page.at, page.class));
            old.chain(record.new.iter().map(|page| (page.at, page.class)))
        })
    }

    /// Whether the change of a record had all its locks.
    async fn is_evident<R: Recover>(&self, remote: &R, record: &Record) -> Result<bool, Failure> {
        match record.evidence {
            Evidence::Lock => Ok(true),
            Evidence::NewPages => {
                for &NewPage { at, version, .. } in &record.new {
                    let word = read_lock(remote, at).await?;
                    // A page that was never used has a word of zero.
                    let is_free = word.state() == LockState::Free || word.word() == 0;
                    if is_free && word.version() == version {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            Evidence::Log => {
                remote.replay_logs(self.owner).await?;
                // What it still holds is in no batch that arrived.
                Ok(false)
            }
            Evidence::Mark if record.is_marked => Ok(true),
            Evidence::Mark => {
                let mut servers: Vec<ServerId> = record.pages.iter().map(|page| page.at.server()).collect();
                servers.sort_unstable();
                servers.dedup();
                for server in servers.into_iter().filter(|&server| server != self.server) {
                    let there = records_on(remote, self.owner, server).await?;
                    if there.iter().any(|other| other.sequence == record.sequence && other.is_marked) {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }

    /// Repairs all pages that a record names and its owner still holds.
    ///
    /// # Errors
    /// If a memory server is lost, or there is no room for a record. Other pages are repaired then.
    pub(crate) async fn finish<R: Recover>(&self, remote: &R, record: &Record) -> Result<(), Failure> {
        let is_evident = self.is_evident(remote, record).await?;
        let mut outcome = Ok(());
        if !is_evident {
            // While a page is locked, so that whoever comes after a repairer that dies does it again.
            for &NewPage { at, class, version } in &record.new {
                outcome = outcome.and(take_back(remote, at, class, version).await);
            }
        }
        for page in &record.pages {
            let finished = match is_evident {
                true => roll_forward(remote, page, self.owner).await,
                false => roll_back(remote, page, self.owner).await,
            };
            outcome = outcome.and(finished);
        }
        outcome
    }
}

/// Frees a new page to which nothing leads, if it was published.
async fn take_back<R: Recover>(remote: &R, at: RemotePtr, class: SizeClass, version: u64) -> Result<(), Failure> {
    let first = LockWord::unlocked(LockWord::unlocked(version).next_version());
    let free = LockWord::free(first.next_version(), Some(remote.owner()));
    if take_alone(remote, at, first.word(), free.word()).await? {
        remote.retire(at, class, free.version());
    }
    Ok(())
}

/// [`take_word`](crate::remote::take_word), by one task of this compute server at a time: what comes of a request that fails is read from
/// the word, which another task would set to the same. Waits for the local slot of the page.
pub(crate) async fn take_alone<R: Recover>(
    remote: &R,
    at: RemotePtr,
    expected: u64,
    ours: u64,
) -> Result<bool, Failure> {
    let _room = remote.reserve(at, &[]).await?;
    Ok(read_lock(remote, at).await?.word() == expected && take_word(remote, at, expected, ours).await?)
}

/// Nothing was written by this change; but where not all are recorded, the lock may be that of a later one, of the page alone.
async fn roll_back<R: Recover>(remote: &R, page: &RecordedPage, owner: OwnerId) -> Result<(), Failure> {
    unlock_if_whole(remote, page.at, page.class, page.lock.locked_by(owner)).await
}

pub(super) async fn roll_forward<R: Recover>(remote: &R, page: &RecordedPage, owner: OwnerId) -> Result<(), Failure> {
    let theirs = page.lock.locked_by(owner).word();
    if read_lock(remote, page.at).await?.word() != theirs {
        return Ok(());
    }
    let mut recording = Recording::new(remote, page.body(), Evidence::Lock, [page.at.server()])?;
    let Room { places, _slot } = remote.reserve(page.at, &recording.parts()).await?;
    recording.seal(remote, remote.next_sequence(), [places]);
    recording.write(remote).await?;
    let ours = page.lock.locked_by(remote.owner()).word();
    if !take_word(remote, page.at, theirs, ours).await? {
        return Ok(());
    }
    write_words(remote, page.words_to_write().collect()).await?;
    let after = page.after(remote.owner());
    release_word(remote, page.at, ours, after.word()).await?;
    if page.frees {
        remote.retire(page.at, page.class, after.version());
    }
    Ok(())
}

/// Repairs a page that `owner`, who is dead, has locked at the version in `lock`, and the others of that change.
///
/// # Errors
/// As [`Recover::repair`].
pub(crate) async fn finish_page<R: Recover>(
    remote: &R,
    page: RemotePtr,
    class: SizeClass,
    lock: LockWord,
    owner: OwnerId,
) -> Result<(), Failure> {
    let outcome = if lock.is_for_one_word() {
        finish_word(remote, page, class, lock).await
    } else {
        let newest = Newest::read(remote, owner, page.server()).await?;
        match newest.of(page, lock.version()) {
            Some(record) => newest.finish(remote, record).await,
            None => unlock_if_whole(remote, page, class, lock).await,
        }
    };
    // What came of the repair says more than why the page could not be read again.
    let found = match read_lock(remote, page).await {
        Ok(found) => found,
        Err(error) => return outcome.and(Err(error)),
    };
    match found == lock {
        false => Ok(()),
        true => outcome.and(Err(Box::new(Error::PageDamaged { page, owner }))),
    }
}

/// Repairs a page that somebody who is dead has locked for one word. The word was written or not, and so was the checksum: what is there becomes the
/// page. To set its checksum is a change of one word.
///
/// # Errors
/// If the memory server is lost, or no buffer can be had.
pub(crate) async fn finish_word<R: Recover>(
    remote: &R,
    page: RemotePtr,
    class: SizeClass,
    lock: LockWord,
) -> Result<(), Failure> {
    unlock_if_whole(remote, page, class, lock).await?;
    let _room = remote.reserve(page, &[]).await?;
    let copy = remote.read(page, class.words()).await?;
    if copy[LOCK] != lock.word() {
        return Ok(());
    }
    let before = LockWord::unlocked(lock.version());
    let ours = before.locked_for_one_word_by(remote.owner()).word();
    // If others have repaired the page meanwhile, the copy may be torn, and the lock word is another one.
    if take_word(remote, page, lock.word(), ours).await? {
        let after = LockWord::unlocked(before.next_version());
        write_words(remote, vec![(page.word(CHECKSUM), page::checksum(&copy, after.version()))]).await?;
        release_word(remote, page, ours, after.word()).await?;
    }
    Ok(())
}

/// Without a record: a page that fits its checksum was not written, and one that fits its next one is written to the end.
async fn unlock_if_whole<R: Recover>(
    remote: &R,
    page: RemotePtr,
    class: SizeClass,
    lock: LockWord,
) -> Result<(), Failure> {
    let copy = remote.read(page, class.words()).await?;
    let before = LockWord::unlocked(lock.version());
    let after = LockWord::unlocked(before.next_version());
    if copy[LOCK] == lock.word() && page::is_whole(&copy) {
        release_word(remote, page, lock.word(), before.word()).await?;
    } else if copy[LOCK] == lock.word() && page::is_whole_at(&copy, after.version()) {
        release_word(remote, page, lock.word(), after.word()).await?;
    }
    Ok(())
}
