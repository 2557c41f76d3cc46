//! The plan that the options of a bench mean, and which of them do not go together.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use farlink_runtime::layout::SLOTS;

use super::bench::{BenchArgs, CacheSize, DistributionChoice};
use crate::load_choice::{LoadChoice, fill_of, require_order_of_inserts};
use crate::place::{Address, VERBS_OPTIONS};
use crate::plan::{AdmissionChoice, CACHE_BYTES_MIN, Limit, Load, PlacementChoice, Plan, PolicyChoice, Validation};
use crate::program::{Kind, Programs};
use crate::subject::{AccessMode, Distribution, InsertOrder, Setting};

/// How long a workload runs unless told otherwise.
const SECONDS_DEFAULT: Duration = Duration::from_secs(3);
const KEYS_DEFAULT: u64 = 1_000_000;
const THETA_DEFAULT: f64 = 0.99;
/// The bench itself joins the cluster beside its processes, to check the structure.
const LOOKING: usize = 1;

/// A key and its value.
const ENTRY_BYTES: f64 = 16.0;

impl BenchArgs {
    /// Whether keys are loaded: always for workloads, for a trace only if they were asked for.
    pub(crate) fn loads_keys(&self) -> bool {
        self.trace.is_none() || self.keys.is_some() || self.keys_file.is_some() || self.rects_file.is_some()
    }

    /// The name of the structure.
    pub(crate) fn structure<'a>(&'a self, programs: Programs<'a>) -> anyhow::Result<&'a str> {
        let first = programs.iter().find(|program| program.known().is_some()).map(|program| program.name());
        self.structure.as_deref().or(first).context("this program knows no structures")
    }

    /// How workers reach it: a cache whose misses are decided about is an engine's.
    fn access(&self) -> AccessMode {
        match (self.access, self.policy) {
            (AccessMode::Cached, Some(_)) => AccessMode::Engine,
            (access, _) => access,
        }
    }

    /// The plan that these arguments mean for a structure.
    pub(crate) fn plan(&self, known: &dyn Kind) -> anyhow::Result<Plan> {
        self.validate_access(known)?;
        self.validate_cache()?;
        ensure!(
            !matches!(self.connect, Some(Address::Verbs(_)))
                || (self.latency == 0 && self.bandwidth.is_none() && !self.nasty),
            "--latency, --bandwidth and --nasty imitate a network; verbs:// is one"
        );
        let input = |path: &Option<PathBuf>| path.as_deref() == Some(std::path::Path::new("-"));
        ensure!(
            !((input(&self.keys_file) || input(&self.rects_file)) && input(&self.trace)),
            "--{} - and --trace - would both read standard input",
            if input(&self.keys_file) { "keys-file" } else { "rects-file" }
        );
        require_order_of_inserts(self.load, self.insert_order)?;
        ensure!(
            matches!(self.connect, Some(Address::Verbs(_))) || !self.verbs.is_given(),
            "{VERBS_OPTIONS} go with --connect verbs://HOST:PORT"
        );
        ensure!(
            self.distribution == DistributionChoice::Zipf || self.theta.is_none(),
            "--theta is for --distribution zipf; uniform has none"
        );
        ensure!(
            known.has_distribution() || (self.distribution == DistributionChoice::Zipf && self.theta.is_none()),
            "--distribution and --theta are not for a {}: its workloads say what they choose",
            known.name()
        );
        ensure!(self.rounds == 0 || known.has_rounds(), "--rounds: a {} has none", known.name());
        let bulk_loads = match self.load {
            Some(LoadChoice::Insert) => false,
            Some(LoadChoice::Bulk) if !known.bulk_loads() => bail!("--load bulk: a {} has no bulk load", known.name()),
            Some(LoadChoice::Bulk) => true,
            None => self.insert_order.is_none() && known.bulk_loads(),
        };
        let policy = self.policy.unwrap_or(PolicyChoice::CostAware);
        let ships = self.access().is_divided() || (self.access().asks_a_policy() && policy != PolicyChoice::Never);
        let server_threads = self.connect.is_none().then(|| self.server_threads.unwrap_or(u32::from(ships)));
        let serving = if server_threads.unwrap_or(0) > 0 { self.servers } else { 0 };
        ensure!(
            (self.processes + serving) as usize + LOOKING <= SLOTS,
            "--processes {}: a cluster has room for {SLOTS} compute servers at a time; {serving} are memory servers that carry out \
             operations, and {LOOKING} looks at the structure",
            self.processes
        );
        Ok(Plan {
            structure: known.name().to_owned(),
            access: self.access(),
            policy,
            placement: self.placement.unwrap_or(PlacementChoice::usual(self.access())),
            is_placement_given: self.placement.is_some(),
            admission: self.admission.unwrap_or(AdmissionChoice::Frequency),
            durability: self.durability.unwrap_or_default(),
            cache_bytes: self.cache_bytes(0),
            cache_pages_max: None,
            name: self.name.clone(),
            parts: Vec::new(),
            servers: self.servers,
            server_threads,
            processes: self.processes,
            joins_owners: false,
            workers: self.workers,
            in_flight: self.in_flight.clone(),
            window: self.window,
            lock_wait: self.lock_wait,
            setting: Setting {
                insert_order: self.insert_order.unwrap_or(InsertOrder::Random),
                distribution: match self.distribution {
                    DistributionChoice::Uniform => Distribution::Uniform,
                    DistributionChoice::Zipf => Distribution::Zipf(self.theta.unwrap_or(THETA_DEFAULT)),
                },
                scan_length: self.scan_length,
                seed: self.seed,
                ..Setting::of_entries(self.keys.unwrap_or(KEYS_DEFAULT))
            },
            loaded: 0,
            load: fill_of(self.fill, bulk_loads)?.map_or(Load::Insert, |fill| Load::Bulk { fill }),
            workloads: self.workloads(known)?,
            has_distribution: known.has_distribution(),
            page_bytes: self.page_bytes.unwrap_or(known.page_bytes()),
            is_page_bytes_given: self.page_bytes.is_some(),
            latency_ns: self.latency,
            bandwidth_bytes_per_second: self.bandwidth,
            nasty: self.nasty,
            validation: self.validation,
            limit: match self.ops {
                Some(operations) => Limit::Operations(operations),
                None => Limit::For(self.seconds.unwrap_or(SECONDS_DEFAULT)),
            },
            warm_up: self.warm_up,
            rounds: self.rounds,
        })
    }

