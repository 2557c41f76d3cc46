//! Our endpoint beside perftest's programs, in the same guest, in rounds in which both measure one right after the other: once
//! in a guest whose clock counts instructions, once in one on real time.
//!
//! What the first prints is the same in each run to two hundredths, and all but the ping-pong can be had so: it has one processor,
//! and two sides that spin need two. It knows nothing of caches, and of what two processors do together.
//!
//! The verdict is on the medians of the rounds. On a machine that others use, too, all takes twice as long at times, for a
//! hundredth of a second or a minute. So a round's median is one of many requests, and beside the medians stand the ratios of the
//! rounds, whose sides mostly meet the same: where their median is far from the ratio of the medians, this one says little.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::guest::Clock;

/// What perftest has for each of our measurements. It wants the variables `round` and `iterations`.
pub(super) const THEIRS: &str = include_str!("theirs.sh");
/// Measures both in turn. It wants the variables `rounds`, `iterations` and `names`.
const SCRIPT: &str = include_str!("perftest.sh");

/// Needs two processors.
const PING_PONG: &str = "write_8_half_ping_pong";
/// The latencies, by the names of our example, and what perftest calls them.
const LATENCIES: [(&str, &str); 4] = [
    ("read_8", "READ 8 B: ib_read_lat"),
    ("read_1024", "READ 1 KiB: ib_read_lat"),
    ("compare_swap", "CAS: ib_atomic_lat"),
    (PING_PONG, "WRITE 8 B, half a ping-pong: ib_write_lat"),
];
/// Sizes of the READs whose rate is measured with one and with 16 in flight.
const RATE_BYTES: [u32; 2] = [8, 1024];

/// Rounds where the clock counts instructions: they differ by two hundredths at most.
const COUNTED_ROUNDS: u32 = 5;
const COUNTED_ITERATIONS: u32 = 1000;

/// A latency may be this much longer than perftest's.
const LATENCY_RATIO_MAX: f64 = 1.15;
/// The gain from 16 READs in flight may be this much of perftest's.
const GAIN_RATIO_MIN: f64 = 0.9;

/// What is measured in one guest.
#[derive(Debug)]
pub(super) struct Series {
    pub(super) clock: Clock,
    rounds: u32,
    iterations: u32,
}

/// All that is measured: by counting, and on real time with so many rounds and requests.
pub(super) fn series(rounds: u32, iterations: u32) -> [Series; 2] {
    let counted = Series { clock: Clock::Counted, rounds: COUNTED_ROUNDS, iterations: COUNTED_ITERATIONS };
    [counted, Series { clock: Clock::Real, rounds, iterations }]
}

/// Values of all rounds, by their names.
#[derive(Debug, Default)]
struct Samples(BTreeMap<String, Vec<f64>>);

impl Samples {
    fn add(&mut self, name: impl Into<String>, value: f64) {
        self.0.entry(name.into()).or_default().push(value);
    }

    /// A value for each round.
    fn of(&self, name: &str) -> Result<&[f64]> {
        self.0.get(name).map(Vec::as_slice).with_context(|| format!("{name} was not measured"))
    }

    /// The gain from 16 READs in flight: of the medians, and each round's.
    fn gains(&self, bytes: u32) -> Result<(f64, Vec<f64>)> {
        let rates = |depth: u32| self.of(&format!("read_rate_{bytes}.{depth}"));
        let (many, one) = (rates(16)?, rates(1)?);
        Ok((percentile(many, 50) / percentile(one, 50), ratios(many, one)))
    }
}

fn ratios(above: &[f64], below: &[f64]) -> Vec<f64> {
    above.iter().zip(below).map(|(above, below)| above / below).collect()
}

/// The value that so many hundredths of these do not exceed.
pub(super) fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    values.len().checked_sub(1).map_or(f64::NAN, |last| values[last * percent / 100])
}

fn print_heading(what: &str) {
    println!(
        "{what:<46} {:>8} {:>8} {:>7}   {:>7} {:>7} {:>7}",
        "farlink", "perftest", "ratio", "quarter", "median", "quarter"
    );
}

/// A row of the table: medians, the verdict on their ratio, and the middle of the rounds' ratios.
fn print_row(what: &str, medians: [f64; 2], rounds: &[f64], verdict: impl Fn(f64) -> Option<&'static str>) -> bool {
    let [ours, theirs] = medians;
    let [low, middle, high] = [25, 50, 75].map(|percent| percentile(rounds, percent));
    let verdict = verdict(ours / theirs);
    let row = format!(
        "{what:<46} {ours:>8.2} {theirs:>8.2} {:>7.3}   {low:>7.3} {middle:>7.3} {high:>7.3}  {}",
        ours / theirs,
        verdict.unwrap_or_default()
    );
    println!("{}", row.trim_end());
    verdict.is_none()
}

impl Series {
    /// The latencies, by the names of our example, and what perftest calls them.
    fn latencies(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let clock = self.clock;
        LATENCIES.into_iter().filter(move |&(name, _)| clock == Clock::Real || name != PING_PONG)
    }

    /// What the guest is to run.
    pub(super) fn script(&self) -> String {
        let Self { rounds, iterations, .. } = self;
        let rates = RATE_BYTES.map(|bytes| format!("read_rate_{bytes}"));
        let names: Vec<_> = self.latencies().map(|(name, _)| name).chain(rates.iter().map(String::as_str)).collect();
        let names = names.join(" ");
        format!("rounds={rounds}\niterations={iterations}\nnames='{names}'\n{THEIRS}\n{SCRIPT}")
    }

