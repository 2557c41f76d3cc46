//! A memory server, and a compute server that owns a tree, which are sent words instead of operations. They serve a B+-tree and an
//! R-tree in this process, for as long as the thread lives that fuzzes them; the trees are checked now and then.

use std::{
    cell::{Cell, OnceCell},
    sync::Arc,
};

use farlink_offload::{
    CacheOptions, ComputeCache, Holdings, OwnerServer, Served,
    route::{GIVE_UP, LOADS, ROUTE, TAKE},
    ship::{At, CallHeader, SHIP},
};
use farlink_runtime::{
    access::{Access as _, Operation, PageRef as _, Plugin, Region, Structure},
    compute::ComputeServer,
    error::Error,
    fabric::listener::ListenOptions,
    fencing::Sender,
    lock::OwnerId,
    messaging::{Channel, ChannelOptions, Error as MessagingError, Kind, Priority, Refusal, ServeMessages, Wait},
    one_sided::OneSided,
    operation::Code,
    ptr::{Link, ServerId},
    wire::Wire,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeOptions, PlacementPolicy, Tree},
    map::{
        KeyRange,
        ops::{Count, Get, Put, Remove, Scan},
    },
    rtree::{self, RTree, RTreeOptions, Rect},
};

use super::{box_counts, box_deletes, box_finds, box_inserts, box_updates, counts, gets, puts, removes, scans};
use crate::{
    cluster::{self, FAST},
    fleet::Fleet,
};

/// Requests between two checks of the trees.
const CHECK_EVERY: u64 = 1 << 14;
/// What an owner takes messages of.
const KINDS: [Kind; 4] = [ROUTE, GIVE_UP, TAKE, LOADS];
/// The keys of the B+-trees, and the payloads of the R-tree.
const ENTRIES: u64 = 100;

thread_local! {
    static SCENE: OnceCell<Scene> = const { OnceCell::new() };
}

struct Scene {
    // In the order in which they go.
    to_server: Channel,
    to_owner: Channel,
    trees: [BTree<OneSided<Tree>>; 2],
    boxes: RTree<OneSided<rtree::Tree>>,
    worker: Worker,
    sent: Cell<u64>,
    _server: OwnerServer,
    holdings: Holdings<Tree>,
    of_owner: Worker,
    _compute: ComputeServer,
    owner: Arc<ComputeServer>,
    _fleet: Fleet,
}

impl Scene {
    fn start() -> Result<Self, Error> {
        let fleet = Fleet::start(1, 8 << 20, 1, FAST)?;
        let (compute, owner) = (cluster::join(&fleet.fabric(), 0)?, Arc::new(cluster::join(&fleet.fabric(), 0)?));
        let (worker, of_owner) = (compute.worker()?, owner.worker()?);
        let (trees, boxes) = worker.block_on(async {
            let options =
                BTreeOptions { page_bytes: 256, placement: PlacementPolicy::OneServer, ..BTreeOptions::default() };
            let trees =
                [BTree::create(&worker, "sent", options).await?, BTree::create(&worker, "owned", options).await?];
            for tree in &trees {
                tree.bulk_load((0..ENTRIES).map(|key| (key, key)), 0.7).await?;
            }
            let boxes = RTree::create(&worker, "boxes", RTreeOptions::default()).await?;
            for payload in 0..ENTRIES {
                let corner = payload as f64 / ENTRIES as f64;
                boxes.insert(Rect::new([corner; 2], [corner + 0.01; 2]).expect("it is a box"), payload).await?;
            }
            Ok::<_, Error>((trees, boxes))
        })?;
        let mut options = CacheOptions::new(128 << 10);
        options.page_bytes = 256;
        let cache = ComputeCache::<Tree>::new(options)?;
        let holdings = Holdings::new(trees[1].structure(), cache);
        of_owner.block_on(holdings.take(&of_owner, KeyRange::ALL))?;
        let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
        let listener = owner.listen(&ListenOptions::default())?;
        let server = OwnerServer::start(listener, &owner, vec![Served::new(&holdings)], &messages)?;
        let to_server = ServerId::new(0).expect("0 is a server id");
        let (to_server, to_owner) = worker.block_on(async {
            let options = ChannelOptions { eager_words: Some(1024), coalesce: true };
            Ok::<_, Error>((worker.channel_with(to_server, options).await?, worker.channel_to(owner.owner()).await?))
        })?;
        let sent = Cell::default();
        Ok(Self {
            to_server,
            to_owner,
            trees,
            boxes,
            worker,
            sent,
            _server: server,
            holdings,
            of_owner,
            _compute: compute,
            owner,
            _fleet: fleet,
        })
    }

    /// Sends words, and whether it was refused.
    fn send(&self, channel: &Channel, kind: Kind, words: &[u64]) -> Option<Refusal> {
        let refused = match self.worker.block_on(channel.request_words(kind, words, Priority::Latency)) {
            Ok(_) => None,
            Err(MessagingError::Refused { why, .. }) => Some(why),
            Err(error) => panic!("no answer: {error}"),
        };
        self.sent.set(self.sent.get() + 1);
        if self.sent.get().is_multiple_of(CHECK_EVERY) {
            self.check();
        }
        refused
    }

