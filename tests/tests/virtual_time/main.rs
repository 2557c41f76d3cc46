//! Several machines on one thread, in virtual time: compute servers join, work, leave, and memory servers carry out what is
//! shipped to them, without a thread, a sleep or a clock but the one of the test. The same seed gives the same run.

mod adaptive;
mod hot_mix;
mod popularity;
mod under_way;

use std::{
    cell::{Cell, RefCell},
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use farlink_offload::{
    Remote,
    ship::{ManualShipServer, Registry, ShipOptions},
};
use farlink_runtime::{
    clock::Clock,
    compute::{ComputeOptions, ComputeServer},
    fabric::{Fabric, listener::ListenOptions, mem::MemOptions},
    messaging::ServeMessages,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    server,
    structure::{PlacementPolicy, StructurePlacement},
};
use farlink_structures::{BTree, btree::Tree};

const STEP_NS: u64 = 100;
const LATENCY_NS: u64 = 1000;
const OPERATIONS: u64 = 60;
const STEPS_MAX: u64 = 1_000_000;

/// What there is to see of a run: what happened, at what time.
type Story = Vec<(u64, String)>;

fn everything(seed: u64) -> Story {
    let now = Rc::new(Cell::new(0));
    let clock = Clock::Virtual(Rc::clone(&now));
    let fabric: Arc<_> =
        server::in_process(2, 8 << 20, MemOptions { latency_ns: LATENCY_NS, ..MemOptions::default() }).unwrap().into();
    let story = RefCell::new(Story::new());
    let tell = |what: String| story.borrow_mut().push((now.get(), what));

    let join = |seed| {
        let fabric: Arc<dyn Fabric> = fabric.clone();
        ComputeServer::join_async(fabric, ComputeOptions { seed, ..ComputeOptions::default() }, clock.clone())
    };
    // The first to be there is the memory servers' own membership; then those who ask.
    let here = ServerId::new(0).unwrap();
    let served = Arc::new(drive(&now, &mut [], Box::pin(join(seed))).unwrap());
    let mut servers = [ManualShipServer::new(
        fabric.listen(here, &ListenOptions::default()).unwrap(),
        fabric.memory(here).unwrap(),
        Registry::new().with::<Tree>(),
        &ShipOptions { messages: ServeMessages { seed, ..ServeMessages::default() }, hold: None },
        Arc::clone(&served),
        &clock,
    )
    .unwrap()];

    let machine = async |number: u64| {
        let compute = join(seed ^ number).await.unwrap();
        tell(format!("{number} joined"));
        let worker = compute.worker_with(clock.clone()).unwrap();
        let work = async {
            let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: Some(here) };
            let name = format!("tree {number}");
            let made = BTree::make_at(&worker, &name, 256, Proof::Checksum, placement).await.unwrap();
            let shipped = BTree::over(Remote::new(&worker, made.structure().clone()));
            for round in 0..OPERATIONS {
                let key = worker.random(|rng| rand::RngExt::random_range(rng, 0..40));
                match round % 3 {
                    0 => tell(format!("{number} put {key}: {:?}", made.upsert(key, round).await.unwrap())),
                    1 => tell(format!("{number} got {key}: {:?}", shipped.get(key).await.unwrap())),
                    _ => tell(format!("{number} removed {key}: {:?}", shipped.remove(key).await.unwrap())),
                }
            }
            // Two at once, so that one backs off from the other's locks.
            let both = OneSided::new(&worker, made.structure().clone(), Proof::Checksum);
            let both = Rc::new(BTree::over(both));
            let tasks: Vec<_> = (0..4u64)
                .map(|task| {
                    let tree = Rc::clone(&both);
                    worker.spawn(async move { tree.upsert(1, task).await.unwrap() })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            compute.maintain(&worker).await.unwrap();
        };
        worker.drive(work).await;
        tell(format!("{number} did {:?}", worker.counters()));
        drop(worker);
        compute.leave(clock.clone()).await;
        tell(format!("{number} left"));
    };
    let both = async {
        let (mut one, mut other) = (pin!(machine(1)), pin!(machine(2)));
        let (mut one_ended, mut other_ended) = (false, false);
        std::future::poll_fn(|cx| {
            one_ended = one_ended || one.as_mut().poll(cx).is_ready();
            other_ended = other_ended || other.as_mut().poll(cx).is_ready();
            if one_ended && other_ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    };
    drive(&now, &mut servers, Box::pin(both));
    drop(servers);
    let Ok(served) = Arc::try_unwrap(served) else { panic!("the server holds its membership") };
    drive(&now, &mut [], Box::pin(served.leave(clock.clone())));
    story.into_inner()
}

/// Polls and turns, and lets the time go on by itself.
fn drive<T>(now: &Cell<u64>, servers: &mut [ManualShipServer], mut future: Pin<Box<dyn Future<Output = T> + '_>>) -> T {
    for _ in 0..STEPS_MAX {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
        for server in &mut *servers {
            server.turn();
        }
        now.set(now.get() + STEP_NS);
    }
    panic!("nothing has come of it at {} ns", now.get());
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let (first, again, other) = (everything(7), everything(7), everything(8));
    assert_eq!(first.len(), 2 * (OPERATIONS as usize + 3));
    for (line, (was, is)) in first.iter().zip(&again).enumerate() {
        assert_eq!(was, is, "line {line}");
    }
    assert_ne!(first, other, "the seed decides");
}
