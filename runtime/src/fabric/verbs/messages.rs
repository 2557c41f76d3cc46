//! Two-sided traffic: messages, WRITEs that notify, and sleeping until one comes.
//!
//! An [`Inbox`] is one thread's receiving side: a shared receive queue, so that many connections need no more buffers than
//! one, and a completion channel, so that it can sleep. A [`Line`] is a connection; what comes in on it arrives at the inbox
//! that made it. A [`Window`] is memory that the other sides of an inbox's lines may write to, and announce in the inbox.
//!
//! How the two sides learn each other's [`LineAddress`] is theirs to decide; both are [`Wire`] values. Nothing here
//! blocks, except [`Inbox::sleep`].
//!
//! ```no_run
//! # use farlink_runtime::{error::Error, fabric::verbs::{DeviceChoice, messages::{Inbox, InboxOptions}}};
//! # fn main() -> Result<(), Error> {
//! let options = InboxOptions::default();
//! let mut server = Inbox::open(&DeviceChoice::default(), options)?;
//! let mut client = Inbox::open(&DeviceChoice::default(), options)?;
//! let (mut there, mut here) = (server.line()?, client.line()?);
//! there.connect(&here.address())?;
//! here.connect(&there.address())?;
//! assert!(here.send(b"hello")?);
//! let mut bytes = Vec::new();
//! while server.receive(&mut bytes)?.is_none() {
//!     server.sleep(std::time::Duration::from_secs(1))?;
//! }
//! assert_eq!(bytes, b"hello");
//! # Ok(())
//! # }
//! ```

use std::{collections::VecDeque, time::Duration};

use super::{
    DeviceChoice, INLINE_BYTES, Reliability,
    ib::{
        Access, Channel, CompletionQueue, Domain, Finished, Local, Memory, Peer, Piece, PostList, Posting, QueuePair,
        QueuePairOptions, ReceiveQueue, Remote,
    },
};
use crate::{
    error::Error,
    fabric::ringer::{Doorbell as _, RequestList as _},
    sync::Arc,
    wire::Wire,
};

/// Room for completions besides those of messages: buffers that come back from lines that broke.
const SPARE_COMPLETIONS: u32 = 64;

/// How large an inbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InboxOptions {
    /// Messages that can have arrived and not been received yet. When there are more, senders wait, as long as it takes.
    pub slots: usize,
    /// Bytes of the longest message.
    pub message_bytes: usize,
    /// Messages that a line can have on their way.
    pub line_depth: usize,
    /// When a line is given up.
    pub reliability: Reliability,
}

impl Default for InboxOptions {
    fn default() -> Self {
        Self { slots: 256, message_bytes: 1024, line_depth: 16, reliability: Reliability::default() }
    }
}

/// What has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// A message, of which the bytes were handed out.
    Message {
        /// The line, by its [`Line::number`].
        line: u32,
    },
    /// A WRITE to a window.
    Written {
        /// The line, by its [`Line::number`].
        line: u32,
        /// The number that the writer gave.
        number: u32,
        /// How many bytes were written.
        bytes: u32,
    },
}

/// Where messages of many lines arrive.
#[derive(Debug)]
pub struct Inbox {
    options: InboxOptions,
    local: Local,
    arrived: VecDeque<Finished>,
    queue: Arc<ReceiveQueue>,
    completions: Arc<CompletionQueue>,
    channel: Arc<Channel>,
    domain: Arc<Domain>,
}

impl Inbox {
    /// An inbox on this device.
    ///
    /// # Errors
    /// If there is no such device, it has no shared receive queues, or refuses one so large.
    pub fn open(device: &DeviceChoice, options: InboxOptions) -> Result<Self, Error> {
        options.reliability.validate()?;
        let (device, local) = device.open()?;
        if !device.info().shared_receive {
            let wanted = format!("shared receive queue on RDMA device {}", device.info().name);
            return Err(Error::NoDevice { wanted, why: "use another device, or SoftRoCE".into() });
        }
        for (option, value) in
            [("slots", options.slots), ("message_bytes", options.message_bytes), ("line_depth", options.line_depth)]
        {
            if !(1..=1 << 20).contains(&value) {
                return Err(Error::BadOption { option, why: format!("{value}; it must be 1 to 2^20") });
            }
        }
        let domain = Domain::new(&device)?;
        let channel = Channel::new(&device)?;
        let depth = options.slots as u32 + SPARE_COMPLETIONS;
        let completions = CompletionQueue::new(&device, depth, Some(&channel))?;
        let queue = ReceiveQueue::new(&domain, options.slots, options.message_bytes)?;
        Ok(Self { options, local, arrived: VecDeque::new(), queue, completions, channel, domain })
    }

