//! An owner dies: what it had is taken over by whoever has an operation for it, and operations go on.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    rc::Rc,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use farlink_offload::{
    Admission, Router,
    route::{balance, move_region},
};
use farlink_runtime::{
    clock::Clock,
    error::Error,
    fabric::{
        Error as FabricError, Fabric,
        listener::ListenOptions,
        mortal::{MortalFabric, Order},
    },
    lock::OwnerId,
    messaging::{MessageServer, ServeMessages},
    one_sided::ownership,
};
use farlink_structures::{btree::KeyRange, map::Map as Ordered};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::Watchdog,
};

use crate::{
    routing::{Owner, Routed, Stopped, poll_until_it_reads, routes, to_owners},
    scene::{CACHE_BYTES_ALL, Map, Member, assert_left_clean, cache, fabric, settle, sparse},
};

/// Every other region is the survivor's, the others are the mortal's.
const CUTS: [u64; 3] = [10_000, 20_000, 30_000];

struct Scene {
    survivor: Owner,
    guest: Member,
    mortal: Option<Owner>,
    life: MortalFabric,
    fabric: Cluster,
    model: Map,
}

impl Scene {
    fn new() -> Self {
        let model = sparse(4000);
        let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
        let life = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let deadly: Arc<dyn Fabric> = Arc::new(life.clone());
        let guest = Member::join(&fabric, 3);
        let [first, second, third] = CUTS.map(|key| guest.worker.block_on(guest.tree.leaf_low(key)).unwrap());
        let ranges = [(0, Some(first)), (first, Some(second)), (second, Some(third)), (third, None)];
        let [low, middle, more, high] = ranges.map(|(low, high)| KeyRange { low, high });
        let all = || cache(CACHE_BYTES_ALL, Admission::Always);
        let survivor = Owner::with(&fabric, 1, &[low, more], all());
        let mortal = Some(Owner::with(&deadly, 2, &[middle, high], all()));
        Self { survivor, guest, mortal, life, fabric, model }
    }

    /// The owner that dies writes what it has changed, and changes more; then it dies.
    fn die(&mut self) -> OwnerId {
        let mortal = self.mortal.as_ref().unwrap();
        let tree = to_owners(&self.guest, &routes(&self.guest));
        for key in (10_000..20_000).step_by(35) {
            self.guest.worker.block_on(tree.insert(key + 1, key)).unwrap();
            self.model.insert(key + 1, key);
        }
        mortal.member.worker.block_on(mortal.holdings.flush(&mortal.member.worker)).unwrap();
        // Lost with it.
        self.guest.worker.block_on(tree.insert(15_003, 1)).unwrap();
        self.die_unheard()
    }

    fn die_unheard(&mut self) -> OwnerId {
        let mut mortal = self.mortal.take().unwrap();
        let owner = mortal.member.compute.owner();
        mortal.stop();
        self.life.dies_after(0);
        self.life.is_taken_for_dead();
        owner
    }

    fn map(&self) -> Vec<(OwnerId, KeyRange)> {
        let map = self.guest.worker.block_on(ownership::read(&self.guest.worker, self.guest.tree.structure())).unwrap();
        map.owners().map(|(owner, part)| (owner, part.to_region().unwrap().unwrap())).collect()
    }

    fn assert_all_there(&self, tree: &Routed, context: &str) {
        let mut found: Map = self.guest.worker.block_on(tree.range(..).take(usize::MAX)).unwrap().into_iter().collect();
        found.remove(&15_003);
        assert!(found == self.model, "{context}: {}", crate::scene::difference(&found, &self.model));
    }

    fn close(mut self, context: &str) {
        // What was not written may be there or not.
        let tree = self.guest_tree();
        self.guest.worker.block_on(tree.remove(15_003)).unwrap();
        drop(tree);
        self.survivor.close();
        settle([&self.survivor.member, &self.guest]);
        self.mortal = None;
        let Self { survivor, guest, fabric, model, .. } = self;
        drop((survivor, guest));
        assert_left_clean(&fabric, &model, context);
    }

    fn guest_tree(&self) -> Routed {
        to_owners(&self.guest, &routes(&self.guest))
    }
}

