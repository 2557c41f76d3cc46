//! Damage to remote memory, and all operations on what is left.

use std::{marker::PhantomData, time::Duration};

use farlink_runtime::{
    access::Access,
    catalog,
    compute::ComputeServer,
    error::Error,
    lock::{LockState, LockWord},
    one_sided::{OneSided, Proof},
    page::{self, CHECKSUM, IDENTITY, Identity, LOCK, SizeClass},
    ptr::{RemotePtr, ServerId},
    worker::{Handle, Worker},
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::{self, Bound},
    cluster,
    direct::Direct,
    raw,
    subject::{StructureName, Subject},
};
use proptest::{prelude::*, sample::Index};

pub(crate) const SERVERS: usize = 2;
pub(crate) const SERVER_BYTES: u64 = 2 << 20;
pub(crate) const TREE: &str = "hostile";
pub(crate) const KEYS: u64 = 300;
/// More than a stale page that is looked at a thousand times costs, on any path through the tree.
pub(crate) const ENDLESS: Bound = Bound { reads_max: 1_500_000, turns_max: 20_000_000 };
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

// Where things stand in a node of the skip list, as its module `node` documents it; its link down is behind that to the right.
const NODE_LOW: usize = 4;
const NODE_RIGHT: usize = 6;

// Where things stand in a region, as the module `layout` documents it.
pub(crate) const SUPERBLOCK: u64 = 64;
const CHANGING_WORDS: u64 = 128;
/// Three, and one for each class of pages.
const CHANGING_LINES: u64 = 3 + SizeClass::LARGEST.index() as u64 + 1;
pub(crate) const EPOCH: u64 = 128;
pub(crate) const NEXT_INCARNATION: u64 = 192;
const CATALOG: u64 = 4 << 10;
const SLOTS: u64 = 12 << 10;
/// Behind the slots, the table of rings and the fences.
pub(crate) const DIRECTORY: u64 = 22 << 10;
/// Two words of the directory and the bitmap of each chunk.
pub(crate) const METADATA_END: u64 = DIRECTORY + CHUNKS * (16 + CHUNK_BYTES / 64 / 8);
const CHUNK_BYTES: u64 = 64 << 10;
/// Of a region of [`SERVER_BYTES`], whose first ones are metadata.
pub(crate) const CHUNKS: u64 = SERVER_BYTES / CHUNK_BYTES - 1;

/// A word that does harm.
#[derive(Debug, Clone)]
pub(crate) enum Evil {
    Any(u64),
    Small(u64),
    Large(u64),
    /// A link to some page of the tree.
    Page(Index),
    /// A link to the root.
    Root,
    /// A link to the page that holds it.
    Itself,
    /// A link into the middle of a page.
    Askew(Index, u64),
    /// A link to a page that was never used.
    Unused(u64),
    Swizzled(u64),
    OutOfRegion(u64),
    NoSuchServer(u64),
    /// What stands at this word of some other page.
    Copied(Index, Index),
}

fn evil() -> impl Strategy<Value = Evil> {
    prop_oneof![
        any::<u64>().prop_map(Evil::Any),
        (0..KEYS + 20).prop_map(Evil::Small),
        (0u64..5).prop_map(Evil::Large),
        any::<Index>().prop_map(Evil::Page),
        Just(Evil::Root),
        Just(Evil::Itself),
        (any::<Index>(), 1u64..256).prop_map(|(page, bytes)| Evil::Askew(page, bytes)),
        (0u64..64).prop_map(Evil::Unused),
        any::<u64>().prop_map(Evil::Swizzled),
        any::<u64>().prop_map(Evil::OutOfRegion),
        any::<u64>().prop_map(Evil::NoSuchServer),
        (any::<Index>(), any::<Index>()).prop_map(|(page, word)| Evil::Copied(page, word)),
    ]
}

/// Something done to remote memory.
#[derive(Debug, Clone)]
pub(crate) enum Damage {
    /// Words of a page of the tree. Sealed: with a checksum that fits, self-address and structure as they were.
    Page { page: Index, words: Vec<(Index, Evil)>, sealed: bool },
    /// A link of an inner page, sealed. The keys on its way are among those that the operations ask for.
    Link { page: Index, slot: Index, to: Evil },
    /// A page becomes a copy of another, but for its address, and sealed.
    Double { page: Index, of: Index },
    /// Every word of a page.
    Garbage { page: Index, seed: u64 },
    /// Words of a page of the catalog.
    Catalog { page: usize, words: Vec<(Index, Evil)>, sealed: bool },
    /// A word of the superblock that changes.
    Changing { server: Index, line: u64, word: Evil },
    /// A word of the slots, the directory or the bitmaps.
    Metadata { server: Index, word: Index, evil: Evil },
}

