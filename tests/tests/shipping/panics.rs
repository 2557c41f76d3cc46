//! An operation whose code panics fails, wherever that is; who carries it out goes on for others.

use farlink_offload::{
    CacheOptions, ComputeCache, Engine, EngineOptions, Holdings, OwnerServer, Policies, Remote, Router, Routes, Served,
    policy::Always,
    ship::{Answer, From, Registry, Shipper},
};
use farlink_runtime::{
    access::{
        Access, Context, Hint, Interrupt, Link, Merge, Operation, Operations, PageRef, Pages, PagesMut, Plugin, Slot,
        Start, Structure, Words,
    },
    catalog::{self, CreateOptions},
    compute::ComputeServer,
    error::Error,
    fabric::listener::ListenOptions,
    messaging::{Error as MessagingError, Refusal, ServeMessages, Wait},
    one_sided::{OneSided, OneSidedPages, Proof},
    operation::{Run, retry},
    page::{HEADER_WORDS, SizeClass},
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::{DecodeError, Wire},
    worker::Worker,
};
use farlink_tests::{backend::FabricProfile, cluster, fleet::Fleet};
use std::sync::Arc;

const ROOT_BYTES: usize = 64;
/// The link of the root, and what is counted in the page below it.
const LINK: usize = HEADER_WORDS;
const COUNT: usize = HEADER_WORDS + 1;

/// A root and a page below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Fuses;

/// Where an operation panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blows {
    Nowhere,
    InDecode,
    InLimit,
    InScope,
    InRun,
    InEncode,
}

impl Blows {
    const ALL: [Self; 6] = [Self::Nowhere, Self::InDecode, Self::InLimit, Self::InScope, Self::InRun, Self::InEncode];
}

#[derive(Debug, Clone)]
struct Fuse {
    blows: Blows,
    /// Where it comes from it does not panic.
    is_there: bool,
}

impl Fuse {
    fn burn(&self, at: Blows) {
        assert!(!self.is_there || self.blows != at, "blown {at:?}");
    }
}

impl Wire for Fuse {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(self.blows as u64);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let blows = *Blows::ALL.get(u64::decode(from)? as usize).ok_or(DecodeError("no fuse"))?;
        let fuse = Self { blows, is_there: true };
        fuse.burn(Blows::InDecode);
        Ok(fuse)
    }
}

#[derive(Debug, Clone)]
struct Charge(Fuse);

impl Wire for Charge {
    fn encode(&self, to: &mut Vec<u64>) {
        // What has been written by then goes, too.
        to.extend([7; 3]);
        self.0.burn(Blows::InEncode);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        <[u64; 3]>::decode(from)?;
        Ok(Self(Fuse { blows: Blows::Nowhere, is_there: false }))
    }
}

impl Merge for Charge {
    fn merge(&mut self, _: Self) {}
}

impl Operation for Fuse {
    type Output = Charge;
    type Plugin = Fuses;
    const NAME: &'static str = "fuse";
    const READS_ONLY: bool = true;

    fn scope(&self) {
        self.burn(Blows::InScope);
    }

    fn limit(&mut self) {
        self.burn(Blows::InLimit);
    }

    async fn run<A: Access<Plugin = Fuses>>(&self, access: &A, from: Start) -> Result<Charge, Interrupt> {
        access.open(from).await?;
        self.burn(Blows::InRun);
        Ok(Charge(self.clone()))
    }
}

/// When an operation that changes a page fails, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    Never,
    /// By a panic, in front of its change or behind it.
    InFront,
    Behind,
    /// By an answer that is too large, of which it knows nothing.
    InAnswer,
}

impl Late {
    const ALL: [Self; 4] = [Self::Never, Self::InFront, Self::Behind, Self::InAnswer];
}

impl Wire for Late {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(*self as u64);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Self::ALL.get(u64::decode(from)? as usize).copied().ok_or(DecodeError("never so late"))
    }
}

