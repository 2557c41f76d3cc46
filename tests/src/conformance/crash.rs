//! A compute server dies in the middle of an operation: what others find is the state before it, or behind it.

use std::{
    cell::{Cell, RefCell},
    fmt,
    sync::Arc,
};

use farlink_offload::{OwnerServer, ship::Registry};
use farlink_runtime::{
    access::{Plugin, Structure},
    catalog,
    compute::ComputeServer,
    error::Error,
    fabric::Fabric,
    leaks,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    report::Report,
    structure::StructurePlacement,
    worker::{Handle, Worker},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use super::{
    AccessVariant, Model, scene,
    variants::{Accessed, Client, logs},
    with_seeds,
};
use crate::{
    backend::Backend,
    cluster::{FAST, WEAK},
    crash::{Member, MemoryServers, Scene, enumerate_from, every},
    settings,
};

/// Those whose requests are what the victim does. (Within a memory server there are none.)
const AMONG: [AccessVariant; 11] = [
    AccessVariant::OneSided,
    AccessVariant::LockBodyLock,
    AccessVariant::CachedInner,
    AccessVariant::CachedMapping,
    AccessVariant::Owned,
    AccessVariant::Shipped,
    AccessVariant::NowAndThen,
    AccessVariant::Coarse,
    AccessVariant::Hybrid,
    AccessVariant::Adaptive,
    AccessVariant::Routed,
];

const NAME: &str = "subject";
/// Operations of the victim before the one in which it dies, at most: as a rule it has the pages that it needs, then.
const WARMING_MAX: usize = 60;
/// More than an operation has requests.
const SELDOM: u64 = 1 << 32;
/// Operations of others.
const GOING_ON: usize = 20;
/// Operations that are drawn until one changes something.
const DRAWN_MAX: usize = 200;

/// A compute server dies in an operation, or in the flush behind it, after some of its requests, once in each order of memory servers; or
/// after each of them. Others find the state before the operation or behind it, behind it if it was answered, and flushed where owners do
/// not log; they go on, the check finds nothing, and no memory is held or lost. Where compute servers own parts, it dies as it takes
/// something from another one and behind that, and the other one goes on first.
///
/// # Panics
/// If they do not.
pub fn crash<M: Model>() {
    if Backend::chosen() == Backend::Verbs {
        return println!("crash of {}: skipped: it is about memory of this process", M::Plugin::NAME);
    }
    with_seeds::<M>("crash", &AMONG, |variants, seed| {
        for &variant in variants {
            let Some(crash) = Crash::<M>::draw(variant, seed) else { continue };
            // While the other one goes on, requests of the dead must not be under way.
            let is_weak = seed.is_multiple_of(3) && variant != AccessVariant::Routed;
            let options = if is_weak { WEAK } else { FAST };
            // Each access dies in its own way.
            let seed = seed ^ (variant as u64) << 32;
            enumerate_from(seed, if every() == 1 { 1 } else { SELDOM }, options, &crash);
        }
        true
    });
}

struct Crash<M: Model> {
    variant: AccessVariant,
    seed: u64,
    /// Operations of somebody who leaves; then those of the victim, and the one in which it dies.
    before: Vec<M::Op>,
    warming: Vec<M::Op>,
    op: M::Op,
    /// The states around that one.
    states: [M::State; 2],
    /// Those that others may find: one, once somebody has found it.
    possible: RefCell<Vec<M::State>>,
    /// Whether that operation was answered, and lasts.
    lasts: Cell<bool>,
    /// It is the memory servers that die.
    servers_die: bool,
    /// Whether others own all next, or work one-sided.
    takes_over: Cell<bool>,
    /// Where compute servers own parts: the other one, and how the victim's worker will own.
    other: RefCell<Option<Other<M>>>,
    client: RefCell<Option<Client<M>>>,
}

/// A compute server that owns all at first, and goes on when the victim is dead.
struct Other<M: Model> {
    // Before its worker.
    server: Option<OwnerServer>,
    client: Client<M>,
    member: Member,
}

impl<M: Model> fmt::Debug for Crash<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { variant, seed, before, warming, op, .. } = self;
        let dies = if self.servers_die { "the memory servers die in" } else { "somebody dies in" };
        let count = before.len() + warming.len();
        write!(f, "{} over {variant:?}, seed {seed}: {dies} {op:?} behind {count} operations", M::Plugin::NAME)
    }
}

