//! Regions go from one compute server to another, while operations run. Whoever has one moved, who may be the one that gets it, asks:
//!
//! | message | from | to | |
//! |---|---|---|---|
//! | [`SERVES`] | who has it moved | the next owner | whether it is there, and carries out operations on the structure |
//! | [`GIVE_UP`] | who has it moved | the owner | to hand the region on: the owner writes it, gives it up, and sends the next |
//! | [`TAKE`] | the owner | the next owner | to enter itself in the map. If it cannot, the owner does so again |

use farlink_runtime::{
    access::{Overlap, Region, Structure},
    error::Error,
    fabric::Error as FabricError,
    lock::OwnerId,
    messaging::{Error as MessagingError, Kind, Priority},
    one_sided::ownership,
    page::StructureId,
    partition::{Part, PartitionMap},
    wire::{Wire, decode_all, wire},
    worker::Handle,
};

use crate::ship::ReplyHeader;

/// The kinds of messages that ask a compute server to hand a region on to another one, or to take one.
pub const GIVE_UP: Kind = Kind(0x4749_5645);
/// See [`GIVE_UP`].
pub const TAKE: Kind = Kind(0x5441_4b45);
/// The kind of message that asks a compute server whether it could take one.
pub(super) const SERVES: Kind = Kind(0x5345_5256);

/// What stands before what such a message is about.
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
/// `None` if the first one does not have it (any more), or nothing of it can move alone; or if both are one. Also if a third one has an
/// operation for it while nobody who lives has it, and takes it.
///
/// The first one is asked, and hands the region on, so that it has an owner in the end whatever becomes of who asked. It has none for
/// an exchange of messages between the two; if the second one cannot take it, the first one takes it again. A dead one's
/// region the second one takes, and all of it: nobody knows how to cut it.
///
/// # Errors
/// If the second one does not answer, or has nothing to do with the structure: nothing was given up then. What the first one failed with:
/// it still has the region, unless it is gone.
pub async fn move_region<R: Region>(
    worker: &Handle,
    structure: &Structure,
    region: &R,
    from: OwnerId,
    to: OwnerId,
) -> Result<Option<R>, Error> {
    if from == to {
        return Ok(None);
    }
    ask(worker, structure, to, SERVES, &()).await?.ok_or_else(|| not_served(structure, to))?;
    if worker.is_dead(from) {
        return take_all_around(worker, structure, region, from, to).await;
    }
    let wanted = (u64::from(to.incarnation()), region.clone());
    match ask(worker, structure, from, GIVE_UP, &wanted).await? {
        Some(words) => Ok(decode_all(&words)?),
        None => Ok(None),
    }
}

/// The region of a dead owner's in which this one lies, which another one has taken.
async fn take_all_around<R: Region>(
    worker: &Handle,
    structure: &Structure,
    region: &R,
    dead: OwnerId,
    to: OwnerId,
) -> Result<Option<R>, Error> {
    let map = ownership::read(worker, structure).await?;
    let Some(whole) = region_around(&map, region, dead)? else { return Ok(None) };
    let Err(error) = take_region(worker, structure, &whole, to).await else { return Ok(Some(whole)) };
    // Another one was faster, perhaps; or it has taken it, and could not say so.
    let map = ownership::read(worker, structure).await?;
    if region_around(&map, region, dead)?.is_some() {
        return Err(error);
    }
    let has_it = map.owners().any(|(owner, part)| owner == to && *part == Part::region(&whole));
    Ok(has_it.then_some(whole))
}

/// The region of an owner's in which all of this one lies.
fn region_around<R: Region>(map: &PartitionMap, region: &R, of: OwnerId) -> Result<Option<R>, Error> {
    for (_, part) in map.owners().filter(|&(owner, _)| owner == of) {
        if let Some(whole) = part.to_region::<R>()?
            && region.overlap(&whole) == Overlap::Inside
        {
            return Ok(Some(whole));
        }
    }
    Ok(None)
}

/// Has a compute server that listens take a region that nobody owns who lives.
///
/// # Errors
/// If it does not answer, or has nothing to do with the structure. What it failed with: somebody owns some of it, say.
pub async fn take_region<R: Wire>(
    worker: &Handle,
    structure: &Structure,
    region: &R,
    to: OwnerId,
) -> Result<(), Error> {
    ask(worker, structure, to, TAKE, region).await?.map(drop).ok_or_else(|| not_served(structure, to))
}

fn not_served(structure: &Structure, owner: OwnerId) -> Error {
    let why = "it carries out nothing on this structure".into();
    Error::OwnerMissing { name: structure.name.clone(), owner, why }
}

/// What a compute server answers; `None` if it has nothing to do with the structure.
pub(super) async fn ask(
    worker: &Handle,
    structure: &Structure,
    owner: OwnerId,
    what: Kind,
    body: &impl Wire,
) -> Result<Option<Vec<u64>>, Error> {
    let mut words = Vec::new();
    MoveHeader::of(structure).encode(&mut words);
    body.encode(&mut words);
    let name = || structure.name.clone();
    let missing = |error: Error| match error {
        Error::Fabric(FabricError::PeerMissing { why, .. } | FabricError::ServerMissing { why, .. }) => {
            Error::OwnerMissing { name: name(), owner, why }
        }
        error => error,
    };
    let channel = worker.channel_to(owner).await.map_err(missing)?;
    let reply = channel.request_words(what, &words, Priority::BestEffort).await;
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
