//! Words that installs change, in operations that begin below the root: at the memory server they were sent to, and no farther.

use farlink_offload::ship::{Answer, Decline, From, Registry, Shipper};
use farlink_runtime::{
    access::{
        Access, Interrupt, Link, Operation, Operations, PagesMut, Plugin, Slot, Start, Structure, Swap, WordPtr, Words,
    },
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, Proof},
    page::{HEADER_WORDS, SizeClass},
    ptr::ServerId,
    report::Report,
    structure::{OPTIONS, PlacementPolicy, StructurePlacement},
    wire::wire,
    worker::Worker,
};
use farlink_tests::{backend::FabricProfile, cluster, fleet::Fleet};

const ROOT_BYTES: usize = 64;
const WORD: usize = HEADER_WORDS;

/// A root with one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Cells;

/// Loads the word of a page, and swaps it if that is asked for; what it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Touch {
    page: u64,
    to: Option<u64>,
}

wire!(struct Touch { page, to });

impl Operation for Touch {
    type Output = u64;
    type Plugin = Cells;
    const NAME: &'static str = "touch";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Cells>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        access.open(from).await?;
        let word = WordPtr { page: Link::from_word(self.page), index: WORD };
        match self.to {
            None => Ok(access.load(&[word]).await?[0]),
            Some(to) => {
                let swap = Swap { word, old: 0, to, found_by: None };
                access.install(Vec::new(), |_| (), swap, Vec::new()).await.map(|swapped| swapped.err().unwrap_or(0))
            }
        }
    }
}

impl Plugin for Cells {
    const NAME: &'static str = "cells";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = ROOT_BYTES..=ROOT_BYTES;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe_words(root, 0, 0);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Touch>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

async fn create(worker: &Worker, name: &str, server: u16) -> OneSided<Cells> {
    let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(server) };
    let class = SizeClass::of_bytes(ROOT_BYTES).unwrap();
    let options = CreateOptions { class, placement, options: [0; OPTIONS] };
    catalog::create(worker, name, &options, Proof::Checksum).await.unwrap()
}

/// The server could read the other one's as any compute server does; but whoever sent the operation has shipped it in order not to.
#[test]
fn words_of_other_servers_are_left_to_the_sender_and_swaps_too() {
    let fleet = Fleet::start_of(2, 2 << 20, 1, FabricProfile::Fast, &Registry::new().with::<Cells>()).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let (here, away) = (create(&worker, "here", 0).await, create(&worker, "away", 1).await);
        let [here, away] = [here, away].map(|access| access.context().structure.clone());
        let shipper = Shipper::<Cells>::new(&worker, here.clone());
        let ship = async |page: Link, to: Option<u64>| {
            let from = From::Page { page: here.root_link(), level: 0, owned: &() };
            match shipper.ship(&Touch { page: page.word(), to }, from).await.unwrap() {
                Answer::Done(shipped) => Ok(shipped.output),
                Answer::Declined(why) => Err(why),
                Answer::GoOn(page) => panic!("to go on at {page:?}"),
            }
        };
        assert_eq!(ship(here.root_link(), None).await, Ok(0));
        assert_eq!(ship(away.root_link(), None).await, Err(Decline::Leaves));
        for structure in [&here, &away] {
            assert_eq!(ship(structure.root_link(), Some(7)).await, Err(Decline::Restructures));
            let word = WordPtr { page: structure.root_link(), index: WORD };
            let access = OneSided::<Cells>::new(&worker, structure.clone(), Proof::Checksum);
            assert_eq!(access.load(&[word]).await.unwrap(), [0]);
        }
    });
}