impl<M: Model> Crash<M> {
    /// None if no operation changes anything.
    fn draw(variant: AccessVariant, seed: u64) -> Option<Self> {
        let (mut rng, mut state) = (SmallRng::seed_from_u64(seed), M::State::default());
        let count = rng.random_range(0..=settings::from_env("FARLINK_KIT_OPS", 300));
        let warming = rng.random_range(0..=WARMING_MAX);
        let servers_die = variant == AccessVariant::Coarse && rng.random();
        let mut next = |state: &mut M::State| {
            let op = M::draw(&mut rng, state);
            M::apply(state, &op);
            op
        };
        let before = (0..count).map(|_| next(&mut state)).collect();
        let warming = (0..warming).map(|_| next(&mut state)).collect();
        let (op, behind) = (0..DRAWN_MAX).find_map(|_| {
            let mut behind = state.clone();
            let op = next(&mut behind);
            (behind != state).then_some((op, behind))
        })?;
        let states = [state, behind];
        let (possible, other, client) = Default::default();
        let [lasts, takes_over] = [const { Cell::new(false) }; 2];
        Some(Self {
            variant,
            seed,
            before,
            warming,
            op,
            states,
            possible,
            lasts,
            servers_die,
            takes_over,
            other,
            client,
        })
    }

    async fn client(&self, worker: &Handle, variant: AccessVariant) -> Result<(Accessed<M::Plugin>, Client<M>), Error> {
        let client = Client::new(structure::<M>(worker).await?, variant, None, self.seed, false)?;
        Ok((client.reach(worker).await?, client))
    }
}

impl<M: Model> Crash<M> {
    /// Somebody finds what has to be there, and goes on.
    async fn judge(&self, reached: &Accessed<M::Plugin>, acknowledged: bool) -> Result<(), Error> {
        let mut found = Vec::new();
        for look in M::looks() {
            found.push(M::run(&look, reached).await?);
        }
        let shows = |state: &M::State| {
            let mut state = state.clone();
            M::looks().iter().map(|look| M::apply(&mut state, look)).eq(found.iter().cloned())
        };
        let mut possible = self.possible.take();
        if acknowledged || self.lasts.get() {
            possible.drain(..possible.len() - 1);
        }
        let Some(mut state) = possible.iter().rfind(|state| shows(state)).cloned() else {
            panic!(
                "neither the state before nor that behind, answered: {acknowledged}, lasts: {}: {found:?}",
                self.lasts.get()
            )
        };
        let mut rng = SmallRng::seed_from_u64(!self.seed);
        for _ in 0..GOING_ON {
            let op = M::draw(&mut rng, &state);
            run::<M>(&op, &mut state, reached).await?;
        }
        for look in M::looks() {
            run::<M>(&look, &mut state, reached).await?;
        }
        self.possible.replace(vec![state]);
        reached.flush().await
    }
}

async fn structure<M: Model>(worker: &Handle) -> Result<Structure, Error> {
    catalog::open::<M::Plugin>(worker, NAME).await
}

async fn one_sided<M: Model>(worker: &Handle) -> Result<OneSided<M::Plugin>, Error> {
    Ok(OneSided::new(worker, structure::<M>(worker).await?, Proof::Checksum))
}

/// Runs an operation against the model.
async fn run<M: Model>(op: &M::Op, state: &mut M::State, on: &Accessed<M::Plugin>) -> Result<(), Error> {
    let (found, expected) = (M::run(op, on).await?, M::apply(state, op));
    assert_eq!(found, expected, "of {op:?}");
    Ok(())
}

