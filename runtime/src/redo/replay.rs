//! What a dead owner's log says, made so.

use std::collections::BTreeMap;

use super::{
    batch::{PageRecord, Recorded, decode},
    record::{Evidence, PartOf, RecordedPage, scan, whole},
    recording::Recording,
    repair::{Recover, Room, are_pages, roll_forward, take_alone},
};
use crate::{
    error::Error,
    fabric::Liveness,
    lock::{LockState, LockWord, OwnerId},
    page::{self, CHECKSUM, LOCK, SizeClass, StructureId},
    ptr::{Link, RemotePtr, ServerId},
    remote::{Waited, read_lock, release_word, take_word, write_words},
};

type Failure = Box<Error>;

/// What those logs of `owner` say that are meant, by structure and number: the records of each page, by the word of its link.
///
/// # Errors
/// If a memory server is lost, or no buffer can be had.
pub(crate) async fn logged<R: Recover>(
    remote: &R,
    owner: OwnerId,
    servers: impl IntoIterator<Item = ServerId>,
    are_meant: impl Fn(StructureId, u64) -> bool,
) -> Result<BTreeMap<u64, Vec<PageRecord>>, Failure> {
    let mut parts = Vec::new();
    for server in servers {
        let scanned = remote.rings(owner, server, |at, words, parts| scan(PartOf::Batch, at, words, owner, parts));
        parts.extend(scanned.await?);
    }
    let mut pages: BTreeMap<u64, Vec<PageRecord>> = BTreeMap::new();
    for (_, _, words) in whole(parts) {
        let batch = decode(&words, |at, class| remote.holds_page(at, class));
        if let Some((_, _, records)) = batch.filter(|&(structure, log, _)| are_meant(structure, log)) {
            // All are pages of a structure.
            if !are_pages(remote, records.iter().filter_map(|record| record.page.remote())).await? {
                tracing::warn!(%owner, "a batch of a log is damaged, and left alone");
                continue;
            }
            records.into_iter().for_each(|record| pages.entry(record.page.word()).or_default().push(record));
        }
    }
    Ok(pages)
}

/// Replays those logs of `owner` that are meant, by structure and number, and that it writes no more: see [`write_ahead`](crate::write_ahead). How many pages it has changed.
///
/// # Errors
/// If a memory server is lost, or there is no memory for records. Others, or a later call, go on with it then.
pub(crate) async fn replay<R: Recover>(
    remote: &R,
    owner: OwnerId,
    servers: impl IntoIterator<Item = ServerId>,
    are_meant: impl Fn(StructureId, u64) -> bool,
) -> Result<usize, Failure> {
    let pages = logged(remote, owner, servers, are_meant).await?;
    let (mut replayed, mut new, mut locked) = (0, Vec::new(), Vec::new());
    for (page, records) in pages {
        let Some((at, class)) = Link::from_word(page).remote() else { continue };
        let (shared, private): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.is_shared);
        if !private.is_empty() {
            replayed += usize::from(replay_page(remote, at, class, private).await?);
        }
        for record in shared {
            match read_lock(remote, at).await?.state() {
                LockState::LockedBy(holder) if holder == owner => locked.push((at, class, record)),
                _ => new.push((at, class, record)),
            }
        }
    }
    // Pages before those that lead to them.
    for (at, class, record) in new.into_iter().chain(locked) {
        replayed += usize::from(replay_shared(remote, owner, at, class, record).await?);
    }
    Ok(replayed)
}

/// Brings a page that others share to the version of a record, if `owner` still holds it at the version before or it is new and still
/// free. Otherwise the change was finished, and others may have changed the page since.
async fn replay_shared<R: Recover>(
    remote: &R,
    owner: OwnerId,
    at: RemotePtr,
    class: SizeClass,
    PageRecord { version, what, .. }: PageRecord,
) -> Result<bool, Failure> {
    let found = read_lock(remote, at).await?;
    let before = LockWord::unlocked(found.version());
    match (found.state(), what) {
        (LockState::LockedBy(holder), what) if holder == owner && before.next_version() == version => {
            let (frees, runs) = match what {
                Recorded::Freed => (true, Vec::new()),
                Recorded::Image(mut image) => {
                    image[CHECKSUM] = page::checksum(&image, version);
                    (false, vec![(LOCK + 1, image[LOCK + 1..].to_vec())])
                }
                Recorded::Words(_) => return Ok(false),
            };
            roll_forward(remote, &RecordedPage { at, class, lock: before, frees, runs }, owner).await?;
            Ok(true)
        }
        (_, Recorded::Image(image)) if is_free(found) && found.version() < version => {
            write_page(remote, at, class, found, LockWord::unlocked(version), image).await
        }
        _ => Ok(false),
    }
}

/// Whether a page is free: one that was never used has a word of zero.
fn is_free(found: LockWord) -> bool {
    found.state() == LockState::Free || found.word() == 0
}

