//! The pages of the tests' tree.
//!
//! ```text
//! words: [ count << 8 | level | low | high | id | key, value or link | ... ]
//! ```
//!
//! A page covers the keys from `low` on and below `high`.

use farlink_cache::{Layout, is_swizzled};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub const HEAD: usize = 0;
pub const LOW: usize = 1;
pub const HIGH: usize = 2;
pub const ID: usize = 3;
const FIRST: usize = 4;

pub const fn key_at(entry: usize) -> usize {
    FIRST + 2 * entry
}

pub const fn value_at(entry: usize) -> usize {
    FIRST + 2 * entry + 1
}

/// Entries that fit in so many words.
pub const fn capacity(words: usize) -> usize {
    (words - FIRST) / 2
}

pub const fn head(level: u8, count: usize) -> u64 {
    (count as u64) << 8 | level as u64
}

/// A page that may be changing: counts are clamped, and all that is said of it is to be validated.
#[derive(Clone, Copy)]
pub struct View<'a>(pub &'a [AtomicU64]);

impl View<'_> {
    pub fn word(&self, index: usize) -> u64 {
        self.0[index].load(Relaxed)
    }

    pub fn level(&self) -> u8 {
        self.word(HEAD) as u8
    }

    pub fn count(&self) -> usize {
        ((self.word(HEAD) >> 8) as usize).min(capacity(self.0.len()))
    }

    pub fn covers(&self, key: u64) -> bool {
        self.word(LOW) <= key && key < self.word(HIGH)
    }

    pub fn key(&self, entry: usize) -> u64 {
        self.word(key_at(entry))
    }

    pub fn value(&self, entry: usize) -> u64 {
        self.word(value_at(entry))
    }

    /// The entry of a key, or where it would be.
    pub fn find(&self, key: u64) -> Result<usize, usize> {
        let count = self.count();
        let at = (0..count).find(|&entry| self.key(entry) >= key).unwrap_or(count);
        if at < count && self.key(at) == key { Ok(at) } else { Err(at) }
    }

    /// The child that covers a key.
    pub fn child(&self, key: u64) -> usize {
        let at = (0..self.count()).find(|&entry| self.key(entry) > key).unwrap_or(self.count());
        at.saturating_sub(1)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct TreeLayout;

impl Layout for TreeLayout {
    fn level(&self, page: &[AtomicU64]) -> u8 {
        View(page).level()
    }

    fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize> {
        let view = View(page);
        let count = if view.level() == 0 { 0 } else { view.count() };
        (0..count).map(value_at)
    }
}

/// A page of the store.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a>(pub &'a [u64]);

impl Image<'_> {
    pub fn level(&self) -> u8 {
        self.0[HEAD] as u8
    }

    pub fn entries(&self) -> impl Iterator<Item = (u64, u64)> {
        (0..(self.0[HEAD] >> 8) as usize).map(|entry| (self.0[key_at(entry)], self.0[value_at(entry)]))
    }
}

pub fn image_links(image: &[u64]) -> Vec<u64> {
    let image = Image(image);
    if image.level() == 0 { Vec::new() } else { image.entries().map(|(_, link)| link).collect() }
}

pub fn image(id: u64, level: u8, low: u64, high: u64, entries: &[(u64, u64)], words: usize) -> Vec<u64> {
    assert!(entries.len() <= capacity(words) && !entries.iter().any(|entry| level != 0 && is_swizzled(entry.1)));
    let mut image = vec![0; words];
    (image[HEAD], image[LOW], image[HIGH], image[ID]) = (head(level, entries.len()), low, high, id);
    for (at, &(key, value)) in entries.iter().enumerate() {
        (image[key_at(at)], image[value_at(at)]) = (key, value);
    }
    image
}
