//! The concurrency primitives of this crate: the standard library's, or loom's under `cfg(loom)`.
//!
//! Everything that two threads share takes its atomics from here, so that the models in `loom-tests` explore the very
//! code that runs.

use std::io;

#[cfg(not(loom))]
pub use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread::JoinHandle,
};

#[cfg(loom)]
pub use loom::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
    thread::JoinHandle,
};

/// Starts a thread with this name.
///
/// # Errors
/// If the system refuses.
pub fn spawn<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    #[cfg(loom)]
    use loom::thread;
    #[cfg(not(loom))]
    use std::thread;
    thread::Builder::new().name(name.into()).spawn(work)
}

/// Passes a moment of a loop that waits for another thread.
#[inline]
pub fn spin() {
    #[cfg(not(loom))]
    std::hint::spin_loop();
    #[cfg(loom)]
    loom::hint::spin_loop();
}

/// Lets other threads run.
pub fn yield_thread() {
    #[cfg(not(loom))]
    std::thread::yield_now();
    #[cfg(loom)]
    loom::thread::yield_now();
}

/// Locks a mutex whose data stay consistent at every step, so that a panic of another holder does not matter.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