/// Brings a page to the newest version that its records know; false if it is at a later one.
async fn replay_page<R: Recover>(
    remote: &R,
    at: RemotePtr,
    class: SizeClass,
    mut records: Vec<PageRecord>,
) -> Result<bool, Failure> {
    records.sort_by_key(|record| record.version);
    let (mut attempt, mut waited) = (0, Waited::default());
    loop {
        let found = read_lock(remote, at).await?;
        let newest = records.last().map_or(0, |record| record.version);
        let is_free = matches!(records.last(), Some(PageRecord { what: Recorded::Freed, .. }));
        if found.version() > newest || is_free && found.version() == newest {
            return Ok(false);
        }
        if let LockState::LockedBy(holder) = found.state() {
            match remote.liveness(holder) {
                Liveness::Dead => remote.repair(at, class, found, holder).await?,
                _ => {
                    waited.bear(remote, at, found, holder)?;
                    remote.back_off(attempt).await;
                }
            }
            attempt += 1;
            continue;
        }
        if is_free {
            let free = LockWord::free(newest, Some(remote.owner()));
            if take_alone(remote, at, found.word(), free.word()).await? {
                remote.retire(at, class, newest);
                return Ok(true);
            }
            continue;
        }
        let Some(image) = newest_image(remote, at, class, found, &records).await? else { return Ok(false) };
        if write_page(remote, at, class, found, LockWord::unlocked(newest), image).await? {
            return Ok(true);
        }
    }
}

/// The page's words as the newest record leaves them; `None` if records are missing, as in what is left of a log that is done with.
async fn newest_image<R: Recover>(
    remote: &R,
    at: RemotePtr,
    class: SizeClass,
    found: LockWord,
    records: &[PageRecord],
) -> Result<Option<Box<[u64]>>, Failure> {
    let whole = |record: &&PageRecord| match &record.what {
        Recorded::Image(image) => Some((record.version, image.clone())),
        _ => None,
    };
    let base =
        records.iter().rev().find_map(|record| whole(&record)).filter(|&(version, _)| version >= found.version());
    let (version, image) = match base {
        Some(base) => base,
        None => (found.version(), remote.read(at, class.words()).await?[..].into()),
    };
    Ok(with_records(version, image, records))
}

/// A page of this version as those of the records that are newer leave it, which are in order; `None` if one is missing. A record may
/// be there twice: a batch that counted as failed may have arrived.
fn with_records(mut version: u64, mut image: Box<[u64]>, records: &[PageRecord]) -> Option<Box<[u64]>> {
    for record in records {
        if record.version <= version {
            continue;
        }
        let Recorded::Words(runs) = &record.what else { return None };
        if LockWord::unlocked(version).next_version() != record.version {
            return None;
        }
        for (first, words) in runs {
            let first = *first as usize;
            image[first..first + words.len()].copy_from_slice(words);
        }
        version = record.version;
    }
    Some(image)
}

/// Writes a page as its owner would have, one version later; false if its lock word is not as it was found.
async fn write_page<R: Recover>(
    remote: &R,
    at: RemotePtr,
    class: SizeClass,
    found: LockWord,
    lock: LockWord,
    mut image: Box<[u64]>,
) -> Result<bool, Failure> {
    image[CHECKSUM] = page::checksum(&image, lock.next_version());
    let runs = vec![(LOCK + 1, image[LOCK + 1..].to_vec())];
    let page = RecordedPage { at, class, lock, frees: false, runs };
    let mut recording = Recording::new(remote, page.body(), Evidence::Lock, [at.server()])?;
    let Room { places, _slot } = remote.reserve(at, &recording.parts()).await?;
    recording.seal(remote, remote.next_sequence(), [places]);
    recording.write(remote).await?;
    let ours = lock.locked_by(remote.owner()).word();
    if !take_word(remote, at, found.word(), ours).await? {
        return Ok(false);
    }
    write_words(remote, page.words_to_write().collect()).await?;
    release_word(remote, at, ours, page.after(remote.owner()).word()).await?;
    Ok(true)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn records_are_applied_once_in_order_or_not_at_all() {
        let page = Link::to(RemotePtr::new(ServerId::new(0).unwrap(), 1 << 16).unwrap(), SizeClass::SMALLEST);
        let record = |version, word| {
            let what = Recorded::Words(smallvec![(5, smallvec![word])]);
            PageRecord { page, version, is_shared: false, what }
        };
        let image = vec![0; 8].into_boxed_slice();
        let word =
            |version, records: &[PageRecord]| with_records(version, image.clone(), records).map(|image| image[5]);
        let twice = [record(4, 40), record(5, 50), record(5, 50), record(6, 60)];
        assert_eq!(word(4, &twice), Some(60), "one that is there twice is not one that is missing");
        assert_eq!([word(6, &twice), word(3, &twice)], [Some(0), Some(60)]);
        assert_eq!(word(2, &twice), None, "version 3 is missing");
        assert_eq!(word(4, &[record(5, 50), record(7, 70)]), None);
    }
}