    /// A line whose messages arrive here; connect it to one of another inbox.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn line(&self) -> Result<Line, Error> {
        let depth = self.options.line_depth;
        let sent = CompletionQueue::new(self.domain.device(), 2 * depth as u32, None)?;
        let options = QueuePairOptions {
            send_depth: depth as u32,
            inline_bytes: self.domain.device().info().inline_bytes.min(INLINE_BYTES),
            gather_max: 1,
            receive: Some(Arc::clone(&self.queue)),
        };
        let queue_pair = QueuePair::new(&self.domain, &sent, &self.completions, options)?;
        let slot_words = self.options.message_bytes.div_ceil(8);
        Ok(Line {
            local: self.local.clone(),
            options: self.options,
            queue_pair,
            sent,
            outgoing: Memory::new(&self.domain, depth * slot_words, Access::Local)?,
            slot_words,
            next: 0,
            under_way: 0,
            batch: PostList::with_capacity(1),
            broken: None,
            connected: false,
        })
    }

    /// Zeroed memory of `words` that the other sides of this inbox's lines may write to.
    ///
    /// # Errors
    /// If the device refuses to register it.
    pub fn window(&self, words: usize) -> Result<Window, Error> {
        Ok(Window { memory: Memory::new(&self.domain, words, Access::Peers)?, words })
    }

    /// Takes the next arrival, if there is one. The bytes of a message replace those in `bytes`.
    ///
    /// # Errors
    /// If the device fails. A line that breaks says so on its own side only.
    pub fn receive(&mut self, bytes: &mut Vec<u8>) -> Result<Option<Arrival>, Error> {
        loop {
            if self.arrived.is_empty() {
                self.completions.poll(|finished| self.arrived.push_back(finished));
            }
            let Some(finished) = self.arrived.pop_front() else { return Ok(None) };
            let slot = finished.id as usize;
            let arrival = finished.received.map(|received| {
                let line = finished.queue_pair;
                if received.is_write {
                    let number = received.immediate.unwrap_or_default();
                    return Arrival::Written { line, number, bytes: received.bytes };
                }
                bytes.resize((received.bytes as usize).min(self.queue.slot_bytes()), 0);
                self.queue.copy_out(slot, bytes);
                Arrival::Message { line }
            });
            self.queue.post(slot)?;
            // Without one, a line broke and gave its buffer back.
            if arrival.is_some() {
                return Ok(arrival);
            }
        }
    }

    /// Sleeps until something has arrived, at most so long; whether something has.
    ///
    /// # Errors
    /// If the device fails.
    pub fn sleep(&mut self, limit: Duration) -> Result<bool, Error> {
        // What comes before this is seen by the poll, what comes after it wakes.
        self.channel.drain();
        self.completions.arm()?;
        self.completions.poll(|finished| self.arrived.push_back(finished));
        if self.arrived.is_empty() && self.channel.wait(limit, None)? {
            self.completions.poll(|finished| self.arrived.push_back(finished));
        }
        Ok(!self.arrived.is_empty())
    }
}

/// One side of a connection for messages. Dropping it breaks the other side.
#[derive(Debug)]
pub struct Line {
    // Before what it uses.
    queue_pair: QueuePair,
    sent: Arc<CompletionQueue>,
    outgoing: Memory,
    slot_words: usize,
    local: Local,
    options: InboxOptions,
    /// The slot of the next message; slots are used in turn, because messages are sent in order.
    next: usize,
    under_way: usize,
    batch: PostList,
    broken: Option<String>,
    connected: bool,
}

/// What the other side must know to connect to a [`Line`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineAddress(Peer);

impl Wire for LineAddress {
    fn encode(&self, to: &mut Vec<u64>) {
        self.0.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        Peer::decode(from).map(Self)
    }
}

impl Line {
    /// Names the line in its own inbox's arrivals.
    pub fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    /// What the other side must know.
    pub fn address(&self) -> LineAddress {
        LineAddress(self.queue_pair.describe(&self.local))
    }

    /// Connects it; the other side must do the same before anything is sent.
    ///
    /// # Errors
    /// If it is connected already, or the device refuses.
    pub fn connect(&mut self, to: &LineAddress) -> Result<(), Error> {
        if std::mem::replace(&mut self.connected, true) {
            return Err(Error::LineBroken { why: "it was connected before".into() });
        }
        self.queue_pair.connect(&self.local, &to.0, Access::Peers, self.options.reliability)
    }

