//! Explores the loom models, each in a process of its own: loom maps stacks for each execution, and threads of one process
//! wait for each other to do so.

use std::{
    env,
    num::NonZero,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use anyhow::{Context, Result, ensure};

use crate::{
    built,
    workspace::{appended, in_workspace},
};

const STEP: &str = "loom";

/// Explores the models whose test's name contains `filter`, as many at a time as there are cores.
pub(crate) fn explore(preemptions: u32, filter: Option<&str>) -> Result<()> {
    let program = build()?;
    let models = models(&program, filter)?;
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while let Some(model) = models.get(next.fetch_add(1, Relaxed)) {
                    if let Err(why) = explore_one(&program, model, preemptions) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{model}: {why:#}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    ensure!(failed.is_empty(), "{STEP}: {} of {} tests failed:\n{}", failed.len(), models.len(), failed.join("\n"));
    println!("{STEP}: ok, {} tests", models.len());
    Ok(())
}

/// What loom needs for its log only, and takes long to optimise.
const FOR_ITS_LOG: [&str; 2] = ["regex-automata", "regex-syntax"];

fn build() -> Result<PathBuf> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["test", "--release", "--package", "farlink-loom-tests", "--test", "models", "--no-run"])
        .args(FOR_ITS_LOG.map(|package| format!("--config=profile.release.package.{package}.opt-level=0")))
        // The last two are for crossbeam-epoch's part.
        .env("RUSTFLAGS", appended("RUSTFLAGS", "--cfg loom --cfg crossbeam_loom --cfg crossbeam_sanitize"))
        // Whole-program optimisation of each model would take longer than running it.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "8");
    let built = built::executables(in_workspace(&mut cargo, STEP)).context("building the models")?;
    let models = built.into_iter().find(|built| built.kind == "test" && built.target == "models");
    Ok(models.context("cargo has not built the models")?.path)
}

/// The names of the tests, some at least.
fn models(program: &Path, filter: Option<&str>) -> Result<Vec<String>> {
    let output = Command::new(program).arg("--list").args(filter).stderr(Stdio::inherit()).output();
    let output = output.with_context(|| format!("starting {}", program.display()))?;
    ensure!(output.status.success(), "{STEP}: listing tests failed ({})", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let models: Vec<_> = text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect();
    ensure!(!models.is_empty(), "{STEP}: no test's name contains {:?}", filter.unwrap_or_default());
    Ok(models)
}

/// What it says is shown when it is over, so that tests do not speak at once.
fn explore_one(program: &Path, model: &str, preemptions: u32) -> Result<()> {
    let mut command = Command::new(program);
    command.args(["--exact", model, "--nocapture"]).env("LOOM_MAX_PREEMPTIONS", preemptions.to_string());
    let output = command.output().context("starting it")?;
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() {
        let told = said.lines().filter(|line| line.starts_with("loom: ") || line.starts_with("test "));
        let told = told.filter(|line| !line.starts_with("test result: ok")).map(|line| format!("{line}\n"));
        print!("{}", told.collect::<String>());
    } else {
        print!("{said}");
    }
    eprint!("{errors}");
    ensure!(output.status.success(), "{}", output.status);
    // It has run, and was not only filtered out.
    ensure!(said.contains("1 passed"), "it did not run");
    Ok(())
}
