//! Operations that are shipped whole: where their pages are.

use std::time::Duration;

use farlink_offload::{Adaptive, Policies, policy::Always};
use farlink_runtime::{
    access::{Link, PageRef, Plugin},
    error::Error,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    structure::PlacementPolicy,
    worker::Worker,
};
use farlink_structures::btree::{BTree, BTreeOptions, Tree};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST},
    fleet::Fleet,
};

const KEYS: u64 = 3000;

fn always(worker: &Worker, tree: &BTree<OneSided<Tree>>) -> BTree<Adaptive<OneSided<Tree>>> {
    let structure = tree.structure().clone();
    let here = OneSided::new(worker, structure.clone(), Proof::Checksum);
    BTree::over(Adaptive::new(here, worker, structure, Policies::new(Always)))
}

/// How many leaves are on each of three memory servers.
async fn leaves_by_server(tree: &BTree<OneSided<Tree>>) -> Result<[usize; 3], Error> {
    let (mut to_visit, mut leaves) = (vec![tree.structure().root_link()], [0; 3]);
    while let Some(link) = to_visit.pop() {
        let page = tree.access().read_page(link).await.expect("nobody changes it");
        if page.level() == 0 {
            leaves[page.at().server().index()] += 1;
            continue;
        }
        let words = page.into_words();
        to_visit.extend(Tree::links(&*words).map(|slot| Link::from_word(words[slot])));
    }
    Ok(leaves)
}

/// New pages are where the structure's pages belong, whoever makes them.
#[test]
fn a_memory_server_places_pages_as_the_structure_says() {
    let _watch = Watchdog::start("placed", Duration::from_secs(120));
    let fleet = Fleet::start(3, 8 << 20, 1, FAST).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    let made = async |name, placement| {
        let options = BTreeOptions { page_bytes: 256, placement, root: ServerId::new(1), ..BTreeOptions::default() };
        let tree = BTree::create(&worker, name, options).await?;
        let shipped = always(&worker, &tree);
        for key in 0..KEYS {
            shipped.insert(key, key).await?;
        }
        assert_eq!(shipped.access().counts().shipped, KEYS);
        let report = tree.check().await?;
        assert!(report.is_clean() && report.entries == KEYS, "{report:?}");
        leaves_by_server(&tree).await
    };
    worker
        .block_on(async {
            let spread = made("spread", PlacementPolicy::RoundRobin).await?;
            let all: usize = spread.iter().sum();
            assert!(spread.iter().all(|&leaves| leaves > all / 6), "{spread:?}");
            let one = made("one", PlacementPolicy::OneServer).await?;
            assert!(one[1] > 100 && one[0] + one[2] == 0, "{one:?}");
            Ok::<_, Error>(())
        })
        .unwrap();
}
