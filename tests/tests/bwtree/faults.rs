//! The Bw-tree where requests fail.

use std::{
    sync::Arc,
    task::{Context as TaskContext, Waker},
};

use farlink_runtime::{
    access::{Access, Link, WordPtr},
    fabric::{
        Fabric,
        faulty::{FaultKinds, FaultOptions, FaultyFabric},
    },
    page::HEADER_WORDS,
};
use farlink_structures::bwtree::record::MapWord;
use farlink_tests::{bounded, cluster};

use crate::{Scene, open};

/// A page of the mapping table is whole before anything leads to it. Whatever becomes of the requests that make it, what others put
/// there as soon as they see it stays.
#[test]
fn a_page_of_mapping_words_is_written_before_anything_leads_to_it() {
    let mut put = 0;
    for seed in 0..8 {
        let scene = Scene::new();
        let kinds = FaultKinds { refused: false, done: true, lost: false };
        let options =
            FaultOptions { kinds, registrations_one_in: 0, connections_one_in: 0, ..FaultOptions::one_in(3, seed) };
        let faulty: Arc<dyn Fabric> = Arc::new(FaultyFabric::new(scene.fabric.clone(), options));
        let compute = cluster::again(|| cluster::join_manual(&faulty, 2)).unwrap();
        let (worker, (other, other_compute)) = (compute.worker().unwrap(), scene.join(3));
        let theirs = other.block_on(open(&other)).unwrap();
        let handle = (*worker).clone();
        let mut growing = Box::pin(worker.spawn(async move {
            let tree = open(&handle).await?;
            for key in 0..40 {
                // What became of one whose answer is lost matters to nobody here.
                let _ = tree.insert(key, key).await;
            }
            Ok::<_, farlink_runtime::error::Error>(())
        }));
        let directory = theirs.structure().root_link();
        let mut seen: Vec<WordPtr> = Vec::new();
        while growing.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())).is_pending() {
            bounded::turn(&worker);
            other.block_on(async {
                let access = theirs.access();
                let next = WordPtr { page: directory, index: HEADER_WORDS + 1 + seen.len() };
                let page = Link::from_word(access.load(&[next]).await.unwrap()[0]);
                let Some((at, class)) = page.remote() else { return };
                let word = WordPtr { page, index: class.words() - 1 };
                // As somebody does who takes this place, and gives it up.
                let found = other.compare_swap(at.word(word.index), 0, MapWord::not_mapped(1, 7).0).await.unwrap();
                assert_eq!(found, 0, "seed {seed}: the page leads to something before anybody has put it there");
                seen.push(word);
            });
        }
        let words = other.block_on(theirs.access().load(&seen)).unwrap();
        assert!(!words.contains(&0), "seed {seed}: what was put into a page of the table is gone");
        put += words.len();
        std::mem::forget((worker, compute, other, other_compute));
    }
    println!("{put} pages");
    assert!(put >= 8, "{put} pages");
}