    /// Prints the table; whether all ratios are good enough.
    pub(super) fn report(&self, results: &Path) -> Result<bool> {
        let (mut ours, mut theirs) = (Samples::default(), Samples::default());
        for round in 1..=self.rounds {
            let read = |name: &str| {
                let path = results.join(format!("{round}.{name}"));
                fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
            };
            for (name, _) in self.latencies() {
                take_ours(&read(&format!("ours.{name}"))?, &mut ours)?;
                theirs.add(name, typical_us(&read(name)?)?);
            }
            for bytes in RATE_BYTES {
                take_ours(&read(&format!("ours.read_rate_{bytes}"))?, &mut ours)?;
                for depth in [1, 16] {
                    let name = format!("read_rate_{bytes}.{depth}");
                    theirs.add(&name, rate(&read(&name)?)?);
                }
            }
        }
        let mut good = true;
        let clock = match self.clock {
            Clock::Counted => "CLOCK THAT COUNTS 2 NS AN INSTRUCTION",
            Clock::Real => "REAL TIME",
        };
        println!("\n{clock:<46} {:^25}   {:^23}", "medians of the rounds", "ratios of the rounds");
        print_heading("each round's median, us");
        for (name, what) in self.latencies() {
            let verdict = |ratio: f64| (ratio.is_nan() || ratio > LATENCY_RATIO_MAX).then_some("TOO SLOW");
            let (ours, theirs) = (ours.of(name)?, theirs.of(name)?);
            good &= print_row(what, [percentile(ours, 50), percentile(theirs, 50)], &ratios(ours, theirs), verdict);
        }
        print_heading("rate with 16 READs in flight over that with 1");
        for bytes in RATE_BYTES {
            let verdict = |ratio: f64| (ratio.is_nan() || ratio < GAIN_RATIO_MIN).then_some("TOO LITTLE");
            let ((ours, our_rounds), (theirs, their_rounds)) = (ours.gains(bytes)?, theirs.gains(bytes)?);
            let rounds = ratios(&our_rounds, &their_rounds);
            good &= print_row(&format!("READ {bytes} B: ib_read_bw"), [ours, theirs], &rounds, verdict);
        }
        Ok(good)
    }
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
pub(super) fn typical_us(text: &str) -> Result<f64> {
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
    fn only_the_ping_pong_is_not_counted() {
        let dir = tempfile::tempdir().unwrap();
        let [counted, timed] = series(5, 1000);
        let names = |series: &Series| {
            let script = series.script();
            let names = script.lines().find_map(|line| line.strip_prefix("names=")).unwrap();
            names.trim_matches('\'').split(' ').map(str::to_owned).collect::<Vec<_>>()
        };
        let (mut all, few) = (names(&timed), names(&counted));
        for name in &few {
            for round in 1..=5 {
                let write =
                    |name: &str, text: &str| fs::write(dir.path().join(format!("{round}.{name}")), text).unwrap();
                if name.contains("rate") {
                    let row = |depth: u32| {
                        format!("{{\"name\":\"{name}\",\"in_flight\":{depth},\"ops_per_second\":{depth}}}\n")
                    };
                    write(&format!("ours.{name}"), &(row(1) + &row(16)));
                    write(&format!("{name}.1"), RATE);
                    write(&format!("{name}.16"), RATE);
                } else {
                    let p50_ns = if round < 4 { 28_300 } else { 50_000 };
                    write(&format!("ours.{name}"), &format!("{{\"name\":\"{name}\",\"p50_ns\":{p50_ns}}}"));
                    write(name, LATENCY);
                }
            }
        }
        assert!(counted.report(dir.path()).unwrap(), "24.67 us and 28.3");
        assert!(timed.report(dir.path()).is_err(), "no ping-pong");
        fs::write(dir.path().join("3.ours.compare_swap"), "{\"name\":\"compare_swap\",\"p50_ns\":28400}").unwrap();
        assert!(!counted.report(dir.path()).unwrap(), "24.67 us and 28.4");
        all.retain(|name| name != PING_PONG);
        assert_eq!((few.len(), &few), (5, &all));
    }

    #[test]
    fn medians_are_judged_and_rounds_compared() {
        let mut samples = Samples::default();
        for (p50_ns, rate) in [(3000, 5), (1000, 40), (9000, 3), (4000, 20), (2000, 30)] {
            let rows = format!(
                "{{\"name\":\"read_8\",\"p50_ns\":{p50_ns}}}\n\
                 {{\"name\":\"read_rate_8\",\"in_flight\":16,\"ops_per_second\":{rate}}}\n\
                 {{\"name\":\"read_rate_8\",\"in_flight\":1,\"ops_per_second\":10}}"
            );
            take_ours(&rows, &mut samples).unwrap();
        }
        assert_eq!(samples.of("read_8").unwrap(), [3.0, 1.0, 9.0, 4.0, 2.0]);
        assert_eq!(samples.gains(8).unwrap(), (2.0, vec![0.5, 4.0, 0.3, 2.0, 3.0]));
        assert_eq!(percentile(samples.of("read_8").unwrap(), 50), 3.0);
        assert!(samples.of("other").is_err() && samples.gains(1024).is_err());
        let too_slow = |ratio: f64| (ratio.is_nan() || ratio > 1.5).then_some("TOO SLOW");
        assert!(print_row("x", [3.0, 2.0], &[1.6, 1.6], too_slow));
        assert!(!print_row("x", [3.1, 2.0], &[1.0, 1.0], too_slow) && !print_row("x", [f64::NAN, 2.0], &[], too_slow));
    }
}
