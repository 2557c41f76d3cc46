//! Operations that wait for their owner's log.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake},
};

use farlink_offload::{Admission, Durability};
use farlink_runtime::error::Error;
use farlink_structures::map::KeyRange;
use farlink_tests::backend::FabricProfile;

use crate::scene::{CACHE_BYTES_ALL, Member, assert_left_clean, cache, fabric, settle, sparse};

/// So many turns are more than all of them need.
const TURNS: u32 = 10_000;

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

type Found<'a> = dyn Future<Output = Result<Option<u64>, Error>> + 'a;

/// An operation that is polled when it was woken, and else not.
struct Put<'a> {
    future: Option<Pin<Box<Found<'a>>>>,
    woken: Arc<Woken>,
}

impl<'a> Put<'a> {
    fn of(future: impl Future<Output = Result<Option<u64>, Error>> + 'a) -> Self {
        Self { future: Some(Box::pin(future)), woken: Arc::new(Woken(true.into())) }
    }

    fn poll(&mut self) {
        if let Some(future) = &mut self.future
            && self.woken.0.swap(false, Ordering::Relaxed)
            && future.as_mut().poll(&mut Context::from_waker(&Arc::clone(&self.woken).into())).is_ready()
        {
            self.future = None;
        }
    }
}

/// The operations of a worker wait for the log as one. Whichever is dropped, or rests, and whenever, the others come to their end.
#[test]
fn who_waits_for_the_log_needs_none_of_the_others() {
    const COUNT: usize = 6;
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let tree = owner.own(&cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged), KeyRange::ALL);
    assert_eq!(owner.worker.block_on(tree.range(..).take(2000)).unwrap().len(), 1000);
    for round in 0..COUNT * 8 {
        let (missing, turns_before, rests) = (round / 2 % COUNT, round / 2 / COUNT, round % 2 == 1);
        let (key, value) = (|number: usize| (round * COUNT + number) as u64 * 10, 1000 + round as u64);
        let mut puts: Vec<Put<'_>> = (0..COUNT).map(|number| Put::of(tree.upsert(key(number), value))).collect();
        puts.iter_mut().for_each(Put::poll);
        assert!(puts.iter().all(|put| put.future.is_some()), "{round}: all wait for the log");
        for _ in 0..turns_before {
            owner.worker.turn();
            puts.iter_mut().for_each(Put::poll);
        }
        let resting = puts[missing].future.take().filter(|_| rests);
        let mut turns = 0;
        while puts.iter().any(|put| put.future.is_some()) {
            owner.worker.turn();
            puts.iter_mut().for_each(Put::poll);
            turns += 1;
            assert!(turns < TURNS, "{round}: somebody waits for one that is not polled");
        }
        drop(puts);
        if let Some(resting) = resting {
            owner.worker.block_on(resting).unwrap();
        }
        for number in 0..COUNT {
            let found = owner.worker.block_on(tree.get(key(number))).unwrap();
            assert!(number == missing && !rests || found == Some(value), "{round}: {found:?}");
            model.extend(found.map(|found| (key(number), found)));
        }
    }
    owner.worker.block_on(tree.access().close()).unwrap();
    drop(tree);
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &model, "dropped");
}
