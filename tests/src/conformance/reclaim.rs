//! Operations in rounds: what they free they use again. Another compute server holds that up now and then.

use std::{fmt::Debug, future::poll_fn, pin::pin, task::Poll};

use farlink_runtime::{audit, layout::CHUNK_BYTES};
use rand::{SeedableRng, rngs::SmallRng};

use super::{AccessVariant, Model, scene::Scene, with_seeds};
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

/// Those over which memory is used again: by compute servers, and by memory servers for them. (What an owner ships allocates and frees nothing
/// there.)
const AMONG: [AccessVariant; 7] = [
    AccessVariant::OneSided,
    AccessVariant::CachedInner,
    AccessVariant::CachedMapping,
    AccessVariant::Owned,
    AccessVariant::Coarse,
    AccessVariant::Hybrid,
    AccessVariant::Adaptive,
];

/// Rounds of operations take no more memory from round to round, and what a round has freed is free once it is over.
///
/// # Panics
/// If they do, or memory is lost.
pub fn reclaim<M: Model>() {
    with_seeds::<M>("reclaim", &AMONG, |variants, seed| {
        variants.iter().for_each(|&variant| rounds::<M>(variant, seed));
        true
    });
}

fn rounds<M: Model>(variant: AccessVariant, seed: u64) {
    let (scene, member) = Scene::<M>::with_member(variant, FabricProfile::Fast, seed);
    let context = &scene.context;
    let client = scene.client(true);
    let compute = cluster::join_manual(&scene.fabric, seed).unwrap();
    let worker = compute.worker().unwrap();
    let reached = worker.block_on(client.reach(&worker)).unwrap();
    let (mut rng, mut state) = (SmallRng::seed_from_u64(seed), M::State::default());
    // Another one has a long operation in the first half of each round: what is freed meanwhile has to wait.
    let other = cluster::join_manual(&scene.fabric, seed.wrapping_add(1)).unwrap();
    let other_worker = other.worker().unwrap();
    let member = member.map(|member| (member.worker().unwrap(), member));
    let maintain_here = || compute.maintain(&worker);
    let maintain_others = async || {
        other_worker.drive(other.maintain(&other_worker)).await?;
        match &member {
            Some((worker, member)) => worker.drive(member.maintain(worker)).await,
            None => Ok(()),
        }
    };
    // Messages take longer.
    let count = if variant.ships() { 1 } else { 4 } * settings::from_env("FARLINK_KIT_OPS", 300);
    let mut warm = 0;
    for round in 0..ROUNDS {
        let mut pin = Some(other_worker.pin());
        worker.block_on(async {
            for number in 0..count {
                if number == count / 2 {
                    pin = None;
                }
                let op = M::draw(&mut rng, &state);
                let expected = M::apply(&mut state, &op);
                let found = M::run(&op, &reached).await;
                assert!(
                    found.as_ref().is_ok_and(|it| *it == expected),
                    "{context}: {op:?} -> {found:?}, not {expected:?}"
                );
                if number % SHIFT == 0 {
                    maintain_here().await.unwrap();
                    maintain_others().await.unwrap();
                }
            }
            reached.flush().await.unwrap();
        });
        let is_settled = worker.block_on(async {
            let is_settled = beside(compute.settle(&worker), &maintain_others).await.unwrap();
            let Some((worker, member)) = &member else { return is_settled };
            let rest = async || {
                maintain_here().await?;
                other_worker.drive(other.maintain(&other_worker)).await
            };
            is_settled && beside(worker.drive(member.settle(worker)), rest).await.unwrap()
        });
        assert!(is_settled, "{context}: what was freed in round {round} waits, and nobody needs it any more");
        let leased = worker.block_on(audit::memory(&worker)).unwrap().leased_bytes;
        if round < WARM {
            warm = leased.max(warm);
        }
        let limit = (warm as f64 * GROWTH) as u64 + SLACK_CHUNKS * CHUNK_BYTES;
        assert!(leased <= limit, "{context}: {leased} bytes leased in round {round}, {warm} in the first {WARM}");
    }
    drop((reached, worker, compute, client, other_worker, other, member));
    scene.close(false);
}

/// Awaits one thing, and has another done again and again meanwhile.
async fn beside<T, E: Debug>(it: impl Future<Output = T>, again: impl AsyncFn() -> Result<(), E>) -> T {
    let (mut it, mut other) = (pin!(it), Box::pin(again()));
    poll_fn(|cx| {
        if let Poll::Ready(done) = other.as_mut().poll(cx) {
            done.unwrap();
            other.set(again());
        }
        it.as_mut().poll(cx)
    })
    .await
}
