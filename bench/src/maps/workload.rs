//! Mixes: which share of the operations is of which kind.
//!
//! Two families go by name. YCSB's A to F, and the five of the DEX paper. Any other mix is given by percentages, which
//! must add to 100 and make its name. A mix says nothing of keys: `keys.rs` chooses those, `stream.rs` puts both together.

use anyhow::{bail, ensure};
use rand::{Rng, RngExt as _};

use crate::units::shorten;

/// One kind of operation, as a mix counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Look one key up.
    Read,
    /// Overwrite the value of a key that is there.
    Update,
    /// Insert a key that was never there.
    Insert,
    /// Remove a loaded key.
    Remove,
    /// Read entries in key order from a key on.
    Scan,
    /// Look one key up, then overwrite its value; counted and timed as one operation.
    ReadModifyWrite,
}

/// Which keys the reads of a mix choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadFrom {
    /// The loaded keys, by the distribution that the user chose.
    Loaded,
    /// The newest keys most (YCSB D), see `stream.rs`.
    Latest,
}

/// How many entries one scan asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScanLength {
    /// Uniform from 1 to `--scan-length`, as YCSB E has it.
    UpTo,
    /// Always `--scan-length`, as DEX has it.
    Exactly,
}

/// Shares in percent; they add to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Shares {
    pub(crate) read: u8,
    pub(crate) update: u8,
    pub(crate) insert: u8,
    pub(crate) remove: u8,
    pub(crate) scan: u8,
    pub(crate) rmw: u8,
}

/// A mix of operations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mix {
    /// What the measured row is called.
    pub(crate) name: String,
    pub(crate) shares: Shares,
    pub(crate) read_from: ReadFrom,
    pub(crate) scan_length: ScanLength,
}

/// The names that are listed. Others are made of [shares](Shares::name).
pub(crate) const NAMES: &[&str] = &[
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "read-only",
    "read-intensive",
    "write-intensive",
    "insert-intensive",
    "scan-intensive",
];

impl Mix {
    /// A mix by its name; YCSB's letters in either case, with or without `ycsb-` before them.
    pub(crate) fn named(name: &str) -> anyhow::Result<Self> {
        let lower = name.trim().to_ascii_lowercase();
        let short = lower.strip_prefix("ycsb-").unwrap_or(&lower);
        let none = Shares::default();
        let shares = match short {
            "a" => Shares { read: 50, update: 50, ..none },
            "b" => Shares { read: 95, update: 5, ..none },
            "c" => Shares { read: 100, ..none },
            "d" => Shares { read: 95, insert: 5, ..none },
            "e" => Shares { scan: 95, insert: 5, ..none },
            "f" => Shares { read: 50, rmw: 50, ..none },
            "read-only" => Shares { read: 100, ..none },
            "read-intensive" => Shares { read: 95, update: 5, ..none },
            "write-intensive" => Shares { read: 50, update: 50, ..none },
            "insert-intensive" => Shares { insert: 50, read: 50, ..none },
            "scan-intensive" => Shares { scan: 95, insert: 5, ..none },
            _ => return Self::of_shares(short),
        };
        let full = if short.len() == 1 { format!("ycsb-{short}") } else { short.to_owned() };
        let read_from = if short == "d" { ReadFrom::Latest } else { ReadFrom::Loaded };
        let scan_length = if short == "e" { ScanLength::UpTo } else { ScanLength::Exactly };
        Ok(Self { name: full, shares, read_from, scan_length })
    }

    /// A mix by the name that [`Shares::name`] makes: `read50-update30-insert20`.
    fn of_shares(name: &str) -> anyhow::Result<Self> {
        let mut shares = Shares::default();
        for part in name.split('-') {
            let kind = part.trim_end_matches(|c: char| c.is_ascii_digit());
            let (share, percent) = (shares.of(kind), part[kind.len()..].parse::<u8>());
            let (Some(share), Ok(percent)) = (share, percent) else {
                bail!("there is no mix `{}`; the mixes are {}", shorten(name), NAMES.join(", "))
            };
            *share = percent;
        }
        let total = shares.total();
        ensure!(
            total == 100,
            "--read, --update, --insert, --remove, --scan and --rmw must add to 100 percent; they add to {total}"
        );
        let (read_from, scan_length) = (ReadFrom::Loaded, ScanLength::Exactly);
        Ok(Self { name: shares.name(), shares, read_from, scan_length })
    }
}