fn words() -> impl Strategy<Value = Vec<(Index, Evil)>> {
    prop::collection::vec((any::<Index>(), evil()), 1..6)
}

/// Damage to the tree's pages.
pub(crate) fn to_pages() -> impl Strategy<Value = Damage> {
    let page = any::<Index>;
    prop_oneof![
        1 => (page(), words()).prop_map(|(page, words)| Damage::Page { page, words, sealed: false }),
        6 => (page(), words()).prop_map(|(page, words)| Damage::Page { page, words, sealed: true }),
        4 => (page(), page(), evil()).prop_map(|(page, slot, to)| Damage::Link { page, slot, to }),
        1 => (page(), page()).prop_map(|(page, of)| Damage::Double { page, of }),
        1 => (page(), any::<u64>()).prop_map(|(page, seed)| Damage::Garbage { page, seed }),
    ]
}

/// Damage to everything around them.
pub(crate) fn to_metadata() -> impl Strategy<Value = Damage> {
    prop_oneof![
        (0usize..4, words(), any::<bool>()).prop_map(|(page, words, sealed)| Damage::Catalog { page, words, sealed }),
        (any::<Index>(), 0..CHANGING_LINES, evil()).prop_map(|(server, line, word)| Damage::Changing {
            server,
            line,
            word
        }),
        (any::<Index>(), any::<Index>(), evil()).prop_map(|(server, word, evil)| Damage::Metadata {
            server,
            word,
            evil
        }),
    ]
}

/// With a B+-tree.
pub(crate) type Scene = SceneOf<Tree>;

pub(crate) struct SceneOf<S: Subject> {
    // The worker leaves before its compute server.
    pub(crate) worker: Worker,
    pub(crate) compute: ComputeServer,
    pub(crate) direct: Direct,
    _fabric: Cluster,
    pub(crate) class: SizeClass,
    pub(crate) root: RemotePtr,
    pub(crate) pages: Vec<RemotePtr>,
    pub(crate) inner: Vec<RemotePtr>,
    of: PhantomData<S>,
}

impl<S: Subject> SceneOf<S> {
    pub(crate) fn new(seed: u64) -> Self {
        let fabric = Cluster::of_this_run(SERVERS, SERVER_BYTES, FabricProfile::Fast).unwrap();
        let compute = cluster::join_manual(&fabric, seed).unwrap();
        let worker = bounded::worker(&compute).unwrap();
        let structure = bounded::block_on(&worker, async {
            let tree = Map::<S, _>::make(&worker, TREE, S::page_bytes(256), Proof::Checksum).await?;
            S::load(&tree, (0..KEYS).map(|key| (key, key)), 0.5).await?;
            Ok::<_, Error>(tree.structure().clone())
        });
        let structure = structure.unwrap();
        let pages = raw::pages_of(&fabric, structure.id, structure.class);
        assert!(pages.len() > 50, "only {} pages", pages.len());
        let direct = Direct::new(&fabric, 0).unwrap();
        let level = |at: &RemotePtr| {
            let words = direct.read(*at, structure.class.words()).unwrap();
            Identity::from_word(words[IDENTITY]).map(|id| id.level)
        };
        let inner = pages.iter().copied().filter(|at| level(at) > Some(0)).collect();
        Self {
            worker,
            compute,
            direct,
            _fabric: fabric,
            class: structure.class,
            root: structure.root,
            pages,
            inner,
            of: PhantomData,
        }
    }