    fn check(&self) {
        // What the owner has changed is in its cache.
        self.of_owner.block_on(self.holdings.flush(&self.of_owner)).expect("there is memory for a small tree");
        self.worker.block_on(async {
            for report in [self.trees[0].check().await, self.trees[1].check().await, self.boxes.check().await] {
                let report = report.expect("what is served can be read");
                assert!(report.is_clean(), "{report:?}");
            }
        });
    }
}

fn with<T>(f: impl FnOnce(&Scene) -> T) -> T {
    SCENE.with(|scene| f(scene.get_or_init(|| Scene::start().expect("a small cluster fits anywhere"))))
}

/// Sends words to the memory server, which must answer; whether, and why, it has refused them.
pub fn send_to_server(words: &[u64]) -> Option<Refusal> {
    with(|scene| scene.send(&scene.to_server, SHIP, words))
}

/// Sends words to the owner, the first of them for the kind of message.
pub fn send_to_owner_of_all(words: &[u64]) -> Option<Refusal> {
    let (&kind, words) = words.split_first()?;
    with(|scene| scene.send(&scene.to_owner, KINDS[kind as usize % KINDS.len()], words))
}

pub(super) fn send(words: &[u64]) {
    send_to_server(words);
}

pub(super) fn send_to_owner(words: &[u64]) {
    send_to_owner_of_all(words);
}

/// The root of a tree.
pub(super) fn a_page() -> Link {
    with(|scene| scene.trees[0].structure().root_link())
}

/// Requests, wherever an operation may begin.
struct Requests<R> {
    structure: Structure,
    level: u8,
    sender: Sender,
    region: R,
    all: Vec<Vec<u64>>,
}

impl<R: Region> Requests<R> {
    fn of<P: Plugin<Region = R>>(worker: &Worker, access: &OneSided<P>) -> Self {
        let structure = access.context().structure.clone();
        let root = worker.block_on(access.read_page(structure.root_link())).expect("there is a root");
        Self { level: root.level(), structure, sender: Sender::of(worker), region: R::everything(), all: Vec::new() }
    }

    /// Of an operation, with each of these parameters.
    fn add<O: Operation>(&mut self, parameters: &[Vec<u64>]) -> &mut Self {
        let root = self.structure.root_link();
        for start in [At::Root, At::Above, At::Page(root, self.level)] {
            let mut before = Vec::new();
            CallHeader { code: Code::of::<O>(), structure: self.structure.id, start }.encode(&mut before);
            match start {
                At::Page(..) => {
                    self.sender.encode(&mut before);
                    self.region.encode(&mut before);
                }
                At::Root if !O::READS_ONLY => self.sender.encode(&mut before),
                At::Root | At::Above => {}
            }
            self.all.extend(parameters.iter().map(|parameters| [&before[..], parameters].concat()));
        }
        self
    }
}

/// Each operation of both structures.
pub(super) fn samples() -> Vec<Vec<u64>> {
    with(|scene| {
        let mut keys = Requests::of(&scene.worker, scene.trees[0].access());
        keys.add::<Get<Tree>>(&gets()).add::<Put<Tree>>(&puts()).add::<Remove<Tree>>(&removes());
        keys.add::<Scan<Tree>>(&scans()).add::<Count<Tree>>(&counts());
        let mut boxes = Requests::of(&scene.worker, scene.boxes.access());
        boxes.add::<rtree::ops::Insert<2>>(&box_inserts()).add::<rtree::ops::Delete<2>>(&box_deletes());
        boxes.add::<rtree::ops::Update<2>>(&box_updates());
        boxes.add::<rtree::ops::Find<2>>(&box_finds()).add::<rtree::ops::Count<2>>(&box_counts());
        [keys.all, boxes.all].concat()
    })
}

/// Operations, and messages about regions.
pub(super) fn samples_to_owner() -> Vec<Vec<u64>> {
    with(|scene| {
        let structure = scene.trees[1].structure().id;
        let mut all = Vec::new();
        let mut operation = |code, parameters: Vec<Vec<u64>>| {
            let mut before = vec![0];
            CallHeader { code, structure, start: At::Root }.encode(&mut before);
            all.extend(parameters.iter().map(|parameters| [&before[..], parameters].concat()));
        };
        operation(Code::of::<Get<Tree>>(), gets());
        operation(Code::of::<Put<Tree>>(), puts());
        operation(Code::of::<Remove<Tree>>(), removes());
        operation(Code::of::<Scan<Tree>>(), scans());
        operation(Code::of::<Count<Tree>>(), counts());
        let id = u64::from(structure.0);
        // To who does not listen, and to the owner itself.
        let others = [scene.worker.owner(), scene.owner.owner()];
        let hand_on = |to: OwnerId| [&[1, id, to.incarnation().into()], &super::regions()[1][..]].concat();
        all.extend(others.map(hand_on));
        all.extend(super::regions().iter().map(|region| [&[2, id], &region[..]].concat()));
        all.extend([vec![3, id, 0], vec![3, id, 16]]);
        all
    })
}
