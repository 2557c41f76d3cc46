//! What each worker of a compute process does in a phase.

use std::sync::Arc;

use anyhow::Context as _;

use crate::keys::{KeySpace, mix};
use crate::keysfile;
use crate::plan::{KeySource, Limit, Load, Phase, Plan};
use crate::stream::{self, Draw, GoOn, Source, WorkerId};

/// Salts, so that the load and the halves of a round each have an order of their own.
const LOAD_SALT: u64 = 1;
const REMOVE_SALT: u64 = 2;
const INSERT_SALT: u64 = 3;

/// What one worker does in a phase.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Work {
    /// Load all keys in key order; one worker of the run does this.
    BulkLoad { sorted: Arc<[u64]>, fill: f64 },
    /// Nothing, while another worker loads.
    Idle,
    /// Run this stream.
    Run { stream: Vec<Draw>, limit: Limit, in_flight: u32 },
}

/// Reads or computes the keys of a plan; also answers how many duplicates a file held.
pub(crate) fn key_space(source: &KeySource) -> anyhow::Result<(KeySpace, u64)> {
    match source {
        KeySource::Scrambled(count) => Ok((KeySpace::scrambled(*count)?, 0)),
        KeySource::File(path) => {
            let keys = keysfile::read(path)?;
            Ok((KeySpace::from_sorted(keys.sorted)?, keys.duplicates_dropped))
        }
    }
}

/// Works out a worker's part of a phase. All of a worker's randomness is drawn here, before any clock starts.
pub(crate) fn work(
    plan: &Plan,
    keys: &KeySpace,
    phase: &Phase,
    worker: WorkerId,
    go_on: GoOn<'_>,
) -> anyhow::Result<Work> {
    let every_key = |salt: u64, round: u32, what| {
        let seed = plan.seed ^ mix(salt) ^ mix(u64::from(round) << 8);
        let stream = stream::every_key(keys, seed, worker, what, go_on)?;
        let limit = Limit::Operations(stream.len() as u64);
        anyhow::Ok(Work::Run { stream, limit, in_flight: plan.in_flight_max() })
    };
    Ok(match phase {
        Phase::Load => match plan.load {
            Load::Bulk { fill } if worker.index == 0 => Work::BulkLoad { sorted: keys.sorted(), fill },
            Load::Bulk { .. } | Load::Found => Work::Idle,
            Load::Insert => every_key(LOAD_SALT, 0, Draw::Insert)?,
        },
        Phase::RemoveAll { round } => every_key(REMOVE_SALT, *round, Draw::Remove)?,
        Phase::InsertAll { round } => every_key(INSERT_SALT, *round, Draw::Insert)?,
        Phase::Mix { mix, in_flight } => {
            let mix = plan.mixes.get(*mix).with_context(|| format!("the plan has no mix number {mix}"))?;
            let limit = plan.limit.share(worker);
            let operations = if let Limit::Operations(share) = limit { Some(share) } else { None };
            let source =
                Source { keys, distribution: plan.distribution, seed: plan.seed, scan_length: plan.scan_length };
            let length = stream::length_for(operations, keys, worker);
            let stream = stream::draw(mix, source, worker, length, go_on)?;
            Work::Run { stream, limit, in_flight: *in_flight }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;

    const GO_ON: GoOn<'static> = &|| Ok(());

    #[test]
    fn one_worker_bulk_loads_and_the_others_wait() {
        let (plan, keys) = (plan(), KeySpace::scrambled(1000).unwrap());
        let loaders = (0..2)
            .flat_map(|process| (0..3).map(move |worker| (process, worker)))
            .map(|(process, worker)| work(&plan, &keys, &Phase::Load, plan.worker_id(process, worker), GO_ON).unwrap());
        assert_eq!(loaders.filter(|work| matches!(work, Work::BulkLoad { fill: 0.9, .. })).count(), 1);
    }

    #[test]
    fn every_phase_has_its_own_order_and_its_length() {
        let (mut plan, keys) = (plan(), KeySpace::scrambled(1000).unwrap());
        plan.load = Load::Insert;
        let worker = plan.worker_id(0, 0);
        let run = |phase: &Phase| match work(&plan, &keys, phase, worker, GO_ON).unwrap() {
            Work::Run { stream, limit, in_flight } => (stream, limit, in_flight),
            other => panic!("{other:?}"),
        };
        let (load, limit, in_flight) = run(&Phase::Load);
        assert_eq!((load.len(), limit, in_flight), (167, Limit::Operations(167), 16));
        let (again, ..) = run(&Phase::InsertAll { round: 1 });
        let (later, ..) = run(&Phase::InsertAll { round: 2 });
        assert_ne!(load, again);
        assert_ne!(again, later);
        let (mix, limit, in_flight) = run(&Phase::Mix { mix: 0, in_flight: 4 });
        assert_eq!((mix.len(), limit, in_flight), (2, Limit::Operations(2), 4));
        assert!(work(&plan, &keys, &Phase::Mix { mix: 9, in_flight: 1 }, worker, GO_ON).is_err());
    }
}
