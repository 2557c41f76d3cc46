//! Which messages are better announced and fetched than written into the ring: measured, on the fabric that is there.
//!
//! Messages of each size are sent to the memory server both ways, one way right after the other, so that whatever else the
//! machine does meets both alike; it answers them itself ([`Kind::PROBE`](super::Kind::PROBE)). Of each way and size the lower
//! quartile of the times counts: what disturbs only adds. What follows from them is for [`Gains`] to say.
//!
//! What is so at the start need not stay so: cores and memory get busy. So channels try both ways on what they carry, now and
//! then (`channel/trial.rs`), and all of a compute server's channels follow what they find out.

use std::{
    future::poll_fn,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use super::{
    Channel, WINDOW,
    gains::{Gains, SIZES},
};
use crate::{
    error::Error,
    sync::{AtomicU64, Mutex, Ordering, lock},
};

/// Rounds, at least and at most; between them as many as fit into the time.
const ROUNDS_MIN: usize = 5;
const ROUNDS_MAX: usize = 25;
const TIME_NS: u64 = 100_000_000;
/// A fabric so slow that this is not enough is not measured; if it is so slow that this is clear at once, no longer than that.
const TIME_MAX_NS: u64 = 400_000_000;
/// The switch-over where it would take too long to measure it, in words.
const UNMEASURED: usize = 512;
/// Rounds that only warm up.
const WARM_UP: usize = 2;
/// Words that are under way at a time, and the messages that they make at least and at most.
const WINDOW_WORDS: usize = 128 << 10;
const IN_FLIGHT: std::ops::RangeInclusive<usize> = 8..=3 * WINDOW / 4;
/// Messages one after another, as many times as that: what is looked for is the rate of a stream.
const LENGTH: usize = 4;
/// The switch-over of a compute server's fabric: measured by whoever needs it first, while the others wait.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// In words; 0 before it is known.
    words: AtomicU64,
    turns: Mutex<Turns>,
    /// None if it was not measured, and never will be.
    gains: Mutex<Option<Gains>>,
}

#[derive(Debug, Default)]
struct Turns {
    is_measuring: bool,
    /// They sleep: what looked again and again would take the core from the one who measures.
    waiting: Vec<Waker>,
}

impl Measured {
    pub(super) fn known(&self) -> Option<usize> {
        Some(self.words.load(Ordering::Relaxed)).filter(|&words| words != 0).map(|words| words as usize)
    }

    /// For which size a message of so many words can stand, if it is one that should be tried, and which way first.
    pub(super) fn choose_trial(&self, words: usize) -> Option<(usize, usize)> {
        lock(&self.gains).as_mut().and_then(|gains| gains.choose_trial(words))
    }

    /// By what factor it took longer to fetch messages of this size than to write them into the ring, as a logarithm.
    pub(super) fn learn(&self, size: usize, gain: f64) {
        if let Some(gains) = &mut *lock(&self.gains) {
            gains.learn(size, gain);
            self.words.store(gains.switch_words().max(1) as u64, Ordering::Relaxed);
        }
    }