    /// The word that does this harm in the page `at`.
    fn word(&self, evil: &Evil, at: RemotePtr) -> u64 {
        // Not all of these places are of pages.
        let link = |at: RemotePtr| at.raw() | self.class.index() as u64;
        match *evil {
            Evil::Any(word) => word,
            Evil::Small(word) => word,
            Evil::Large(below) => u64::MAX - below,
            Evil::Page(page) => link(*page.get(&self.pages)),
            Evil::Root => link(self.root),
            Evil::Itself => link(at),
            Evil::Askew(page, bytes) => page.get(&self.pages).raw() + bytes,
            Evil::Unused(page) => link(self.root) | 0xff00 | page << 8,
            Evil::Swizzled(word) => word | 1 << 63,
            Evil::OutOfRegion(word) => SERVER_BYTES + (word & 0xffff_ffff_ff00),
            Evil::NoSuchServer(word) => (word & !(1 << 63)) | 0x0002 << 48,
            Evil::Copied(page, word) => {
                let page = self.direct.read(*page.get(&self.pages), self.class.words()).unwrap();
                *word.get(&page)
            }
        }
    }

    /// Does it, and returns a key whose way leads there, if there is one.
    pub(crate) fn do_harm(&self, damage: &Damage) -> Option<u64> {
        match damage {
            Damage::Link { page, slot, to } => {
                let at = *page.get(&self.inner);
                let mut image = self.direct.read(at, self.class.words()).unwrap();
                if S::WHICH == StructureName::SkipList {
                    image[NODE_RIGHT + slot.index(2)] = self.word(to, at);
                    let key = image[NODE_LOW];
                    self.put(at, image, true);
                    return Some(key);
                }
                let slot = slot.index(raw::capacity(image.len())).min((image[raw::META] & 0xff) as usize);
                image[raw::KEYS + raw::capacity(self.class.words()) + slot] = self.word(to, at);
                let key = image[raw::KEYS + slot];
                self.put(at, image, true);
                return Some(key);
            }
            Damage::Page { page, words, sealed } => self.overwrite(*page.get(&self.pages), self.class, words, *sealed),
            Damage::Double { page, of } => {
                let at = *page.get(&self.pages);
                let mut image = self.direct.read(*of.get(&self.pages), self.class.words()).unwrap();
                image[page::SELF] = at.raw();
                self.put(at, image, true);
            }
            Damage::Garbage { page, seed } => {
                let image = (0..self.class.words() as u64).map(|index| page::binding(seed ^ index)).collect();
                self.put(*page.get(&self.pages), image, false);
            }
            Damage::Catalog { page, words, sealed } => {
                let class = SizeClass::of_bytes(128).unwrap();
                self.overwrite(at(0, CATALOG + *page as u64 * 128), class, words, *sealed);
            }
            Damage::Changing { server, line, word } => {
                let at = at(server.index(SERVERS), CHANGING_WORDS + line * 64);
                self.direct.write(at, &[self.word(word, at)]).unwrap();
            }
            Damage::Metadata { server, word, evil } => {
                let words = (METADATA_END - SLOTS) / 8;
                let at = at(server.index(SERVERS), SLOTS + word.index(words as usize) as u64 * 8);
                self.direct.write(at, &[self.word(evil, at)]).unwrap();
            }
        }
        None
    }

    fn overwrite(&self, at: RemotePtr, class: SizeClass, words: &[(Index, Evil)], sealed: bool) {
        let mut image = self.direct.read(at, class.words()).unwrap();
        for (index, evil) in words {
            let word = self.word(evil, at);
            match index.index(class.words()) {
                // Of the identity only the level, so that the page still passes for one of the structure's.
                IDENTITY if sealed => image[IDENTITY] = image[IDENTITY] & !(0xff << 24) | (word & 0xff) << 24,
                LOCK..=IDENTITY if sealed => image[raw::META] = word,
                index => image[index] = word,
            }
        }
        self.put(at, image, sealed);
    }

    pub(crate) fn put(&self, at: RemotePtr, mut image: Vec<u64>, sealed: bool) {
        let lock = LockWord::from_word(image[LOCK]);
        if sealed {
            image[LOCK] = LockWord::unlocked(lock.version()).word();
            image[CHECKSUM] = page::checksum(&image, lock.version());
        } else if lock.state() == LockState::LockedBy(self.compute.owner()) {
            image[LOCK] = LockWord::free(lock.version(), None).word();
        }
        self.direct.write(at, &image).unwrap();
    }