impl Shares {
    fn each(&self) -> [(Kind, &'static str, u8); 6] {
        [
            (Kind::Read, "read", self.read),
            (Kind::Update, "update", self.update),
            (Kind::Insert, "insert", self.insert),
            (Kind::Remove, "remove", self.remove),
            (Kind::Scan, "scan", self.scan),
            (Kind::ReadModifyWrite, "rmw", self.rmw),
        ]
    }

    fn of(&mut self, kind: &str) -> Option<&mut u8> {
        Some(match kind {
            "read" => &mut self.read,
            "update" => &mut self.update,
            "insert" => &mut self.insert,
            "remove" => &mut self.remove,
            "scan" => &mut self.scan,
            "rmw" => &mut self.rmw,
            _ => return None,
        })
    }

    /// The name of the mix with these shares.
    pub(crate) fn name(&self) -> String {
        let given = self.each().into_iter().filter(|(_, _, share)| *share > 0);
        given.map(|(_, name, share)| format!("{name}{share}")).collect::<Vec<_>>().join("-")
    }

    fn total(&self) -> u32 {
        self.each().iter().map(|(_, _, share)| u32::from(*share)).sum()
    }

    /// Draws one kind.
    pub(crate) fn draw(&self, random: &mut impl Rng) -> Kind {
        let mut ticket = random.random_range(0..self.total().max(1));
        for (kind, _, share) in self.each() {
            match ticket.checked_sub(u32::from(share)) {
                Some(rest) => ticket = rest,
                None => return kind,
            }
        }
        Kind::Read // only if every share is zero, which the constructors exclude
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng as _, rngs::StdRng};
    use std::collections::HashMap;

    #[test]
    fn every_listed_name_is_a_mix_of_100_percent() {
        for name in NAMES {
            let mix = Mix::named(name).unwrap();
            assert_eq!(mix.shares.total(), 100, "{name}");
            assert_eq!(Mix::named(&mix.name).unwrap(), mix);
        }
    }

    #[test]
    fn names_are_forgiving_and_errors_list_them() {
        assert_eq!(Mix::named("A").unwrap().name, "ycsb-a");
        assert_eq!(Mix::named("ycsb-d").unwrap().read_from, ReadFrom::Latest);
        assert_eq!(Mix::named(" e").unwrap().scan_length, ScanLength::UpTo);
        for wrong in ["g", "", "read", "50", "read50-", "read-5", "read300"] {
            let error = Mix::named(wrong).unwrap_err().to_string();
            assert!(error.contains(&format!("`{wrong}`")) && error.contains("scan-intensive"), "{error}");
        }
    }

    #[test]
    fn percentages_must_add_to_100() {
        let shares = Shares { read: 50, update: 30, insert: 10, remove: 5, scan: 5, rmw: 0 };
        assert_eq!(shares.name(), "read50-update30-insert10-remove5-scan5");
        assert_eq!(Mix::named(&shares.name()).unwrap().shares, shares);
        let error = Mix::named("read99").unwrap_err().to_string();
        assert!(error.ends_with("they add to 99"), "{error}");
        assert!(Mix::named("read255-rmw255").is_err());
    }

    #[test]
    fn draws_follow_the_shares() {
        let shares = Shares { read: 50, update: 30, insert: 10, remove: 5, scan: 5, rmw: 0 };
        let mut random = StdRng::seed_from_u64(1);
        let mut counts: HashMap<Kind, u32> = HashMap::new();
        for _ in 0..100_000 {
            *counts.entry(shares.draw(&mut random)).or_default() += 1;
        }
        for (kind, name, share) in shares.each() {
            let drawn = f64::from(counts.get(&kind).copied().unwrap_or(0)) / 1000.0;
            assert!((drawn - f64::from(share)).abs() < 1.0, "{name}: {drawn} for {share}");
        }
    }
}
