//! `farlink repartition`: who owns what of a structure, and moves of it, while it is used.

use anyhow::{Context as _, anyhow, bail, ensure};
use farlink_offload::route::{self, Load, Moved, balance, move_region, take_region};
use farlink_runtime::access::{Overlap, Region, Structure};
use farlink_runtime::error::Error;
use farlink_runtime::lock::OwnerId;
use farlink_runtime::one_sided::ownership;
use farlink_runtime::worker::Worker;

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

/// How regions are written for people.
#[derive(Clone, Copy)]
pub(crate) struct Written<R> {
    pub(crate) parse: fn(&str) -> anyhow::Result<R>,
    pub(crate) show: fn(&R) -> String,
}

/// A region of the map, or one that has moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RegionRow {
    /// As `--region` takes it, where it does.
    pub(crate) region: String,
    /// Who has it now.
    pub(crate) owner: u32,
    /// Who had it, if it has moved.
    pub(crate) from: Option<u32>,
    /// Uses of its cached leaves, or why they are not known.
    pub(crate) uses: Result<u64, &'static str>,
}

/// What was moved, and what the map says then.
#[derive(Debug, Default)]
pub(crate) struct Repartitioned {
    pub(crate) moved: Vec<RegionRow>,
    pub(crate) map: Vec<RegionRow>,
    /// What nobody owns of a structure that has owners.
    pub(crate) unowned: Vec<String>,
    pub(crate) epoch: u64,
    /// Why not all has moved that should have. Where the map is known, it is told before that.
    pub(crate) problem: Option<anyhow::Error>,
}

/// Moves what is wished, and says who has what then.
pub(crate) fn repartition<R: Region>(
    worker: &Worker,
    structure: &Structure,
    wish: &Wish,
    written: Written<R>,
) -> anyhow::Result<Repartitioned> {
    let id = |number: u32| OwnerId::new(number.into()).with_context(|| format!("{number} is no compute server"));
    let (mut problem, mut unbalanced, mut moved) = (None, None, Vec::<Moved<R>>::new());
    if wish.balance {
        let more: Vec<OwnerId> = wish.to.iter().copied().map(id).collect::<anyhow::Result<_>>()?;
        let balanced = worker.block_on(balance(worker, structure, &more, TOLERANCE, MOVES_MAX, &mut moved));
        match balanced {
            Ok(left) => unbalanced = left.map(|left| is_left(left, moved.len())),
            Err(error) => problem = Some(error.into()),
        }
    } else if let Some(region) = &wish.region {
        let region = (written.parse)(region)?;
        let to = *wish.to.first().context("--region needs --to, the compute server that takes it")?;
        ensure!(wish.to.len() == 1, "--region goes to one compute server: give one --to");
        moved = move_one(worker, structure, &region, id(to)?, written.show)?;
    } else if let Some(from) = wish.away_from {
        ensure!(!wish.to.contains(&from), "--away-from {from} cannot go --to {from}: name others, or none");
        let to = wish.to.iter().copied().map(id).collect::<anyhow::Result<Vec<_>>>()?;
        problem = move_away(worker, structure, (id(from)?, &to), &mut moved, written.show).err();
    } else {
        ensure!(wish.to.is_empty(), "--to goes with --region, --away-from or --balance");
    }
    let moved = moved.into_iter().map(|Moved { region, from, to, uses }| RegionRow {
        region: (written.show)(&region),
        owner: to.incarnation(),
        from: Some(from.incarnation()),
        uses: uses.ok_or("not counted"),
    });
    let moved = moved.collect();
    if problem.is_some() {
        return Ok(Repartitioned { moved, problem, ..Repartitioned::default() });
    }
    // What has moved is told, whatever fails behind it.
    Ok(match map_of(worker, structure, written.show) {
        Ok(map) => Repartitioned { moved, problem: unbalanced, ..map },
        Err(problem) => Repartitioned { moved, problem: Some(problem), ..Repartitioned::default() },
    })
}

