//! Programs for the guest: built here, or named by the user.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::{host, plan::Wanted, process::run, target_dir};
use crate::built;

/// Programs by the name that they have in the guest.
#[derive(Debug, Default)]
pub(super) struct Programs {
    by_name: BTreeMap<String, PathBuf>,
}

impl Programs {
    /// Adds a program of this machine. Returns its name in the guest.
    pub(super) fn add(&mut self, path: &Path) -> Result<String> {
        let path = path.canonicalize().with_context(|| format!("there is no program {}", path.display()))?;
        let name = path.file_name().and_then(|name| name.to_str()).context("a program's name is text")?.to_owned();
        let known = self.by_name.insert(name.clone(), path.clone());
        ensure!(known.is_none_or(|known| known == path), "two programs are called {name}");
        Ok(name)
    }

    /// Copies all to a guest's share, without what only a debugger reads: the guest reads slowly.
    pub(super) fn copy_to(&self, share: &Path) -> Result<()> {
        let bin = share.join("bin");
        if self.by_name.is_empty() {
            return Ok(());
        }
        fs::create_dir_all(&bin)?;
        let mut places = String::new();
        for (name, path) in &self.by_name {
            if is_script(path)? {
                fs::copy(path, bin.join(name))?;
            } else {
                run(Command::new("strip").arg("--strip-debug").arg("-o").arg(bin.join(name)).arg(path))?;
            }
            places += &format!("{name} {}\n", path.display());
        }
        fs::write(share.join("places"), places)?;
        Ok(())
    }
}

fn is_script(path: &Path) -> Result<bool> {
    let mut start = Vec::new();
    fs::File::open(path)?.take(2).read_to_end(&mut start)?;
    Ok(start == b"#!")
}

/// The package whose code is about verbs.
const VERBS: &str = "farlink-fabric";
/// The package of the program.
const PROGRAM: &str = "farlink";
/// Packages with programs or tests that run on verbs.
const PACKAGES: [&str; 4] = [VERBS, "farlink-runtime", "farlink-tests", PROGRAM];
/// Tests with which the programs come: a small one of each package that has some.
const WITH_PROGRAMS: [&str; 2] = ["fabric", "program"];
/// The tests of memory, and of messages.
const MEMORY: [&str; 6] = ["verbs", "fabric", "failing", "program", "threads", "conformance"];
const MESSAGES: [&str; 2] = ["messaging", "shipping"];
/// Those that take minutes.
const MORE: [&str; 6] = ["cached", "faults", "hostile", "killed", "model", "reclaim"];

/// What was built for the guest.
#[derive(Debug)]
pub(super) struct Built {
    pub(super) programs: Programs,
    /// Names of test programs in the guest, by the names of the tests.
    tests: BTreeMap<String, String>,
}

impl Built {
    /// Builds the tests that are wanted, and the programs, with verbs, in the profile of tests.
    pub(super) fn tests(wanted: &Wanted) -> Result<Self> {
        match wanted {
            Wanted::Memory => Self::with_programs(MEMORY.to_vec()),
            Wanted::Messages => Self::with_programs(MESSAGES.to_vec()),
            Wanted::Named(name) => {
                let all = MEMORY.into_iter().chain(MESSAGES).chain(MORE);
                Self::with_programs(
                    all.filter(|test| test.contains(name.as_str()) || (name == "routing" && *test == "cached"))
                        .collect(),
                )
            }
        }
    }

    /// Builds the programs, with verbs, in the profile of tests.
    pub(super) fn programs() -> Result<Programs> {
        Ok(Self::with_programs(Vec::new())?.programs)
    }

    fn with_programs(tests: Vec<&str>) -> Result<Self> {
        let mut built = Self { programs: Programs::default(), tests: BTreeMap::new() };
        // With a package's tests come its programs. To build them by themselves would build all that they need once more.
        let tests: BTreeSet<&str> = tests.into_iter().chain(WITH_PROGRAMS).collect();
        let tests = tests.into_iter().flat_map(|test| ["--test", test]);
        built.take(cargo("test", &PACKAGES).arg("--no-run").args(tests))?;
        for program in ["farlink", "farlink-stress"] {
            ensure!(built.programs.by_name.contains_key(program), "cargo has not built {program}");
        }
        Ok(built)
    }

    /// Checks the whole workspace with all features: with clippy, and the tests of what only features build, which need no device.
    pub(super) fn lint() -> Result<()> {
        // In the profile of the guest's programs, whose build scripts and macros are there.
        let mut clippy = cargo("clippy", &PACKAGES);
        clippy.args(["--workspace", "--all-targets", "--profile", "test", "--", "-D", "warnings"]);
        // All that they depend on is as the guest's programs have it: it is built.
        let mut tests = cargo("test", &[VERBS, "farlink-bench", PROGRAM]);
        tests.args(["--lib", "--test", "figures", "--", "verbs::", "geojson::", "local_r_trees"]);
        for mut command in [clippy, tests] {
            let status = command.status().context("starting cargo")?;
            ensure!(status.success(), "{command:?} failed ({status})");
        }
        Ok(())
    }

    /// The name in the guest of a test program.
    pub(super) fn test(&self, name: &str) -> Result<&str> {
        self.tests.get(name).map(String::as_str).with_context(|| format!("cargo has not built the test {name}"))
    }

    /// Runs cargo and takes the programs that it names.
    fn take(&mut self, cargo: &mut Command) -> Result<()> {
        for built in built::executables(cargo).context("building the guest's programs")? {
            match built.kind.as_str() {
                "test" => drop(self.tests.insert(built.target, self.programs.add(&built.path)?)),
                "bin" if !built.is_test => drop(self.programs.add(&built.path)?),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A cargo command on packages, the program's among them, with verbs and all other features.
fn cargo(command: &str, packages: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.arg(command).current_dir(crate::workspace::workspace()).env("CARGO_TARGET_DIR", target_dir());
    cargo.env("LIBCLANG_PATH", host::libclang_dir());
    // Emulated programs mostly wait: what is built quickly is done first.
    for (name, value) in [
        ("CARGO_INCREMENTAL", "0"),
        ("CARGO_PROFILE_TEST_OPT_LEVEL", "1"),
        ("CARGO_PROFILE_TEST_DEBUG", "0"),
        ("CARGO_PROFILE_DEV_DEBUG", "0"),
    ] {
        if std::env::var_os(name).is_none() {
            cargo.env(name, value);
        }
    }
    for package in packages {
        cargo.args(["--package", package, "--features", &format!("{package}/verbs")]);
    }
    // What has these features is built once, for the guest and for all else.
    cargo.args(["--features", &format!("{PROGRAM}/peers,{PROGRAM}/geojson")]);
    cargo
}
