//! Operations in rounds: what they free they use again.

use farlink_runtime::{audit, layout::CHUNK_BYTES};
use rand::{SeedableRng, rngs::SmallRng};

use super::{AccessVariant, Model, scene::Scene, variants, with_seeds};
use crate::{backend::FabricProfile, cluster, settings};

const ROUNDS: usize = 6;
/// Rounds after which the structure is as large as it gets.
const WARM: usize = 3;
/// How much more memory later rounds may take.
const GROWTH: f64 = 1.5;
/// For what is lent out by chance.
const SLACK_CHUNKS: u64 = 4;
/// Operations between two turns of maintenance.
const SHIFT: usize = 100;

/// Rounds of operations take no more memory from round to round.
///
/// # Panics
/// If they do, or memory is lost.
pub fn reclaim<M: Model>() {
    with_seeds("reclaim", |seed| {
        for variant in variants::<M>().into_iter().filter(|variant| {
            matches!(
                variant,
                AccessVariant::OneSided
                    | AccessVariant::CachedInner
                    | AccessVariant::CachedMapping
                    | AccessVariant::Owned
            )
        }) {
            rounds::<M>(variant, seed);
        }
    });
}

fn rounds<M: Model>(variant: AccessVariant, seed: u64) {
    let scene = Scene::<M>::new(variant, FabricProfile::Fast, seed);
    let context = &scene.context;
    let client = scene.client(true);
    let compute = cluster::join_manual(&scene.fabric, seed).unwrap();
    let worker = compute.worker().unwrap();
    let reached = worker.block_on(client.reach(&worker)).unwrap();
    let (mut rng, mut state) = (SmallRng::seed_from_u64(seed), M::State::default());
    let mut warm = 0;
    for round in 0..ROUNDS {
        worker.block_on(async {
            for number in 0..4 * settings::from_env("FARLINK_KIT_OPS", 300) {
                let op = M::draw(&mut rng, &state);
                let expected = M::apply(&mut state, &op);
                let found = M::run(&op, &reached).await;
                assert!(
                    found.as_ref().is_ok_and(|it| *it == expected),
                    "{context}: {op:?} -> {found:?}, not {expected:?}"
                );
                if number % SHIFT == 0 {
                    compute.maintain(&worker).await.unwrap();
                }
            }
            reached.flush().await.unwrap();
        });
        let leased = worker.block_on(audit::memory(&worker)).unwrap().leased_bytes;
        if round < WARM {
            warm = leased.max(warm);
        }
        let limit = (warm as f64 * GROWTH) as u64 + SLACK_CHUNKS * CHUNK_BYTES;
        assert!(leased <= limit, "{context}: {leased} bytes leased in round {round}, {warm} in the first {WARM}");
    }
    drop((reached, worker, compute, client));
    scene.close(false);
}
