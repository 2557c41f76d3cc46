//! `farlink repartition`: who owns what of a structure, and moves of it, while it is used.

use anyhow::{Context as _, bail, ensure};
use farlink_offload::route::{self, Load, Moved, balance, move_region, take_region};
use farlink_runtime::access::{Overlap, Region as _, Structure};
use farlink_runtime::lock::OwnerId;
use farlink_runtime::one_sided::ownership;
use farlink_runtime::worker::Worker;
use serde::Serialize;

use crate::subject::Subject;

/// No owner has more than so many times the average after it was balanced, if regions allow.
const TOLERANCE: f64 = 1.1;
/// Moves of one command.
const MOVES_MAX: usize = 64;

/// What is to be moved, and to which compute servers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wish {
    pub(crate) region: Option<String>,
    pub(crate) away_from: Option<u32>,
    pub(crate) balance: bool,
    pub(crate) to: Vec<u32>,
}

/// A region of the map, or one that has moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct RegionRow {
    /// As `--region` takes it, where it does.
    pub(crate) region: String,
    /// Who has it now.
    pub(crate) owner: u32,
    /// Who had it, if it has moved.
    pub(crate) from: Option<u32>,
    /// Uses of its cached leaves; `None` if nobody was asked, or the owner is dead or does not listen.
    pub(crate) uses: Option<u64>,
    /// The owner is dead: somebody else is to take it.
    pub(crate) dead: bool,
}

/// What was moved, and what the map says then.
#[derive(Debug, Default)]
pub(crate) struct Repartitioned {
    pub(crate) moved: Vec<RegionRow>,
    pub(crate) map: Vec<RegionRow>,
    /// What nobody owns of a structure that has owners.
    pub(crate) unowned: Vec<String>,
    pub(crate) epoch: u64,
    /// Why not all has moved that should have.
    pub(crate) problem: Option<anyhow::Error>,
}

/// Moves what is wished, and says who has what then.
pub(crate) fn repartition<S: Subject>(
    worker: &Worker,
    structure: &Structure,
    wish: &Wish,
) -> anyhow::Result<Repartitioned> {
    let id = |number: u32| OwnerId::new(number.into()).with_context(|| format!("{number} is no compute server"));
    let mut problem = None;
    let moved: Vec<Moved<S::Region>> = if wish.balance {
        let more: Vec<OwnerId> = wish.to.iter().copied().map(id).collect::<anyhow::Result<_>>()?;
        worker.block_on(balance(worker, structure, &more, TOLERANCE, MOVES_MAX))?
    } else if let Some(region) = &wish.region {
        let region = S::parse_region(region)?;
        let to = *wish.to.first().context("--region needs --to, the compute server that takes it")?;
        ensure!(wish.to.len() == 1, "--region goes to one compute server: give one --to");
        move_one::<S>(worker, structure, &region, id(to)?)?
    } else if let Some(from) = wish.away_from {
        ensure!(!wish.to.contains(&from), "--away-from {from} cannot go --to {from}: name others, or none");
        let to = wish.to.iter().copied().map(id).collect::<anyhow::Result<Vec<_>>>()?;
        let mut moved = Vec::new();
        problem = move_away::<S>(worker, structure, id(from)?, &to, &mut moved).err();
        moved
    } else {
        ensure!(wish.to.is_empty(), "--to goes with --region, --away-from or --balance");
        Vec::new()
    };
    let moved = moved.into_iter().map(|Moved { region, from, to, uses }| RegionRow {
        region: S::show_region(&region),
        owner: to.incarnation(),
        from: Some(from.incarnation()),
        uses: Some(uses),
        dead: false,
    });
    if problem.is_some() {
        return Ok(Repartitioned { moved: moved.collect(), problem, ..Repartitioned::default() });
    }
    let map = worker.block_on(ownership::read(worker, structure))?;
    let mut rows = Vec::new();
    let mut unowned = vec![S::Region::everything()];
    for (owner, part) in map.owners() {
        let Some(region) = part.to_region::<S::Region>()? else { continue };
        unowned = unowned.iter().flat_map(|left| left.without(&region).unwrap_or_default()).collect();
        let dead = worker.is_dead(owner);
        let ask = || worker.block_on(route::loads::<S::Region>(worker, structure, owner, 0)).ok();
        let loads = if dead { None } else { ask() };
        let is_it = |load: &&Load<S::Region>| load.region.overlap(&region) != Overlap::Outside;
        let uses = loads.as_ref().and_then(|loads| loads.regions.iter().find(is_it)).map(|load| load.uses);
        let region = S::show_region(&region);
        rows.push(RegionRow { region, owner: owner.incarnation(), from: None, uses, dead });
    }
    if rows.is_empty() {
        unowned.clear();
    }
    let unowned = unowned.iter().map(S::show_region).collect();
    Ok(Repartitioned { moved: moved.collect(), map: rows, unowned, epoch: map.epoch, problem })
}

