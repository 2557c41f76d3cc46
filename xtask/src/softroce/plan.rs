//! What runs in the guests.

use anyhow::{Result, ensure};

use super::{environment, guest::quoted, programs::Built};

/// The functions `step` and `verdict`.
const STEPS: &str = include_str!("steps.sh");
/// Cases of several processes.
const PROGRAMS: &str = include_str!("programs.sh");

/// How many times slower than usual a machine may be, or busier, before what runs in its guests is taken to hang.
pub(super) const SLOWER_MAX: u32 = 5;

/// Which steps follow one another: first those that are timed, then both other lanes beside each other. Much of what a step
/// does is to wait.
#[derive(Debug, Clone, Copy)]
enum Lane {
    /// What needs the guest for itself.
    Alone,
    /// Test programs.
    Tests,
    /// farlink's programs as a user runs them.
    Programs,
}

/// A script of steps, put together.
struct Script {
    text: String,
    lanes: [String; 3],
    filter: Option<String>,
}

impl Script {
    fn new(filter: Option<&str>) -> Self {
        let mut text = environment();
        text += "export FARLINK_REQUIRE_VERBS=1 FARLINK_FABRIC=verbs RUST_BACKTRACE=0\n";
        text += STEPS;
        text += &format!("cat >/tmp/programs.sh <<'END_OF_PROGRAMS'\n{PROGRAMS}END_OF_PROGRAMS\n");
        Self { text, lanes: Default::default(), filter: filter.map(str::to_owned) }
    }

    fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    /// A step, unless it is not asked for. It is taken to hang after [several](SLOWER_MAX) times `limit_s`.
    fn step(&mut self, lane: Lane, name: &str, limit_s: u32, command: &[&str]) {
        if self.wants(name) {
            let limit = (limit_s * SLOWER_MAX).to_string();
            let words = [name, &limit].into_iter().chain(command.iter().copied());
            self.lanes[lane as usize] += &format!("{}\n", quoted(words));
        }
    }

    fn end(self) -> Result<String> {
        let has_steps = self.lanes.iter().any(|lane| !lane.is_empty());
        ensure!(has_steps, "no step's name contains {:?}", self.filter.unwrap_or_default());
        let mut text = self.text;
        let steps = |with: &str, lane: &str| lane.lines().map(|line| format!("{with} {line}\n")).collect::<String>();
        let [alone, tests, programs] = &self.lanes;
        text += &steps("step", alone);
        if self.filter.is_some() || tests.is_empty() || programs.is_empty() {
            // Whoever waits for one step wants to see what it says at once.
            text += &(steps("step", tests) + &steps("step", programs));
        } else {
            text += &format!("{{\n{}}} &\nlane=$!\n{}wait $lane\n", steps("aside", tests), steps("aside", programs));
        }
        Ok(text + "verdict\n")
    }
}

/// What one guest is to show.
#[derive(Debug, Clone)]
pub(super) enum Wanted {
    /// Memory over verbs: what is there without threads at memory servers.
    Memory,
    /// Messages and shipped operations.
    Messages,
    /// All steps whose name contains this, those that take minutes, too.
    Named(String),
}

/// The steps that are wanted.
pub(super) fn alone(built: &Built, wanted: &Wanted) -> Result<String> {
    let named = if let Wanted::Named(name) = wanted { Some(name.as_str()) } else { None };
    let mut script = Script::new(named);
    if !matches!(wanted, Wanted::Messages) {
        script.memory(built)?;
    }
    if !matches!(wanted, Wanted::Memory) {
        script.messages(built, named.is_some())?;
    }
    if named.is_some() {
        script.long(built)?;
    }
    script.end()
}

/// A stress test of two processes.
const TWO: [&str; 4] = ["--processes", "2", "--workers", "2"];
/// Its memory servers, where they have threads.
const WITH_THREADS: [&str; 4] = ["--servers", "2", "--server-threads", "1"];
/// What makes a cache evict and write back.
const SMALL_CACHE: [&str; 6] = ["--access", "cached", "--keys", "8000", "--cache-percent", "5"];

