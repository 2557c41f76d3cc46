//! A compute-side page cache.

mod arena;
mod cache;
mod change;
mod cool;
mod cooling;
mod counters;
mod error;
mod fetch;
mod frame;
mod frame_lock;
mod handle;
mod heat;
mod id;
#[cfg(loom)]
#[doc(hidden)]
pub mod model;
mod options;
mod sync;
mod table;
mod traits;
mod write_back;

pub use crate::{
    cache::{Memory, PageCache},
    change::{Change, NewPage},
    cooling::{Cooled, CoolingMap},
    counters::{Counters, LEVELS, LevelCounters},
    error::{CacheError, Conflict, OptionsError, TooManyHandles},
    frame_lock::{FrameLock, Version, WAITERS_MAX, Waiters},
    handle::{Anchor, CacheHandle, Page},
    id::{PageId, SizeClass, is_swizzled},
    options::{Admission, CacheOptions},
    traits::{Layout, Store},
};
