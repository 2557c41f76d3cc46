//! The coarse-grained design of Ziegler et al. (SIGMOD 2019, section 3): the key space is divided among the memory servers, each
//! holds its part as a structure of its own, and every operation is sent there. The hybrid design divides the key space in the
//! same way, and so do several owners of what cannot be owned in part.

use std::future::Future;

use farlink_runtime::{
    access::{InPieces, Operation, Overlap, Plugin, Region, Shards, Structure},
    error::Error,
    operation::{Run, RunInPieces},
    page::avalanche,
    worker::Handle,
};

use crate::ship::Shipper;

/// A structure on one memory server, which carries out all its operations: one two-sided exchange each.
#[derive(Debug, Clone)]
pub struct Remote<P: Plugin>(Shipper<P>);

impl<P: Plugin> Remote<P> {
    /// Sends operations on this structure to the memory server of its root. All its pages are there, and stay, if it is
    /// [placed](farlink_runtime::structure::PlacementPolicy::OneServer) so; others are reached from there.
    pub fn new(worker: &Handle, structure: Structure) -> Self {
        Self(Shipper::new(worker, structure))
    }

    /// The same; reading asks for no right, as [there](Shipper::beside_owners).
    pub fn beside_owners(self) -> Self {
        Self(self.0.beside_owners())
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        self.0.structure()
    }

    /// Its way to the memory servers.
    pub fn shipper(&self) -> &Shipper<P> {
        &self.0
    }
}

impl<P: Plugin> Run for Remote<P> {
    type Plugin = P;

    fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        self.0.ship_whole(operation)
    }
}

impl<P: Plugin> RunInPieces for Remote<P> {
    fn execute_in_pieces<O: InPieces<Plugin = P>>(
        &self,
        operation: &O,
    ) -> impl Future<Output = Result<O::Output, Error>> {
        self.0.ship_in_pieces(operation)
    }
}

/// How a structure is divided among its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShardKey<R> {
    /// Each part has a region; together they are everything.
    Regions(Vec<R>),
    /// So many parts; each has the points ([`Region::point`]) of some hash values.
    Hash(usize),
}

impl<R: Region> ShardKey<R> {
    /// All of it is in one part.
    pub fn whole() -> Self {
        Self::Regions(vec![R::everything()])
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        match self {
            Self::Regions(regions) => regions.len(),
            Self::Hash(parts) => *parts,
        }
    }

    /// The numbers of those parts that have something of a region.
    pub fn about(&self, region: &R) -> Vec<usize> {
        match (self, region.point()) {
            (Self::Regions(regions), _) => {
                let has_some = |part: &usize| region.overlap(&regions[*part]) != Overlap::Outside;
                (0..regions.len()).filter(has_some).collect()
            }
            (Self::Hash(parts @ 1..), Some(point)) => vec![(avalanche(point) % *parts as u64) as usize],
            (Self::Hash(parts), _) => (0..*parts).collect(),
        }
    }
}

/// A structure in parts, each a structure of its own: of the coarse-grained design, of the [hybrid](crate::Hybrid) one, or each with an
/// owner of its own, where a structure cannot be owned in part ([`Router`](crate::Router)).
#[derive(Debug, Clone)]
pub struct Sharded<A: Run> {
    parts: Vec<A>,
    cut: ShardKey<<A::Plugin as Plugin>::Region>,
}

/// A structure of the coarse-grained design: each part on one memory server, which carries out its operations.
pub type ShardedRemote<P> = Sharded<Remote<P>>;

impl<A: Run> Sharded<A> {
    /// The structure that consists of these parts. All who use it must name the same parts, in the same order, and the same cut.
    ///
    /// # Errors
    /// [`Error::BadOption`] if there is no part, or the cut is not one of so many parts.
    pub fn new(parts: Vec<A>, cut: ShardKey<<A::Plugin as Plugin>::Region>) -> Result<Self, Error> {
        if cut.parts() == parts.len() && !parts.is_empty() {
            return Ok(Self { parts, cut });
        }
        let why = format!("{}, and it is cut into {}; there is one at least", parts.len(), cut.parts());
        Err(Error::BadOption { option: "parts", why })
    }

    /// The parts.
    pub fn parts(&self) -> &[A] {
        &self.parts
    }
}

impl<A: Run> Shards for Sharded<A> {
    type Plugin = A::Plugin;

    fn about(&self, region: &<A::Plugin as Plugin>::Region) -> Vec<usize> {
        self.cut.about(region)
    }

    fn region(&self, part: usize) -> Option<&<A::Plugin as Plugin>::Region> {
        match &self.cut {
            ShardKey::Regions(regions) => regions.get(part),
            ShardKey::Hash(_) => None,
        }
    }

    async fn on<O: Operation<Plugin = A::Plugin>>(&self, part: usize, operation: &O) -> Result<O::Output, Error> {
        self.parts[part].execute(operation).await
    }
}

impl<A: Run> Run for Sharded<A> {
    type Plugin = A::Plugin;

    async fn execute<O: Operation<Plugin = A::Plugin>>(&self, operation: &O) -> Result<O::Output, Error> {
        match &*self.parts {
            [only] => only.execute(operation).await,
            _ => operation.route(self).await,
        }
    }
}