/// Somebody who owns nothing asks an owner that lives.
#[test]
fn a_guest_has_what_a_dead_one_had_taken() {
    let mut scene = Scene::new();
    let (tree, worker) = (scene.guest_tree(), &scene.guest.worker);
    assert_eq!(worker.block_on(tree.get(12_000)).unwrap(), Some(1200));
    let dead = scene.die();
    // Of a change that is sent over the connection of before nobody could say whether the dead one did it.
    assert_eq!(scene.guest.worker.block_on(tree.get(12_000)).unwrap(), Some(1200));
    assert_eq!(scene.guest.worker.block_on(tree.update(12_000, 7)).unwrap(), Some(1200));
    scene.model.insert(12_000, 7);
    scene.assert_all_there(&tree, "a guest");
    let heir = scene.survivor.member.compute.owner();
    assert!(scene.map().iter().all(|&(owner, _)| owner == heir), "{:?}, {dead} is dead", scene.map());
    assert_eq!(scene.survivor.holdings.regions().len(), 4);
    drop(tree);
    scene.close("a guest");
}

/// An owner takes it itself.
#[test]
fn an_owner_takes_what_a_dead_one_had() {
    let mut scene = Scene::new();
    scene.die();
    let member = &scene.survivor.member;
    let tree: Routed =
        Ordered::over(Router::new(&member.worker, &routes(member), scene.survivor.holdings.here(&member.worker)));
    let done = scene.survivor.counts().done;
    assert_eq!(member.worker.block_on(tree.get(35_000)).unwrap(), Some(3500));
    assert_eq!(member.worker.block_on(tree.get(15_000)).unwrap(), Some(1500));
    assert_eq!(scene.survivor.counts().done, done, "it has sent itself a message");
    assert_eq!(scene.survivor.holdings.regions().len(), 4);
    drop(tree);
    scene.assert_all_there(&scene.guest_tree(), "an owner");
    scene.close("an owner");
}

/// An owner that was taken for dead knows, and owns nothing any more: what it had changed is lost, and nobody is told that it is written.
#[test]
fn who_was_taken_for_dead_has_written_nothing() {
    let mut scene = Scene::new();
    let mut mortal = scene.mortal.take().unwrap();
    let (worker, holdings) = (&mortal.member.worker, &mortal.holdings);
    let here = Ordered::over(holdings.here(worker));
    assert_eq!(worker.block_on(here.update(15_000, 7)).unwrap(), Some(1500));
    let region = holdings.regions()[0];
    scene.life.is_taken_for_dead();
    let is_told = |outcome: Result<(), Error>| {
        assert!(matches!(outcome, Err(Error::Fabric(FabricError::TakenForDead { .. }))), "{outcome:?}");
    };
    is_told(worker.block_on(mortal.member.compute.maintain(worker)));
    is_told(worker.block_on(holdings.flush(worker)));
    is_told(worker.block_on(holdings.give_up(worker, &region)).map(drop));
    is_told(worker.block_on(holdings.give_up_all(worker)));
    drop(here);
    mortal.stop();
    drop(mortal);
    scene.assert_all_there(&scene.guest_tree(), "taken for dead");
    scene.close("taken for dead");
}

/// One died as it handed a region on: nobody has that, until an owner has an operation for it.
#[test]
fn what_nobody_owns_is_taken_by_an_owner_who_needs_it() {
    let mut scene = Scene::new();
    let mortal = scene.mortal.as_ref().unwrap();
    let region = mortal.holdings.regions()[0];
    mortal.member.worker.block_on(mortal.holdings.give_up(&mortal.member.worker, &region)).unwrap();
    scene.die_unheard();
    let (tree, worker) = (scene.survivor.router(), &scene.survivor.member.worker);
    assert_eq!(worker.block_on(tree.get(15_000)).unwrap(), Some(1500));
    assert!(scene.survivor.holdings.regions().contains(&region), "{:?}", scene.survivor.holdings.regions());
    drop(tree);
    scene.assert_all_there(&scene.guest_tree(), "nobody's");
    scene.close("nobody's");
}

