//! How much owners have to do, and moves that even it out.
//!
//! An owner answers how often pages of level 0 were used lately in each of its regions, as far as they are cached: the cache counts
//! that anyhow, to know what to keep. So operations are not slowed down by it, and the count ages as the cache's does.

use farlink_runtime::{
    access::{Overlap, Structure},
    error::Error,
    lock::OwnerId,
    messaging::Kind,
    one_sided::ownership,
    structure::Region,
    wire::{DecodeError, Wire, decode_all},
    worker::Handle,
};

use super::moves::{ask, move_region};

/// The kind of message that asks an owner how much it has to do.
pub const LOADS: Kind = Kind(0x4c4f_4144);

/// A region, or a piece of one, and how often its pages were used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load<R> {
    /// The region.
    pub region: R,
    /// Uses of its cached pages of level 0, and one more for each.
    pub uses: u64,
}

impl<R: Wire> Wire for Load<R> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.region.encode(to);
        self.uses.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (region, uses) = Wire::decode(from)?;
        Ok(Self { region, uses })
    }
}

/// What an owner has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loads<R> {
    /// For each of its regions.
    pub regions: Vec<Load<R>>,
    /// A piece of one of them, which has about so much as was asked for: of the hottest that has such a one. `None` if none can be cut.
    pub piece: Option<Load<R>>,
}

impl<R: Wire> Wire for Loads<R> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.regions.encode(to);
        self.piece.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (regions, piece) = Wire::decode(from)?;
        Ok(Self { regions, piece })
    }
}

impl<R> Loads<R> {
    /// Of all its regions.
    pub fn uses(&self) -> u64 {
        self.regions.iter().map(|load| load.uses).sum()
    }
}

/// Asks an owner how much it has to do, and for a piece that has about `wanted` uses of that.
///
/// # Errors
/// If it does not listen, or is lost.
pub async fn loads<R: Wire>(
    worker: &Handle,
    structure: &Structure,
    owner: OwnerId,
    wanted: u64,
) -> Result<Loads<R>, Error> {
    match ask(worker, structure, owner, LOADS, &wanted).await? {
        Some(words) => Ok(decode_all(&words)?),
        None => Ok(Loads { regions: Vec::new(), piece: None }),
    }
}

/// A move that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved<R> {
    /// What has moved.
    pub region: R,
    /// Who had it.
    pub from: OwnerId,
    /// Who has it.
    pub to: OwnerId,
    /// Its uses, where they were counted.
    pub uses: Option<u64>,
}

