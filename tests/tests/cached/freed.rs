//! What an owner frees is a page of its chunk.

use std::sync::atomic::Ordering;

use farlink_offload::{Admission, Cached};
use farlink_runtime::{
    access::{Access, Hint, Interrupt, Link, PageRef, Pages, PagesMut, Plugin, Start},
    error::Error,
    page::SizeClass,
    ptr::RemotePtr,
};
use farlink_structures::{btree::Tree, map::KeyRange};
use farlink_tests::backend::FabricProfile;

use crate::scene::{CACHE_BYTES_ALL, Map, Member, assert_left_clean, cache, fabric, settle, sparse};

/// Where the chunk directory stands, as the module `layout` documents it: two words a chunk.
const DIRECTORY_AT: u64 = 22 << 10;

/// Has the chunks that have pages of one class say that they have pages of another one; what they have said.
fn misname(member: &Member, from: SizeClass, to: SizeClass) -> Vec<(RemotePtr, u64)> {
    let mut said = Vec::new();
    for geometry in member.compute.geometry() {
        for chunk in 0..geometry.chunks {
            let entry = RemotePtr::new(geometry.server, DIRECTORY_AT + chunk * 16).unwrap();
            let state = member.worker.block_on(member.worker.load(entry)).unwrap();
            if state & 0xff == from.index() as u64 + 1 {
                said.push((entry, state));
                let state = state & !0xff | (to.index() as u64 + 1);
                member.worker.block_on(member.worker.write_word(entry, state)).unwrap();
            }
        }
    }
    said
}

/// Frees the first leaf, whatever leads to it.
async fn free_first_leaf(tree: &Cached<Tree>) -> Result<(), Interrupt> {
    let mut page = tree.open(Start::Root).await?;
    while page.level() > 0 {
        let word = page.read(|words| Tree::links(words).next().map(|index| words[index].load(Ordering::Relaxed)))?;
        let link = Link::from_word(word.expect("an inner page has a link"));
        page = tree.follow(&page, link, Hint::DOWN).await?;
    }
    let mut pages = Pages::new();
    let leaf = pages.add(page);
    tree.change(pages, |pages| pages.free(leaf)).await.map(drop)
}

/// What seems to lie inside other pages is not freed: a change that would is refused before anything of it is there, removals leave
/// their pages as they are, and the owner goes on.
#[test]
fn what_is_no_page_of_its_chunk_is_not_freed() {
    let model = sparse(500);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let tree = owner.own(&cache(CACHE_BYTES_ALL, Admission::Always), KeyRange::ALL);
    let [small, large] = [256, 4096].map(|bytes| SizeClass::of_bytes(bytes).unwrap());
    let said = misname(&owner, small, large);
    let refused = owner.worker.block_on(free_first_leaf(tree.access()));
    let is_refused = |error: &Error| matches!(error, Error::BadPointer { .. });
    assert!(matches!(&refused, Err(Interrupt::Failed(error)) if is_refused(error)), "{refused:?}");
    for (&key, &value) in &model {
        assert_eq!(owner.worker.block_on(tree.remove(key)).unwrap(), Some(value), "{key}");
    }
    assert_eq!(owner.worker.counters().merges, 0, "pages were freed that are none");
    for (entry, state) in said {
        owner.worker.block_on(owner.worker.write_word(entry, state)).unwrap();
    }
    // Its log says nothing that could not be done.
    owner.worker.block_on(tree.access().close()).unwrap();
    drop(tree);
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &Map::new(), "after removals that freed nothing");
}
