//! The coarse-grained design of Ziegler et al. (SIGMOD 2019, section 3): the key space is divided among the memory servers, each
//! holds its part as a structure of its own, and every operation is sent there. The hybrid design divides the key space in the
//! same way.

use std::future::Future;

use farlink_runtime::{
    error::Error,
    operation::{Cut, Parts, Routed, Run},
    structure::Structure,
    worker::Handle,
};

use crate::ship::Shipper;

/// A structure on one memory server, which carries out all its operations: one two-sided exchange each.
#[derive(Debug, Clone)]
pub struct Remote(Shipper);

impl Remote {
    /// Sends operations on this structure to the memory server of its root, where all its pages are, and stay.
    pub fn new(worker: &Handle, structure: Structure) -> Self {
        Self(Shipper::new(worker, structure))
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        self.0.structure()
    }

    /// Its way to the memory servers.
    pub fn shipper(&self) -> &Shipper {
        &self.0
    }
}

impl Run for Remote {
    fn perform<O: Routed>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        self.0.ship_whole(operation)
    }
}

/// A structure in parts, each a structure of its own: of the coarse-grained design, or of the [hybrid](crate::Hybrid) one.
#[derive(Debug, Clone)]
pub struct Parted<R> {
    parts: Vec<R>,
    cut: Cut,
}

/// A structure of the coarse-grained design: each part on one memory server, which carries out its operations.
pub type PartedRemote = Parted<Remote>;

impl<R: Run> Parted<R> {
    /// The structure that consists of these parts. All who use it must name the same parts, in the same order, and the same cut.
    ///
    /// # Errors
    /// [`Error::BadOption`] if there is no part, or the cut is not one of so many parts.
    pub fn new(parts: Vec<R>, cut: Cut) -> Result<Self, Error> {
        let fits = match &cut {
            Cut::Range(lows) => lows.len() + 1 == parts.len() && lows.is_sorted_by(|a, b| a < b),
            Cut::Hash => !parts.is_empty(),
        };
        if fits {
            return Ok(Self { parts, cut });
        }
        let why = format!("{} parts; there is one more than least keys, which ascend", parts.len());
        Err(Error::BadOption { option: "parts", why })
    }

    /// The parts.
    pub fn parts(&self) -> &[R] {
        &self.parts
    }
}

impl<R: Run> Parts for Parted<R> {
    fn cut(&self) -> &Cut {
        &self.cut
    }

    fn count(&self) -> usize {
        self.parts.len()
    }

    async fn on<O: Routed>(&self, part: usize, operation: &O) -> Result<O::Output, Error> {
        self.parts[part].perform(operation).await
    }

    async fn on_all<O: Routed>(&self, operation: &O) -> Result<Vec<O::Output>, Error> {
        let answers = futures_util::future::join_all(self.parts.iter().map(|part| part.perform(operation))).await;
        answers.into_iter().collect()
    }
}

impl<R: Run> Run for Parted<R> {
    fn perform<O: Routed>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        operation.over(self)
    }
}
