//! What every way to reach pages promises to a structure's code, beyond what the structures at hand make use of.

use std::sync::Arc;

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    compute::ComputeServer,
    error::Error,
    fabric::{
        Fabric,
        mem::{MemFabric, MemOptions},
    },
    one_sided::{OneSided, Proof},
    page::HEADER_WORDS,
    ptr::{Link, RemotePtr, ServerId},
    server::LocalMemory,
    structure::{Layout, Structure},
    words::Words,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeLayout, BTreeOptions, Tree},
    map::KeyRange,
};
use farlink_tests::cluster::{self, FAST, WEAK};

const TREE: &str = "access";
const PAGE_BYTES: usize = 1024;
const KEYS: u64 = 200;

/// A tree of two levels, and a worker beside it.
struct Scene {
    worker: Worker,
    _compute: ComputeServer,
    memory: LocalMemory,
    structure: Structure,
}

impl Scene {
    fn new(options: MemOptions) -> Self {
        let memory = Arc::new(MemFabric::in_process(1, 4 << 20, options).unwrap());
        let fabric: Arc<dyn Fabric> = memory.clone();
        let tree = BTreeOptions { page_bytes: PAGE_BYTES, ..BTreeOptions::default() };
        cluster::create_tree(&fabric, TREE, tree).unwrap();
        cluster::load::<Tree>(&fabric, TREE, (0..KEYS).map(|key| (key, key)), 0.7).unwrap();
        let compute = cluster::join(&fabric, 1).unwrap();
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(BTree::<OneSided>::open(&worker, TREE, Proof::Checksum)).unwrap();
        let structure = tree.structure().clone();
        let memory = memory.memory(ServerId::new(0).unwrap()).unwrap();
        Self { worker, _compute: compute, memory, structure }
    }

    fn one_sided(&self, proof: Proof) -> OneSided {
        OneSided::new(&self.worker, self.structure.clone(), proof)
    }

    fn cache(&self) -> ComputeCache<BTreeLayout> {
        let mut options = CacheOptions::new(1 << 20);
        options.page_bytes = PAGE_BYTES;
        ComputeCache::new(BTreeLayout, options).unwrap()
    }
}

/// Runs `test` with each access to the tree that can change it from here.
macro_rules! with_each_access {
    ($test:ident) => {
        for options in [FAST, WEAK] {
            let scene = Scene::new(options);
            $test(&scene, &scene.one_sided(Proof::Checksum));
            let scene = Scene::new(options);
            $test(&scene, &scene.one_sided(Proof::LockBodyLock));
            let scene = Scene::new(options);
            $test(&scene, &OneSided::within(&scene.worker, scene.structure.clone(), scene.memory.clone()));
            let scene = Scene::new(options);
            let shared = scene.cache().share(&scene.worker, scene.structure.clone(), Proof::Checksum).unwrap();
            $test(&scene, &shared);
            let scene = Scene::new(options);
            let owned = scene.cache().own(&scene.worker, scene.structure.clone(), KeyRange::ALL).unwrap();
            $test(&scene, &owned);
        }
    };
}

async fn children<A: Access>(access: &A, root: &A::Page<'_>) -> Result<Vec<Link>, Interrupt> {
    assert_eq!(root.level(), 1);
    let _ = access;
    root.read(|words| BTreeLayout.links(words).map(|index| Link::from_word(words.word(index))).collect())
}

#[test]
fn links_that_are_followed_together_have_a_result_each() {
    fn test<A: Access>(scene: &Scene, access: &A) {
        let outcome: Result<(), Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let root = access.enter(Start::Root).await?;
            let links = children(access, &root).await?;
            let outside = RemotePtr::new(ServerId::new(0).unwrap(), (4 << 20) - 8).unwrap();
            let mixed = [links[0], Link::from_word(0), links[1], outside.into(), links[2]];
            let pages = access.follow_many(&root, &mixed).await;
            assert_eq!(pages.len(), mixed.len());
            for (index, page) in pages.iter().enumerate() {
                assert_eq!(page.is_ok(), index % 2 == 0, "link {index}: {:?}", page.as_ref().map(PageRef::at));
            }
            for (link, page) in mixed.iter().zip(&pages).step_by(2) {
                assert!(page.as_ref().is_ok_and(|page| access.leads_to(*link, page)));
            }
            Ok(())
        });
        outcome.unwrap();
    }
    with_each_access!(test);
}

/// A change that sets nothing still says that its pages were so at one moment.
#[test]
fn a_change_without_effect_is_one_of_pages_as_they_are() {
    fn test<A: Access>(scene: &Scene, access: &A) {
        let outcome: Result<(), Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            for changes_between in [false, true] {
                let root = access.enter(Start::Root).await?;
                let links = children(access, &root).await?;
                let [left, again, right] = [
                    access.follow(&root, links[0]).await?,
                    access.follow(&root, links[0]).await?,
                    access.follow(&root, links[1]).await?,
                ];
                if changes_between {
                    // A value of the first leaf, which has no meaning to the framework.
                    let last = PAGE_BYTES / 8 - 1;
                    access.change(vec![again], vec![], |views| views.set(0, last, 7)).await?;
                }
                let read = |views: &mut A::Views<'_>| views.word(0, HEADER_WORDS) + views.word(1, HEADER_WORDS);
                let seen = access.change(vec![left, right], vec![], read).await;
                assert_eq!(seen.is_ok(), !changes_between);
                assert!(matches!(seen, Ok(_) | Err(Interrupt::Restart(_))));
            }
            Ok(())
        });
        outcome.unwrap();
    }
    with_each_access!(test);
}

#[test]
fn a_page_that_was_freed_is_freed_once() {
    fn test<A: Access>(scene: &Scene, access: &A) {
        let leaf: Result<RemotePtr, Interrupt> = scene.worker.block_on(async {
            let _pin = scene.worker.pin();
            let root = access.enter(Start::Root).await?;
            let links = children(access, &root).await?;
            Ok(access.follow(&root, links[0]).await?.at())
        });
        let leaf = leaf.unwrap();
        let free = || scene.worker.block_on(farlink_runtime::access::free(access, leaf));
        free().unwrap();
        let again = free().unwrap_err();
        assert!(matches!(again, Interrupt::Restart(_) | Interrupt::Failed(_)), "{again}");
        let one_sided = scene.one_sided(Proof::Checksum);
        let class = scene.structure.class;
        let read = scene.worker.block_on(one_sided.read_page(leaf, class));
        assert!(matches!(read, Err(Interrupt::Restart(_))), "{read:?}");
    }
    with_each_access!(test);
}

#[test]
fn a_bad_request_is_never_tried_again() {
    let scene = Scene::new(FAST);
    let nowhere = RemotePtr::new(ServerId::new(7).unwrap(), 4096).unwrap();
    let outcome = scene.worker.block_on(scene.worker.read(nowhere, 1));
    assert!(matches!(outcome.map_err(|error| *error), Err(Error::BadAddress { .. })));
}
