//! What a change remembers, to put it back.

/// A word of a page of a change, as it was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Overwritten {
    pub(crate) page: u32,
    pub(crate) index: u32,
    pub(crate) word: u64,
}