impl Operation for Late {
    /// First what was counted.
    type Output = Vec<u64>;
    type Plugin = Fuses;
    const NAME: &'static str = "late";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Fuses>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        let mut page = access.open(from).await?;
        if page.level() > 0 {
            let link = page.read(|root| Link::from_word(root.word(LINK)))?;
            page = access.descend(&page, link, Hint::DOWN).await?;
        }
        let before = page.read(|words| words.word(COUNT))?;
        assert!(*self != Self::InFront, "blown {self:?}");
        let (mut pages, count) = (Pages::new(), Slot::ONLY);
        pages.add(page);
        access.change(pages, |pages| pages.set(count, COUNT, before + 1)).await?;
        assert!(*self != Self::Behind, "blown {self:?}");
        Ok(vec![before; if *self == Self::InAnswer { 5 << 20 } else { 1 }])
    }
}

impl Plugin for Fuses {
    const NAME: &'static str = "fuses";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = ROOT_BYTES..=ROOT_BYTES;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        // Null in the page below.
        std::iter::once(LINK)
    }

    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<()> {
        Some(())
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 1, 0);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Fuse>().add::<Late>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

fn fuse(blows: Blows) -> Fuse {
    Fuse { blows, is_there: false }
}

/// What is read from a message makes no sense if that panics; else it is told.
fn judge(blows: Blows, outcome: Result<(), Error>) {
    match (blows, outcome) {
        (Blows::Nowhere, Ok(())) => {}
        (
            Blows::InDecode | Blows::InLimit,
            Err(Error::Messaging(MessagingError::Refused { why: Refusal::Malformed, .. }) | Error::AtOwner { .. }),
        ) => {}
        (Blows::InScope | Blows::InRun, Err(Error::Panicked { why, .. })) => {
            assert!(why.contains(&format!("{blows:?}")), "{why}");
        }
        // It has had its effect.
        (Blows::InEncode, Err(Error::OnServer { why, .. } | Error::AtOwner { why, .. })) => {
            assert!(why.contains("InEncode") && why.contains("carried out"), "{why}");
        }
        (_, outcome) => panic!("{blows:?}: {outcome:?}"),
    }
}

