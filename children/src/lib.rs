//! Child processes: started so that none outlives this program, talked to line by line, ended and waited for.
//!
//! The kernel sends a child SIGTERM when the thread that started it ends (PR_SET_PDEATHSIG). Start children from the
//! main thread, or from one that outlives them.

pub mod huge_pages;
mod scratch;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{self, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};

pub use crate::scratch::Scratch;

/// A child that was told to stop and has not is killed after this.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Children that run, by their numbers. No child is waited for, so that its number is free for another process, while somebody else
/// holds this.
static RUNNING: Mutex<Vec<u32>> = Mutex::new(Vec::new());

fn running() -> MutexGuard<'static, Vec<u32>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills all children (SIGKILL) and waits until they are gone: for a program that is about to end. Who starts a child from now on, or asks
/// what has become of one, waits for ever: the program would else say that they have died.
pub fn end_all() {
    let running = running();
    for &child in &*running {
        // SAFETY: kill touches no memory. Nobody has waited for the child, so its number is its own.
        unsafe { libc::kill(child as libc::pid_t, libc::SIGKILL) };
        await_end(child);
    }
    std::mem::forget(running);
}

/// Writes a line to standard error, whole. Where that is gone nothing happens: `eprintln!` would panic, in a thread that has more to do.
pub fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Waits until a child has ended, and leaves it to be waited for.
fn await_end(child: u32) {
    loop {
        let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: `info` is valid for writes of the type that waitid writes.
        let ended = unsafe { libc::waitid(libc::P_PID, child, info.as_mut_ptr(), options) };
        if ended == 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// A child process with its standard input and output as lines. What it writes to standard error comes out of ours, line by
/// line, with its name before each.
#[derive(Debug)]
pub struct Child {
    name: String,
    process: process::Child,
    /// `None` once it is closed.
    input: Option<process::ChildStdin>,
    /// Lines of its standard output; the sender is gone when the output has ended. Locked only to be shared at all.
    lines: Mutex<Receiver<String>>,
    /// Copies its standard error; ends with it.
    errors: Option<JoinHandle<()>>,
    /// Known once it was waited for.
    status: Option<ExitStatus>,
    /// Whether its number is free.
    is_reaped: bool,
}

impl Child {
    /// Starts `command`; `name` is what errors call it.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, mut command: Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        die_with_parent(&mut command);
        let mut process = {
            let mut running = running();
            let process = command.spawn().with_context(|| format!("cannot start {name}"))?;
            running.push(process.id());
            process
        };
        let input = process.stdin.take();
        let output = process.stdout.take().with_context(|| format!("{name} has no standard output"))?;
        let errors = process.stderr.take().with_context(|| format!("{name} has no standard error"))?;
        let prefix = name.to_owned();
        let errors = thread::Builder::new()
            .name(format!("errors of {name}"))
            .spawn(move || {
                let mut lines = BufReader::new(errors);
                let mut line = Vec::new();
                while lines.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                    say(format_args!("{prefix}: {}", String::from_utf8_lossy(line.trim_ascii_end())));
                    line.clear();
                }
            })
            .with_context(|| format!("cannot start a thread that reads from {name}"))?;
        let (sender, lines) = mpsc::channel();
        // A thread reads, so that a line can be waited for with a time limit. It ends with the child's output.
        thread::Builder::new()
            .name(format!("lines of {name}"))
            .spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            })
            .with_context(|| format!("cannot start a thread that reads from {name}"))?;
        let (name, lines, errors) = (name.to_owned(), Mutex::new(lines), Some(errors));
        Ok(Self { name, process, input, lines, errors, status: None, is_reaped: false })
    }

    /// What errors call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends one line.
    ///
    /// # Errors
    /// If it is no line, or the child has ended.
    pub fn send(&mut self, line: &str) -> anyhow::Result<()> {
        ensure!(!line.contains('\n'), "a message to {} must be one line", self.name);
        let input = self.input.as_mut().with_context(|| format!("the input of {} is closed", self.name))?;
        let sent = input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush());
        match sent {
            Ok(()) => Ok(()),
            Err(error) => Err(self.ended().context(error)),
        }
    }

    /// Waits for one line; `None` waits for as long as the child lives.
    ///
    /// # Errors
    /// If the child says nothing in time, or has ended.
    pub fn receive(&mut self, limit: Option<Duration>) -> anyhow::Result<String> {
        let received = match limit {
            Some(limit) => self.lines().recv_timeout(limit),
            None => self.lines().recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                bail!("{} said nothing for {} seconds", self.name, limit.unwrap_or_default().as_secs_f64())
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    /// Waits so long for one line; `None` if none comes.
    ///
    /// # Errors
    /// If the child has ended.
    pub fn poll(&mut self, limit: Duration) -> anyhow::Result<Option<String>> {
        match self.lines().recv_timeout(limit) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended()),
        }
    }

    /// Asks the child to end (SIGTERM), and does not wait.
    pub fn terminate(&mut self) {
        self.close_input();
        self.signal(libc::SIGTERM);
    }

    /// Waits so long until the child has ended; whether it has.
    pub fn ends_within(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            // The output ends when the process does: waiting for that has a time limit, waiting for a process has none.
            match self.lines().recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    }

    /// Closes the child's standard input: no more messages will come.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Asks the child to end (SIGTERM) and waits until it has.
    ///
    /// # Errors
    /// If it ended any other way.
    pub fn stop(mut self) -> anyhow::Result<()> {
        let stopped = self.end();
        let status = self.wait()?;
        ensure!(stopped, "{} did not stop in {} seconds and was killed", self.name, STOP_LIMIT.as_secs());
        ensure!(status.success() || status.signal() == Some(libc::SIGTERM), "{} ended with {status}", self.name);
        Ok(())
    }

    /// Closes the child's input and waits until it has ended by itself.
    ///
    /// # Errors
    /// If it ended without success.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.close_input();
        let status = self.wait()?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }

    /// Kills the child (SIGKILL) and waits until it is gone.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.signal(libc::SIGKILL);
        self.wait().map(drop)
    }

    /// Stops the child where it is (SIGSTOP), until it is [resumed](Child::resume).
    pub fn pause(&mut self) {
        self.signal(libc::SIGSTOP);
    }

    /// Lets a child go on that was [paused](Child::pause).
    pub fn resume(&mut self) {
        self.signal(libc::SIGCONT);
    }

    /// Kills the child (SIGKILL), waits until it is gone, and returns the lines that it has written and nobody has received.
    ///
    /// # Errors
    /// If it has ended by itself before, or the system refuses.
    pub fn kill_and_drain(mut self) -> anyhow::Result<Vec<String>> {
        self.signal(libc::SIGKILL);
        let status = self.wait()?;
        ensure!(
            status.signal() == Some(libc::SIGKILL),
            "{} ended early with {status}; what it said is above",
            self.name
        );
        // The thread that reads ends with the pipe.
        Ok(self.lines().iter().collect())
    }

    /// Whether the child still runs.
    pub fn is_running(&mut self) -> bool {
        let mut running = running();
        let is_running = self.status.is_none() && matches!(self.process.try_wait(), Ok(None));
        if !is_running {
            self.forget(&mut running);
        }
        is_running
    }

    /// It was waited for.
    fn forget(&mut self, running: &mut Vec<u32>) {
        // Afterwards its number may be another child's.
        if !std::mem::replace(&mut self.is_reaped, true) {
            running.retain(|&child| child != self.process.id());
        }
    }

    /// Asks the child to end, and kills it (and answers `false`) if it does not.
    fn end(&mut self) -> bool {
        self.terminate();
        if self.ends_within(STOP_LIMIT) {
            return true;
        }
        self.signal(libc::SIGKILL);
        false
    }

    fn lines(&mut self) -> &Receiver<String> {
        self.lines.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        // Once waited for, the number may be another child's.
        if !self.is_reaped {
            await_end(self.process.id());
        }
        let mut running = running();
        let status = self.process.wait().with_context(|| format!("cannot wait for {}", self.name))?;
        self.forget(&mut running);
        drop(running);
        self.status = Some(status);
        // All that it said is out before anything is said of its end.
        if let Some(errors) = self.errors.take() {
            let _ = errors.join();
        }
        Ok(status)
    }

    fn signal(&mut self, signal: libc::c_int) {
        // Once waited for, the number may belong to another process.
        if self.is_running() {
            // SAFETY: kill touches no memory. The child was not waited for, so its number is still its own.
            unsafe { libc::kill(self.process.id() as libc::pid_t, signal) };
        }
    }

    /// The error for a child whose pipe broke: it has ended, or closed its output and is about to.
    fn ended(&mut self) -> anyhow::Error {
        self.signal(libc::SIGKILL);
        match self.wait() {
            Ok(status) => anyhow!("{} ended early with {status}; what it said is above", self.name),
            Err(error) => error,
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.status.is_none() {
            // An error is on its way out. Still politely: a compute server that is killed leaves locked pages behind.
            self.end();
            let _ = self.wait();
        }
    }
}

