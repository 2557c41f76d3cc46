//! The concurrency primitives of this crate: the standard library's, or loom's under `cfg(loom)`.
//!
//! Everything that two threads share takes its atomics from here, so that the models in `loom-tests` explore the very
//! code that runs.

#[cfg(not(loom))]
pub use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

#[cfg(loom)]
pub use loom::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};

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
