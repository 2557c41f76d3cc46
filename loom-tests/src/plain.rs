//! Memory that is no atomic: what a protocol protects.

use loom::cell::UnsafeCell;

/// A word of plain memory. Loom refuses an execution in which a read and a write, or two writes, are not ordered by what
/// happened between them.
#[derive(Debug)]
pub struct Plain(UnsafeCell<u64>);

// SAFETY: loom checks every access: one that races panics instead of touching the memory.
unsafe impl Sync for Plain {}

impl Plain {
    /// A word with this value.
    pub fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// The value.
    ///
    /// # Panics
    /// If a write does not happen before or after this.
    pub fn read(&self) -> u64 {
        // SAFETY: `with` has checked that no write races with this; the pointer is the cell's own.
        self.0.with(|word| unsafe { *word })
    }

    /// Sets the value.
    ///
    /// # Panics
    /// If a read or another write does not happen before or after this.
    pub fn write(&self, value: u64) {
        // SAFETY: `with_mut` has checked that no other access races with this; the pointer is the cell's own.
        self.0.with_mut(|word| unsafe { *word = value });
    }
}
