//! Which messages are better announced and fetched than written into the ring: measured, on the fabric that is there.
//!
//! A few messages of each size are sent to the memory server both ways, in turn, several at a time; it answers them itself
//! ([`Kind::PROBE`]). The smallest size from which on fetching is faster at every larger one is the switch-over.

use super::{Channel, Kind, Priority, message::push_item};
use crate::{error::Error, sync::Ordering};

/// Words of the messages that are tried, with what surrounds them a little more.
const SIZES: [usize; 7] = [64, 256, 512, 1024, 2048, 4096, 8192];
const ROUNDS: usize = 3;
/// Messages at a time.
const IN_FLIGHT: usize = 4;

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
    let mut switch = usize::MAX;
    for words in SIZES.into_iter().rev() {
        let (mut ring, mut fetched) = (u64::MAX, u64::MAX);
        for _ in 0..ROUNDS {
            ring = ring.min(time_ns(channel, words, usize::MAX).await?);
            fetched = fetched.min(time_ns(channel, words, 0).await?);
        }
        if fetched >= ring {
            break;
        }
        switch = words - 1;
    }
    Ok(switch)
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
