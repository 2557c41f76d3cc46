//! Why an attempt at an operation ends early.

use crate::{
    error::Error,
    ptr::{Link, RemotePtr},
};

/// Why an attempt begins anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Somebody else changed a page first.
    #[error("somebody else changed a page first")]
    Conflict,
    /// The cache has moved a page that the attempt holds; whether somebody has changed it is not known.
    #[error("a page that the operation holds has left its place in the cache")]
    Moved,
    /// A page is not what the link to it promised.
    #[error("page {page} is not what its link promised: {why}")]
    Stale {
        /// The page.
        page: RemotePtr,
        /// What does not fit.
        why: &'static str,
    },
    /// The attempt has made progress that only a new one can use: it has split the parent, say.
    #[error("the pages above were changed first")]
    Again,
    /// The attempt began below pages that it needs.
    #[error("the operation needs pages above the one where it began")]
    Above,
}

/// Why an attempt ends early. It may end so until its first visible effect; a structure modification that leaves the
/// structure whole, such as a split, is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Interrupt {
    /// Begin anew from the root.
    #[error("{0}")]
    Restart(Cause),
    /// Run the rest on the memory server of this page. Made by accesses alone.
    #[error("to be run on the memory server of page {0:?}")]
    Ship(Link),
    /// Give up.
    #[error("{0}")]
    Failed(Box<Error>),
}

impl From<Error> for Interrupt {
    fn from(error: Error) -> Self {
        Self::Failed(Box::new(error))
    }
}

impl From<Box<Error>> for Interrupt {
    fn from(error: Box<Error>) -> Self {
        Self::Failed(error)
    }
}

impl Interrupt {
    /// The page is not what the link to it promised.
    pub const fn stale(page: RemotePtr, why: &'static str) -> Self {
        Self::Restart(Cause::Stale { page, why })
    }

    /// Somebody else was first. Attempts are repeated for as long as that is so: what a damaged page could be the reason for is
    /// [`Interrupt::stale`], which is not.
    pub const fn conflict() -> Self {
        Self::Restart(Cause::Conflict)
    }

    /// The cache has moved a page.
    pub const fn moved() -> Self {
        Self::Restart(Cause::Moved)
    }

    /// Come again: the attempt has made room, and the next one will find it. An operation whose attempts end so a thousand times in a row
    /// fails: what takes many steps makes them in one attempt.
    pub const fn again() -> Self {
        Self::Restart(Cause::Again)
    }

    /// The operation began below pages that it needs.
    pub const fn above() -> Self {
        Self::Restart(Cause::Above)
    }

    /// Whether a change that ends so was made if its function was called, and is only [not recorded](Error::NotRecorded) yet.
    pub fn lacks_record(&self) -> bool {
        matches!(self, Self::Failed(error) if matches!(**error, Error::NotRecorded { .. }))
    }
}
