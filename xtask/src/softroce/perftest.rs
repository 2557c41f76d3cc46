//! Our endpoint beside perftest's programs, in the same guest: medians of rounds that take turns.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Measures both in turn. It wants the variables `rounds` and `iterations`.
const SCRIPT: &str = include_str!("perftest.sh");

/// The latencies, by the names of our example, and what perftest calls them.
const LATENCIES: [(&str, &str); 4] = [
    ("read_8", "READ 8 B: ib_read_lat"),
    ("read_1024", "READ 1 KiB: ib_read_lat"),
    ("compare_swap", "CAS: ib_atomic_lat"),
    ("write_8_half_ping_pong", "WRITE 8 B, half a ping-pong: ib_write_lat"),
];
/// Sizes of the READs whose rate is measured with one and with 16 in flight.
const RATE_BYTES: [u32; 2] = [8, 1024];

/// A latency may be this much longer than perftest's.
const LATENCY_RATIO_MAX: f64 = 1.15;
/// The gain from 16 READs in flight may be this much of perftest's.
const GAIN_RATIO_MIN: f64 = 0.9;

/// What the guest is to run.
pub(super) fn script(rounds: u32, iterations: u32) -> String {
    format!("rounds={rounds}\niterations={iterations}\n{SCRIPT}")
}

/// Values of all rounds, by their names.
#[derive(Debug, Default)]
struct Samples(BTreeMap<String, Vec<f64>>);

impl Samples {
    fn add(&mut self, name: impl Into<String>, value: f64) {
        self.0.entry(name.into()).or_default().push(value);
    }

    fn median(&self, name: &str) -> Result<f64> {
        let mut values = self.0.get(name).with_context(|| format!("{name} was not measured"))?.clone();
        values.sort_unstable_by(f64::total_cmp);
        Ok(values[values.len() / 2])
    }
}

/// Prints the table; whether all ratios are good enough.
pub(super) fn report(results: &Path, rounds: u32) -> Result<bool> {
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    for round in 1..=rounds {
        let read = |name: &str| {
            let path = results.join(format!("{round}.{name}"));
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        take_ours(&read("ours")?, &mut ours)?;
        for (name, _) in LATENCIES {
            theirs.add(name, typical_us(&read(name)?)?);
        }
        for bytes in RATE_BYTES {
            for depth in [1, 16] {
                let name = format!("read_rate_{bytes}.{depth}");
                theirs.add(&name, rate(&read(&name)?)?);
            }
        }
    }
    let mut good = true;
    println!("{:<44} {:>10} {:>10} {:>7}", "median of each round's median, us", "farlink", "perftest", "ratio");
    for (name, what) in LATENCIES {
        let (mine, other) = (ours.median(name)?, theirs.median(name)?);
        let ratio = mine / other;
        good &= ratio <= LATENCY_RATIO_MAX;
        let verdict = if ratio <= LATENCY_RATIO_MAX { "" } else { "  TOO SLOW" };
        println!("{what:<44} {mine:>10.2} {other:>10.2} {ratio:>7.3}{verdict}");
    }
    println!(
        "{:<44} {:>10} {:>10} {:>7}",
        "rate with 16 READs in flight over that with 1", "farlink", "perftest", "ratio"
    );
    for bytes in RATE_BYTES {
        let gain = |samples: &Samples| {
            let rate = |depth: u32| samples.median(&format!("read_rate_{bytes}.{depth}"));
            anyhow::Ok(rate(16)? / rate(1)?)
        };
        let (mine, other) = (gain(&ours)?, gain(&theirs)?);
        let ratio = mine / other;
        good &= ratio >= GAIN_RATIO_MIN;
        let verdict = if ratio >= GAIN_RATIO_MIN { "" } else { "  TOO LITTLE" };
        println!("{:<44} {mine:>10.2} {other:>10.2} {ratio:>7.3}{verdict}", format!("READ {bytes} B: ib_read_bw"));
    }
    Ok(good)
}

/// Our example's rows, one JSON object a line.
fn take_ours(text: &str, samples: &mut Samples) -> Result<()> {
    for line in text.lines() {
        let row: Value = serde_json::from_str(line).with_context(|| format!("{line:?} is no row of ours"))?;
        let name = row["name"].as_str().context("a row without a name")?;
        match (row["p50_ns"].as_f64(), row["ops_per_second"].as_f64(), row["in_flight"].as_u64()) {
            (Some(p50_ns), _, _) => samples.add(name, p50_ns / 1000.0),
            (_, Some(rate), Some(in_flight)) => samples.add(format!("{name}.{in_flight}"), rate),
            _ => {}
        }
    }
    Ok(())
}

/// `t_typical[usec]` of one of perftest's latency programs: the median.
fn typical_us(text: &str) -> Result<f64> {
    let columns = columns(text)?;
    ensure!(columns.len() >= 6, "perftest's columns are not those of a latency: {columns:?}");
    Ok(columns[4])
}

/// `MsgRate[Mpps]` of one of perftest's rate programs, in requests a second.
fn rate(text: &str) -> Result<f64> {
    let columns = columns(text)?;
    ensure!(columns.len() == 5, "perftest's columns are not those of a rate: {columns:?}");
    Ok(columns[4] * 1e6)
}

/// The numbers in the line below perftest's heading.
fn columns(text: &str) -> Result<Vec<f64>> {
    let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).skip(1);
    let line = lines.next().with_context(|| format!("perftest has printed no result: {text}"))?;
    line.split_whitespace().map(|word| word.parse().with_context(|| format!("{word:?} in perftest's result"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = " GID: 00:00\n---\n #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    \
                           t_avg[usec]\n 2       1000          24.02          226.03       24.67    \t 25.89  \t7.97 \
                           58.17  226.03 \n---\n";
    const RATE: &str = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 8          \
                        1000             0.55               0.54   \t\t   0.070881\n";

    #[test]
    fn perftest_is_understood() {
        assert_eq!(typical_us(LATENCY).unwrap(), 24.67);
        assert_eq!(rate(RATE).unwrap(), 70881.0);
        assert!(typical_us(RATE).is_err() && rate(LATENCY).is_err() && rate("nothing").is_err());
    }

    #[test]
    fn medians_are_of_rounds() {
        let mut samples = Samples::default();
        for p50_ns in [3000, 1000, 9000] {
            let rows = format!(
                "{{\"name\":\"read_8\",\"p50_ns\":{p50_ns}}}\n{{\"name\":\"r\",\"in_flight\":16,\"ops_per_second\":5}}"
            );
            take_ours(&rows, &mut samples).unwrap();
        }
        assert_eq!((samples.median("read_8").unwrap(), samples.median("r.16").unwrap()), (3.0, 5.0));
        assert!(samples.median("other").is_err());
    }
}