/// Makes the kernel end the child when the thread that starts it ends.
fn die_with_parent(command: &mut Command) {
    let parent = process::id();
    let arrange = move || {
        // SAFETY: prctl with PR_SET_PDEATHSIG takes a signal number and touches no memory.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have died before the call above: then the signal never comes.
        // SAFETY: getppid has no preconditions.
        if unsafe { libc::getppid() } as u32 != parent {
            return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; `arrange` makes two system calls and
    // allocates nothing (an error from a number does not allocate).
    unsafe { command.pre_exec(arrange) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set for the process that has children.
    const TALKS: &str = "FARLINK_CHILDREN_TALK";
    const CHILDREN: usize = 4;
    /// Set for the process that ends its children.
    const ENDS: &str = "FARLINK_CHILDREN_END";
    const LINES: usize = 200;

    /// Each line comes out whole, with the name of who wrote it, however slowly it was written.
    #[test]
    fn errors_of_several_children_come_line_by_line() {
        if std::env::var_os(TALKS).is_some() {
            let talk = format!("for i in $(seq {LINES}); do printf 'line ' >&2; printf $i >&2; echo ' ends' >&2; done");
            let start = |number| {
                let mut command = Command::new("sh");
                command.args(["-c", &talk]);
                Child::start(&format!("child {number}"), command).unwrap()
            };
            let children: Vec<_> = (0..CHILDREN).map(start).collect();
            return children.into_iter().for_each(|child| child.finish().unwrap());
        }
        let test = "tests::errors_of_several_children_come_line_by_line";
        let program = std::env::current_exe().unwrap();
        let talk = Command::new(program).args(["--exact", test, "--nocapture"]).env(TALKS, "1").output().unwrap();
        let errors = String::from_utf8(talk.stderr).unwrap();
        let mut next = [1; CHILDREN];
        for line in errors.lines().filter(|line| !line.is_empty()) {
            let number = (0..CHILDREN).find(|number| line == format!("child {number}: line {} ends", next[*number]));
            next[number.unwrap_or_else(|| panic!("{line:?} is no line of a child"))] += 1;
        }
        assert_eq!(next, [LINES + 1; CHILDREN]);
    }

    /// In a process of its own: whoever has ended all children can do nothing but end.
    #[test]
    fn all_children_are_gone_before_the_program_ends() {
        if std::env::var_os(ENDS).is_some() {
            let start = |number| {
                let mut command = Command::new("sh");
                command.args(["-c", "trap '' TERM; echo ready; read line"]);
                let mut child = Child::start(&format!("child {number}"), command).unwrap();
                assert_eq!(child.receive(None).unwrap(), "ready");
                child
            };
            let mut children: Vec<_> = (0..CHILDREN).map(start).collect();
            children.pop().unwrap().finish().unwrap_err();
            children.pop().unwrap().kill().unwrap();
            end_all();
            for child in &children {
                let state = std::fs::read_to_string(format!("/proc/{}/stat", child.process.id())).unwrap();
                assert!(state.contains(") Z "), "{state}");
            }
            std::process::exit(0);
        }
        let test = "tests::all_children_are_gone_before_the_program_ends";
        let program = std::env::current_exe().unwrap();
        let ended = Command::new(program).args(["--exact", test, "--nocapture"]).env(ENDS, "1").output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
}