fn start() -> (Fleet, ComputeServer) {
    let registry = Registry::new().with::<Fuses>();
    let fleet = Fleet::start_of(1, 2 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    (fleet, compute)
}

fn create(worker: &Worker) -> Structure {
    let class = SizeClass::of_bytes(ROOT_BYTES).unwrap();
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    let fill = async move |access: &OneSided<Fuses>| {
        let Context { worker, structure, .. } = access.context();
        let build = async || {
            let page = access.allocate(class, structure.placement(0, structure.root)).await?;
            let (link, mut pages) = (page.link(), Pages::new());
            let root = pages.add(access.open(Start::Root).await?);
            let page = pages.add_new(page);
            let set = |pages: &mut OneSidedPages| {
                pages.describe(page, 0, 0);
                pages.set(root, LINK, link.word());
            };
            access.change(pages, set).await.map(drop)
        };
        retry(worker, build).await
    };
    let made = worker.block_on(catalog::create_with(worker, "fuses", &options, Proof::Checksum, fill));
    made.unwrap().context().structure.clone()
}

fn own(owner: &Arc<ComputeServer>, worker: &Worker, structure: &Structure) -> (Holdings<Fuses>, OwnerServer) {
    let holdings = Holdings::<Fuses>::new(structure, ComputeCache::new(CacheOptions::new(64 << 10)).unwrap());
    worker.block_on(holdings.take(worker, ())).unwrap();
    let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
    let listener = owner.listen(&ListenOptions::default()).unwrap();
    let server = OwnerServer::start(listener, owner, vec![Served::new(&holdings)], &messages).unwrap();
    (holdings, server)
}

#[test]
fn who_panics_fails_and_others_are_served() {
    let (fleet, compute) = start();
    let owner = Arc::new(cluster::join(&fleet.fabric(), 2).unwrap());
    let worker = compute.worker().unwrap();
    let structure = create(&worker);
    worker.block_on(async {
        let shipper = Shipper::<Fuses>::new(&worker, structure.clone());
        for blows in Blows::ALL {
            let answer = shipper.ship(&fuse(blows), From::Root).await;
            judge(blows, answer.map(|answer| assert!(matches!(answer, Answer::Done(_)))));
            assert!(shipper.ship(&fuse(Blows::Nowhere), From::Root).await.is_ok(), "after {blows:?}");
        }
    });
    let of_owner = owner.worker().unwrap();
    let (holdings, server) = own(&owner, &of_owner, &structure);
    worker.block_on(async {
        let routes = Routes::<Fuses>::read(&worker, structure).await.unwrap();
        let router = Router::to_owners(&worker, &routes);
        for blows in Blows::ALL {
            judge(blows, router.execute(&fuse(blows)).await.map(drop));
            assert!(router.execute(&fuse(Blows::Nowhere)).await.is_ok(), "after {blows:?}");
        }
    });
    drop(server);
    of_owner.block_on(holdings.give_up_all(&of_owner)).unwrap();
}

/// An error says that nothing was changed only where that is so. An owner does not look.
async fn errors_are_true_of_a_change(run: &impl Run<Plugin = Fuses>, is_exact: bool) {
    let mut count = 0;
    for late in Late::ALL {
        let outcome = run.execute(&late).await;
        match (late, &outcome) {
            (Late::Never, Ok(counted)) => assert_eq!(counted[..], [count]),
            (Late::InFront | Late::Behind, Err(error @ Error::Panicked { may_have_changed, .. })) => {
                let (has_changed, text) = (late == Late::Behind, error.to_string());
                assert!(text.contains(&format!("blown {late:?}")), "{text}");
                assert!(*may_have_changed == has_changed || !is_exact && *may_have_changed, "{text}");
                assert_eq!(text.contains("changed nothing"), !may_have_changed, "{text}");
            }
            (Late::InAnswer, Err(error @ Error::AnswerTooLarge { .. })) => {
                assert!(error.to_string().contains("was carried out"), "{error}");
            }
            (late, outcome) => panic!("{late:?}: {outcome:?}"),
        }
        count += u64::from(late != Late::InFront);
        assert_eq!(run.execute(&Late::Never).await.unwrap(), [count], "{late:?}");
        count += 1;
    }
}

#[test]
fn who_fails_behind_a_change_does_not_say_that_there_is_none() {
    let (_fleet, compute) = start();
    let worker = compute.worker().unwrap();
    let structure = create(&worker);
    worker.block_on(errors_are_true_of_a_change(&Remote::<Fuses>::new(&worker, structure), true));

    let (_fleet, compute) = start();
    let worker = compute.worker().unwrap();
    let structure = create(&worker);
    let mut options = CacheOptions::new(64 << 10);
    (options.page_bytes, options.excludes_subtrees) = (ROOT_BYTES, true);
    let cache = ComputeCache::<Fuses>::new(options).unwrap();
    worker.block_on(async {
        let owned = cache.own(&worker, structure, ()).await.unwrap();
        let to_level = EngineOptions { level_max: Some(0) };
        let engine = Engine::new(owned, Policies::new(Always), to_level).unwrap();
        errors_are_true_of_a_change(&engine, true).await;
        // Those that were carried out, and answered.
        assert_eq!(engine.counts().shipped, Late::ALL.len() as u64 + 1);
        engine.cached().close().await.unwrap();
    });

    let (fleet, compute) = start();
    let owner = Arc::new(cluster::join(&fleet.fabric(), 2).unwrap());
    let (worker, of_owner) = (compute.worker().unwrap(), owner.worker().unwrap());
    let structure = create(&worker);
    let (holdings, server) = own(&owner, &of_owner, &structure);
    worker.block_on(async {
        let routes = Routes::<Fuses>::read(&worker, structure).await.unwrap();
        errors_are_true_of_a_change(&Router::to_owners(&worker, &routes), false).await;
    });
    drop(server);
    of_owner.block_on(holdings.give_up_all(&of_owner)).unwrap();
}