impl Script {
    /// A test program.
    fn test(&mut self, built: &Built, name: &str, limit_s: u32, settings: &[&str], skipped: &[&str]) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        let mut command = vec!["env"];
        command.extend(settings);
        command.extend([built.test(name)?, "--test-threads", "2", "--nocapture"]);
        command.extend(skipped.iter().flat_map(|name| ["--skip", name]));
        self.step(Lane::Tests, name, limit_s, &command);
        Ok(())
    }

    fn stress(&mut self, lane: Lane, name: &str, options: &[&[&str]]) {
        let command =
            [&["farlink-stress", "--fabric", "verbs", "--seconds", "5"][..], &TWO, &options.concat()].concat();
        self.step(lane, name, 300, &command);
    }

    fn program(&mut self, lane: Lane, case: &str) {
        self.step(lane, case, 180, &["sh", "/tmp/programs.sh", case]);
    }

    fn memory(&mut self, built: &Built) -> Result<()> {
        self.step(Lane::Alone, "devices", 60, &["farlink", "devices"]);
        self.program(Lane::Alone, "killed_server");
        self.test(built, "verbs", 240, &[], &[])?;
        self.step(Lane::Tests, "program", 180, &[built.test("program")?, "over_rdma", "--test-threads", "2"]);
        self.test(built, "fabric", 240, &["FARLINK_FABRIC_ROUNDS=100"], &[])?;
        // A minute each, and the messages are those of the B+-tree's.
        let sent = ["bwtree::all_is_sent", "bwtree::inner_levels_are_searched"];
        let skipped = [&["skiplist::", "a_weak", "larger_pages", "three_times", "dropped"][..], &sent].concat();
        self.test(built, "threads", 240, &["FARLINK_THREADS_SECONDS=.4"], &skipped)?;
        // Connections break, and requests fail on top of that. To load and to check takes longer than to fail.
        let settings = ["FARLINK_FAILING_RUNS=1", "FARLINK_FAILING_SECONDS=0.06", "FARLINK_FAILING_KEYS=4000"];
        let skipped = ["skiplist::", "bwtree::", "shipped", "searched", "inner_pages", "dropped"];
        self.test(built, "failing", 300, &settings, &skipped)?;
        if self.wants("conformance") {
            // The kit of structures that are no ordered maps.
            let settings = ["env", "FARLINK_KIT_SECONDS=.05", "FARLINK_KIT_OPS=40"];
            let tests =
                [built.test("conformance")?, "latch_free::model", "mixed_sizes::linearizable", "--test-threads", "2"];
            self.step(Lane::Tests, "conformance", 240, &[&settings[..], &tests].concat());
        }
        for case in ["serve_and_bench", "without_the_secret", "random_bytes", "killed_bench"] {
            self.program(Lane::Programs, case);
        }
        self.stress(Lane::Programs, "stress one-sided", &[]);
        self.stress(Lane::Programs, "stress cached", &[&SMALL_CACHE]);
        self.stress(Lane::Programs, "stress faulty", &[&["--faulty", "200"]]);
        self.stress(Lane::Programs, "stress cached-inner", &[&["--access", "cached-inner", "--keys", "1000"]]);
        Ok(())
    }

    fn messages(&mut self, built: &Built, all: bool) -> Result<()> {
        self.program(Lane::Alone, "stopped_server");
        self.test(
            built,
            "messaging",
            240,
            &["FARLINK_MESSAGE_ROUNDS=15", "FARLINK_END_ROUNDS=2", "FARLINK_END_REQUESTS=200"],
            &[],
        )?;
        let settings = [
            "FARLINK_COARSE_STEPS=60",
            "FARLINK_COARSE_KEYS=400",
            "FARLINK_PIECES_ROUNDS=25",
            "FARLINK_SENT_STEPS=120",
            "FARLINK_SENT_ROUNDS=5",
            "FARLINK_TURN_ROUNDS=8",
        ];
        // The same code over another structure, and what does not depend on the fabric.
        let skipped = [
            "skiplist::",
            "bwtree::",
            "a_get_is_one",
            "leaves_are_everywhere",
            "hold_nothing_back",
            "places_pages",
            "done_over_caches",
        ];
        self.test(built, "shipping", 300, &settings, if all { &[] } else { &skipped })?;
        self.program(Lane::Programs, "serve_and_ship");
        self.program(Lane::Programs, "killed_owner");
        self.stress(Lane::Programs, "stress shipped", &[&WITH_THREADS, &SMALL_CACHE, &["--ship", "always"]]);
        // Compute servers ask each other, and hand regions on. The first takes minutes, and runs when it is named.
        if all && self.wants("routing") {
            let command = [built.test("cached")?, "routing::", "moving::", "--test-threads", "2"];
            let skipped = ["balanced", "hottest_leaf", "stays_cached", "done_twice", "a_guest_and_a_model"];
            let skipped = skipped.iter().flat_map(|name| ["--skip", name]);
            self.step(Lane::Programs, "routing", 240, &command.into_iter().chain(skipped).collect::<Vec<_>>());
        }
        self.stress(Lane::Programs, "stress routed", &[&SMALL_CACHE, &["--route", "yes", "--move-every", "500"]]);
        Ok(())
    }

    /// A minute and more each under emulation.
    fn long(&mut self, built: &Built) -> Result<()> {
        // Several packets a READ, so that some are torn.
        self.stress(Lane::Programs, "stress large pages", &[&["--page-bytes", "2048", "--keys", "1000"]]);
        self.stress(Lane::Programs, "stress coarse", &[&WITH_THREADS, &["--access", "coarse", "--keys", "300"]]);
        self.stress(Lane::Programs, "stress hybrid", &[&WITH_THREADS, &["--access", "hybrid", "--keys", "300"]]);
        self.test(built, "faults", 300, &[], &[])?;
        self.test(built, "killed", 400, &["FARLINK_FAULT_ROUNDS=1"], &["memory_servers", "ships"])?;
        // One fills the memory of three servers with small pages and frees them again: minutes, one by one.
        let skipped = ["failed_bulk_loads"];
        self.test(built, "model", 400, &["FARLINK_MODEL_CASES=3", "FARLINK_MODEL_KEYS=1000"], &skipped)?;
        self.test(built, "reclaim", 400, &["FARLINK_RECLAIM_KEYS=400"], &[])?;
        self.test(built, "cached", 400, &["FARLINK_MODEL_CASES=2"], &["endings::"])?;
        self.test(built, "hostile", 300, &["FARLINK_HOSTILE_CASES=3"], &[])
    }
}

/// Two guests: the memory servers in one, all that uses them in the other.
pub(super) fn pair() -> Result<[String; 2]> {
    let mut memory = Script::new(None);
    memory.step(Lane::Programs, "memory servers", PAIR_LIMIT_S, &["sh", "/tmp/programs.sh", "serve_until_told"]);
    let mut compute = Script::new(None);
    compute.step(Lane::Programs, "another machine", PAIR_LIMIT_S, &["sh", "/tmp/programs.sh", "over_the_net"]);
    let to_memory = |script: Script| -> Result<String> {
        Ok(script.end()?.replacen("\nstep '", "\nexport AT=10.0.0.1\nstep '", 1))
    };
    Ok([to_memory(memory)?, to_memory(compute)?])
}

/// How long the programs of two guests may take.
const PAIR_LIMIT_S: u32 = 240;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_fits_no_step_is_refused() {
        let end = |filter| {
            let mut script = Script::new(Some(filter));
            script.program(Lane::Programs, "killed_bench");
            script.end().map(drop)
        };
        end("bench").unwrap();
        assert!(end("typo").unwrap_err().to_string().contains("typo"));
    }
}
