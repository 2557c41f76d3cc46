//! Requests that wait for room, and channels for their connection.

use std::{pin::Pin, task::Wake};

use super::*;
use crate::protocol::{MESSAGE_WORDS_MAX, WINDOW};

/// Whether somebody was woken.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

impl Woken {
    fn is(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

fn poll<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Poll<T> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn poll_with<T>(future: &mut (impl Future<Output = T> + Unpin), woken: &Arc<Woken>) -> Poll<T> {
    Pin::new(future).poll(&mut Context::from_waker(&Waker::from(Arc::clone(woken))))
}

/// A channel whose window is full of requests that nobody waits for; none is answered.
fn full() -> (Played, Rc<Worker>, Channel) {
    let (mut server, worker) = played();
    let (host, id) = (Rc::clone(&worker) as Rc<dyn Host>, ServerId::new(0).unwrap());
    let mut opening = Box::pin(Channel::open(host, id, ChannelOptions::default()));
    let opened = (0..1000).find_map(|_| {
        turns(&mut server, &worker, 1);
        match poll(&mut opening) {
            Poll::Ready(opened) => Some(opened.unwrap()),
            Poll::Pending => None,
        }
    });
    drop(opening);
    let channel = opened.expect("it is welcome");
    for _ in 0..WINDOW {
        assert!(poll(&mut pin!(channel.request(Kind(1), &1u64, Priority::Latency))).is_pending());
    }
    turns(&mut server, &worker, 2 * WINDOW);
    (server, worker, channel)
}

fn turns(server: &mut Played, worker: &Worker, count: usize) {
    for _ in 0..count {
        worker.turn();
        server.turn();
    }
}

fn answer(server: &mut Played, sequence: u64) {
    let Some((_, connection)) = &mut server.connection else { panic!("the worker has come") };
    let [first, second] = reply_header(1, sequence);
    connection.enqueue_notice(&[first, second, reply_item(0, 0, Ok(()))]);
}

/// Who is polled at every turn of a worker takes nobody else's wake-up.
#[test]
fn who_waits_for_room_is_woken_however_often_another_was_polled() {
    let (mut server, worker, channel) = full();
    let window = WINDOW as u64;
    let woken = Arc::new(Woken::default());
    let [mut first, mut second] = [(); 2].map(|()| Box::pin(channel.request(Kind(1), &1u64, Priority::Latency)));
    assert!((0..3 * WINDOW).all(|_| poll(&mut first).is_pending()));
    assert!(poll_with(&mut second, &woken).is_pending());
    (2..=window).for_each(|sequence| answer(&mut server, sequence));
    turns(&mut server, &worker, 10);
    assert!(poll(&mut first).is_pending() && !woken.is(), "there is no room while the oldest one is unanswered");
    answer(&mut server, 1);
    turns(&mut server, &worker, 10);
    assert!(poll(&mut first).is_pending());
    turns(&mut server, &worker, 10);
    answer(&mut server, window + 1);
    turns(&mut server, &worker, 10);
    assert!(matches!(poll(&mut first), Poll::Ready(Ok(_))));
    assert!(woken.is(), "there is room for all, and it waits");
    drop((first, second));
    worker.channels.close(&*worker);
}

/// Whether it is dropped, or asks for something that is too long.
#[test]
fn who_was_woken_and_does_not_ask_wakes_the_next_one() {
    for is_dropped in [true, false] {
        let (mut server, worker, channel) = full();
        let too_long = vec![0; MESSAGE_WORDS_MAX];
        let mut first = Box::pin(channel.request_words(Kind(1), &too_long, Priority::Latency));
        let mut second = Box::pin(channel.request(Kind(1), &1u64, Priority::Latency));
        let [first_woken, second_woken] = [(); 2].map(|()| Arc::new(Woken::default()));
        assert!(poll_with(&mut first, &first_woken).is_pending());
        assert!(poll_with(&mut second, &second_woken).is_pending());
        answer(&mut server, 1);
        turns(&mut server, &worker, 10);
        assert!(first_woken.is() && !second_woken.is(), "there is room for one");
        if !is_dropped {
            assert!(matches!(poll(&mut first), Poll::Ready(Err(Error::BadSize { .. }))));
        }
        drop(first);
        assert!(second_woken.is(), "dropped: {is_dropped}");
        drop(second);
        worker.channels.close(&*worker);
    }
}

/// Nobody says hello.
#[test]
fn who_waits_has_one_place_however_often_it_is_polled() {
    let (_server, worker) = played();
    let (host, id) = (Rc::clone(&worker) as Rc<dyn Host>, ServerId::new(0).unwrap());
    let mut opening = Box::pin(Channel::open(host, id, ChannelOptions::default()));
    assert!((0..10_000).all(|_| poll(&mut opening).is_pending()));
    let waiting = || worker.channels.list.borrow()[0].core.borrow().connecting.len();
    assert_eq!(waiting(), 1);
    drop(opening);
    assert_eq!(waiting(), 0);
    worker.channels.close(&*worker);
}
