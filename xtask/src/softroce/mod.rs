//! `cargo xtask softroce`: real RDMA verbs without a card, in a virtual machine.
//!
//! The guest runs Debian's own kernel under software emulation, with `rdma_rxe` on a dummy network device, so it needs
//! neither hardware nor virtualisation. Nothing is changed on this machine except that missing Debian packages are
//! installed.

mod guest;
mod host;
mod initramfs;
mod kernel;
mod plan;
mod process;
mod programs;

use std::{
    env,
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Subcommand;

use self::{
    guest::{Guest, Network, Outcome, Spec, quoted},
    host::Unable,
    kernel::Kernel,
    plan::Wanted,
    programs::{Built, Programs},
};

/// Exit code where this machine cannot run a guest.
const UNABLE: u8 = 77;
/// Exit code of a guest that did not end in time.
const TIMED_OUT: u8 = 124;
/// Exit code of a guest that ended without a result.
const CRASHED: u8 = 125;

/// What the command line says.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    /// Only steps whose name contains this.
    #[arg(long)]
    only: Option<String>,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Messages and shipped operations.
    Messages,
    /// Memory servers in one guest, compute servers in another, and a network between them that loses packets.
    Pair {
        /// How much each guest loses of what it sends.
        #[arg(long, default_value = LOSS)]
        loss: String,
    },
    /// Runs clippy on the whole workspace, with all features, and the tests that need one. Needs no guest.
    Lint,
    /// Runs one program in a guest.
    Run {
        /// Seconds after which the guest is stopped.
        #[arg(long, default_value_t = 300)]
        limit: u64,
        /// A program that PROGRAM starts; it has the same path in the guest as here. May be given several times.
        #[arg(long, value_name = "FILE")]
        with: Vec<PathBuf>,
        /// A file of this machine, with a slash; or a program of the guest, such as `sh` or `ibv_devinfo`.
        program: String,
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Runs a step and says how it ended.
pub(crate) fn main(args: &Args) -> Result<ExitCode> {
    match execute(args) {
        Err(error) if error.is::<Unable>() => {
            eprintln!("softroce: this machine cannot run the guest: {error}");
            Ok(ExitCode::from(UNABLE))
        }
        Err(error) => Err(error),
        Ok(outcome) => Ok(ExitCode::from(match outcome {
            Outcome::Exit(code) => code,
            Outcome::TimedOut => TIMED_OUT,
            Outcome::Crashed => CRASHED,
        })),
    }
}

/// What the network between two guests loses, unless told otherwise.
const LOSS: &str = "2%";
/// When a guest with all its steps is taken to hang.
const LIMIT: Duration = Duration::from_secs(600 * plan::SLOWER_MAX as u64);

fn execute(args: &Args) -> Result<Outcome> {
    match &args.action {
        None => run_alone(&args.only.clone().map_or(Wanted::Memory, Wanted::Named)),
        Some(Action::Messages) => run_alone(&Wanted::Messages),
        Some(Action::Pair { loss }) => Bench::prepare()?.run_pair(&Built::programs()?, loss),
        Some(Action::Lint) => {
            host::prepare()?;
            Built::lint().map(|()| Outcome::Exit(0))
        }
        Some(Action::Run { limit, with, program, arguments }) => {
            let bench = Bench::prepare()?;
            let mut programs = Programs::default();
            for path in with {
                programs.add(path)?;
            }
            let program = if program.contains('/') { programs.add(Path::new(program))? } else { program.clone() };
            let words = [program.as_str()].into_iter().chain(arguments.iter().map(String::as_str));
            let script = format!("{}{}\n", environment(), quoted(words));
            bench.run(&programs, &script, Duration::from_secs(*limit))
        }
    }
}

fn run_alone(wanted: &Wanted) -> Result<Outcome> {
    let bench = Bench::prepare()?;
    let built = Built::tests(wanted)?;
    bench.run(&built.programs, &plan::alone(&built, wanted)?, LIMIT)
}

/// What all guests of a run need.
#[derive(Debug)]
struct Bench {
    kernel: Kernel,
    initramfs: PathBuf,
    dir: PathBuf,
    /// Locked while the run lasts.
    _lock: File,
}

impl Bench {
    fn prepare() -> Result<Self> {
        host::prepare()?;
        let kernel = Kernel::obtain()?;
        let (dir, lock) = own_dir(&target_dir().join("softroce"))?;
        let initramfs = dir.join("initramfs");
        let work = tempfile::Builder::new().prefix("initramfs-").tempdir_in(&dir)?;
        initramfs::build(&kernel, work.path(), &initramfs)?;
        Ok(Self { kernel, initramfs, dir, _lock: lock })
    }

    /// A guest with the usual limit.
    fn spec<'a>(&'a self, name: &'a str, programs: &'a Programs, script: &'a str, network: Network) -> Spec<'a> {
        Spec {
            name,
            kernel: &self.kernel,
            initramfs: &self.initramfs,
            dir: self.dir.join(if name.is_empty() { "guest" } else { name }),
            programs,
            script,
            network,
            limit: LIMIT,
        }
    }

    /// Two guests, of which one serves until the other is done. The result is the first that is not success.
    fn run_pair(&self, programs: &Programs, loss: &str) -> Result<Outcome> {
        let sockets = [self.dir.join("memory.socket"), self.dir.join("compute.socket")];
        let network = |number: u8| {
            let [here, there] = if number == 1 { [0, 1] } else { [1, 0] }.map(|index| sockets[index].clone());
            Network::Pair { here, there, number, loss: loss.to_owned() }
        };
        let [memory, compute] = plan::pair()?;
        let memory = Guest::start(&self.spec("memory", programs, &memory, network(1)))?;
        let compute = Guest::start(&self.spec("compute", programs, &compute, network(2)))?;
        let outcome = compute.wait()?;
        memory.tell("stop")?;
        let other = memory.wait()?;
        Ok(if outcome == Outcome::Exit(0) { other } else { outcome })
    }

    /// A guest without others.
    fn run(&self, programs: &Programs, script: &str, limit: Duration) -> Result<Outcome> {
        Guest::start(&Spec { limit, ..self.spec("", programs, script, Network::Alone) })?.wait()
    }
}

/// A folder that no other run uses while the lock is held.
fn own_dir(base: &Path) -> Result<(PathBuf, File)> {
    for number in 0.. {
        let dir = base.join(number.to_string());
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        let lock = File::create(dir.join("lock"))?;
        match lock.try_lock() {
            Ok(()) => return Ok((dir, lock)),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error).context("locking a folder for the guest"),
        }
    }
    unreachable!("there are more numbers than runs")
}

/// What of this program's environment is for the guest's programs.
fn environment() -> String {
    let wanted =
        |name: &str| name.starts_with("FARLINK_") || name.starts_with("RUST_") || name.starts_with("PROPTEST_");
    let variables = env::vars().filter(|(name, _)| wanted(name));
    let exports = variables.map(|(name, value)| format!("export {}\n", quoted([format!("{name}={value}").as_str()])));
    exports.collect()
}

/// Where cargo builds.
fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| crate::workspace::workspace().join("target"), PathBuf::from)
}
