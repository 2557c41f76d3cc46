//! Registered local memory, as pooled buffers.
//!
//! Every transfer needs local memory that the fabric knows. A worker registers slabs and cuts them into buffers, in powers
//! of two from the smallest page to [`BUFFER_WORDS_MAX`]; a buffer is owned by one holder at a time (a task, or the endpoint while it is posted) and goes
//! back to the worker's free list when dropped. Nothing here is shared between threads.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    cell::RefCell,
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    rc::Rc,
};

use crate::error::Error;

/// A key that stands for registered local memory in requests; 0 where a fabric needs none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LocalKey(pub u32);

const SLAB_BYTES: usize = 64 << 10;
/// The most that one buffer holds: a page is less, a chunk of a large message is that.
pub const BUFFER_WORDS_MAX: usize = SLAB_BYTES / 8;
const SMALLEST_WORDS: usize = 8;
const CLASSES: usize = (BUFFER_WORDS_MAX / SMALLEST_WORDS).trailing_zeros() as usize + 1;
const SLAB_ALIGN: usize = 4096;

#[derive(Debug)]
struct Slab {
    base: NonNull<u64>,
}

impl Slab {
    const LAYOUT: Layout = match Layout::from_size_align(SLAB_BYTES, SLAB_ALIGN) {
        Ok(layout) => layout,
        Err(_) => panic!("constant layout"),
    };

    fn new() -> Self {
        // SAFETY: the layout has a non-zero size.
        let base = unsafe { alloc_zeroed(Self::LAYOUT) };
        let Some(base) = NonNull::new(base.cast::<u64>()) else { handle_alloc_error(Self::LAYOUT) };
        Self { base }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout. The pool owns its slabs and every buffer holds the pool, so no
        // buffer is left.
        unsafe { dealloc(self.base.as_ptr().cast(), Self::LAYOUT) };
    }
}

/// The size of a slot: 8 words times a power of two.
#[derive(Debug, Clone, Copy)]
struct Class(u8);

impl Class {
    /// The smallest that holds so many words.
    ///
    /// # Panics
    /// If there is none.
    fn of(words: usize) -> Self {
        assert!((1..=BUFFER_WORDS_MAX).contains(&words), "a buffer holds 1 to {BUFFER_WORDS_MAX} words, not {words}");
        Self((words.next_power_of_two().max(SMALLEST_WORDS) / SMALLEST_WORDS).trailing_zeros() as u8)
    }

    fn index(self) -> usize {
        usize::from(self.0)
    }

    fn words(self) -> usize {
        SMALLEST_WORDS << self.0
    }
}

/// A slot of a slab, of a size class. Boxed once, so that a buffer is one pointer: buffers are moved often.
struct Slot {
    base: NonNull<u64>,
    key: LocalKey,
    class: Class,
    /// How many words the holder asked for.
    len: usize,
    /// Where it goes when it is dropped; set while somebody holds it.
    pool: Option<Buffers>,
}

#[derive(Default)]
struct Pool {
    #[expect(clippy::vec_box, reason = "a slot moves between the list and its holder without being copied")]
    free: [Vec<Box<Slot>>; CLASSES],
    slabs: Vec<Slab>,
}

/// The buffers of one worker.
#[derive(Clone, Default)]
pub struct Buffers(Rc<RefCell<Pool>>);

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers").field("slabs", &self.0.borrow().slabs.len()).finish_non_exhaustive()
    }
}

impl Buffers {
    /// A buffer of `words` (1 to [`BUFFER_WORDS_MAX`]) with arbitrary contents. Registers a new slab with `register` when
    /// the free list of its size class is empty: memory that lives as long as these buffers, or any of them, do. Whoever has
    /// them drops the endpoint first, with which it is registered.
    ///
    /// # Errors
    /// If the fabric refuses to register more memory.
    pub fn take(
        &self,
        words: usize,
        register: impl FnOnce(NonNull<u64>, usize) -> Result<LocalKey, Error>,
    ) -> Result<Buffer, Error> {
        let class = Class::of(words);
        let free = self.0.borrow_mut().free[class.index()].pop();
        let mut slot = match free {
            Some(slot) => slot,
            None => self.grow(class, register)?,
        };
        slot.len = words;
        slot.pool = Some(self.clone());
        Ok(Buffer(Some(slot)))
    }

    #[cold]
    fn grow(
        &self,
        class: Class,
        register: impl FnOnce(NonNull<u64>, usize) -> Result<LocalKey, Error>,
    ) -> Result<Box<Slot>, Error> {
        let slab = Slab::new();
        let key = register(slab.base, SLAB_BYTES / 8)?;
        let slot = |index: usize| {
            // SAFETY: index * class.words() is below the slab's words, so the pointer stays inside the allocation.
            let base = unsafe { slab.base.add(index * class.words()) };
            Box::new(Slot { base, key, class, len: 0, pool: None })
        };
        let mut pool = self.0.borrow_mut();
        pool.free[class.index()].extend((1..BUFFER_WORDS_MAX / class.words()).rev().map(slot));
        let first = slot(0);
        pool.slabs.push(slab);
        Ok(first)
    }
}

/// Registered local memory with one owner; derefs to its words.
pub struct Buffer(Option<Box<Slot>>);

const _: () = assert!(size_of::<Buffer>() == 8);

impl Buffer {
    fn slot(&self) -> &Slot {
        self.0.as_deref().expect("only dropping a buffer takes its slot")
    }

    /// Keeps the first `words` only; as it is if it has no more.
    pub fn truncate(&mut self, words: usize) {
        if let Some(slot) = &mut self.0 {
            slot.len = slot.len.min(words);
        }
    }

    /// The fabric's name for the memory.
    pub fn key(&self) -> LocalKey {
        self.slot().key
    }
}

impl Deref for Buffer {
    type Target = [u64];

    #[inline]
    fn deref(&self) -> &[u64] {
        let slot = self.slot();
        // SAFETY: the slot has room for `len` words, which `take` chose its class for; they are initialised (slabs are
        // zeroed), live as long as the pool that the slot holds, and nothing else touches them: a slot is in a free
        // list or in one buffer.
        unsafe { std::slice::from_raw_parts(slot.base.as_ptr(), slot.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u64] {
        let slot = self.slot();
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(slot.base.as_ptr(), slot.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(mut slot) = self.0.take()
            && let Some(pool) = slot.pool.take()
        {
            pool.0.borrow_mut().free[slot.class.index()].push(slot);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} words)", self.len())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_disjoint_and_recycled() {
        let buffers = Buffers::default();
        let mut registered = 0;
        let mut take = |words| {
            buffers.take(words, |_, _| {
                registered += 1;
                Ok(LocalKey(7))
            })
        };
        let mut held: Vec<Buffer> = (0..64).map(|_| take(128).unwrap()).collect();
        for (tag, buffer) in held.iter_mut().enumerate() {
            buffer.fill(tag as u64);
        }
        assert!(held.iter().enumerate().all(|(tag, buffer)| buffer.iter().all(|&word| word == tag as u64)));
        held.clear();
        let again: Vec<Buffer> = (0..64).map(|_| take(100).unwrap()).collect();
        assert_eq!((again[0].len(), again[0].key()), (100, LocalKey(7)));
        assert_eq!(registered, 1);
    }
}
