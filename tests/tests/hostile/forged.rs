//! Sound pages of a B+-tree in places where they do not belong.

use farlink_offload::Admission;
use farlink_runtime::{
    access::Access,
    error::Error,
    one_sided::{OneSided, Proof},
    page::{IDENTITY, Identity, LOCK, SELF, SizeClass},
    pages::allocate,
    ptr::{Link, RemotePtr},
    structure::Placement,
};
use farlink_structures::{
    btree::Tree,
    map::{KeyRange, Map},
};
use farlink_tests::{bounded, raw};

use crate::{
    cached::cache_of,
    damage::{KEYS, Scene, TREE},
};

type Opened = Map<Tree, OneSided<Tree>>;

fn open(scene: &Scene) -> Opened {
    bounded::block_on(&scene.worker, Opened::open(&scene.worker, TREE, Proof::Checksum)).unwrap()
}

/// The last page of level 1 that has so many children, its words, and where its links begin.
fn above_leaves(scene: &Scene, children: usize) -> (RemotePtr, Vec<u64>, usize) {
    let words = scene.class.words();
    let pages = scene.inner.iter().map(|&at| (at, scene.direct.read(at, words).unwrap()));
    let is_wanted = |image: &[u64]| {
        let level = Identity::from_word(image[IDENTITY]).map(|identity| identity.level);
        level == Some(1) && (image[raw::META] & 0xff) as usize >= children
    };
    let (at, image) = pages.filter(|(_, image)| is_wanted(image)).max_by_key(|(_, image)| image[raw::LOW]).unwrap();
    (at, image, raw::KEYS + raw::capacity(words))
}

#[test]
fn a_scan_does_not_go_on_from_a_leaf_far_to_the_left() {
    let scene = Scene::new(1);
    let map = open(&scene);
    let (above, mut image, links) = above_leaves(&scene, 4);
    let from = image[raw::KEYS];
    let sound = bounded::block_on(&scene.worker, map.scan(from, 30)).unwrap();
    assert_eq!(sound.first(), Some(&(from, from)));
    // As where a leaf was freed, and its page has come back there.
    let first = bounded::block_on(&scene.worker, raw::leaf_of(map.access(), 0)).unwrap();
    image[links + 1] = Link::to(first, scene.class).word();
    scene.put(above, image, true);
    let before = scene.worker.counters();
    assert_eq!(bounded::block_on(&scene.worker, map.scan(from, 30)).unwrap(), sound);
    let reads = (scene.worker.counters() - before).reads;
    assert!(reads < 20, "{reads} READs");
}

#[test]
fn a_page_of_another_size_is_read_and_not_rewritten() {
    for (bytes, count) in [(512, 28), (128, 4)] {
        let scene = Scene::new(1);
        let map = open(&scene);
        let (above, mut image, links) = above_leaves(&scene, 3);
        let class = SizeClass::of_bytes(bytes).unwrap();
        let forged = bounded::block_on(&scene.worker, allocate(&scene.worker, class, Placement::RoundRobin)).unwrap();
        let at = forged.at();
        let leaf = Link::from_word(image[links + 1]).remote().unwrap().0;
        let leaf = scene.direct.read(leaf, scene.class.words()).unwrap();
        let identity = Identity { class, ..Identity::from_word(leaf[IDENTITY]).unwrap() };
        let mut page = vec![0; class.words()];
        page[..raw::KEYS].copy_from_slice(&leaf[..raw::KEYS]);
        (page[SELF], page[IDENTITY]) = (at.raw(), identity.word());
        page[LOCK] = leaf[LOCK];
        page[raw::META] = leaf[raw::META] & !0xff | count;
        let keys = (leaf[raw::LOW]..).take(count as usize);
        let values = raw::KEYS + raw::capacity(page.len());
        for (index, key) in keys.enumerate() {
            (page[raw::KEYS + index], page[values + index]) = (key, key);
        }
        scene.put(at, page, true);
        image[links + 1] = Link::to(at, class).word();
        let (low, left) = (leaf[raw::LOW], image[raw::KEYS]);
        scene.put(above, image, true);
        let get = bounded::block_on(&scene.worker, map.get(low)).unwrap();
        assert_eq!(get, Some(low));
        // Fills it until it would split; then empties both neighbours until they would merge.
        scene
            .ends("inserts", {
                let map = map.clone();
                async move |_| {
                    for key in low..low + 2 * count {
                        let _ = map.upsert(key, key).await;
                    }
                    for key in (left..low).chain(low..low + 2 * count) {
                        let _ = map.remove(key).await;
                    }
                    Ok(())
                }
            })
            .unwrap();
        let report = bounded::block_on(&scene.worker, map.check()).unwrap();
        assert!(
            report.problems.iter().any(|problem| problem.to_string().contains("is not of 256 bytes")),
            "{report:?}"
        );
    }
}

/// A leaf that names another one's address would have that one changed in its stead.
#[test]
fn a_leaf_that_names_the_address_of_another_harms_neither() {
    for is_owned in [false, true] {
        let scene = Scene::new(1);
        let map = open(&scene);
        let leaf = |key| bounded::block_on(&scene.worker, raw::leaf_of(map.access(), key)).unwrap();
        let (forged, other) = (leaf(KEYS / 2), leaf(0));
        let words = |at| scene.direct.read(at, scene.class.words()).unwrap();
        let mut image = words(forged);
        // The other one's lock could be had.
        (image[SELF], image[LOCK]) = (other.raw(), words(other)[LOCK]);
        scene.put(forged, image, true);
        let before = [other, forged].map(words);
        let refused = match is_owned {
            false => remove_and_get(&scene, &map),
            true => {
                let cache = cache_of::<Tree>(Admission::Always);
                let owned = cache.own(&scene.worker, map.structure().clone(), KeyRange::ALL);
                let owned = Map::over(bounded::block_on(&scene.worker, owned).unwrap());
                let refused = remove_and_get(&scene, &owned);
                bounded::block_on(&scene.worker, owned.access().flush()).unwrap();
                refused
            }
        };
        for outcome in refused {
            assert!(matches!(outcome, Err(Error::Inconsistent { page, .. }) if page == forged), "{outcome:?}");
        }
        assert_eq!([other, forged].map(words), before);
    }
}

fn remove_and_get<A: Access<Plugin = Tree>>(scene: &Scene, map: &Map<Tree, A>) -> [Result<Option<u64>, Error>; 2] {
    let removed = bounded::block_on(&scene.worker, map.remove(KEYS / 2));
    [removed, bounded::block_on(&scene.worker, map.get(KEYS / 2))]
}