    /// Sends a message. False if as many as it can hold are on their way: try again later.
    ///
    /// # Errors
    /// If the message is too long, or the line is broken.
    pub fn send(&mut self, message: &[u8]) -> Result<bool, Error> {
        self.post(message, Posting::Send)
    }

    /// Writes to the other side's window, from the byte `at` on (a multiple of 8), and has its inbox say so, with this
    /// number. False as for [`Line::send`].
    ///
    /// # Errors
    /// If the bytes are too many for a message or do not fit the window, or the line is broken.
    pub fn write_notify(&mut self, to: &WindowAddress, at: u64, bytes: &[u8], number: u32) -> Result<bool, Error> {
        let end = at.checked_add(bytes.len() as u64);
        if !at.is_multiple_of(8) || end.is_none_or(|end| end > to.bytes) {
            let why = format!("{} bytes at {at} of a window of {}; begin at a multiple of 8", bytes.len(), to.bytes);
            return Err(Error::BadOption { option: "at", why });
        }
        let remote = Remote { address: to.address.wrapping_add(at), key: to.key };
        self.post(bytes, Posting::WriteNotify(remote, number))
    }

    fn post(&mut self, bytes: &[u8], posting: Posting) -> Result<bool, Error> {
        if bytes.len() > self.options.message_bytes {
            let why = format!("{} bytes; this line takes {}", bytes.len(), self.options.message_bytes);
            return Err(Error::BadOption { option: "message", why });
        }
        if !self.connected {
            return Err(Error::LineBroken { why: "it is not connected yet".into() });
        }
        self.poll()?;
        if self.under_way == self.options.line_depth {
            return Ok(false);
        }
        let first = self.next * self.slot_words;
        self.outgoing.copy_in(first, bytes);
        let (address, key) = (self.outgoing.address(first), self.outgoing.key());
        let inline = bytes.len() <= self.queue_pair.inline_bytes() as usize;
        self.batch.push(0, posting, Piece { address, bytes: bytes.len() as u32, key }, inline);
        // SAFETY: the slot is registered memory of this line, which outlives the queue pair; it is not written again before
        // the request has completed, because at most `line_depth` are under way and they complete in order.
        let posted = unsafe { self.queue_pair.ring(&mut self.batch) };
        if let Err(error) = posted {
            return Err(self.break_off(error.to_string()));
        }
        self.under_way += 1;
        self.next = (self.next + 1) % self.options.line_depth;
        Ok(true)
    }

    /// Learns which messages have arrived, and returns how many are still on their way.
    ///
    /// # Errors
    /// If the line is broken. What was on its way may have arrived or not.
    pub fn poll(&mut self) -> Result<usize, Error> {
        let (under_way, mut failed) = (&mut self.under_way, None);
        self.sent.poll(|finished| {
            *under_way = under_way.saturating_sub(1);
            if !finished.status.is_success() && failed.is_none() {
                failed = Some(finished.status.why());
            }
        });
        if let Some(why) = failed {
            return Err(self.break_off(why));
        }
        match &self.broken {
            Some(why) => Err(Error::LineBroken { why: why.clone() }),
            None => Ok(self.under_way),
        }
    }

    fn break_off(&mut self, why: String) -> Error {
        // Nothing more is to arrive at the other side from here.
        if let Err(error) = self.queue_pair.fail() {
            tracing::debug!(%error, "a broken line did not end");
        }
        Error::LineBroken { why: self.broken.get_or_insert(why).clone() }
    }
}

/// Memory that others write to; see [`Inbox::window`].
#[derive(Debug)]
pub struct Window {
    memory: Memory,
    words: usize,
}

/// What the other side must know to write to a [`Window`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowAddress {
    address: u64,
    bytes: u64,
    key: u32,
}

impl Wire for WindowAddress {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.address, self.bytes, u64::from(self.key)]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        let (address, bytes) = (u64::decode(from)?, u64::decode(from)?);
        let key = u32::try_from(u64::decode(from)?).map_err(|_| Error::Malformed("a key has more than 32 bits"))?;
        Ok(Self { address, bytes, key })
    }
}

impl Window {
    /// What the other side must know.
    pub fn address(&self) -> WindowAddress {
        let registered = self.memory.registered();
        WindowAddress { address: registered.address(), bytes: self.words as u64 * 8, key: registered.remote_key() }
    }

    /// The word at `index`. While somebody writes to it, old and new bytes may be mixed; after the arrival that announces a
    /// WRITE, what was written is there.
    ///
    /// # Panics
    /// If the window is not so large.
    pub fn load(&self, index: usize) -> u64 {
        self.memory.load(index)
    }
}
