//! Each operation as a whole: shipped, or done here (Catfish, ICDCS 2019, section IV).
//!
//! An [`Adaptive`] client of a structure that everybody changes asks a [policy](crate::policy) before each operation: is it
//! sent to the memory server of the root, which carries all of it out, or done here, over an access of its own? Catfish ships
//! until the server reports to be busy ([`BackOff`](crate::policy::BackOff)); [`CostAware`](crate::policy::CostAware) compares
//! what both ways have taken. The structure is the same on both ways: memory servers and compute servers change it at the same
//! time, under the same locks. Catfish ships every write; here a policy decides about those, too.

use std::{future::Future, rc::Rc};

use farlink_runtime::{
    access::{Operation, Structure},
    error::Error,
    operation::{Code, Run},
    worker::Handle,
};

use crate::{
    policies::{Chooser, OffloadCounts, Policies},
    ship::{Answer, Decline, From, Shipper},
};

/// Ships each operation to the memory server of the root, or does it over another access, as a policy says. Belongs to one
/// worker; cheap to clone.
///
/// The other access is one for structures that others change: [`OneSided`](farlink_runtime::one_sided::OneSided),
/// [`CachedInner`](crate::CachedInner), or of a latch-free one [`CachedMapping`](crate::CachedMapping). A memory server is one of
/// those others: what a cache holds is validated, or compared with its word, as ever.
///
/// ```
/// # use std::sync::Arc;
/// use farlink_offload::{Adaptive, Policies, policy::BackOff, ship::{Registry, ShipOptions, ShipServer}};
/// # use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::{Fabric as _, mem::MemOptions}, ptr::ServerId, server};
/// use farlink_runtime::one_sided::{OneSided, Proof};
/// use farlink_structures::btree::{BTree, BTreeOptions, Tree};
///
/// # let fabric = Arc::new(server::in_process(1, 1 << 20, MemOptions::default())?);
/// # let memory = fabric.memory(ServerId::new(0).unwrap())?;
/// # let listener = fabric.listen(memory.server(), &Default::default())?;
/// # let registry = Registry::new().with::<Tree>();
/// # let join = || ComputeServer::join(Arc::clone(&fabric) as _, ComputeOptions::default()).map(Arc::new);
/// # let (clients, server) = (join()?, join()?);
/// # let served = ShipServer::start(listener, memory, registry, &ShipOptions::default(), move || Ok(Arc::clone(&server)))?;
/// # let worker = clients.worker()?;
/// worker.block_on(async {
///     let made = BTree::create(&worker, "ages", BTreeOptions::default()).await?;
///     let structure = made.structure().clone();
///     let here = OneSided::new(&worker, structure.clone(), Proof::Checksum);
///     let access = Adaptive::new(here, &worker, structure, Policies::new(BackOff::default()));
///     let tree = BTree::over(access.clone());
///     tree.insert(7, 70).await?;
///     assert_eq!(tree.get(7).await?, Some(70));
///     // Nobody has said that the server is busy.
///     assert_eq!(access.counts().shipped, 2);
///     Ok(())
/// })
/// # .map_err(|error: farlink_runtime::error::Error| error)?;
/// # drop(served);
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
#[derive(Debug)]
pub struct Adaptive<A: Run> {
    shared: Rc<Shared<A>>,
    /// Whether what is shipped asks for no right to read.
    beside_owners: bool,
}

#[derive(Debug)]
struct Shared<A: Run> {
    here: A,
    chooser: Chooser<A::Plugin>,
}

impl<A: Run> Clone for Adaptive<A> {
    fn clone(&self) -> Self {
        Self { shared: Rc::clone(&self.shared), ..*self }
    }
}

impl<A: Run> Adaptive<A> {
    /// A client whose operations on `structure` are done over `here` if they are not shipped.
    pub fn new(here: A, worker: &Handle, structure: Structure, policies: Policies) -> Self {
        let chooser = Chooser::new(worker, structure, policies);
        Self { shared: Rc::new(Shared { here, chooser }), beside_owners: false }
    }

    /// The same; reading asks for no right where it is shipped, as [there](Shipper::beside_owners). `here` is told by itself.
    pub fn beside_owners(self) -> Self {
        Self { beside_owners: true, ..self }
    }

    /// The access for what is not shipped.
    pub fn here(&self) -> &A {
        &self.shared.here
    }

    /// Its way to the memory servers.
    pub fn shipper(&self) -> &Shipper<A::Plugin> {
        &self.shared.chooser.shipper
    }

    /// The structure.
    pub fn structure(&self) -> &Structure {
        self.shipper().structure()
    }

    /// What it has counted.
    pub fn counts(&self) -> OffloadCounts {
        self.shared.chooser.counts()
    }

    /// Ships an operation; nothing if it is to be done here after all, without any effect so far.
    async fn shipped<O: Operation<Plugin = A::Plugin>>(&self, operation: &O) -> Result<Option<O::Output>, Error> {
        let chooser = &self.shared.chooser;
        let (server, clock) = (self.structure().root.server(), self.shipper().worker().clock());
        let mut start_ns = clock.now_ns();
        // To open a connection is no part of what a message takes.
        if let Err(error) = self.shipper().connect(server).await {
            return chooser.undone::<O>(server, 0, start_ns, error).map(|()| None);
        }
        start_ns = clock.now_ns();
        match self.shipper().ship_as(operation, From::Root, self.beside_owners).await {
            Ok(Answer::Done(shipped)) => {
                chooser.done::<O>(server, start_ns);
                Ok(Some(shipped.output))
            }
            Ok(Answer::Declined(why)) => {
                chooser.came_back::<O>(server, 0, start_ns);
                if why == Decline::FencedOff {
                    chooser.ships_no_more_to(server);
                }
                Ok(None)
            }
            Ok(Answer::GoOn(_)) => Ok(None),
            Err(error) => chooser.undone::<O>(server, 0, start_ns, error).map(|()| None),
        }
    }

    async fn run<O: Operation<Plugin = A::Plugin>>(&self, operation: &O) -> Result<O::Output, Error> {
        let (chooser, server) = (&self.shared.chooser, self.structure().root.server());
        if chooser.may_serve(server)
            && chooser.choose(Code::of::<O>(), server, 0, &|| false)
            && let Some(output) = self.shipped(operation).await?
        {
            return Ok(output);
        }
        let clock = self.shipper().worker().clock();
        let start_ns = clock.now_ns();
        let output = self.shared.here.execute(operation).await?;
        let took_ns = clock.now_ns() - start_ns;
        chooser.policies.borrow_mut().of(Code::of::<O>()).fetched(server, took_ns);
        Ok(output)
    }
}

impl<A: Run> Run for Adaptive<A> {
    type Plugin = A::Plugin;

    fn execute<O: Operation<Plugin = A::Plugin>>(
        &self,
        operation: &O,
    ) -> impl Future<Output = Result<O::Output, Error>> {
        self.run(operation)
    }
}