/// An owner whose cache was closed can own nothing any more: it has another one take it.
#[test]
fn who_cannot_own_any_more_has_another_one_take_it() {
    let mut scene = Scene::new();
    let (middle, more) = (scene.mortal.as_ref().unwrap().holdings.regions()[0], scene.survivor.holdings.regions()[1]);
    let retired: Owner = Owner::new(&scene.fabric, 4, &[], CACHE_BYTES_ALL);
    let (worker, survivor) = (&retired.member.worker, &scene.survivor);
    survivor.member.worker.block_on(survivor.holdings.give_up(&survivor.member.worker, &more)).unwrap();
    worker.block_on(retired.holdings.take(worker, more)).unwrap();
    let here = retired.holdings.here(worker);
    worker.block_on(here.with(&more).unwrap().unwrap().close()).unwrap();
    // Nobody's for a while, and then a dead one's.
    let tree = retired.router();
    assert_eq!(worker.block_on(tree.get(20_000)).unwrap(), Some(2000));
    scene.die_unheard();
    assert_eq!(worker.block_on(tree.get(15_000)).unwrap(), Some(1500));
    let owned = scene.survivor.holdings.regions();
    assert!(owned.contains(&middle) && owned.contains(&more), "{owned:?}");
    drop((tree, here));
    settle([&retired.member, &scene.survivor.member, &scene.guest]);
    drop(retired);
    scene.assert_all_there(&scene.guest_tree(), "retired");
    scene.close("retired");
}

/// Two workers of one compute server: an operation of the one has what a dead owner had taken, and rests.
#[test]
fn who_rests_as_he_takes_keeps_nobody_from_it() {
    let mut scene = Scene::new();
    let colleague = scene.guest.colleague();
    let routes = routes(&scene.guest);
    let (tree, other) = (to_owners(&scene.guest, &routes), to_owners(&colleague, &routes));
    scene.die_unheard();
    {
        let mut rests = pin!(tree.get(15_000));
        // The map, and who lives.
        poll_until_it_reads(&scene.guest.worker, 2, &mut rests);
        assert_eq!(colleague.worker.block_on(other.get(15_000)).unwrap(), Some(1500));
        assert_eq!(scene.guest.worker.block_on(rests).unwrap(), Some(1500));
    }
    drop((tree, other, colleague));
    scene.assert_all_there(&scene.guest_tree(), "rests");
    scene.close("rests");
}

/// The same where the compute server owns, and only the operation rests: what it has begun goes on.
#[test]
fn what_one_that_rests_was_about_to_own_is_owned() {
    let _watchdog = Watchdog::start("one that rests owns", Duration::from_secs(60));
    let mut scene = Scene::new();
    let colleague = scene.survivor.member.colleague();
    let routes = routes(&scene.survivor.member);
    let [tree, other] = [&scene.survivor.member.worker, &colleague.worker]
        .map(|worker| -> Routed { Ordered::over(Router::new(worker, &routes, scene.survivor.holdings.here(worker))) });
    scene.die_unheard();
    {
        let worker = &scene.survivor.member.worker;
        let mut rests = pin!(tree.get(15_000));
        poll_until_it_reads(worker, 2, &mut rests);
        let (mut getting, reads) = (pin!(other.get(15_000)), routes.reads());
        let found = colleague.worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            // Only when the other one has lost its patience.
            if routes.reads() - reads > 250 {
                worker.turn();
            }
            getting.as_mut().poll(cx)
        }));
        assert_eq!(found.unwrap(), Some(1500));
        assert_eq!(worker.block_on(rests).unwrap(), Some(1500));
    }
    drop((tree, other, colleague));
    scene.assert_all_there(&scene.guest_tree(), "goes on");
    scene.close("goes on");
}

/// With nobody who could take it, the operation fails at once, by the dead one's name.
#[test]
fn nobody_waits_for_the_dead() {
    let mut scene = Scene::new();
    scene.survivor.stop();
    let dead = scene.die_unheard();
    let worker = scene.guest.compute.worker_with(Clock::Virtual(Rc::default())).unwrap();
    let tree: Routed = Ordered::over(Router::to_owners(&worker, &routes(&scene.guest)));
    let found = worker.block_on(tree.get(15_000));
    assert!(matches!(found, Err(Error::OwnerMissing { owner, .. }) if owner == dead), "{found:?}");
    drop((tree, worker));
    scene.survivor.listen().unwrap();
    scene.assert_all_there(&scene.guest_tree(), "listens again");
    scene.close("nobody");
}

