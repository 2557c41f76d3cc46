//! A cluster with one structure, and what has to be true of it in the end.

use std::{fmt::Write, marker::PhantomData, sync::Arc, time::Duration};

use farlink_offload::ship::Registry;
use farlink_runtime::{
    access::{Plugin, Structure},
    catalog,
    compute::ComputeServer,
    error::Error,
    fabric::Fabric,
    leaks,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    structure::StructurePlacement,
};

use super::{
    AccessVariant, Event, Model, Verdict,
    search::{self, EventOf},
    variants::Client,
};
use crate::{
    backend::{Backend, FabricProfile},
    bounded::Watchdog,
    cluster,
    fleet::Fleet,
};

pub(super) const SERVERS: usize = 2;
pub(super) const SERVER_BYTES: u64 = 16 << 20;
const NAME: &str = "subject";
/// Far more than a run takes.
const LIMIT: Duration = Duration::from_secs(20);

/// Kinds of fabric: on real RDMA there is one.
pub(super) fn profiles() -> Vec<FabricProfile> {
    match Backend::chosen() {
        Backend::Verbs => vec![FabricProfile::Fast],
        _ => vec![FabricProfile::Fast, FabricProfile::Nasty, FabricProfile::Weak],
    }
}

/// What memory servers know.
pub(super) fn registry<M: Model>() -> Registry {
    Registry::new().with::<M::Plugin>()
}

/// Makes the structure.
pub(super) fn create<M: Model>(fabric: &Arc<dyn Fabric>, variant: AccessVariant) -> Result<Structure, Error> {
    let placement = StructurePlacement { policy: variant.policy(), root: ServerId::new(1) };
    cluster::with_worker(fabric, |worker| {
        worker.block_on(async {
            M::create(worker, NAME, placement).await?;
            catalog::open::<M::Plugin>(worker, NAME).await
        })
    })
}

/// Checks the structure and the cluster's memory, once all have left; `may_lose_pages`: behind what frees pages to which nothing leads.
pub(super) fn check<M: Model>(fabric: &Arc<dyn Fabric>, context: &str, may_lose_pages: bool) {
    if may_lose_pages {
        let freed = cluster::with_worker(fabric, |worker| {
            worker.block_on(async {
                let structure = catalog::open::<M::Plugin>(worker, NAME).await?;
                leaks::free(&OneSided::<M::Plugin>::new(worker, structure, Proof::Checksum)).await
            })
        });
        let freed = freed.unwrap_or_else(|error| panic!("{context}: lost pages were not freed: {error}"));
        assert!(freed.is_some(), "{context}: somebody is still there");
    }
    let report = cluster::with_worker(fabric, |worker| {
        worker.block_on(async {
            let structure = catalog::open::<M::Plugin>(worker, NAME).await?;
            M::Plugin::check(&OneSided::<M::Plugin>::new(worker, structure, Proof::Checksum)).await
        })
    });
    let report = report.unwrap_or_else(|error| panic!("{context}: the check failed: {error}"));
    assert!(report.is_clean(), "{context}: {report:?}");
    assert_eq!(report.audit.held, 0, "{context}: pages are held after all have left");
    let unaccounted = cluster::unaccounted_bytes(fabric, &report).unwrap();
    assert_eq!(unaccounted, 0, "{context}: bytes of remote memory are nobody's: {report:?}");
}

/// Memory servers of this process, with the structure.
pub(super) struct Scene<M: Model> {
    pub(super) context: String,
    pub(super) fabric: Arc<dyn Fabric>,
    fleet: Fleet,
    structure: Structure,
    variant: AccessVariant,
    seed: u64,
    _watchdog: Watchdog,
    of: PhantomData<M>,
}

impl<M: Model> Scene<M> {
    pub(super) fn new(variant: AccessVariant, profile: FabricProfile, seed: u64) -> Self {
        Self::of(variant, profile, seed, usize::from(variant.ships()))
    }

    /// One whose memory servers, if they carry out operations, do so as a member whose maintenance is up to the test.
    pub(super) fn with_member(
        variant: AccessVariant,
        profile: FabricProfile,
        seed: u64,
    ) -> (Self, Option<Arc<ComputeServer>>) {
        let mut scene = Self::of(variant, profile, seed, 0);
        let join = |scene: &mut Self| {
            let member = Arc::new(cluster::join_manual(&scene.fabric, !seed)?);
            scene.fleet.serve_as(&member, &registry::<M>())?;
            Ok::<_, Error>(member)
        };
        let member = variant.ships().then(|| join(&mut scene)).transpose();
        let member = member.unwrap_or_else(|error| panic!("{}: {error}", scene.context));
        (scene, member)
    }

    fn of(variant: AccessVariant, profile: FabricProfile, seed: u64, threads: usize) -> Self {
        let context = format!("{} over {variant:?} and {profile:?}, seed {seed}", M::Plugin::NAME);
        let fleet = Fleet::start_of(SERVERS, SERVER_BYTES, threads, profile, &registry::<M>());
        let fleet = fleet.unwrap_or_else(|error| panic!("{context}: {error}"));
        let structure = create::<M>(&fleet.cluster.sound_fabric(), variant);
        let structure = structure.unwrap_or_else(|error| panic!("{context}: {error}"));
        let watchdog = Watchdog::start(context.clone(), LIMIT);
        Self { context, fabric: fleet.fabric(), fleet, structure, variant, seed, _watchdog: watchdog, of: PhantomData }
    }

    /// A compute server's way to the structure.
    pub(super) fn client(&self, is_alone: bool) -> Client<M> {
        let memory = self.fleet.cluster.memory(ServerId::new(0).expect("0 is a server id")).ok();
        Client::new(self.structure.clone(), self.variant, memory, self.seed, is_alone)
            .unwrap_or_else(|error| panic!("{}: {error}", self.context))
    }

    /// A way to the cluster on which nothing fails.
    pub(super) fn sound_fabric(&self) -> Arc<dyn Fabric> {
        self.fleet.cluster.sound_fabric()
    }

    pub(super) fn structure(&self) -> &Structure {
        &self.structure
    }

    /// Once all have left.
    pub(super) fn close(self, may_lose_pages: bool) {
        let sound = self.sound_fabric();
        // They leave the cluster, and give back what they hold.
        let Fleet { servers, cluster } = self.fleet;
        drop(servers);
        check::<M>(&sound, &self.context, may_lose_pages);
        drop(cluster);
    }
}

/// Judges a history; false if it takes too long to find out.
pub(super) fn judge<M: Model>(history: &[EventOf<M>], context: &str) -> bool {
    M::judge(history).unwrap_or_else(|why| panic!("{context}: {why}"));
    match search::linearize::<M>(history) {
        Verdict::Linearizable => true,
        Verdict::Undecided => {
            println!("{context}: {} operations, too many orders to find out", history.len());
            false
        }
        Verdict::Not(why) => {
            let mut all = String::new();
            for Event { worker, op, outcome, begin_ns, end_ns } in history {
                let _ = writeln!(all, "{begin_ns} to {end_ns}, worker {worker}: {op:?} -> {outcome:?}");
            }
            panic!("{context}: not linearizable: {why}\n{all}");
        }
    }
}
