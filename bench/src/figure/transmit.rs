//! Records of a memory server's region, sent to a worker in one of two ways, and what that took, counted: for `to-copy`.
//!
//! Over the `mem` fabric, by the same requests that messages are sent by: copied into a buffer and written, or gathered from where
//! they lie. What arrives is compared with what was sent.

use anyhow::{Context as _, ensure};
use farlink_runtime::buffer::{Buffer, Buffers, LocalKey};
use farlink_runtime::clock::Clock;
use farlink_runtime::fabric::connection::{OpenMemory, PeerId, far};
use farlink_runtime::fabric::gather::{Gather, Piece};
use farlink_runtime::fabric::listener::{Change, ListenOptions, Listener, ServerEndpoint};
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::fabric::region::Region;
use farlink_runtime::fabric::{Endpoint, Fabric as _, Request, Ticket, Verb};
use farlink_runtime::lock::OwnerId;
use farlink_runtime::ptr::{RemotePtr, ServerId};
use farlink_runtime::sync::Ordering;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::card::{LIST_MAX, Sent};

/// How records are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sending {
    /// Copied into one buffer.
    CopyOut,
    /// Gathered by the card.
    Gather,
}

/// All of a region's records, and a connection to send them over.
pub(crate) struct Transmitter {
    // The endpoints before the buffers that they may use.
    port: Box<dyn ServerEndpoint>,
    _worker: Box<dyn Endpoint>,
    buffers: Buffers,
    peer: ServerId,
    arrived: OpenMemory,
    server: ServerId,
    region_bytes: u64,
    /// Where records of a size are, in random order.
    places: StdRng,
    _listener: Box<dyn Listener>,
    _fabric: MemFabric,
}

impl Transmitter {
    /// A region of so many bytes of random words.
    pub(crate) fn new(region_bytes: u64, seed: u64) -> anyhow::Result<Self> {
        let mut places = StdRng::seed_from_u64(seed);
        let region = Region::anonymous(usize::try_from(region_bytes)?)?;
        region.words().iter().for_each(|word| word.store(places.random(), Ordering::Relaxed));
        let options = MemOptions { gather_max: LIST_MAX as usize, ..MemOptions::default() };
        let fabric = MemFabric::in_process(vec![region], options);
        let server = ServerId::new(0).context("server 0")?;
        let listener = fabric.listen(server, &ListenOptions::default())?;
        let mut port = listener.endpoint(0, seed, Clock::monotonic())?;
        let mut worker = fabric.endpoint(seed, Clock::monotonic())?;
        let who = PeerId { owner: OwnerId::new(1).context("owner 1")?, worker: 0 };
        let arrived = worker.connect(server, who)?;
        let mut changes = Vec::new();
        port.changes(true, &mut changes);
        let Some(Change::Joined { peer, .. }) = changes.pop() else { anyhow::bail!("nobody has connected") };
        let buffers = Buffers::default();
        Ok(Self {
            port,
            _worker: worker,
            buffers,
            peer,
            arrived,
            server,
            region_bytes,
            places,
            _listener: listener,
            _fabric: fabric,
        })
    }

    /// Sends messages of records of these sizes, each from places of its own, `messages` times; what it took.
    pub(crate) fn send(&mut self, records: &[u64], sending: Sending, messages: u64) -> anyhow::Result<Sent> {
        let mut sent = Sent::default();
        for _ in 0..messages {
            let places = self.draw(records)?;
            let (verb, entries) = match sending {
                Sending::Gather => (self.gather(&places)?, places.len() as u64),
                Sending::CopyOut => {
                    let buffer = self.copy(&places)?;
                    sent.copied_bytes += buffer.len() as u64 * 8;
                    sent.copied_pieces += places.len() as u64;
                    (Verb::Write(buffer), 1)
                }
            };
            sent.descriptors += 1;
            sent.entries += entries;
            sent.bytes += verb.bytes() as u64;
            self.port.ring(&mut vec![Request { ticket: Ticket(1), at: far(self.peer, 0), verb }]);
            let mut completions = Vec::new();
            self.port.poll(&mut completions);
            completions.into_iter().try_for_each(|completion| completion.outcome.map(drop).map_err(|error| *error))?;
            self.compare(&places)?;
        }
        Ok(sent)
    }

    /// Places of their own for records of these sizes, scattered over the region.
    fn draw(&mut self, records: &[u64]) -> anyhow::Result<Vec<(RemotePtr, usize)>> {
        let largest = records.iter().copied().max().context("a message has records")?;
        let slots = self.region_bytes / largest;
        ensure!(slots > records.len() as u64, "the region has too few records");
        let mut numbers: Vec<u64> = (1..slots).collect();
        let (chosen, _) = numbers.partial_shuffle(&mut self.places, records.len());
        let place = |(slot, &bytes): (&mut u64, &u64)| {
            Ok((RemotePtr::new(self.server, *slot * largest)?, usize::try_from(bytes / 8)?))
        };
        chosen.iter_mut().zip(records).map(place).collect()
    }

    fn buffer(&mut self, words: usize) -> anyhow::Result<Buffer> {
        // In memory, nothing has to be registered.
        Ok(self.buffers.take(words, |_, _| Ok(LocalKey::default()))?)
    }

    fn copy(&mut self, places: &[(RemotePtr, usize)]) -> anyhow::Result<Buffer> {
        let mut buffer = self.buffer(places.iter().map(|(_, words)| words).sum())?;
        let mut filled = 0;
        for &(at, words) in places {
            let record = self.port.memory().words(at, words).context("a record lies in the region")?;
            for (to, from) in buffer[filled..].iter_mut().zip(record) {
                *to = from.load(Ordering::Relaxed);
            }
            filled += words;
        }
        Ok(buffer)
    }

    fn gather(&mut self, places: &[(RemotePtr, usize)]) -> anyhow::Result<Verb> {
        let buffer = self.buffer(1)?;
        let pieces = places.iter().map(|&(at, words)| Piece::Region(at, words)).collect();
        Ok(Verb::Gather(Box::new(Gather::new(buffer, pieces))))
    }

    /// That what has arrived is what was sent.
    fn compare(&self, places: &[(RemotePtr, usize)]) -> anyhow::Result<()> {
        let mut arrived = self.arrived.iter();
        for &(at, words) in places {
            let record = self.port.memory().words(at, words).context("a record lies in the region")?;
            let is_same = record
                .iter()
                .zip(&mut arrived)
                .all(|(sent, arrived)| sent.load(Ordering::Relaxed) == arrived.load(Ordering::Acquire));
            ensure!(is_same, "a record has not arrived as it was sent");
        }
        Ok(())
    }
}
