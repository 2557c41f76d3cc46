//! An operation whose code panics fails, wherever that is; who carries it out goes on for others.

use farlink_offload::{
    CacheOptions, ComputeCache, Holdings, OwnerServer, Router, Routes, Served,
    ship::{Answer, From, Registry, Shipper},
};
use farlink_runtime::{
    access::{Access, Interrupt, Merge, Operation, Operations, PagesMut, Plugin, Slot, Start, Structure, Words},
    catalog::{self, CreateOptions},
    error::Error,
    fabric::listener::ListenOptions,
    messaging::{Error as MessagingError, Refusal, ServeMessages, Wait},
    one_sided::{OneSided, Proof},
    operation::Run,
    page::SizeClass,
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::{DecodeError, Wire},
};
use farlink_tests::{backend::FabricProfile, cluster, fleet::Fleet};
use std::sync::Arc;

const ROOT_BYTES: usize = 64;

/// A page, of which nothing is ever asked.
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

impl Plugin for Fuses {
    const NAME: &'static str = "fuses";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = ROOT_BYTES..=ROOT_BYTES;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<()> {
        None
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 0, 0);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Fuse>();
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

#[test]
fn who_panics_fails_and_others_are_served() {
    let registry = Registry::new().with::<Fuses>();
    let fleet = Fleet::start_of(1, 2 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let (compute, owner) =
        (cluster::join(&fleet.fabric(), 1).unwrap(), Arc::new(cluster::join(&fleet.fabric(), 2).unwrap()));
    let worker = compute.worker().unwrap();
    let class = SizeClass::of_bytes(ROOT_BYTES).unwrap();
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    let structure = worker.block_on(async {
        let one_sided: OneSided<Fuses> = catalog::create(&worker, "fuses", &options, Proof::Checksum).await.unwrap();
        one_sided.context().structure.clone()
    });
    worker.block_on(async {
        let shipper = Shipper::<Fuses>::new(&worker, structure.clone());
        for blows in Blows::ALL {
            let answer = shipper.ship(&fuse(blows), From::Root).await;
            judge(blows, answer.map(|answer| assert!(matches!(answer, Answer::Done(_)))));
            assert!(shipper.ship(&fuse(Blows::Nowhere), From::Root).await.is_ok(), "after {blows:?}");
        }
    });
    let holdings = Holdings::<Fuses>::new(&structure, ComputeCache::new(CacheOptions::new(64 << 10)).unwrap());
    let of_owner = owner.worker().unwrap();
    of_owner.block_on(holdings.take(&of_owner, ())).unwrap();
    let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
    let listener = owner.listen(&ListenOptions::default()).unwrap();
    let server = OwnerServer::start(listener, &owner, vec![Served::new(&holdings)], &messages).unwrap();
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
