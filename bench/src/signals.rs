//! What a signal that ends the program does in a bench or a chaos run.
//!
//! Usually it ends at once: children end with it, and folders that it has made are removed first. While other processes have
//! work in hand that must not be cut off ([`Waiting`]), whoever waits for them sees [`stopped`], and has them finish.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::Context as _;
use farlink_children::{Scratch, say};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The signals that end the program. SIGHUP is none if it was ignored when the program began: whoever starts it under `nohup` wants that.
pub(crate) fn ending() -> Vec<i32> {
    let mut hangup = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: no new action is given, and `hangup` is valid for writes of the type that sigaction writes.
    let is_known = unsafe { libc::sigaction(SIGHUP, std::ptr::null(), hangup.as_mut_ptr()) } == 0;
    // SAFETY: all of it are numbers, and zeroed or written above.
    let is_ignored = is_known && unsafe { hangup.assume_init() }.sa_sigaction == libc::SIG_IGN;
    [SIGINT, SIGTERM].into_iter().chain((!is_ignored).then_some(SIGHUP)).collect()
}

static STOPPED: AtomicI32 = AtomicI32::new(0);
static WAITING: AtomicBool = AtomicBool::new(false);
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// From now on signals do so. A second one ends the program whatever it waits for.
pub(crate) fn watch() -> anyhow::Result<()> {
    let mut signals = Signals::new(ending()).context("cannot watch for signals")?;
    let watch = move || {
        for signal in signals.forever() {
            let is_second = STOPPED.swap(signal, Ordering::SeqCst) != 0;
            if is_second || !WAITING.load(Ordering::SeqCst) {
                say(format_args!("farlink: stopped by {}", name(signal)));
                exit(signal);
            }
            say(format_args!("farlink: {}: compute processes finish what they do", name(signal)));
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(watch).context("cannot start the signal thread")?;
    Ok(())
}

/// A folder that is removed before a signal ends the program, too.
pub(crate) fn scratch() -> anyhow::Result<Scratch> {
    let scratch = Scratch::new()?;
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).push(scratch.path().to_owned());
    Ok(scratch)
}

/// While it lives, a signal only makes [`stopped`] say so.
#[derive(Debug)]
pub(crate) struct Waiting(());

impl Waiting {
    pub(crate) fn begin() -> Self {
        WAITING.store(true, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.store(false, Ordering::SeqCst);
    }
}

/// The signal that has asked the program to end.
pub(crate) fn stopped() -> Option<i32> {
    Some(STOPPED.load(Ordering::SeqCst)).filter(|&signal| signal != 0)
}

/// What people call a signal.
pub(crate) fn name(signal: i32) -> &'static str {
    match signal {
        SIGINT => "SIGINT",
        SIGTERM => "SIGTERM",
        _ => "SIGHUP",
    }
}

/// The exit status of a program that a signal has ended, as a shell has it.
pub(crate) fn status(signal: i32) -> u8 {
    128 + signal as u8
}

/// Ends the program as a shell expects of one that a signal has ended.
fn exit(signal: i32) -> ! {
    // Of a cluster that goes on nobody is killed: children are told to end as this program does.
    if !WAITING.load(Ordering::SeqCst) {
        farlink_children::end_all();
    }
    // Best effort: the program ends either way, and the next run sweeps.
    let folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    folders.iter().for_each(|folder| Scratch::remove(folder));
    std::process::exit(status(signal).into())
}