impl<M: Model> Scene for Crash<M> {
    type Open = (Accessed<M::Plugin>, Client<M>);

    fn memory_servers(&self) -> MemoryServers {
        match self.variant.ships() {
            true if self.servers_die => MemoryServers::Die,
            true => MemoryServers::Serve,
            false => MemoryServers::Passive,
        }
    }

    fn registry(&self) -> Registry {
        scene::registry::<M>()
    }

    fn take_way(&self, is_other: bool) {
        self.takes_over.set(is_other && self.variant.owns());
    }

    fn is_swept_first(&self) -> bool {
        self.variant.owns() && !self.takes_over.get()
    }

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        let placement = StructurePlacement { policy: self.variant.policy(), root: ServerId::new(1) };
        M::create(worker, NAME, placement).await?;
        let (reached, _client) = self.client(worker, AccessVariant::OneSided).await?;
        let mut state = M::State::default();
        for op in &self.before {
            run::<M>(op, &mut state, &reached).await?;
        }
        Ok(())
    }

    fn others(&self, fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
        self.possible.replace(self.states.to_vec());
        if self.variant == AccessVariant::Routed {
            let member = Member::join(fabric, 5)?;
            let (_, client) = member.worker().block_on(self.client(member.worker(), self.variant))?;
            let server = client.serve(member.compute(), true)?;
            self.other.replace(Some(Other { server, client, member }));
        }
        Ok(())
    }

    fn serve(&self, victim: &Arc<ComputeServer>) -> Result<Option<OwnerServer>, Error> {
        if self.variant != AccessVariant::Routed {
            return Ok(None);
        }
        let worker = victim.worker()?;
        let (_, client) = worker.block_on(self.client(&worker, self.variant))?;
        let server = client.serve(victim, false);
        self.client.replace(Some(client));
        server
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        let (reached, client) = match self.client.take() {
            Some(client) => (client.reach(worker).await?, client),
            None => self.client(worker, self.variant).await?,
        };
        for op in &self.warming {
            M::run(op, &reached).await?;
        }
        reached.flush().await?;
        if let Some(Other { client, member, .. }) = &*self.other.borrow() {
            // So that there is something to take.
            let worker = member.worker();
            worker.block_on(async { client.reach(worker).await?.take_some().await })?;
        }
        Ok((reached, client))
    }

    async fn act(&self, (reached, _): &Self::Open) -> Result<(), Error> {
        self.lasts.set(false);
        reached.take_some().await?;
        run::<M>(&self.op, &mut self.states[0].clone(), reached).await?;
        self.lasts.set(logs(self.variant, self.seed));
        reached.flush().await
    }

    fn outlive(&self, acknowledged: bool) -> Result<(), Error> {
        let Some(Other { server, client, member }) = self.other.take() else { return Ok(()) };
        // It has done all that the dead one has sent.
        drop(server);
        if self.takes_over.get() {
            // Over new connections: of a change that goes over one of before nobody could say whether the dead one has done it.
            let worker = member.compute().worker()?;
            worker.block_on(async { self.judge(&client.reach(&worker).await?, acknowledged).await })?;
        }
        client.leave(member.compute())?;
        drop(client);
        member.maintain()
    }

    async fn free_leaked(&self, worker: &Worker) -> Result<u64, Error> {
        if !M::DEATHS_LOSE_PAGES {
            return Ok(0);
        }
        let freed = leaks::free(&one_sided::<M>(worker).await?).await?;
        Ok(freed.expect("nobody holds up the epoch"))
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        let variant = if self.takes_over.get() { AccessVariant::Owned } else { AccessVariant::OneSided };
        let (reached, _client) = self.client(worker, variant).await?;
        self.judge(&reached, acknowledged).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        M::Plugin::check(&one_sided::<M>(worker).await?).await
    }
}