/// Nobody knows where a dead owner's leaves are cut: a piece of a region that it had brings all of that.
#[test]
fn regions_are_moved_away_from_a_dead_owner() {
    let mut scene = Scene::new();
    let dead = scene.die();
    let (structure, worker) = (scene.guest.tree.structure(), &scene.guest.worker);
    let heir = scene.survivor.member.compute.owner();
    let of_the_dead = || scene.map().into_iter().filter(|(owner, _)| *owner == dead).map(|(_, region)| region);
    let [middle, high] = of_the_dead().collect::<Vec<_>>()[..] else { panic!("{:?}", scene.map()) };
    let piece = KeyRange { low: 35_000, high: Some(36_000) };
    let moved = worker.block_on(move_region(worker, structure, &piece, dead, heir)).unwrap();
    assert_eq!(moved, Some(high));
    assert_eq!(of_the_dead().collect::<Vec<_>>(), [middle], "what nobody took is still the dead one's");
    let mut moved = Vec::new();
    worker.block_on(balance::<KeyRange>(worker, structure, &[], 1e9, 64, &mut moved)).unwrap();
    assert_eq!(
        moved.iter().map(|moved| (moved.region, moved.from, moved.to, moved.uses)).collect::<Vec<_>>(),
        [(middle, dead, heir, None)]
    );
    assert_eq!(of_the_dead().count(), 0);
    scene.assert_all_there(&scene.guest_tree(), "moved away");
    scene.close("moved away");
}

/// Whoever is asked to take it refuses, for another one has just done so: the operation goes there.
#[test]
fn what_another_one_takes_meanwhile_is_found_there() {
    let mut scene = Scene::new();
    let other = Member::join(&scene.fabric, 4);
    let (told, message) = mpsc::channel();
    let (go_on, waits) = mpsc::channel();
    let refuses = Mutex::new(Some(Stopped(told, waits)));
    let refuses = move |_| Ok(Box::new(refuses.lock().unwrap().take().unwrap()) as _);
    let listener = other.compute.listen(&ListenOptions::default()).unwrap();
    let refusing = MessageServer::start(listener, &ServeMessages::default(), refuses).unwrap();
    let tree = scene.guest_tree();
    scene.survivor.stop();
    scene.die_unheard();
    let (worker, survivor) = (&scene.guest.worker, &mut scene.survivor);
    let asking = tree.clone();
    let mut getting = pin!(async move { asking.get(15_000).await });
    let found = worker.block_on(poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if message.try_recv().is_ok() {
            let (owner, holdings) = (&survivor.member.worker, &survivor.holdings);
            let gap = KeyRange { low: holdings.regions()[0].high.unwrap(), high: Some(holdings.regions()[1].low) };
            owner.block_on(holdings.take(owner, gap)).unwrap();
            survivor.listen().unwrap();
            go_on.send(()).unwrap();
        }
        getting.as_mut().poll(cx)
    }));
    assert_eq!(found.unwrap(), Some(1500));
    drop((refusing, tree));
    drop(other);
    scene.assert_all_there(&scene.guest_tree(), "another one");
    scene.close("another one");
}

/// Before the next owner is asked to take a dead one's region, another one has it: then it has not moved.
#[test]
fn what_another_one_takes_from_the_dead_has_not_moved() {
    let mut scene = Scene::new();
    let next: Owner = Owner::new(&scene.fabric, 4, &[], CACHE_BYTES_ALL);
    let dead = scene.die_unheard();
    let of_the_dead = scene.map().into_iter().find(|(owner, _)| *owner == dead);
    let Some((_, region)) = of_the_dead else { panic!("{:?}", scene.map()) };
    {
        let (structure, worker) = (scene.guest.tree.structure(), &scene.guest.worker);
        let (survivor, reads) = (&scene.survivor, worker.counters().reads);
        let mut moving = pin!(move_region(worker, structure, &region, dead, next.member.compute.owner()));
        let moved = worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            // The map is here as it was, and nobody has looked at it yet.
            if worker.counters().reads > reads && !survivor.holdings.regions().contains(&region) {
                let owner = &survivor.member.worker;
                owner.block_on(survivor.holdings.take(owner, region)).unwrap();
            }
            moving.as_mut().poll(cx)
        }));
        assert_eq!(moved.unwrap(), None);
    }
    assert!(scene.survivor.holdings.regions().contains(&region) && next.holdings.regions().is_empty());
    drop(next);
    scene.assert_all_there(&scene.guest_tree(), "not moved");
    scene.close("not moved");
}