    /// The switch-over, or the turn to measure it.
    fn known_or_turn(&self, cx: &Context<'_>) -> Poll<Result<usize, Turn<'_>>> {
        let mut turns = lock(&self.turns);
        if let Some(words) = self.known() {
            return Poll::Ready(Ok(words));
        }
        if turns.is_measuring {
            turns.waiting.push(cx.waker().clone());
            return Poll::Pending;
        }
        turns.is_measuring = true;
        Poll::Ready(Err(Turn { measured: self, words: 0 }))
    }
}

/// Somebody's turn to measure. Another one has it if this one comes to nothing.
struct Turn<'a> {
    measured: &'a Measured,
    words: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut turns = lock(&self.measured.turns);
            self.measured.words.store(self.words, Ordering::Relaxed);
            turns.is_measuring = false;
            std::mem::take(&mut turns.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// Returns when the switch-over of the compute server's fabric is known; measures it if nobody has. One at a time: two would
/// disturb each other.
pub(super) async fn measured(channel: &Channel) -> Result<(), Error> {
    let measured = &channel.handle().compute().switch_words;
    if measured.known().is_some() {
        return Ok(());
    }
    let mut turn = match poll_fn(|cx| measured.known_or_turn(cx)).await {
        Ok(_) => return Ok(()),
        Err(turn) => turn,
    };
    let gains = measure(channel).await?.map(Gains::new);
    let words = gains.as_ref().map_or(UNMEASURED, Gains::switch_words).max(1);
    *lock(&measured.gains) = gains;
    tracing::debug!(words, "measured from which size on messages are fetched");
    turn.words = words as u64;
    Ok(())
}

/// By what factor fetching takes longer than the ring at each size, as logarithms; none if that would take too long.
async fn measure(channel: &Channel) -> Result<Option<[f64; SIZES.len()]>, Error> {
    let clock = channel.handle().clock();
    let start_ns = clock.now_ns();
    let mut times_ns: [[Vec<u64>; 2]; SIZES.len()] = Default::default();
    'rounds: for round in 0..ROUNDS_MAX {
        if round >= WARM_UP + ROUNDS_MIN && clock.now_ns() - start_ns > TIME_NS {
            break;
        }
        for (words, times_ns) in SIZES.into_iter().zip(&mut times_ns) {
            // Another one first each time.
            for way in [round % 2, 1 - round % 2] {
                let in_flight = (WINDOW_WORDS / words).clamp(*IN_FLIGHT.start(), *IN_FLIGHT.end());
                match time_ns(channel, words, [usize::MAX, 0][way], in_flight, start_ns + TIME_MAX_NS).await? {
                    Some(took_ns) => times_ns[way].push(took_ns),
                    None => break 'rounds,
                }
            }
            if round == 0 && words == SIZES[0] && clock.now_ns() - start_ns > TIME_MAX_NS / 8 {
                break 'rounds;
            }
        }
    }
    if times_ns.iter().flatten().any(Vec::is_empty) {
        return Ok(None);
    }
    let quartile = |times_ns: Vec<u64>| quartile(times_ns[WARM_UP.min(times_ns.len() / 2)..].to_vec());
    Ok(Some(times_ns.map(|[ring, fetched]| (quartile(fetched) / quartile(ring)).ln())))
}

fn quartile(mut values: Vec<u64>) -> f64 {
    values.sort_unstable();
    values.get(values.len() / 4).copied().unwrap_or(1).max(1) as f64
}

/// How long a stream of messages takes; nothing more is sent after the deadline, and then it is none.
async fn time_ns(
    channel: &Channel,
    words: usize,
    switch_words: usize,
    in_flight: usize,
    deadline_ns: u64,
) -> Result<Option<u64>, Error> {
    if !channel.try_switch_over(switch_words) {
        return Ok(None);
    }
    let handle = channel.handle();
    // Copied into each message, like what a caller sends: which side has more to do decides which way is better.
    let source: Rc<[u64]> = vec![0; words].into();
    let start_ns = handle.clock().now_ns();
    let messages: Vec<_> = (0..in_flight)
        .map(|_| {
            let (channel, source) = (channel.clone(), Rc::clone(&source));
            handle.spawn(async move {
                for _ in 0..LENGTH {
                    if channel.handle().clock().now_ns() > deadline_ns {
                        return Ok(false);
                    }
                    channel.probe(&source).await?;
                }
                Ok::<_, Error>(true)
            })
        })
        .collect();
    let mut is_whole = true;
    for message in messages {
        is_whole &= message.await?;
    }
    let took_ns = handle.clock().now_ns() - start_ns;
    Ok((is_whole && channel.try_switch_over(switch_words)).then_some(took_ns))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{
        compute::{ComputeOptions, ComputeServer},
        fabric::{
            link::ListenOptions,
            mem::{MemFabric, MemOptions},
        },
        messaging::{Kind, MessageServer, Priority, Request, Responder, ServeMessages, Service},
        ptr::ServerId,
    };

    /// Takes what it is sent.
    struct Sink;

    impl Service for Sink {
        fn handle(&mut self, _: Request<'_>, reply: Responder) {
            reply.send_words(&[]);
        }
    }

    #[test]
    fn a_channel_that_carries_much_tries_both_ways_and_the_others_follow() {
        let fabric = MemFabric::in_process(1, 2 << 20, MemOptions::default()).unwrap();
        let server = ServerId::new(0).unwrap();
        let listener = fabric.listen(server, &ListenOptions::default()).unwrap();
        let _messages = MessageServer::start(listener, &ServeMessages::default(), |_| Ok(Box::new(Sink))).unwrap();
        let compute = ComputeServer::join(std::sync::Arc::new(fabric), ComputeOptions::default()).unwrap();
        let (busy, calm) = (compute.worker().unwrap(), compute.worker().unwrap());
        let measured = &busy.compute().switch_words;
        // As if fetching had been far better from the start.
        let first = Gains::new([-5.0; SIZES.len()]);
        measured.words.store(first.switch_words() as u64, Ordering::Relaxed);
        *lock(&measured.gains) = Some(first);
        let send = async |channel: &Channel, words: usize| {
            channel.request_words(Kind(1), &vec![0; words], Priority::BestEffort).await.unwrap();
        };
        let calm_channel = calm.block_on(calm.channel(server)).unwrap();
        assert_eq!(calm_channel.switch_words(), SIZES[0] - 1);
        let has_learned = || lock(&measured.gains).as_ref().is_some_and(|gains| gains.switch_words() != SIZES[0] - 1);
        busy.block_on(async {
            let channel = busy.channel(server).await.unwrap();
            let before = busy.counters();
            let mut sent = 0;
            while !has_learned() {
                send(&channel, SIZES[0]).await;
                sent += 1;
                assert!(sent < 2_000_000, "it tries nothing, or learns nothing from it");
            }
            let counted = busy.counters() - before;
            // What is tried is what was sent anyhow. A request is four words longer, its reply three.
            assert_eq!((counted.two_sided, counted.bytes), (sent, sent * (SIZES[0] as u64 + 7) * 8));
        });
        // Whatever they have found out, everybody gets it.
        *lock(&measured.gains) = None;
        measured.words.store(1234, Ordering::Relaxed);
        for (worker, channel) in [(&busy, busy.block_on(busy.channel(server)).unwrap()), (&calm, calm_channel)] {
            worker.block_on(send(&channel, 1));
            assert_eq!(channel.switch_words(), 1234);
        }
    }

    #[test]
    fn who_waits_for_a_measurement_sleeps_until_it_is_over() {
        struct Woken(AtomicU64);
        impl std::task::Wake for Woken {
            fn wake(self: std::sync::Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let woken = std::sync::Arc::new(Woken(AtomicU64::new(0)));
        let waker = Waker::from(std::sync::Arc::clone(&woken));
        let cx = Context::from_waker(&waker);
        let measured = Measured::default();
        let Poll::Ready(Err(first)) = measured.known_or_turn(&cx) else { panic!("the first one measures") };
        assert!(measured.known_or_turn(&cx).is_pending());
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
        // It came to nothing: the next one's turn.
        drop(first);
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        let Poll::Ready(Err(mut second)) = measured.known_or_turn(&cx) else { panic!("nobody measures") };
        assert!(measured.known_or_turn(&cx).is_pending());
        second.words = 300;
        drop(second);
        assert_eq!(woken.0.load(Ordering::Relaxed), 2);
        assert!(matches!(measured.known_or_turn(&cx), Poll::Ready(Ok(300))));
        assert_eq!(measured.known(), Some(300));
    }
}
