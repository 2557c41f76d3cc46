//! Regions go from one compute server to another, while operations run.

use farlink_runtime::{
    access::Structure,
    error::Error,
    fabric::Error as FabricError,
    lock::OwnerId,
    messaging::{Error as MessagingError, Kind, Priority},
    page::StructureId,
    wire::{Wire, decode_all, wire},
    worker::Handle,
};

use crate::ship::ReplyHeader;

/// The kinds of messages that ask a compute server to give up a region, or to take one.
pub const GIVE_UP: Kind = Kind(0x4749_5645);
/// See [`GIVE_UP`].
pub const TAKE: Kind = Kind(0x5441_4b45);

/// What stands before the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MoveHeader {
    structure: u64,
}

wire!(struct MoveHeader { structure });

impl MoveHeader {
    pub(super) fn of(structure: &Structure) -> Self {
        Self { structure: structure.id.0.into() }
    }

    pub(super) fn structure(self) -> Option<StructureId> {
        u32::try_from(self.structure).ok().map(StructureId)
    }
}

/// Has a region go from one compute server to another; both listen, and all of it lies in one region that the first one has. Operations on
/// it go on, but for the last of it, which wait. What has moved: a piece of a region is made smaller so that no page of level 0 is cut.
/// `None` if the first one does not have it (any more), or nothing of it can move alone.
///
/// The region has no owner for the time between: if the second one cannot take it, the first one is asked to take it again.
///
/// # Errors
/// What the first one failed with: it still has the region, unless it is gone. What the second one failed with.
pub async fn move_region<R: Wire + Clone>(
    worker: &Handle,
    structure: &Structure,
    region: &R,
    from: OwnerId,
    to: OwnerId,
) -> Result<Option<R>, Error> {
    move_to(worker, structure, region, from, async |region| ask(worker, structure, &region, to, TAKE).await.map(drop))
        .await
}

/// [`move_region`], where the region is taken in this way.
pub(super) async fn move_to<R: Wire + Clone>(
    worker: &Handle,
    structure: &Structure,
    region: &R,
    from: OwnerId,
    take: impl AsyncFnOnce(R) -> Result<(), Error>,
) -> Result<Option<R>, Error> {
    let Some(region) = ask(worker, structure, region, from, GIVE_UP).await? else { return Ok(None) };
    match take(region.clone()).await {
        Ok(()) => Ok(Some(region)),
        Err(error) => {
            if let Err(again) = ask(worker, structure, &region, from, TAKE).await {
                tracing::warn!(structure = structure.name, %again, "a region has no owner: it was given up, and nobody can take it");
            }
            Err(error)
        }
    }
}

/// Asks a compute server to give up a region, or to take it; what it has given up or taken.
async fn ask<R: Wire>(
    worker: &Handle,
    structure: &Structure,
    region: &R,
    owner: OwnerId,
    what: Kind,
) -> Result<Option<R>, Error> {
    let mut words = Vec::new();
    MoveHeader::of(structure).encode(&mut words);
    region.encode(&mut words);
    match answer_to(worker, structure, owner, what, &words).await? {
        Some(words) => Ok(decode_all(&words)?),
        None => Ok(None),
    }
}

/// What a compute server answers; `None` if it has nothing to do with the structure.
pub(super) async fn answer_to(
    worker: &Handle,
    structure: &Structure,
    owner: OwnerId,
    what: Kind,
    words: &[u64],
) -> Result<Option<Vec<u64>>, Error> {
    let name = || structure.name.clone();
    let missing = |error: Error| match error {
        Error::Fabric(FabricError::PeerMissing { why, .. } | FabricError::ServerMissing { why, .. }) => {
            Error::OwnerMissing { name: name(), owner, why }
        }
        error => error,
    };
    let channel = worker.channel_to(owner).await.map_err(missing)?;
    let reply = channel.request_words(what, words, Priority::BestEffort).await;
    let reply = reply.map_err(|error| match error {
        MessagingError::OutcomeUnknown { why, .. } => Error::OwnerLost { name: name(), owner, why },
        MessagingError::NoAnswer { waited, .. } => Error::OwnerSilent { name: name(), owner, waited },
        MessagingError::Refused { why, .. } => Error::AtOwner { owner, why: why.to_string() },
        error => missing(error.into()),
    })?;
    let mut words = reply.words();
    match ReplyHeader::decode(&mut words)?.0 {
        ReplyHeader::Done { .. } => Ok(Some(words.to_vec())),
        ReplyHeader::Failed(failure) => Err(failure.into_error(|why| Error::AtOwner { owner, why })),
        ReplyHeader::NotOwned(_) => Ok(None),
        _ => {
            Err(Error::Malformed("a compute server that was asked about its regions answered as a memory server would"))
        }
    }
}
