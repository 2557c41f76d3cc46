//! Build steps of farlink that are more than one `cargo` command: `cargo xtask <step>`.

use std::{
    env,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};

mod built;
mod circles;
mod loom;
mod softroce;
mod workspace;

use workspace::{appended, in_workspace, workspace};

/// Build steps of farlink.
///
/// To run all that takes a fabric on real RDMA verbs, in a virtual machine with a software RDMA device (rxe0, 10.0.0.1):
/// `cargo xtask softroce`. To run one program there:
///
///     cargo xtask softroce run target/debug/deps/verbs-0123456789abcdef --nocapture
///     cargo xtask softroce run --with target/debug/farlink target/debug/deps/program-0123456789abcdef
///     cargo xtask softroce run sh -c 'ibv_rc_pingpong -g 1 >/dev/null & sleep 1; ibv_rc_pingpong -g 1 10.0.0.1'
///
/// The exit code is the program's own; 77 where this machine cannot run it, 124 if it did not end in time, 125 if the
/// virtual machine crashed. Variables whose name begins with FARLINK_, RUST_ or PROPTEST_ are handed over.
#[derive(Debug, Parser)]
#[allow(rustdoc::invalid_rust_codeblocks, reason = "these lines are for the help, which keeps them as they are")]
#[command(name = "cargo xtask", bin_name = "cargo xtask", verbatim_doc_comment)]
struct Args {
    #[command(subcommand)]
    step: Step,
}

#[derive(Debug, Subcommand)]
enum Step {
    /// Explores the loom models of the concurrent protocols, built with `--cfg loom` into target/loom.
    Loom {
        /// Preemptions per execution. Three take minutes, two a minute.
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
        preemptions: u32,
        /// Only models whose test's name contains this.
        filter: Option<String>,
    },
    /// Fuzzes whatever reads words that others have written: messages, and parameters of operations.
    Fuzz {
        /// How long, over all targets.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// The seed of the inputs, to have the same ones again; drawn and printed unless given.
        #[arg(long)]
        seed: Option<u64>,
        /// Only targets whose name contains this.
        filter: Option<String>,
    },
    /// Runs the unit tests, and all tests of the cache, under Miri, where the nightly toolchain has it.
    Miri {
        /// Only tests whose name contains this.
        filter: Option<String>,
    },
    /// Looks for circles of modules inside each crate, and prints where each comes from.
    Circles,
    /// Runs all that takes a fabric on real RDMA verbs: in a virtual machine with a software RDMA device.
    Softroce(softroce::Args),
}

fn main() -> Result<ExitCode> {
    match Args::parse().step {
        Step::Loom { preemptions, filter } => loom::explore(preemptions, filter.as_deref())?,
        Step::Fuzz { seconds, seed, filter } => fuzz(seconds, seed, filter.as_deref())?,
        Step::Miri { filter } => miri(filter.as_deref())?,
        Step::Circles => return circles(),
        Step::Softroce(args) => return softroce::main(&args),
    }
    Ok(ExitCode::SUCCESS)
}

fn fuzz(seconds: u64, seed: Option<u64>, filter: Option<&str>) -> Result<()> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Overflow checks and assertions on, as in tests.
    cargo.args(["run", "--profile", "test", "--package", "farlink-tests", "--bin", "farlink-fuzz", "--"]);
    cargo.arg(seconds.to_string()).arg(seed.map_or_else(|| "-".into(), |seed| seed.to_string())).args(filter);
    run(&mut cargo, "fuzz")
}

/// What Miri runs: code without files, sockets and large memory, which is where the unsafe code of these crates is.
const MIRI_PACKAGES: [&str; 4] = ["farlink-fabric", "farlink-messaging", "farlink-runtime", "farlink-structures"];
/// Its tests leave out by themselves what is about files and the system's memory, and are small under Miri.
const MIRI_CACHE: [&str; 4] = ["--package", "farlink-cache", "--lib", "--tests"];
/// What it leaves out: files, for which there is no unsafe code and which Miri knows only in part.
const MIRI_SKIPPED: &str = "mem::files::";

fn miri(filter: Option<&str>) -> Result<()> {
    if !has_miri() {
        println!("miri: skipped: the nightly toolchain has no Miri here");
        println!("miri: to install it: rustup toolchain install nightly --component miri rust-src");
        return Ok(());
    }
    let packages: Vec<_> = MIRI_PACKAGES.iter().flat_map(|package| ["--package", package]).chain(["--lib"]).collect();
    let cargo = |tested: &[&str], does: Option<&str>| {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["+nightly", "miri", "test"])
            .args(tested)
            .args(["--", "--skip", MIRI_SKIPPED])
            .args(does)
            .args(filter)
            .env("MIRIFLAGS", appended("MIRIFLAGS", "-Zmiri-disable-isolation"))
            .env("PROPTEST_CASES", "4");
        // Set by the cargo that runs this program, for its own toolchain.
        cargo.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
        cargo
    };
    let all = [&MIRI_CACHE[..], &packages];
    require_tests(filter, all.map(|tested| cargo(tested, Some("--list"))), "miri")?;
    all.into_iter().try_for_each(|tested| run(&mut cargo(tested, None), "miri"))
}

fn has_miri() -> bool {
    let mut cargo = Command::new("cargo");
    cargo.args(["+nightly", "miri", "--version"]).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
    cargo.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn circles() -> Result<ExitCode> {
    let workspace = workspace();
    let found = circles::of_workspace(&workspace)?;
    for (root, circle) in &found {
        let text = circle.to_string().replace(&format!("{}/", workspace.display()), "");
        print!("{}: {text}", root.strip_prefix(&workspace).unwrap_or(root).display());
    }
    if found.is_empty() {
        println!("circles: none");
        return Ok(ExitCode::SUCCESS);
    }
    println!("circles: {}; the top-level modules of a crate depend on each other in one direction", found.len());
    Ok(ExitCode::FAILURE)
}

/// Refuses a filter that no test's name contains, of those that the commands list: a run of none would pass.
fn require_tests(filter: Option<&str>, lists: impl IntoIterator<Item = Command>, step: &str) -> Result<()> {
    let Some(filter) = filter else { return Ok(()) };
    for mut list in lists {
        let output = in_workspace(&mut list, step).stderr(Stdio::inherit()).output();
        let output = output.with_context(|| format!("{step}: starting {:?}", list.get_program()))?;
        ensure!(output.status.success(), "{step}: listing tests failed ({})", output.status);
        if String::from_utf8_lossy(&output.stdout).lines().any(|line| line.ends_with(": test")) {
            return Ok(());
        }
    }
    bail!("{step}: no test's name contains {filter:?}")
}

/// Runs a command of a step.
fn run(command: &mut Command, step: &str) -> Result<()> {
    let status = in_workspace(command, step).status();
    let status = status.with_context(|| format!("{step}: starting {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{step}: failed ({status})");
    }
    println!("{step}: ok");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_fits_no_test_is_refused() {
        let says = |text: &str| {
            let mut list = Command::new("echo");
            list.arg(text);
            list
        };
        let (none, one) = (|| says("0 tests, 0 benchmarks"), || says("a::model: test\n\n1 test, 0 benchmarks"));
        require_tests(Some("model"), [none(), one()], "tests").unwrap();
        require_tests(None, [none()], "tests").unwrap();
        let error = require_tests(Some("typo"), [none(), none()], "tests").unwrap_err().to_string();
        assert!(error.contains("typo"), "{error}");
    }
}
