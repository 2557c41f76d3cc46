//! Structures whose making or dropping did not come to its end: all that they have is freed.

use std::collections::HashSet;

use super::{Entry, KIND, Sound, access, change_entry, read_sound};
use crate::{
    access::PagesMut as _, audit, error::Error, lock::OwnerId, operation::retry, page::StructureId, pages, sync::lock,
    worker::Handle,
};

/// Frees all pages of a structure whose entry is unfinished, and then the entry; how many pages.
async fn free_entry(worker: &Handle, id: StructureId) -> Result<u64, Error> {
    let count = free_all(worker, id).await?;
    change_entry(worker, id, |pages, entry| pages.set(entry, KIND, 0)).await?;
    Ok(count)
}

/// [`free_entry`] of what this compute server was making or dropping. If that fails, maintenance tries [again](free_left).
pub(super) async fn free_own(worker: &Handle, id: StructureId) -> Result<u64, Error> {
    let freed = free_entry(worker, id).await;
    let unfinished = &mut *lock(&worker.compute().unfinished);
    match &freed {
        // It may have been freed by a request that has failed.
        Ok(_) | Err(Error::NoSuchName { .. }) => unfinished.remove(&id),
        Err(_) => unfinished.insert(id),
    };
    freed
}

/// Frees what this compute server was making or dropping and could not free. Part of maintenance; may be begun again at any point.
///
/// # Errors
/// Why some of it is left.
pub(crate) async fn free_left(worker: &Handle) -> Result<(), Error> {
    let left: Vec<StructureId> = lock(&worker.compute().unfinished).iter().copied().collect();
    if left.is_empty() {
        return Ok(());
    }
    let handle = worker.clone();
    let freeing = async move {
        let mut outcome = Ok(());
        for id in left {
            match free_own(&handle, id).await {
                Ok(_) | Err(Error::NoSuchName { .. }) => {}
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome
    };
    worker.spawn_to_end(freeing).await
}

/// Frees the structures that those were making or dropping who are `dead`, and whose changes are finished. May be begun again by
/// others at any point, and several may do it at once. Of whom something is left, and why: what is left is still entered.
pub(crate) async fn free_unfinished(worker: &Handle, dead: &[OwnerId]) -> (Vec<OwnerId>, Result<(), Error>) {
    let access = access(worker);
    let all = match retry(worker, async || read_sound(&access).await).await {
        Ok(Sound { entries, .. }) => entries,
        Err(error) => return (dead.to_vec(), Err(error)),
    };
    let (mut left, mut outcome) = (Vec::new(), Ok(()));
    for (_, entry) in all {
        if let Entry::Unfinished { id, name, by } = entry
            && dead.contains(&by)
        {
            match free_entry(worker, id).await {
                Ok(pages) => {
                    tracing::info!(name, %by, pages, "freed what a dead compute server was making or dropping")
                }
                // Somebody else was faster.
                Err(Error::NoSuchName { .. }) => {}
                // It keeps no other from being freed.
                Err(error) => {
                    left.push(by);
                    outcome = outcome.and(Err(error));
                }
            }
        }
    }
    (left, outcome)
}

/// Frees every live page of a structure.
async fn free_all(worker: &Handle, id: StructureId) -> Result<u64, Error> {
    let mut count = 0;
    loop {
        let audit = audit::audit(worker, id, None, &HashSet::new()).await?;
        // Who repairs a dead one's change, here or elsewhere, makes pages live that were new in it.
        if audit.leaked.is_empty() {
            return Ok(count);
        }
        for page in audit.leaked {
            count += u64::from(pages::free_unlinked(worker, id, page).await?);
        }
    }
}
