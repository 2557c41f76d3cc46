//! Fuzzes whatever reads words of others, for a set time: `farlink-fuzz [SECONDS [SEED [TARGET]]]`. With `-` a seed is drawn, too.

use std::time::Duration;

use anyhow::Context;
use farlink_tests::fuzz;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let seconds: u64 = args.next().map_or(Ok(60), |text| text.parse()).context("SECONDS is no number")?;
    let seed = args.next().filter(|text| text != "-");
    let seed = seed.map_or_else(|| Ok(rand::random()), |text| text.parse()).context("SEED is no number")?;
    let target = args.next().unwrap_or_default();
    println!("fuzz: seed {seed}");
    for (name, inputs) in fuzz::fuzz(seed, Duration::from_secs(seconds), &target)? {
        println!("fuzz: {name}: {inputs} inputs");
    }
    Ok(())
}
