//! One worker, one operation after another, against the model.

use std::{collections::VecDeque, sync::Arc};

use rand::{SeedableRng, rngs::SmallRng};

use super::{
    AccessVariant, Model,
    scene::{Scene, profiles},
    variants::first,
    with_seeds,
};
use crate::{backend::FabricProfile, cluster, settings};

/// Operations that are told of when one is wrong.
const TOLD: usize = 12;

/// Random operations against the model, over every access and kind of fabric.
///
/// # Panics
/// If an answer is not the model's, or the structure is not clean behind it.
pub fn model<M: Model>() {
    with_seeds::<M>("model", &AccessVariant::ALL, |variants, seed| {
        for profile in profiles() {
            variants.iter().for_each(|&variant| run::<M>(variant, profile, seed));
        }
        true
    });
}

fn run<M: Model>(variant: AccessVariant, profile: FabricProfile, seed: u64) {
    let scene = Scene::<M>::new(variant, profile, seed);
    let context = &scene.context;
    let client = scene.client(true);
    let compute = Arc::new(cluster::join(&scene.fabric, seed).unwrap());
    // Where operations go to owners, somebody else has all at first.
    let other = (variant == AccessVariant::Routed).then(|| {
        let client = scene.client(true);
        let compute = Arc::new(cluster::join(&scene.fabric, seed + 1).unwrap());
        (client.serve(&compute, true).unwrap(), client, compute)
    });
    let server = client.serve(&compute, other.is_none()).unwrap();
    let worker = compute.worker().unwrap();
    let reached = worker.block_on(client.reach(&worker)).unwrap();
    let (mut rng, mut state) = (SmallRng::seed_from_u64(seed), M::State::default());
    let mut last = VecDeque::new();
    let count: usize = settings::from_env("FARLINK_KIT_OPS", 300);
    // Strict access looks at all there is, again and again.
    let is_strict = matches!(variant, AccessVariant::Strict | AccessVariant::StrictOwned);
    let first = if is_strict { Vec::new() } else { first::<M>(seed) };
    let drawn = (0..count).map(|_| None);
    let ops = first.into_iter().map(Some).chain(drawn).chain(M::looks().into_iter().map(Some));
    worker.block_on(async {
        for (number, op) in ops.enumerate() {
            let op = op.unwrap_or_else(|| M::draw(&mut rng, &state));
            let expected = M::apply(&mut state, &op);
            let found = M::run(&op, &reached).await;
            last.push_back(format!("{op:?} -> {found:?}"));
            last.drain(..last.len().saturating_sub(TOLD));
            let is_right = found.as_ref().is_ok_and(|found| *found == expected);
            assert!(is_right, "{context}: operation {number} should have answered {expected:?}: {last:#?}");
        }
    });
    client.leave(&compute).unwrap_or_else(|error| panic!("{context}: {error}"));
    if let Some((_server, client, compute)) = &other {
        client.leave(compute).unwrap_or_else(|error| panic!("{context}: {error}"));
    }
    drop((other, reached, worker, server));
    drop((compute, client));
    scene.close(false);
}