/// Why regions are not as even as was asked for.
fn is_left((owner, times): (OwnerId, f64), moves: usize) -> anyhow::Error {
    let why = match moves >= MOVES_MAX {
        true => format!("{MOVES_MAX} moves were made, as many as one command makes"),
        false => "nothing that it has would make it more even elsewhere, or it was given up just now".to_owned(),
    };
    let owner = owner.incarnation();
    anyhow!("compute server {owner} has still {times:.2} times the average of uses, and not {TOLERANCE} at most: {why}")
}

/// Who owns what now.
fn map_of<R: Region>(worker: &Worker, structure: &Structure, show: fn(&R) -> String) -> anyhow::Result<Repartitioned> {
    let map = worker.block_on(ownership::read(worker, structure))?;
    let mut rows = Vec::new();
    let mut unowned = vec![R::everything()];
    for (owner, part) in map.owners() {
        let Some(region) = part.to_region::<R>()? else { continue };
        unowned = unowned.iter().flat_map(|left| left.without(&region).unwrap_or_default()).collect();
        let uses = uses(worker, structure, owner, &region);
        rows.push(RegionRow { region: show(&region), owner: owner.incarnation(), from: None, uses });
    }
    if rows.is_empty() {
        unowned.clear();
    }
    let unowned = unowned.iter().map(show).collect();
    Ok(Repartitioned { map: rows, unowned, epoch: map.epoch, ..Repartitioned::default() })
}

/// Uses of a region's cached leaves, as its owner says, or why it does not.
fn uses<R: Region>(worker: &Worker, structure: &Structure, owner: OwnerId, region: &R) -> Result<u64, &'static str> {
    if worker.is_dead(owner) {
        return Err("dead");
    }
    let loads = worker.block_on(route::loads::<R>(worker, structure, owner, 0));
    let loads = loads.map_err(|error| match error {
        Error::OwnerMissing { .. } => "takes no requests: nothing moves from or to it",
        _ => "does not answer",
    })?;
    let is_it = |load: &&Load<R>| load.region.overlap(region) != Overlap::Outside;
    loads.regions.iter().find(is_it).map(|load| load.uses).ok_or("has given it up just now")
}

/// None has moved if nobody had it: then it is taken.
fn move_one<R: Region>(
    worker: &Worker,
    structure: &Structure,
    region: &R,
    to: OwnerId,
    show: fn(&R) -> String,
) -> anyhow::Result<Vec<Moved<R>>> {
    let map = worker.block_on(ownership::read(worker, structure))?;
    let mut is_unowned = map.owners().next().is_some();
    for (from, part) in map.owners() {
        let Some(owned) = part.to_region::<R>()? else { continue };
        let overlap = region.overlap(&owned);
        is_unowned &= overlap == Overlap::Outside;
        if overlap != Overlap::Inside {
            continue;
        }
        ensure!(from != to, "compute server {} owns {} already", to.incarnation(), show(region));
        let moved = worker.block_on(move_region(worker, structure, region, from, to))?;
        let region = moved.with_context(|| {
            format!("{} cannot move by itself: no leaf lies in it, or it was given up just now", show(region))
        })?;
        return Ok(vec![Moved { region, from, to, uses: None }]);
    }
    if is_unowned {
        worker.block_on(take_region(worker, structure, region, to))?;
        return Ok(Vec::new());
    }
    bail!("no compute server owns all of {}; `farlink repartition` without --region shows who owns what", show(region))
}

/// All regions of one go to these, or to the others that own something, in turn. `moved`: what has, also before an error.
fn move_away<R: Region>(
    worker: &Worker,
    structure: &Structure,
    (from, to): (OwnerId, &[OwnerId]),
    moved: &mut Vec<Moved<R>>,
    show: fn(&R) -> String,
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
        let Some(region) = part.to_region::<R>()? else { continue };
        let to = to[number % to.len()];
        match worker.block_on(move_region(worker, structure, &region, from, to))? {
            Some(region) => moved.push(Moved { region, from, to, uses: None }),
            None => stayed.push(show(&region)),
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
