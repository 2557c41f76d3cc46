//! Several tasks renew one cached inner page.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use farlink_offload::Admission;
use farlink_runtime::{
    access::{Access, PageRef, Start},
    one_sided::Proof,
    page::LOCK,
};
use farlink_tests::backend::FabricProfile;

use crate::scene::{CACHE_BYTES_ALL, Member, cache, fabric, sparse};

/// One has read the page before it changed, and comes to put it into the cache when another one has put the newer page there.
#[test]
fn an_older_image_does_not_replace_a_newer_one() {
    let model = sparse(2000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 1.0);
    let [me, other] = [1, 2].map(|seed| Member::join(&fabric, seed));
    let colleague = me.colleague();
    let cache = cache(CACHE_BYTES_ALL, Admission::Always);
    let [first, second] = [&me, &colleague].map(|member| member.share(&cache, Proof::Checksum));
    let root = me.tree.structure().root_link();
    let lock_of = |words: &[u64]| words[LOCK];
    let stored = || {
        let page = other.worker.block_on(other.tree.access().read_page(root)).unwrap();
        page.read(lock_of).unwrap()
    };
    me.worker.block_on(first.get(0)).unwrap();
    let before = stored();
    let mut renewing = pin!(me.worker.drive(first.access().open(Start::Anew)));
    let mut turn = || renewing.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    // The READ is made, and nobody has looked at what it has brought.
    assert!(turn().is_pending(), "it was at once there");
    let mut keys = (1..20_000).filter(|key| key % 10 != 0);
    while stored() == before {
        let key = keys.next().expect("the root changes before that");
        other.worker.block_on(other.tree.insert(key, key)).unwrap();
    }
    let newer = colleague.worker.block_on(second.access().open(Start::Anew)).unwrap().read(lock_of).unwrap();
    assert_eq!(newer, stored());
    let older = loop {
        if let Poll::Ready(page) = turn() {
            break page.unwrap().read(lock_of).unwrap();
        }
    };
    assert_eq!(older, before, "the READ was made later");
    let cached = colleague.worker.block_on(second.access().open(Start::Root)).unwrap();
    assert_eq!(cached.read(lock_of).unwrap(), newer, "the older page has replaced the newer one");
}