    fn workloads(&self, known: &dyn Kind) -> anyhow::Result<Vec<String>> {
        if self.trace.is_some() {
            return Ok(Vec::new());
        }
        let names = match self.shares.given() {
            Some(shares) => vec![shares.name()],
            None if self.mix.is_empty() => known.workloads_usual().iter().map(|&name| name.to_owned()).collect(),
            None => self.mix.iter().map(|name| name.trim().to_ascii_lowercase()).collect(),
        };
        let names: Vec<String> =
            names.into_iter().map(|name| name.strip_prefix("ycsb-").map(str::to_owned).unwrap_or(name)).collect();
        names.iter().try_for_each(|name| known.require_workload(name))?;
        Ok(names)
    }

    /// What does not go together with --access.
    fn validate_access(&self, known: &dyn Kind) -> anyhow::Result<()> {
        let access = self.access();
        if let Some(why) = known.refuses(access) {
            bail!("--access {access} is not for a {}: {why}", known.name());
        }
        ensure!(
            self.policy.is_none() || access.asks_a_policy(),
            "--policy is for --access cached, engine and adaptive; {access} {}",
            if access.is_divided() { "sends every operation" } else { "sends none" }
        );
        ensure!(
            self.placement.is_none_or(|placement| placement.is_fit_for(access)),
            "--access {access} has its inner pages on one memory server: --placement {}; or leave it out",
            PlacementChoice::usual(access)
        );
        ensure!(
            self.server_threads != Some(0) || !access.is_divided(),
            "--access {access} sends operations to memory servers: --server-threads is 1 at least"
        );
        if let Some(policy) = self.policy.filter(|policy| *policy != PolicyChoice::Never) {
            ensure!(
                self.server_threads != Some(0),
                "--policy {} sends operations to memory servers: --server-threads is 1 at least",
                policy.name()
            );
        }
        ensure!(
            self.validation == Validation::Checksum || access != AccessMode::Coarse,
            "--validation is for who reads pages from afar; with --access coarse memory servers read their own"
        );
        Ok(())
    }

    /// How large each cache is to be, if told, when so many keys are loaded.
    pub(crate) fn cache_bytes(&self, loaded: u64) -> Option<u64> {
        match self.cache? {
            CacheSize::Bytes(bytes) => Some(bytes),
            CacheSize::Percent(percent) => {
                let bytes = loaded as f64 * ENTRY_BYTES * percent / 100.0;
                Some((bytes as u64).max(CACHE_BYTES_MIN))
            }
        }
    }