    /// Runs one operation; how it ends does not matter, but that it does.
    pub(crate) fn ends<T: 'static>(
        &self,
        what: &str,
        operation: impl AsyncFnOnce(Handle) -> Result<T, Error> + 'static,
    ) -> Result<(), TestCaseError> {
        let handle = Handle::clone(&self.worker);
        match bounded::run(&self.worker, ENDLESS, operation(handle)) {
            Ok(_) => Ok(()),
            Err(endless) => Err(TestCaseError::fail(format!("{what}: {endless}"))),
        }
    }

    fn on_tree<A: Access<Plugin = S> + Clone + 'static, T: 'static>(
        &self,
        what: &str,
        tree: &Map<S, A>,
        operation: impl AsyncFnOnce(&Map<S, A>) -> Result<T, Error> + 'static,
    ) -> Result<(), TestCaseError> {
        let tree = tree.clone();
        self.ends(what, async move |_| operation(&tree).await)
    }

    pub(crate) fn all_operations<A: Access<Plugin = S> + Clone + 'static>(
        &self,
        tree: &Map<S, A>,
        keys: &[u64],
    ) -> Result<(), TestCaseError> {
        for &key in keys {
            self.on_tree("get", tree, async move |tree| tree.get(key).await)?;
            self.on_tree("insert", tree, async move |tree| tree.insert(key, 1).await)?;
            self.on_tree("upsert", tree, async move |tree| tree.upsert(key, 2).await)?;
            self.on_tree("update", tree, async move |tree| tree.update(key, 3).await)?;
            self.on_tree("scan", tree, async move |tree| tree.scan(key, 50).await)?;
            self.on_tree("descending", tree, async move |tree| tree.range(..=key).descending().take(50).await)?;
            self.on_tree("remove", tree, async move |tree| tree.remove(key).await)?;
        }
        self.on_tree("scan of all", tree, async |tree| tree.scan(0, usize::MAX).await)?;
        self.on_tree("descending over all", tree, async |tree| tree.range(..).descending().take(usize::MAX).await)?;
        self.on_tree("len", tree, async |tree| tree.len().await)?;
        self.on_tree("is_empty", tree, async |tree| tree.is_empty().await)?;
        self.on_tree("bulk load", tree, async |tree| S::load(tree, (0..50).map(|key| (key, key)), 0.9).await)
    }

    pub(crate) fn check(&self, tree: &Map<S, OneSided<S>>) -> Result<(), TestCaseError> {
        self.on_tree("check", tree, async |tree| tree.check().await)
    }

    pub(crate) fn all_on_catalog(&self) -> Result<(), TestCaseError> {
        self.ends("list", async |worker| catalog::list(&worker).await)?;
        self.ends("open", async |worker| catalog::open::<S>(&worker, TREE).await)?;
        self.ends("open and get", async |worker| {
            Map::<S, OneSided<S>>::open(&worker, TREE, Proof::Checksum).await?.get(7).await
        })?;
        self.ends("create and load", async move |worker| {
            let tree = Map::<S, _>::make(&worker, "another", S::page_bytes(256), Proof::Checksum).await?;
            S::load(&tree, (0..KEYS).map(|key| (key, key)), 0.5).await?;
            tree.remove(7).await?;
            tree.check().await
        })?;
        self.ends("memory", async |worker| farlink_runtime::audit::memory(&worker).await)?;
        self.ends("destroy", async |worker| {
            let all = catalog::list(&worker).await?;
            let Some(first) = all.first() else { return Ok(0) };
            catalog::destroy(&worker, &first.name).await
        })
    }

    pub(crate) fn maintain(&self) -> Result<(), TestCaseError> {
        let reads = self.worker.counters().reads;
        for _ in 0..4 {
            let _ = bounded::block_on(&self.worker, self.compute.maintain(&self.worker));
        }
        // Where a slot names somebody who is dead, all pages are looked through.
        prop_assert!(self.worker.counters().reads - reads < 100_000, "maintenance reads on and on");
        Ok(())
    }
}

impl<S: Subject> Drop for SceneOf<S> {
    /// Leaving waits for the grace of retired pages: bring on the end of time, which no damaged epoch comes after.
    fn drop(&mut self) {
        for slot in 0..256 {
            self.direct.write(at(0, SLOTS + slot * 16), &[0, 0]).unwrap();
        }
        self.direct.write(at(0, EPOCH), &[u64::MAX - 8]).unwrap();
    }
}

pub(crate) fn at(server: usize, offset: u64) -> RemotePtr {
    RemotePtr::new(ServerId::new(server as u16).unwrap(), offset).unwrap()
}
