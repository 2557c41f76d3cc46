//! A guest: QEMU in software emulation, with a folder of the host's as its way in and out.
//!
//! The share holds `run.sh`, which the guest runs, `bin/` with programs and `places` that says where the host has them.
//! The guest leaves the script's exit code in `exit`. A guest that ends without it has crashed; one that does not end in
//! time is ended.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{kernel::Kernel, programs::Programs};

/// All that the emulator has but fast string instructions: it carries them out byte by byte.
const CPU: &str = "max,erms=off";

/// What Debian's kernel would do to be safe, or because it is fast on a real processor: an emulator pays more for it. It does not
/// clear what it allocates, nor has the emulator look whether it touches a program's memory, and copies by loops: string
/// instructions of words are slow, too.
const LEFT_OUT: &str = "mitigations=off init_on_alloc=0 clearcpuid=rep_good,smap,smep";

/// What a guest is connected to.
#[derive(Debug, Clone)]
pub(super) enum Network {
    /// Nothing: its RDMA device is on a dummy device, 10.0.0.1.
    Alone,
    /// One other guest.
    Pair {
        /// Its own socket.
        here: PathBuf,
        /// The other guest's.
        there: PathBuf,
        /// The last number of its address, 10.0.0.N.
        number: u8,
        /// How much of what it sends is lost, as `tc` takes it; empty for none.
        loss: String,
    },
}

/// What a guest is started with.
#[derive(Debug)]
pub(super) struct Spec<'a> {
    /// Its name, which stands before each line it prints; empty for none.
    pub(super) name: &'a str,
    pub(super) kernel: &'a Kernel,
    pub(super) initramfs: &'a Path,
    /// A folder of its own, emptied before.
    pub(super) dir: PathBuf,
    pub(super) programs: &'a Programs,
    /// A shell script.
    pub(super) script: &'a str,
    pub(super) network: Network,
    pub(super) limit: Duration,
}

/// How a guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its script came to an end, with this exit code.
    Exit(u8),
    /// It did not end in time.
    TimedOut,
    /// It ended without a result.
    Crashed,
}

/// A guest that runs. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Guest {
    name: String,
    qemu: Child,
    reader: Option<JoinHandle<()>>,
    panicked: Arc<AtomicBool>,
    dir: PathBuf,
    until: Instant,
    limit: Duration,
}

impl Guest {
    /// Boots a guest.
    pub(super) fn start(spec: &Spec<'_>) -> Result<Self> {
        if spec.dir.exists() {
            fs::remove_dir_all(&spec.dir)?;
        }
        let share = spec.dir.join("share");
        fs::create_dir_all(&share).with_context(|| format!("making {}", share.display()))?;
        fs::write(share.join("run.sh"), spec.script)?;
        spec.programs.copy_to(&share)?;
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-accel", "tcg,thread=multi", "-smp", "2", "-m", "2048", "-cpu", CPU])
            .args(["-nodefaults", "-no-reboot", "-vga", "none", "-display", "none", "-serial", "stdio"])
            .arg("-kernel")
            .arg(spec.kernel.image())
            .arg("-initrd")
            .arg(spec.initramfs)
            .arg("-virtfs")
            .arg(format!("local,path={},mount_tag=share,security_model=none", share.display()))
            .arg("-append")
            .arg(command_line(spec));
        match &spec.network {
            Network::Alone => qemu.args(["-nic", "none"]),
            Network::Pair { here, there, number, .. } => qemu
                .arg("-netdev")
                .arg(format!(
                    "dgram,id=pair,local.type=unix,local.path={},remote.type=unix,remote.path={}",
                    here.display(),
                    there.display()
                ))
                .arg("-device")
                .arg(format!("virtio-net-pci,netdev=pair,mac=52:54:00:00:00:{number:02x}")),
        };
        let mut qemu = qemu
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("starting qemu-system-x86_64")?;
        let console = BufReader::new(qemu.stdout.take().context("the guest has no console")?);
        let log = File::create(spec.dir.join("console.log"))?;
        let panicked = Arc::new(AtomicBool::new(false));
        let reader = thread::spawn({
            let (name, panicked) = (spec.name.to_owned(), Arc::clone(&panicked));
            move || show(console, log, &name, &panicked)
        });
        Ok(Self {
            name: spec.name.to_owned(),
            qemu,
            reader: Some(reader),
            panicked,
            dir: spec.dir.clone(),
            until: Instant::now() + spec.limit,
            limit: spec.limit,
        })
    }

    /// Makes an empty file in its share.
    pub(super) fn tell(&self, name: &str) -> Result<()> {
        fs::write(self.dir.join("share").join(name), "").context("writing to the guest's share")
    }

    /// Waits until it ends, and says so if it did not end as it should.
    pub(super) fn wait(mut self) -> Result<Outcome> {
        let mut timed_out = false;
        while self.qemu.try_wait()?.is_none() {
            if Instant::now() >= self.until {
                timed_out = true;
                self.end();
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        if let Some(reader) = self.reader.take() {
            reader.join().map_err(|_| anyhow::anyhow!("showing the console failed"))?;
        }
        let guest = if self.name.is_empty() { "the guest".to_owned() } else { format!("the guest `{}`", self.name) };
        let console = self.dir.join("console.log");
        if timed_out {
            let limit = self.limit.as_secs();
            eprintln!(
                "softroce: {guest} did not end within {limit} s and was stopped; its console: {}",
                console.display()
            );
            return Ok(Outcome::TimedOut);
        }
        let exit = fs::read_to_string(self.dir.join("share/exit")).ok().and_then(|code| code.trim().parse().ok());
        Ok(match exit {
            Some(code) => Outcome::Exit(code),
            None => {
                let how =
                    if self.panicked.load(Ordering::Relaxed) { "its kernel panicked" } else { "it gave no result" };
                eprintln!("softroce: {guest} crashed: {how}; its console: {}", console.display());
                Outcome::Crashed
            }
        })
    }

    fn end(&mut self) {
        // Both fail only if it has ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end();
    }
}

/// The kernel's command line. What the kernel does not know it hands to init as environment.
fn command_line(spec: &Spec<'_>) -> String {
    let (device, number, loss) = match &spec.network {
        Network::Alone => ("dum0", 1, ""),
        Network::Pair { number, loss, .. } => ("eth0", *number, loss.as_str()),
    };
    // A guest whose host process was killed ends by itself, a little later than it would have been stopped.
    let limit = spec.limit.as_secs() + 30;
    format!(
        "console=ttyS0 quiet panic=-1 nokaslr tsc=reliable no_timer_check {LEFT_OUT} netdev={device} address=10.0.0.{number} \
         loss={loss} limit={limit}"
    )
}

/// Copies the console to this program's output and to a file, line by line.
fn show(mut console: impl BufRead, mut log: File, name: &str, panicked: &AtomicBool) {
    let mut line = Vec::new();
    while console.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\r', '\n']);
        if text.contains("Kernel panic") {
            panicked.store(true, Ordering::Relaxed);
        }
        if text.ends_with("reboot: Power down") {
            break;
        }
        let prefix = if name.is_empty() { String::new() } else { format!("{name} | ") };
        // Whoever reads the output may have left, and the log is a convenience: the guest's result counts.
        let _ = writeln!(io::stdout(), "{prefix}{text}");
        let _ = writeln!(log, "{text}");
        line.clear();
    }
}

/// `words` as one command of a shell script.
pub(super) fn quoted<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let quote = |word: &str| format!("'{}'", word.replace('\'', r"'\''"));
    words.into_iter().map(quote).collect::<Vec<_>>().join(" ")
}
