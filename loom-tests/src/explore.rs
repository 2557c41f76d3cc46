//! Running models: a sound one must be explored, a broken one refused.

use std::{
    cell::Cell,
    panic::{self, AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Once,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// Preemptions per execution, unless `LOOM_MAX_PREEMPTIONS` says otherwise.
const PREEMPTIONS: usize = 2;

/// Steps per execution: a spinning one has more.
const BRANCHES: usize = 10_000;

fn builder() -> loom::model::Builder {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.max_branches = builder.max_branches.max(BRANCHES);
    builder
}

/// Explores every execution of `model` and returns how many there were.
///
/// # Panics
/// If one of them fails, or if there was only one: then nothing was explored, for example because the code under test
/// uses the standard library's atomics.
pub fn explore(name: &str, model: impl Fn() + Send + Sync + 'static) -> u64 {
    explore_by(builder(), name, model)
}

/// The same with one preemption less, for a model of many steps.
///
/// # Panics
/// As [`explore`].
pub fn explore_long(name: &str, model: impl Fn() + Send + Sync + 'static) -> u64 {
    let mut builder = builder();
    builder.preemption_bound = builder.preemption_bound.map(|bound| bound.saturating_sub(1).max(1));
    explore_by(builder, name, model)
}

fn explore_by(builder: loom::model::Builder, name: &str, model: impl Fn() + Send + Sync + 'static) -> u64 {
    let executions = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&executions);
    let start = Instant::now();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let executions = executions.load(Ordering::Relaxed);
    println!("loom: {name}: {executions} executions, {:.1?}", start.elapsed());
    assert!(executions > 1, "{name}: one execution only; was everything built with --cfg loom?");
    executions
}

std::thread_local! {
    /// Whether a panic of this thread is what a test waits for. (Loom runs all threads of a model on one real thread.)
    static EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Keeps expected panics, with their backtraces, out of the output.
fn hush_expected_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !EXPECTED.get() {
                report(info);
            }
        }));
    });
}

/// Asserts that loom finds an execution in which the broken `model` fails, with `why` in the message.
///
/// # Panics
/// If every execution passes, or one fails for another reason; or if no reason is named.
pub fn refuse(name: &str, why: &str, model: impl Fn() + Send + Sync + 'static) {
    assert!(!why.is_empty(), "{name}: any panic would do");
    let executions = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&executions);
    hush_expected_panics();
    EXPECTED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        builder().check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            model();
        });
    }));
    EXPECTED.set(false);
    let executions = executions.load(Ordering::Relaxed);
    let Err(panic) = outcome else { panic!("{name}: broken, and yet all {executions} executions passed") };
    let message = match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(message), _) => message.as_str(),
        (None, Some(message)) => message,
        (None, None) => "",
    };
    assert!(message.contains(why), "{name}: refused, but not because {why:?}: {message}");
    println!("loom: {name}: refused at execution {executions}");
}

/// Runs `work` on a thread of the model's. Whatever takes part in a race belongs on one: loom does not try every order of
/// what the model's first thread does itself against what the threads that it has spawned do.
pub fn run<T: 'static>(work: impl FnOnce() -> T + 'static) -> Running<T> {
    Running(loom::thread::spawn(work))
}

/// A thread of a model.
#[derive(Debug)]
pub struct Running<T>(loom::thread::JoinHandle<T>);

impl<T> Running<T> {
    /// Waits for the thread's end and returns its result.
    ///
    /// # Panics
    /// If it panicked.
    pub fn join(self) -> T {
        self.0.join().expect("loom ends an execution with the first panic")
    }
}

/// Something that must happen in some execution of a model, so that what the model asserts about it is not vacuous.
/// Counted outside loom.
#[derive(Debug, Clone, Default)]
pub struct Seen(Arc<AtomicU64>);

impl Seen {
    /// Not seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// It happened.
    pub fn mark(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// # Panics
    /// If it never happened.
    pub fn require(&self, what: &str) {
        assert_ne!(self.0.load(Ordering::Relaxed), 0, "no execution in which {what}");
    }
}