    fn validate_cache(&self) -> anyhow::Result<()> {
        let access = self.access();
        if !access.owns() {
            ensure!(
                self.durability.is_none(),
                "--durability is for --access cached or engine; with {access} nothing is owned"
            );
        }
        if !access.caches() {
            let of = "is for --access cached, cached-inner";
            ensure!(self.cache.is_none(), "--cache {of}, cached-mapping or engine; {access} has no cache");
            ensure!(self.admission.is_none(), "--admission {of} or engine; {access} has no cache");
            return Ok(());
        }
        ensure!(
            self.admission.is_none() || !access.is_of_words(),
            "--admission is for --access cached, cached-inner or engine; {access} keeps what is used most"
        );
        if let Some(CacheSize::Bytes(bytes)) = self.cache {
            ensure!(
                bytes >= CACHE_BYTES_MIN,
                "--cache {bytes} is less than the {CACHE_BYTES_MIN} bytes that a cache needs"
            );
        }
        ensure!(
            self.validation == Validation::Checksum || !(access.owns() || access.is_of_words()),
            "--access {access} proves pages by their checksum; leave --validation out, or use --access cached-inner"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use clap::Parser as _;
    use farlink_structures::{btree::Tree, bwtree::Bw, rtree, skiplist::List};

    use super::*;
    use crate::args::{Cli, Command};
    use crate::program::Of;

    fn bench(args: &str) -> anyhow::Result<Plan> {
        let line = ["farlink", "bench"].into_iter().chain(args.split_whitespace());
        match Cli::try_parse_from(line)?.command {
            Command::Bench(args) => {
                let kinds: [&dyn Kind; 4] = [
                    &Of::<Tree>(PhantomData),
                    &Of::<List>(PhantomData),
                    &Of::<rtree::Tree>(PhantomData),
                    &Of::<Bw>(PhantomData),
                ];
                let name = args.structure.as_deref().unwrap_or(kinds[0].name());
                args.plan(kinds.into_iter().find(|kind| kind.name() == name).context("no such structure")?)
            }
            other => panic!("{other:?}"),
        }
    }

    fn error(args: &str) -> String {
        format!("{:#}", bench(args).unwrap_err())
    }

    #[test]
    fn defaults() {
        let plan = bench("").unwrap();
        assert_eq!(plan.workloads, ["a", "b", "c", "d", "e", "f"]);
        assert_eq!((plan.servers, plan.processes, plan.workers, plan.in_flight), (2, 1, 2, vec![1]));
        assert_eq!((plan.setting.entries, plan.load), (1_000_000, Load::Bulk { fill: 0.9 }));
        assert_eq!(
            (plan.setting.distribution, plan.limit),
            (Distribution::Zipf(0.99), Limit::For(Duration::from_secs(3)))
        );
        assert_eq!((plan.page_bytes, plan.validation, plan.nasty), (1024, Validation::Checksum, false));
    }

    #[test]
    fn options() {
        let plan = bench(
            "--in-flight 1,16 --keys 2M --load insert --distribution uniform --latency 2us --bandwidth 10GB/s \
             --nasty --validation lock-body-lock --ops 5 --rounds 3 --mix c,scan-intensive --seed 9 --connect /tmp/c",
        )
        .unwrap();
        assert_eq!((plan.in_flight, plan.setting.entries), (vec![1, 16], 2_000_000));
        assert_eq!((plan.load, plan.setting.distribution), (Load::Insert, Distribution::Uniform));
        assert_eq!((plan.latency_ns, plan.bandwidth_bytes_per_second), (2000, Some(10_000_000_000)));
        assert_eq!((plan.validation, plan.limit), (Validation::LockBodyLock, Limit::Operations(5)));
        assert_eq!((plan.workloads.len(), plan.rounds, plan.setting.seed, plan.nasty), (2, 3, 9, true));
        assert_eq!(bench("--latency-ns 700").unwrap().latency_ns, 700);
        let inner = bench("--access cached-inner --processes 2 --cache 2MiB --validation lock-body-lock").unwrap();
        assert_eq!((inner.access, inner.cache_bytes), (AccessMode::CachedInner, Some(2 << 20)));
        let shares = bench("--read 50 --update 30 --insert 10 --remove 5 --scan 5 --rmw 0").unwrap();
        assert_eq!(shares.workloads, ["read50-update30-insert10-remove5-scan5"]);
        let tree = Of::<Tree>(PhantomData);
        assert!(tree.removes(&shares.workloads[0]) && !tree.removes("a"));
        let engine = bench("--access engine --policy back-off --seconds 2s --warm-up 500ms").unwrap();
        assert_eq!(
            (engine.policy, engine.placement, engine.server_threads),
            (PolicyChoice::BackOff, PlacementChoice::Subtrees(2), Some(1))
        );
        assert_eq!((engine.limit, engine.warm_up), (Limit::For(Duration::from_secs(2)), Duration::from_millis(500)));
        let cached = bench("--access cached --policy cold --server-threads 2 --cache 1%").unwrap();
        assert_eq!(
            (cached.access, cached.policy, cached.server_threads),
            (AccessMode::Engine, PolicyChoice::Cold, Some(2))
        );
        assert_eq!(bench("--access cached").unwrap().access, AccessMode::Cached);
        let hybrid = bench("--access hybrid --server-threads 2 --connect d");
        assert!(hybrid.unwrap_err().to_string().contains("cannot be used with"));
        let list = bench("--structure skiplist --access coarse").unwrap();
        assert_eq!((list.load, list.page_bytes, list.placement), (Load::Insert, 64, PlacementChoice::OneServer));
    }

    #[test]
    fn mistakes_are_explained() {
        for (args, says) in [
            ("--servers 0", "0 is not in 1..=256"),
            ("--in-flight 1,0", "0 is not in 1..=4096"),
            ("--in-flight 1,x", "invalid value 'x'"),
            ("--page-bytes 1000", "a power of two from 64 to 65536"),
            ("--fill 0.05", "from 0.1 to 1"),
            ("--fill NaN", "from 0.1 to 1"),
            ("--theta=-1", "a number of at least 0"),
            ("--keys 0", "1 or more"),
            ("--mix a,z", "there is no mix `z`"),
            ("--read 50", "they add to 50"),
            ("--read 300", "300 is not in 0..=255"),
            ("--read 100 --mix a", "cannot be used with"),
            ("--seconds 0", "above 0"),
            ("--seconds NaN", "unknown unit"),
            ("--seconds 1e300", "--seconds"),
            ("--seconds 1 --ops 1", "cannot be used with"),
            ("--keys 5 --keys-file k", "cannot be used with"),
            ("--latency 2h", "unknown unit `h`"),
            ("--access cached --cache 0%", "not a share of the data"),
            ("--connect verbs://host", "not HOST:PORT"),
            ("--connect verbs://host:1 --latency 2us", "imitate a network"),
            ("--connect verbs://host:1 --nasty", "imitate a network"),
            ("--cache 1MiB", "--cache is for --access cached"),
            ("--access coarse --admission always", "coarse has no cache"),
            ("--access cached-inner --durability logged", "nothing is owned"),
            ("--policy never", "--policy is for --access cached, engine and adaptive; one-sided sends none"),
            ("--access coarse --policy never", "sends every operation"),
            ("--access coarse --placement leaves", "--placement one-server"),
            ("--access hybrid --placement round-robin", "--placement leaves"),
            ("--access hybrid --server-threads 0", "--server-threads is 1 at least"),
            ("--access engine --policy always --server-threads 0", "--server-threads is 1 at least"),
            ("--access coarse --validation lock-body-lock", "memory servers read their own"),
            ("--structure skiplist --access engine", "is not for a skiplist"),
            ("--structure rtree --theta 0.5", "not for a rtree"),
            ("--structure rtree --distribution uniform", "not for a rtree"),
            ("--structure bwtree --access cached-mapping --admission always", "keeps what is used most"),
            ("--structure bwtree --access cached-mapping --validation lock-body-lock", "leave --validation out"),
            ("--structure skiplist --load bulk", "a skiplist has no bulk load"),
            ("--keys 5 --rects-file r", "cannot be used with"),
            ("--rects-file r --keys-file k", "cannot be used with"),
            ("--load bulk --insert-order rows", "an order of inserts: give --load insert"),
            ("--load insert --fill 0.5", "--fill is for a bulk load"),
            ("--structure rtree --insert-order rows --fill 0.5", "--fill is for a bulk load"),
            ("--structure skiplist --fill 0.5", "--fill is for a bulk load"),
            ("--insert-order sideways", "[possible values: random, given, rows]"),
            ("--placement some", "subtrees:LEVEL"),
            ("--keys-file - --trace -", "--keys-file - and --trace - would both read standard input"),
            ("--rects-file - --trace -", "--rects-file - and --trace - would both read standard input"),
            ("--access cached --cache 1KiB", "--cache 1024 is less than the 65536"),
            ("--access cached --validation lock-body-lock", "leave --validation out"),
            (
                "--access elsewhere",
                "[possible values: one-sided, cached, cached-inner, cached-mapping, coarse, hybrid, engine, adaptive]",
            ),
            ("--trace t --ops 5", "cannot be used with"),
            ("--trace t --in-flight 4", "cannot be used with"),
            ("--trace t --workers 2", "cannot be used with"),
            ("--distribution uniform --theta 0.5", "--theta is for --distribution zipf"),
            ("--device rxe0", "go with --connect verbs://"),
            ("--connect d --gid-index 1", "go with --connect verbs://"),
            ("--port 2", "go with --connect verbs://"),
            ("--unordered", "go with --connect verbs://"),
            ("--secret-file s", "go with --connect verbs://"),
            ("--connect d --servers 3", "cannot be used with"),
            ("--processes 256", "256 is not in 1..=255"),
            ("--access coarse --servers 62 --processes 194", "62 are memory servers"),
        ] {
            let error = error(args);
            assert!(error.contains(says), "{args}: {error}");
        }
    }
}
