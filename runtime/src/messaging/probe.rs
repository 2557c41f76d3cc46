//! Which messages are better announced and fetched than written into the ring: measured, on the fabric that is there.
//!
//! Messages of each size are sent to the memory server both ways, one way right after the other, so that whatever else the
//! machine does meets both alike; it answers them itself ([`Kind::PROBE`](super::Kind::PROBE)). Of each way and size the lower quartile of the times
//! counts: what disturbs only adds. Fetching gains on the ring as messages grow: so the logarithms of the quotients of both are
//! fitted by a falling sequence, which evens out what noise is left, and the switch-over is where it passes zero, on a
//! logarithmic scale of sizes. Near that point both ways cost the same, so a small error costs little.
//!
//! What is so at the start need not stay so: cores and memory get busy. So a channel looks again now and then
//! ([`look_again`]): after it has carried [`SPACING`] times as many words as that takes (at first less), one size near the switch-over is tried
//! both ways, for a fraction of a millisecond. Of each size the median of the last quotients counts, at first that of the
//! measurement at the start, and the others follow with their next exchange.

use std::{
    collections::VecDeque,
    future::poll_fn,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use super::{Channel, WINDOW};
use crate::{
    error::Error,
    sync::{AtomicU64, Mutex, Ordering, lock},
};

/// Words of the messages that are tried, with what surrounds them a little more. The last ones are so long that it is clear
/// which way is better for them.
const SIZES: [usize; 7] = [128, 256, 512, 1024, 2048, 4096, 16384];
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
/// Looking again: words under way at a time, and the messages that they make at most.
const LOOK_WORDS: usize = 8 << 10;
const LOOK_IN_FLIGHT: std::ops::RangeInclusive<usize> = 4..=WINDOW / 4;
/// A look is given up after so long.
const LOOK_NS_MAX: u64 = 5_000_000;
/// Words that a channel carries between two looks, as a multiple of what one takes; and fewer between the first ones, because
/// what a stream gains shows only once it has gone on for a while.
const SPACING: usize = 128;
const SPACING_EARLY: usize = 32;
const LOOKS_EARLY: usize = 16;
/// Quotients of each size that are remembered.
const MEMORY: usize = 5;
/// Differences below one in a hundred are none.
const INDIFFERENT: f64 = 0.01;

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

/// By what factor fetching takes longer than the ring, as logarithms: the last ones of each size.
#[derive(Debug)]
struct Gains {
    last: [VecDeque<f64>; SIZES.len()],
    looks: usize,
}

impl Gains {
    fn new(first: [f64; SIZES.len()]) -> Self {
        Self { last: first.map(|gain| VecDeque::from([gain])), looks: 0 }
    }

    fn switch_words(&self) -> usize {
        switch_of(self.last.each_ref().map(|gains| {
            let mut sorted = Vec::from_iter(gains.iter().copied());
            sorted.sort_by(f64::total_cmp);
            middle(&sorted)
        }))
    }

    /// Which size is to be tried next, one of those around the switch-over, and which way first.
    fn next(&mut self) -> (usize, usize) {
        const AROUND: usize = 2;
        let switch_words = self.switch_words();
        let above = SIZES.iter().position(|&size| size > switch_words).unwrap_or(SIZES.len());
        let first = above.saturating_sub(AROUND / 2).min(SIZES.len() - AROUND);
        self.looks += 1;
        (first + self.looks % AROUND, self.looks / AROUND % 2)
    }

    fn learn(&mut self, size: usize, gain: f64) {
        self.last[size].push_back(gain);
        if self.last[size].len() > MEMORY {
            self.last[size].pop_front();
        }
    }
}

impl Measured {
    pub(super) fn known(&self) -> Option<usize> {
        Some(self.words.load(Ordering::Relaxed)).filter(|&words| words != 0).map(|words| words as usize)
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

/// Tries one size both ways; returns after how many more words the channel should look again, or none if there is no need to.
pub(super) async fn look_again(channel: &Channel) -> Result<Option<usize>, Error> {
    let measured = &channel.handle().compute().switch_words;
    let next = |gains: &mut Gains| (gains.next(), gains.looks <= LOOKS_EARLY);
    let Some(((size, first), is_early)) = lock(&measured.gains).as_mut().map(next) else { return Ok(None) };
    let words = SIZES[size];
    let in_flight = (LOOK_WORDS / words).clamp(*LOOK_IN_FLIGHT.start(), *LOOK_IN_FLIGHT.end());
    let deadline_ns = channel.handle().clock().now_ns() + LOOK_NS_MAX;
    let mut took_ns = [None; 2];
    for way in [first, 1 - first] {
        // Messages of quite other sizes go on as before.
        took_ns[way] = time_ns(channel, words, [2 * words, words / 2][way], in_flight, deadline_ns).await?;
    }
    if let [Some(ring), Some(fetched)] = took_ns
        && let Some(gains) = &mut *lock(&measured.gains)
    {
        gains.learn(size, (fetched.max(1) as f64 / ring.max(1) as f64).ln());
        measured.words.store(gains.switch_words().max(1) as u64, Ordering::Relaxed);
    }
    let spacing = if is_early { SPACING_EARLY } else { SPACING };
    Ok(Some(spacing * 2 * LENGTH * in_flight * words))
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

/// The switch-over, given by what factor fetching takes longer than the ring at each size, as logarithms.
fn switch_of(gains: [f64; SIZES.len()]) -> usize {
    let fitted = falling(&gains);
    // Within this much of zero nothing tells the ways apart; the ring, which needs no answer, has it.
    let Some(first) = fitted.iter().position(|&gain| gain < -INDIFFERENT) else { return usize::MAX };
    let Some(before) = first.checked_sub(1) else { return SIZES[0] - 1 };
    let (left, right) = (fitted[before].max(0.0), fitted[first]);
    let share = left / (left - right);
    let (small, large) = (SIZES[before] as f64, SIZES[first] as f64);
    (small * (large / small).powf(share)) as usize
}

/// A falling sequence close to these values: neighbours that rise are replaced by their median, so that one that is far off
/// does not count for more than any other.
fn falling(values: &[f64]) -> Vec<f64> {
    let mut runs: Vec<Vec<f64>> = Vec::new();
    for &value in values {
        let mut run = vec![value];
        while let Some(before) = runs.pop_if(|before| middle(before) < middle(&run)) {
            run.extend(before);
            run.sort_by(f64::total_cmp);
        }
        runs.push(run);
    }
    runs.iter().flat_map(|run| std::iter::repeat_n(middle(run), run.len())).collect()
}

/// The median of sorted values, the lower one of two.
fn middle(sorted: &[f64]) -> f64 {
    sorted[(sorted.len() - 1) / 2]
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

    fn gains(fetched: impl Fn(f64) -> f64) -> [f64; SIZES.len()] {
        SIZES.map(|words| (fetched(words as f64) / words as f64).ln())
    }

    #[test]
    fn the_switch_over_lies_where_the_better_way_changes() {
        // A message of w words takes w by the ring, 700 + w / 4 if it is fetched: the same at 933.
        let clean = gains(|words| 700.0 + words / 4.0);
        assert!((880..990).contains(&switch_of(clean)), "{}", switch_of(clean));
        // One disturbed measurement does not move it far.
        for place in 0..SIZES.len() {
            for error in [-0.3, 0.3, 2.0] {
                let mut disturbed = clean;
                disturbed[place] += error;
                assert!((600..1500).contains(&switch_of(disturbed)), "{place} {error} {}", switch_of(disturbed));
            }
        }
        assert_eq!(switch_of(gains(|_| 1e6)), usize::MAX);
        assert_eq!(switch_of(gains(|_| 1.0)), SIZES[0] - 1);
        // Ways that nothing tells apart.
        assert_eq!(switch_of(gains(|words| words * 0.995)), usize::MAX);
    }

    #[test]
    fn looks_follow_when_the_machine_changes() {
        let mut gains = Gains::new(gains(|words| 700.0 + words / 4.0));
        assert!((880..990).contains(&gains.switch_words()), "{}", gains.switch_words());
        // The same at 4000, then at 200; every fifth look is disturbed.
        for (cost, expected) in [(3000.0, 3000..5300), (150.0, 150..265)] {
            for look in 0..100 {
                let (size, _) = gains.next();
                let words = SIZES[size] as f64;
                let disturbance = if look % 5 == 0 { 1.0 } else { 0.0 };
                gains.learn(size, ((cost + words / 4.0) / words).ln() + disturbance);
            }
            assert!(expected.contains(&gains.switch_words()), "{cost}: {}", gains.switch_words());
        }
    }

    /// Takes what it is sent.
    struct Sink;

    impl Service for Sink {
        fn handle(&mut self, _: Request<'_>, reply: Responder) {
            reply.send_words(&[]);
        }
    }

    #[test]
    fn a_channel_that_carries_much_looks_again_and_the_others_follow() {
        let fabric = MemFabric::in_process(1, 2 << 20, MemOptions::default()).unwrap();
        let server = ServerId::new(0).unwrap();
        let listener = fabric.listen(server, &ListenOptions::default()).unwrap();
        let _messages = MessageServer::start(listener, &ServeMessages::default(), |_| Ok(Box::new(Sink))).unwrap();
        let compute = ComputeServer::join(std::sync::Arc::new(fabric), ComputeOptions::default()).unwrap();
        let (busy, calm) = (compute.worker().unwrap(), compute.worker().unwrap());
        let measured = &busy.compute().switch_words;
        // As if fetching had been far better from the start.
        *lock(&measured.gains) = Some(Gains::new([-5.0; SIZES.len()]));
        measured.words.store(SIZES[0] as u64 - 1, Ordering::Relaxed);
        let send = async |channel: &Channel, words: usize| {
            channel.request_words(Kind(1), &vec![0; words], Priority::BestEffort).await.unwrap();
        };
        let calm_channel = calm.block_on(calm.channel(server)).unwrap();
        assert_eq!(calm_channel.switch_words(), SIZES[0] - 1);
        busy.block_on(async {
            let channel = busy.channel(server).await.unwrap();
            let before = busy.counters();
            let mut sent = 0;
            while lock(&measured.gains).as_ref().is_some_and(|gains| gains.looks < 3) {
                send(&channel, 1 << 18).await;
                sent += 1;
                assert!(sent < 400, "it does not look again");
            }
            while channel.is_looking() {
                busy.yield_now().await;
            }
            let counted = busy.counters() - before;
            // Looks are in nobody's statistics. A request is four words longer, its reply three.
            assert_eq!((counted.two_sided, counted.bytes), (sent, sent * ((1 << 18) + 7) * 8));
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

    #[test]
    fn the_fit_falls_and_keeps_what_falls_already() {
        assert_eq!(falling(&[3.0, 2.0, 0.0]), [3.0, 2.0, 0.0]);
        assert_eq!(falling(&[3.0, 0.0, 2.0, -1.0]), [3.0, 0.0, 0.0, -1.0]);
        assert_eq!(falling(&[1.0, 2.0, 6.0]), [2.0, 2.0, 2.0]);
        assert_eq!(falling(&[3.0, -1.0, -2.0, 90.0]), [3.0, -1.0, -2.0, -2.0]);
    }
}
