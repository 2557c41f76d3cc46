//! Which messages are better announced and fetched than written into the ring: measured, on the fabric that is there.
//!
//! A few messages of each size are sent to the memory server both ways, in turn, several at a time; it answers them itself
//! ([`Kind::PROBE`]). The best of some rounds counts, which is least disturbed by whatever else the machine does. The
//! switch-over is where both ways together take the least time over all sizes, each counted in times of its better way.

use super::{Channel, Kind, Priority, message::push_item};
use crate::{error::Error, sync::Ordering};

/// Words of the messages that are tried, with what surrounds them a little more.
const SIZES: [usize; 7] = [64, 256, 512, 1024, 2048, 4096, 8192];
const ROUNDS: usize = 8;
/// Messages at a time.
const IN_FLIGHT: usize = 8;

/// The switch-over of the compute server's fabric, in words; measures it if nobody has.
pub(super) async fn switch_words(channel: &Channel) -> Result<usize, Error> {
    let measured = &channel.handle().compute().switch_words;
    match measured.load(Ordering::Relaxed) {
        0 => {
            channel.set_quiet(true);
            let words = measure(channel).await;
            channel.set_quiet(false);
            let words = words?;
            tracing::debug!(words, "measured from which size on messages are fetched");
            measured.store(words as u64, Ordering::Relaxed);
            Ok(words)
        }
        words => Ok(usize::try_from(words).unwrap_or(usize::MAX)),
    }
}

async fn measure(channel: &Channel) -> Result<usize, Error> {
    let mut best = [[u64::MAX; 2]; SIZES.len()];
    for _ in 0..ROUNDS {
        for (words, [ring, fetched]) in SIZES.into_iter().zip(&mut best) {
            *ring = time_ns(channel, words, usize::MAX).await?.min(*ring);
            *fetched = time_ns(channel, words, 0).await?.min(*fetched);
        }
    }
    Ok(switch_of(&best))
}

/// The switch-over that fits times of the ring and of fetching, by size.
fn switch_of(times: &[[u64; 2]; SIZES.len()]) -> usize {
    let cost = |fetched_from: usize| -> f64 {
        let sizes = times.iter().enumerate();
        sizes
            .map(|(size, [ring, fetched])| {
                let taken = if size >= fetched_from { fetched } else { ring };
                *taken as f64 / (*ring.min(fetched)).max(1) as f64
            })
            .sum()
    };
    let from = (0..=SIZES.len()).min_by(|a, b| cost(*a).total_cmp(&cost(*b))).unwrap_or(SIZES.len());
    match from {
        0 => SIZES[0] - 1,
        from if from == SIZES.len() => usize::MAX,
        // Between the last size that is better written and the first that is better fetched.
        from => (SIZES[from - 1] + SIZES[from]) / 2,
    }
}

async fn time_ns(channel: &Channel, words: usize, switch_words: usize) -> Result<u64, Error> {
    channel.set_switch_over(switch_words);
    let handle = channel.handle();
    let start_ns = handle.clock().now_ns();
    let messages: Vec<_> = (0..IN_FLIGHT)
        .map(|_| {
            let channel = channel.clone();
            handle.spawn(async move {
                let fill = |to: &mut Vec<u64>| to.resize(to.len() + words, 0);
                channel.send(Priority::BestEffort, 1, |to| push_item(to, Kind::PROBE, fill)).await.map(drop)
            })
        })
        .collect();
    for message in messages {
        message.await?;
    }
    Ok(handle.clock().now_ns() - start_ns)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_switch_over_lies_where_the_better_way_changes() {
        let mut times = SIZES.map(|words| [words as u64, 700 + words as u64 / 4]);
        assert_eq!(switch_of(&times), 768);
        // One disturbed measurement does not move it far.
        times[6] = [9000, 9500];
        assert_eq!(switch_of(&times), 768);
        assert_eq!(switch_of(&SIZES.map(|words| [words as u64, 1 << 20])), usize::MAX);
        assert_eq!(switch_of(&SIZES.map(|words| [words as u64, 1])), 63);
    }
}
