//! A value that changes seldom and is read all the time: by many threads, without a lock.
//!
//! Whoever changes it does so under a lock, and then counts the version up. Each reader keeps a copy, and the version that it is of:
//! to read is to load the version, which lies in every core's cache as long as nothing changes, and to compare. Only the first
//! read after a change takes the lock, to copy the value anew.
//!
//! A read that begins when a change is over shows it, or a later one; what a reader has seen it never sees older again.

use std::{cell::RefCell, fmt, rc::Rc, sync::Arc};

use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// The value, as all share it.
pub struct Versioned<T> {
    /// Of the value. Changed under its lock.
    version: AtomicU64,
    value: Mutex<T>,
}

impl<T: fmt::Debug> fmt::Debug for Versioned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Versioned").field("value", &*lock(&self.value)).finish_non_exhaustive()
    }
}

impl<T: Clone> Versioned<T> {
    /// It begins as this.
    pub fn new(value: T) -> Arc<Self> {
        Arc::new(Self { version: AtomicU64::new(0), value: Mutex::new(value) })
    }

    /// Changes the value, if `change` says that it has.
    pub fn update(&self, change: impl FnOnce(&mut T) -> bool) {
        let mut value = lock(&self.value);
        if change(&mut value) {
            self.version.fetch_add(1, Ordering::Release);
        }
    }

    /// A copy of the value as it is now, under the lock: for who reads seldom.
    pub fn copy(&self) -> T {
        lock(&self.value).clone()
    }

    /// A reader of it, for one thread.
    pub fn reader(self: &Arc<Self>) -> VersionedReader<T> {
        let copy = RefCell::new(self.copy_with_version());
        VersionedReader { of: Arc::clone(self), copy }
    }

    fn copy_with_version(&self) -> (u64, Rc<T>) {
        let value = lock(&self.value);
        (self.version.load(Ordering::Relaxed), Rc::new(value.clone()))
    }
}

/// One thread's way to read a [`Versioned`] value.
pub struct VersionedReader<T> {
    of: Arc<Versioned<T>>,
    /// The value of this version.
    copy: RefCell<(u64, Rc<T>)>,
}

impl<T: fmt::Debug> fmt::Debug for VersionedReader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("VersionedReader").field(&self.copy.borrow().1).finish()
    }
}

impl<T: Clone> VersionedReader<T> {
    /// The value. One load, unless it has changed since this reader last read it.
    #[inline]
    pub fn get(&self) -> Rc<T> {
        let copy = self.copy.borrow();
        if self.of.version.load(Ordering::Acquire) == copy.0 {
            return Rc::clone(&copy.1);
        }
        drop(copy);
        self.renew()
    }

    /// What a function makes of the value. Costs less than [`VersionedReader::get`]; the function does not read it again.
    #[inline]
    pub fn with<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        let copy = self.copy.borrow();
        if self.of.version.load(Ordering::Acquire) == copy.0 {
            return f(&copy.1);
        }
        drop(copy);
        f(&self.renew())
    }

    #[cold]
    fn renew(&self) -> Rc<T> {
        let copy = self.of.copy_with_version();
        let value = Rc::clone(&copy.1);
        self.copy.replace(copy);
        value
    }
}
