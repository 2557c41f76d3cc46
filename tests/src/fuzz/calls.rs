//! A memory server that is sent words instead of operations. It serves a tree in this process, for as long as the thread lives
//! that fuzzes it; the tree is checked now and then.

use std::cell::OnceCell;

use farlink_offload::ship::SHIP;
use farlink_runtime::{
    compute::ComputeServer,
    error::Error,
    messaging::{Channel, ChannelOptions, Error as MessagingError, Priority},
    one_sided::OneSided,
    ptr::ServerId,
    worker::Worker,
};
use farlink_structures::btree::{BTree, BTreeOptions, PlacementPolicy, Tree};

use crate::{
    cluster::{self, FAST},
    fleet::Fleet,
};

/// Requests between two checks of the tree.
const CHECK_EVERY: u64 = 1 << 14;

thread_local! {
    static SCENE: OnceCell<Scene> = const { OnceCell::new() };
}

struct Scene {
    // In the order in which they go.
    channel: Channel,
    tree: BTree<OneSided<Tree>>,
    worker: Worker,
    sent: std::cell::Cell<u64>,
    _compute: ComputeServer,
    _fleet: Fleet,
}

impl Scene {
    fn start() -> Result<Self, Error> {
        let fleet = Fleet::start(1, 4 << 20, 1, FAST)?;
        let compute = cluster::join(&fleet.fabric(), 0)?;
        let worker = compute.worker()?;
        let server = ServerId::new(0).expect("0 is a server id");
        let (channel, tree) = worker.block_on(async {
            let options =
                BTreeOptions { page_bytes: 256, placement: PlacementPolicy::OneServer, ..BTreeOptions::default() };
            let tree = BTree::create(&worker, "fuzzed", options).await?;
            tree.bulk_load((0..100).map(|key| (key, key)), 0.7).await?;
            let options = ChannelOptions { eager_words: Some(1024), coalesce: true };
            Ok::<_, Error>((worker.channel_with(server, options).await?, tree))
        })?;
        Ok(Self { channel, tree, worker, sent: Default::default(), _compute: compute, _fleet: fleet })
    }

    fn send(&self, words: &[u64]) {
        let outcome = self.worker.block_on(self.channel.request_words(SHIP, words, Priority::Latency));
        let is_answered = matches!(outcome, Ok(_) | Err(MessagingError::Refused { .. }));
        assert!(is_answered, "the memory server did not answer: {outcome:?}");
        self.sent.set(self.sent.get() + 1);
        if self.sent.get().is_multiple_of(CHECK_EVERY) {
            let report = self.worker.block_on(self.tree.check()).expect("the tree can be read");
            assert!(report.is_clean(), "{report:?}");
        }
    }
}

fn with<T>(f: impl FnOnce(&Scene) -> T) -> T {
    SCENE.with(|scene| f(scene.get_or_init(|| Scene::start().expect("a small cluster fits anywhere"))))
}

/// Sends words to the memory server, which must answer.
pub(super) fn send(words: &[u64]) {
    with(|scene| scene.send(words));
}

/// The root of its tree.
pub(super) fn a_page() -> u64 {
    with(|scene| scene.tree.structure().root_link().word())
}
