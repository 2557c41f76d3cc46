//! A worker, a memory server that takes messages, and streams of requests between them, in this process.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error;
use farlink_runtime::fabric::link::ListenOptions;
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::messaging::{
    Channel, Kind, MessageServer, Priority, Refusal, Request, Responder, ServeMessages, Service, Wait,
};
use farlink_runtime::ptr::ServerId;
use farlink_runtime::worker::Worker;

use crate::cores::stay_on_core;

/// Takes what it is sent and replies with nothing.
const SINK: Kind = Kind(1);

struct Sink;

impl Service for Sink {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        match request.kind() {
            SINK => reply.send_words(&[]),
            _ => reply.refuse(Refusal::UnknownKind),
        }
    }
}

/// Where messages go to and fro.
#[derive(Debug)]
pub(super) struct Bench {
    // Dropped in this order: who sends, what it sends on, and who receives.
    channel: Channel,
    worker: Worker,
    _compute: ComputeServer,
    _messages: MessageServer,
}

/// Requests of one size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stream {
    pub(super) bytes: usize,
    pub(super) in_flight: usize,
    pub(super) priority: Priority,
    /// How many, at least.
    pub(super) messages: u64,
}

/// What a stream did.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    pub(super) messages: u64,
    pub(super) seconds: f64,
    /// Of each message in turn, if that was asked for.
    pub(super) latencies_ns: Vec<u64>,
}

impl Done {
    pub(super) fn per_second(&self) -> f64 {
        self.messages as f64 / self.seconds
    }

    /// The latency that this share of messages does not exceed.
    pub(super) fn percentile_ns(&mut self, share: f64) -> Option<u64> {
        self.latencies_ns.sort_unstable();
        let last = self.latencies_ns.len().checked_sub(1)?;
        self.latencies_ns.get((last as f64 * share).round() as usize).copied()
    }
}

impl Bench {
    pub(super) fn start(options: MemOptions, seed: u64) -> anyhow::Result<Self> {
        let server = ServerId::new(0).context("0 is a server")?;
        let fabric = Arc::new(MemFabric::in_process(1, 2 << 20, options)?);
        let listener = fabric.listen(server, &ListenOptions::default())?;
        let serve = ServeMessages { wait: Wait::Poll, seed, ..ServeMessages::default() };
        stay_on_core(0);
        let messages = MessageServer::start(listener, &serve, |_| {
            stay_on_core(1);
            Ok(Box::new(Sink))
        })?;
        let compute = ComputeServer::join(fabric, ComputeOptions { seed, ..ComputeOptions::default() })?;
        let worker = compute.worker()?;
        let channel = worker.block_on(worker.channel(server))?;
        Ok(Self { channel, worker, _compute: compute, _messages: messages })
    }

    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Runs one stream.
    pub(super) fn run(&self, stream: Stream) -> anyhow::Result<Done> {
        let mut done = self.together(&[stream], false)?;
        done.pop().context("a stream has a result")
    }

    /// Runs streams at the same time. The first to have sent all its messages ends them all; what comes later does not count.
    pub(super) fn together(&self, streams: &[Stream], timed: bool) -> anyhow::Result<Vec<Done>> {
        let start = Instant::now();
        let end: Rc<Cell<Option<f64>>> = Rc::default();
        let (mut tasks, mut tallies) = (Vec::new(), Vec::new());
        for &stream in streams {
            let words: Rc<[u64]> = (0..stream.bytes.div_ceil(8) as u64).collect();
            let tally = Rc::new(Tally::default());
            tallies.push(Rc::clone(&tally));
            for _ in 0..stream.in_flight {
                let (channel, words) = (self.channel.clone(), Rc::clone(&words));
                let (tally, end) = (Rc::clone(&tally), Rc::clone(&end));
                tasks.push(self.worker.spawn(async move {
                    while end.get().is_none() && tally.begun.get() < stream.messages {
                        tally.begun.set(tally.begun.get() + 1);
                        let sent = timed.then(Instant::now);
                        channel.request_words(SINK, &words, stream.priority).await?;
                        if end.get().is_some() {
                            break;
                        }
                        tally.ended.set(tally.ended.get() + 1);
                        if let Some(sent) = sent {
                            tally.latencies_ns.borrow_mut().push(sent.elapsed().as_nanos() as u64);
                        }
                        if tally.ended.get() == stream.messages {
                            end.set(Some(start.elapsed().as_secs_f64()));
                        }
                    }
                    Ok::<(), Error>(())
                }));
            }
        }
        self.worker.block_on(async {
            for task in tasks {
                task.await?;
            }
            Ok::<(), Error>(())
        })?;
        let seconds = end.get().context("a stream sends all its messages")?;
        let done =
            |tally: Rc<Tally>| Done { messages: tally.ended.get(), seconds, latencies_ns: tally.latencies_ns.take() };
        Ok(tallies.into_iter().map(done).collect())
    }
}

/// What the tasks of a stream have done so far.
#[derive(Debug, Default)]
struct Tally {
    begun: Cell<u64>,
    ended: Cell<u64>,
    latencies_ns: RefCell<Vec<u64>>,
}
