//! Who reads what somebody owns, or comes to own: refused, or read anew.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use farlink_runtime::{
    error::Error,
    one_sided::{OneSided, Proof, ownership},
};
use farlink_structures::{
    btree::{BTree, KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::backend::FabricProfile;

use crate::{
    ownership::{is_owned_by, new_cache, scene},
    scene::{assert_left_clean, settle},
};

#[test]
fn nobody_owns_what_another_reads_one_sided() {
    let (fabric, members, model) = scene(FabricProfile::Fast);
    let [reader, other] = &members;
    let plain = reader.plain();
    let inner = new_cache().share(&reader.worker, plain.structure().clone(), Proof::Checksum).unwrap();
    reader.worker.block_on(async {
        assert_eq!(plain.clone().beside_owners().get(10).await.unwrap(), Some(1));
        assert_eq!(BTree::over(inner.clone().beside_owners()).get(10).await.unwrap(), Some(1));
        let owned = other.try_own(&new_cache(), KeyRange::ALL).unwrap();
        assert_eq!(BTree::over(inner.clone().beside_owners()).get(10).await.unwrap(), Some(1));
        is_owned_by(BTree::over(inner).get(10).await, other);
        is_owned_by(plain.get(10).await, other);
        drop(owned);
        other.maintain();
        assert_eq!(plain.get(10).await.unwrap(), Some(1));
    });
    let named = |error: &Error| matches!(error, Error::HasUser { user, .. } if *user == reader.compute.owner());
    let refused = other.try_own(&new_cache(), KeyRange { low: 5000, high: None });
    assert!(refused.as_ref().is_err_and(named), "{refused:?}");
    // Once is enough, for all its handles.
    let before = reader.worker.counters();
    assert_eq!(reader.worker.block_on(reader.plain().get(9000)).unwrap(), Some(900));
    let did = reader.worker.counters() - before;
    assert_eq!((did.writes, did.atomics), (0, 0), "{did:?}");
    drop(plain);
    reader.maintain();
    let tree = other.try_own(&new_cache(), KeyRange::ALL).unwrap();
    is_owned_by(reader.worker.block_on(reader.plain().get(10)), other);
    settle(&members);
    drop((tree, members));
    assert_left_clean(&fabric, &model, "a reader");
}

/// Once the map names its own compute server as an owner, others may be granted what they then change.
#[test]
fn nobody_reads_what_the_map_says_is_owned() {
    let (fabric, [member, other], model) = scene(FabricProfile::Fast);
    let colleague = member.colleague();
    let (plain, cache, structure) = (colleague.plain(), new_cache(), member.tree.structure());
    colleague.worker.block_on(plain.get(20)).unwrap();
    let mut claiming = Box::pin(cache.own(&member.worker, structure.clone(), KeyRange::ALL));
    // While the map is locked it is not to be had.
    let is_owned = || {
        let mut looking = pin!(other.worker.drive(ownership::read(&other.worker, structure)));
        let map = (0..100).find_map(|_| match looking.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(map) => Some(map.unwrap()),
            Poll::Pending => None,
        });
        map.is_some_and(|map| map.owners().next().is_some())
    };
    while !is_owned() {
        assert!(
            claiming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(),
            "the map does not say it"
        );
        member.worker.turn();
    }
    // The claim does not know yet that it stands there.
    let mut reading = Box::pin(plain.get(10));
    for _ in 0..1000 {
        let answer = reading.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(answer.is_pending(), "{answer:?}, and it is owned");
        colleague.worker.turn();
    }
    let owned = member.worker.block_on(claiming).unwrap();
    is_owned_by(colleague.worker.block_on(reading), &member);
    drop((owned, cache, plain));
    settle([&member, &other, &colleague]);
    drop((member, other, colleague));
    assert_left_clean(&fabric, &model, "a claim that rests");
}

/// Its own compute server becomes the owner of what somebody reads, or finds nothing to change in: the answer is no older than what the owner
/// has answered.
#[test]
fn what_is_read_as_an_owner_comes_is_read_anew() {
    const ABSENT: u64 = 15;
    let (fabric, [member, other], mut model) = scene(FabricProfile::Fast);
    let act = async |tree: &Ordered<Tree, OneSided<Tree>>, what| match what {
        "get" => tree.get(10).await,
        _ => tree.update(ABSENT, 1).await,
    };
    let mut next = 100;
    // While the owner is there, once it has given up, and once another operation has had the right again; wherever the first one rests.
    for (what, goes_on) in ["get", "update"].into_iter().flat_map(|what| ENDS.map(|goes_on| (what, goes_on))) {
        for rest in 1.. {
            let plain = member.plain();
            member.worker.block_on(plain.get(20)).unwrap();
            let mut acting = pin!(act(&plain, what));
            let mut is_over = || {
                let is_over = acting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
                member.worker.turn();
                is_over
            };
            if (0..rest).any(|_| is_over()) {
                assert!(rest > 2, "it rests at each page");
                break;
            }
            next += 1;
            let tree = member.try_own(&new_cache(), KeyRange::ALL).unwrap();
            member.worker.block_on(tree.update(10, next)).unwrap();
            member.worker.block_on(tree.upsert(ABSENT, next)).unwrap();
            model.insert(10, next);
            if goes_on != "owned" {
                member.worker.block_on(tree.access().close()).unwrap();
            }
            if goes_on == "used again" {
                member.worker.block_on(plain.get(30)).unwrap();
            }
            let answer = member.worker.block_on(acting);
            match goes_on {
                "owned" => is_owned_by(answer, &member),
                _ => assert_eq!(answer.unwrap(), Some(next), "{what}, {goes_on}, {rest}"),
            }
            member.worker.block_on(tree.access().close()).unwrap();
            member.worker.block_on(plain.remove(ABSENT)).unwrap();
        }
    }
    settle([&member, &other]);
    drop((member, other));
    assert_left_clean(&fabric, &model, "read anew");
}

const ENDS: [&str; 3] = ["owned", "given up", "used again"];
