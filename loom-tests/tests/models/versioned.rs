//! A value that many threads read without a lock, and few change.
//!
//! Asserted: whoever knows that a change is over reads it, or a later one; a reader never goes back; what it reads is whole. Readers
//! copy the value under its lock after each change, and otherwise only load the version.
//!
//! Broken variant: a version counted up before the value is changed leaves a reader with the old value for ever.

use std::{cell::RefCell, sync::Arc};

use farlink_loom_tests::{explore, refuse, run};
use farlink_runtime::{
    sync::{AtomicU64, Mutex, Ordering, lock},
    versioned::{Versioned, VersionedReader},
};

/// What the model needs of it. The value is a pair of the same number twice.
trait Value: Send + Sync + 'static {
    type Reader;
    fn new() -> Arc<Self>;
    fn count_up(&self);
    fn reader(self: &Arc<Self>) -> Self::Reader;
    fn get(reader: &Self::Reader) -> (u64, u64);
}

struct Real(Arc<Versioned<(u64, u64)>>);

impl Value for Real {
    type Reader = VersionedReader<(u64, u64)>;

    fn new() -> Arc<Self> {
        Arc::new(Self(Versioned::new((0, 0))))
    }

    fn count_up(&self) {
        self.0.update(|value| {
            *value = (value.0 + 1, value.1 + 1);
            true
        });
    }

    fn reader(self: &Arc<Self>) -> Self::Reader {
        self.0.reader()
    }

    fn get(reader: &Self::Reader) -> (u64, u64) {
        *reader.get()
    }
}

/// The version is counted up first, and not under the lock.
struct TooEarly(AtomicU64, Mutex<(u64, u64)>);

impl Value for TooEarly {
    type Reader = (Arc<Self>, RefCell<(u64, (u64, u64))>);

    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(0), Mutex::new((0, 0))))
    }

    fn count_up(&self) {
        self.0.fetch_add(1, Ordering::Release);
        let mut value = lock(&self.1);
        *value = (value.0 + 1, value.1 + 1);
    }

    fn reader(self: &Arc<Self>) -> Self::Reader {
        (Arc::clone(self), RefCell::new((0, (0, 0))))
    }

    fn get((of, copy): &Self::Reader) -> (u64, u64) {
        let version = of.0.load(Ordering::Acquire);
        if version != copy.borrow().0 {
            *copy.borrow_mut() = (version, *lock(&of.1));
        }
        copy.borrow().1
    }
}

/// One changes it and says so, one reads again and again.
fn changed_and_read<V: Value>() {
    let value = V::new();
    let told = Arc::new(AtomicU64::new(0));
    let (changed, tells) = (Arc::clone(&value), Arc::clone(&told));
    let changer = run(move || {
        for change in 1..=2 {
            changed.count_up();
            tells.store(change, Ordering::Release);
        }
    });
    let reading = run(move || {
        let reader = value.reader();
        let mut last = 0;
        for _ in 0..2 {
            let known = told.load(Ordering::Acquire);
            let (a, b) = V::get(&reader);
            assert_eq!(a, b, "it is not whole");
            assert!(a >= last, "it has gone back from {last} to {a}");
            assert!(a >= known, "change {known} is over, and {a} is read");
            last = a;
        }
    });
    changer.join();
    reading.join();
}

#[test]
fn a_change_that_is_over_is_read() {
    explore("a_change_that_is_over_is_read", changed_and_read::<Real>);
}

#[test]
fn a_version_that_comes_before_its_value_is_caught() {
    refuse("a_version_that_comes_before_its_value_is_caught", "is over, and", changed_and_read::<TooEarly>);
}
