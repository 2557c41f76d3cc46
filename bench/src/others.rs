//! Others that use a run's structure beside it: those whom its partition maps name.

use std::collections::BTreeSet;

use anyhow::bail;
use farlink_offload::route;
use farlink_runtime::error::Error;
use farlink_runtime::lock::OwnerId;
use farlink_runtime::one_sided::ownership::{self, SharedUser};
use farlink_runtime::structure::Structure;
use farlink_runtime::wire::Wire;
use farlink_runtime::worker::Worker;

/// Compute servers, by their incarnations.
pub(crate) type Incarnations = BTreeSet<u32>;

/// Who lives and owns some of these structures or uses them; not this compute server.
pub(crate) fn living(worker: &Worker, structures: &[Structure]) -> anyhow::Result<Incarnations> {
    let mut others = Incarnations::new();
    for structure in structures {
        let map = worker.block_on(ownership::read(worker, structure))?;
        let all = map.entries.iter().map(|entry| entry.owner).filter(|&owner| owner != worker.owner());
        others.extend(all.filter(|&owner| !worker.is_dead(owner)).map(OwnerId::incarnation));
    }
    Ok(others)
}

/// Whether others own some of these structures, and all of those take requests: then operations can be sent to them.
pub(crate) fn own_and_serve<R: Wire>(worker: &Worker, structures: &[Structure]) -> anyhow::Result<bool> {
    let mut is_owned = false;
    for structure in structures {
        let map = worker.block_on(ownership::read(worker, structure))?;
        for (owner, _) in map.owners().filter(|&(owner, _)| owner != worker.owner() && !worker.is_dead(owner)) {
            match worker.block_on(route::loads::<R>(worker, structure, owner, 0)) {
                Err(Error::OwnerMissing { .. }) => return Ok(false),
                answered => drop(answered?),
            }
            is_owned = true;
        }
    }
    Ok(is_owned)
}

/// `compute server 7`, or `compute servers 7, 9`.
pub(crate) fn name(others: &Incarnations) -> String {
    let numbers: Vec<String> = others.iter().map(u32::to_string).collect();
    format!("compute server{} {}", if numbers.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// Why what is counted may differ from what this run has done, as far as that is known.
pub(crate) fn likely_cause(name: &str, others: &Incarnations) -> String {
    match others.is_empty() {
        true => format!("if others changed `{name}` meanwhile, that may be why"),
        false => format!("{} may have changed `{name}` meanwhile, too, which may be why", self::name(others)),
    }
}

/// The right to load an empty structure one-sided, until it is dropped: that of the user who was entered in its map first.
#[derive(Debug)]
pub(crate) struct Loader {
    _users: Vec<SharedUser>,
}

impl Loader {
    /// Enters this compute server as a user of all parts.
    pub(crate) fn enter(worker: &Worker, parts: &[Structure]) -> anyhow::Result<Self> {
        let mut users = Vec::new();
        for part in parts {
            let user = SharedUser::default();
            worker.block_on(user.enter(worker, part))?;
            let map = worker.block_on(ownership::read(worker, part))?;
            // Who enters is put behind all others.
            let first = map.entries.iter().map(|entry| entry.owner).find(|&owner| !worker.is_dead(owner));
            if let Some(first) = first.filter(|&first| first != worker.owner()) {
                bail!(loads_or_uses(&part.name, &first.to_string()));
            }
            users.push(user);
        }
        Ok(Self { _users: users })
    }
}

/// Why a structure is not to be used now.
pub(crate) fn loads_or_uses(name: &str, who: &str) -> String {
    format!("`{name}` is being loaded or used by {who}; wait until that is over, or give another --name")
}