/// None has moved if nobody had it: then it is taken.
fn move_one<S: Subject>(
    worker: &Worker,
    structure: &Structure,
    region: &S::Region,
    to: OwnerId,
) -> anyhow::Result<Vec<Moved<S::Region>>> {
    let map = worker.block_on(ownership::read(worker, structure))?;
    let mut is_unowned = map.owners().next().is_some();
    for (from, part) in map.owners() {
        let Some(owned) = part.to_region::<S::Region>()? else { continue };
        let overlap = region.overlap(&owned);
        is_unowned &= overlap == Overlap::Outside;
        if overlap != Overlap::Inside {
            continue;
        }
        ensure!(from != to, "compute server {} owns {} already", to.incarnation(), S::show_region(region));
        let moved = worker.block_on(move_region(worker, structure, region, from, to))?;
        let region = moved.with_context(|| {
            format!("{} cannot move by itself: no leaf lies in it, or it was given up just now", S::show_region(region))
        })?;
        return Ok(vec![Moved { region, from, to, uses: 0 }]);
    }
    if is_unowned {
        worker.block_on(take_region(worker, structure, region, to))?;
        return Ok(Vec::new());
    }
    bail!(
        "no compute server owns all of {}; `farlink repartition` without --region shows who owns what",
        S::show_region(region)
    )
}

/// All regions of one go to these, or to the others that own something, in turn. `moved`: what has, also before an error.
fn move_away<S: Subject>(
    worker: &Worker,
    structure: &Structure,
    from: OwnerId,
    to: &[OwnerId],
    moved: &mut Vec<Moved<S::Region>>,
) -> anyhow::Result<()> {
    let map = worker.block_on(ownership::read(worker, structure))?;
    ensure!(
        map.owners().any(|(owner, _)| owner == from),
        "compute server {} owns nothing of `{}`; `farlink repartition` alone shows who does",
        from.incarnation(),
        structure.name
    );
    let mut to = to.to_vec();
    if to.is_empty() {
        to = map.owners().map(|(owner, _)| owner).filter(|&owner| owner != from).collect();
        to.sort_unstable_by_key(|owner| owner.incarnation());
        to.dedup();
    }
    ensure!(!to.is_empty(), "nobody else owns anything of `{}`: give --to", structure.name);
    let mut stayed = Vec::new();
    for (number, (_, part)) in map.owners().filter(|&(owner, _)| owner == from).enumerate() {
        let Some(region) = part.to_region::<S::Region>()? else { continue };
        let to = to[number % to.len()];
        match worker.block_on(move_region(worker, structure, &region, from, to))? {
            Some(region) => moved.push(Moved { region, from, to, uses: 0 }),
            None => stayed.push(S::show_region(&region)),
        }
    }
    ensure!(
        stayed.is_empty(),
        "{} did not move from compute server {}: it was given up just now, or cannot move by itself; try again",
        stayed.join(" and "),
        from.incarnation()
    );
    Ok(())
}