/// Has regions and pieces go to others until no owner has more to do than `tolerance` times the average: each time the hottest
/// owner's hottest region that is small enough goes to the coolest owner, or a piece of one (FlexKV, arXiv 2512.16148, moves the
/// hottest small regions until ranks balance). `more` are compute servers that listen and may own nothing yet. At most `moves_max`.
///
/// How much there is to do is asked once, at first, and later of who gives something away alone: who has just been given a region has
/// cached little of it. What dead owners had goes to the others in turn, before that. `moved` gets each move that is made, also before an
/// error.
///
/// Answers who has more than that all the same, if somebody has, and how many times the average: nothing that it has would
/// make it more even elsewhere, or it was given up just now, or that were moves enough.
///
/// # Errors
/// As [`loads`] and [`move_region`].
pub async fn balance<R: Region>(
    worker: &Handle,
    structure: &Structure,
    more: &[OwnerId],
    tolerance: f64,
    moves_max: usize,
    moved: &mut Vec<Moved<R>>,
) -> Result<Option<(OwnerId, f64)>, Error> {
    let map = ownership::read(worker, structure).await?;
    let mut owners: Vec<OwnerId> = map.owners().map(|(owner, _)| owner).chain(more.iter().copied()).collect();
    owners.sort_unstable_by_key(|owner| owner.incarnation());
    owners.dedup();
    owners.retain(|&owner| !worker.is_dead(owner));
    for (from, part) in map.owners().filter(|(owner, _)| !owners.contains(owner)) {
        let Some(region) = part.to_region::<R>()? else { continue };
        let Some(&to) = owners.get(moved.len() % owners.len().max(1)) else { break };
        let region = move_region(worker, structure, &region, from, to).await?;
        moved.extend(region.map(|region| Moved { region, from, to, uses: None }));
    }
    let mut ranks: Vec<(OwnerId, Vec<Load<R>>)> = Vec::new();
    for owner in owners {
        ranks.push((owner, loads(worker, structure, owner, 0).await?.regions));
    }
    let uses = |loads: &[Load<R>]| loads.iter().map(|load| load.uses).sum::<u64>();
    let average = ranks.iter().map(|(_, loads)| uses(loads)).sum::<u64>() as f64 / ranks.len().max(1) as f64;
    loop {
        let by_uses = |&index: &usize| uses(&ranks[index].1);
        let (Some(hot), Some(cool)) = ((0..ranks.len()).max_by_key(by_uses), (0..ranks.len()).min_by_key(by_uses))
        else {
            return Ok(None);
        };
        let (most, least) = (uses(&ranks[hot].1), uses(&ranks[cool].1));
        // Uses are whole: somebody has the next whole number.
        if most as f64 <= (average * tolerance).max(average.ceil()) {
            return Ok(None);
        }
        let left = Ok(Some((ranks[hot].0, most as f64 / average)));
        if moved.len() >= moves_max {
            return left;
        }
        let excess = ((most as f64 - average) as u64).min(average as u64 - least.min(average as u64)).max(1);
        let (from, to) = (ranks[hot].0, ranks[cool].0);
        let is_small = |load: &&Load<R>| load.uses <= excess + excess / 4 && load.uses * 2 >= excess;
        let whole = ranks[hot].1.iter().filter(is_small).max_by_key(|load| load.uses).cloned();
        // What makes the other one as hot would only come back.
        let makes_even = |load: &Load<R>| load.uses > 0 && least + load.uses < most;
        let chosen = match whole {
            Some(load) => Some(load),
            None => loads(worker, structure, from, excess).await?.piece.filter(makes_even),
        };
        let hotter = |load: &&Load<R>| (most - load.uses).max(least + load.uses);
        let smaller = || ranks[hot].1.iter().filter(|load| makes_even(load)).min_by_key(hotter).cloned();
        let Some(Load { region, uses }) = chosen.filter(makes_even).or_else(smaller) else { return left };
        let Some(region) = move_region(worker, structure, &region, from, to).await? else { return left };
        // What it was a part of.
        let of = ranks[hot].1.iter().position(|load| region.overlap(&load.region) != Overlap::Outside);
        if let Some(of) = of {
            let whole = ranks[hot].1.swap_remove(of);
            let rest = whole.region.without(&region).unwrap_or_default();
            let left = whole.uses.saturating_sub(uses);
            ranks[hot].1.extend(divided(worker, structure, from, rest, left).await?);
        }
        ranks[cool].1.push(Load { region: region.clone(), uses });
        moved.push(Moved { region, from, to, uses: Some(uses) });
    }
}

/// What is left of an owner's region, with as much of these uses for each as it has of the owner's by now.
async fn divided<R: Region>(
    worker: &Handle,
    structure: &Structure,
    owner: OwnerId,
    rest: Vec<R>,
    uses: u64,
) -> Result<Vec<Load<R>>, Error> {
    if rest.len() <= 1 {
        return Ok(rest.into_iter().map(|region| Load { region, uses }).collect());
    }
    let now = loads::<R>(worker, structure, owner, 0).await?.regions;
    let of = |region: &R| -> u64 {
        now.iter().filter(|load| load.region.overlap(region) != Overlap::Outside).map(|load| load.uses).sum()
    };
    let all = rest.iter().map(of).sum::<u64>().max(1);
    let share = |region: &R| (u128::from(uses) * u128::from(of(region)) / u128::from(all)) as u64;
    Ok(rest.into_iter().map(|region| Load { uses: share(&region), region }).collect())
}
