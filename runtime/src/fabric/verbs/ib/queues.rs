//! Completion queues, the channel that wakes a sleeper, and shared receive queues.

use std::{
    fmt,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    ptr::NonNull,
    sync::Arc,
    time::Duration,
};

use rdma_sys as rdma;

use super::{Device, Domain, Memory, check, device::refused};
use crate::{
    error::Error,
    fabric::link::{Arrived, ReceiveBuffers},
    ptr::ServerId,
    sync::AtomicU64,
};

/// Completions taken from a queue at a time.
const POLL_MAX: usize = 32;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(rdma::ibv_wc_status::Type);

impl Status {
    /// It was carried out.
    pub(crate) fn is_success(self) -> bool {
        self.0 == rdma::ibv_wc_status::IBV_WC_SUCCESS
    }

    /// It was dropped because an earlier request of its connection failed, or the connection was torn down.
    pub(crate) fn is_flushed(self) -> bool {
        self.0 == rdma::ibv_wc_status::IBV_WC_WR_FLUSH_ERR
    }

    /// Cause and remedy.
    pub(crate) fn why(self) -> String {
        use rdma::ibv_wc_status as status;
        match self.0 {
            status::IBV_WC_SUCCESS => "it was carried out".into(),
            status::IBV_WC_REM_ACCESS_ERR => "the memory server's card refused the access: no memory is registered there \
                                              under this key. Was the server restarted? Connect anew"
                .into(),
            status::IBV_WC_RETRY_EXC_ERR => "the memory server's card did not answer, again and again: its process has \
                                             ended, or the network between is down. Check `farlink devices` and `ping` on \
                                             both sides, then connect anew"
                .into(),
            status::IBV_WC_WR_FLUSH_ERR => "the connection was torn down before it was carried out".into(),
            status::IBV_WC_LOC_PROT_ERR => "its local buffer is not registered with this device".into(),
            status::IBV_WC_REM_INV_REQ_ERR | status::IBV_WC_REM_OP_ERR => {
                "the memory server's card cannot carry it out: does it have atomics? `farlink devices` tells".into()
            }
            other => {
                // SAFETY: the library answers every number with a string that lives for ever.
                let text = unsafe { std::ffi::CStr::from_ptr(rdma::ibv_wc_status_str(other)) };
                format!("the card says: {} ({other})", text.to_string_lossy())
            }
        }
    }
}

/// A completion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Finished {
    /// The request's name.
    pub(crate) id: u64,
    pub(crate) status: Status,
    /// The queue pair it belongs to.
    pub(crate) queue_pair: u32,
    /// Whether something arrived, rather than something sent has ended; and what came with it.
    pub(crate) received: Option<Received>,
}

/// What a receive completion tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    /// Bytes of a message that was sent, or written by a WRITE that notifies.
    pub(crate) bytes: u32,
    /// The number that came with it.
    pub(crate) immediate: Option<u32>,
    /// Whether it announces a WRITE, which used no bytes of the receive buffer.
    pub(crate) is_write: bool,
}

/// What a sleeping thread waits on.
pub(crate) struct Channel {
    raw: NonNull<rdma::ibv_comp_channel>,
    device: Arc<Device>,
}

// SAFETY: a file descriptor and a counter that libibverbs guards.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channel({:?})", self.device)
    }
}

impl Channel {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Arc<Self>, Error> {
        // SAFETY: the device is open and held by the channel.
        let raw = unsafe { rdma::ibv_create_comp_channel(device.context()) };
        let raw = refused(raw, || format!("making a completion channel on {}", device.info().name))?;
        let channel = Self { raw, device: Arc::clone(device) };
        // Waiting is done by `poll`, with a limit; taking an event must not block.
        // SAFETY: the descriptor is open.
        let code = unsafe { libc::fcntl(channel.descriptor(), libc::F_SETFL, libc::O_NONBLOCK) };
        check(code.min(0), || "setting up a completion channel".into())?;
        Ok(Arc::new(channel))
    }

    fn descriptor(&self) -> RawFd {
        // SAFETY: the channel is alive.
        unsafe { self.raw.as_ref() }.fd
    }

    /// Sleeps until an event comes, `end` has something to read, or the time is over; whether either came. Signals end it
    /// early.
    pub(crate) fn wait(&self, limit: Duration, end: Option<&UnixStream>) -> Result<bool, Error> {
        let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut polled = [watch(self.descriptor()), watch(end.map_or(-1, AsRawFd::as_raw_fd))];
        let milliseconds = i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: two entries, which outlive the call; one with a negative descriptor is passed over.
        let code = unsafe { libc::poll(polled.as_mut_ptr(), 2, milliseconds) };
        if code < 0 {
            let error = std::io::Error::last_os_error();
            return match error.kind() {
                std::io::ErrorKind::Interrupted => Ok(false),
                _ => Err(Error::io("waiting for a completion")(error)),
            };
        }
        Ok(code > 0)
    }

    /// Takes all events that have come.
    pub(crate) fn drain(&self) {
        loop {
            let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the channel is alive and does not block; the out-parameters outlive the call.
            let code = unsafe { rdma::ibv_get_cq_event(self.raw.as_ptr(), &raw mut queue, &raw mut context) };
            if code != 0 {
                return;
            }
            // SAFETY: the event names a live queue: destroying one waits until its events are acknowledged.
            unsafe { rdma::ibv_ack_cq_events(queue, 1) };
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: made in `new`; its completion queues hold it, so none is left.
        unsafe { rdma::ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// Where ended requests are told.
pub(crate) struct CompletionQueue {
    raw: NonNull<rdma::ibv_cq>,
    device: Arc<Device>,
    _channel: Option<Arc<Channel>>,
}

// SAFETY: libibverbs locks a completion queue that several threads poll.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({:?})", self.device)
    }
}

impl CompletionQueue {
    /// A queue with room for `depth` completions; more than that must never be outstanding.
    pub(crate) fn new(device: &Arc<Device>, depth: u32, channel: Option<&Arc<Channel>>) -> Result<Arc<Self>, Error> {
        let depth = i32::try_from(depth).unwrap_or(i32::MAX);
        let raw_channel = channel.map_or(std::ptr::null_mut(), |channel| channel.raw.as_ptr());
        // SAFETY: the device is open, the channel alive; both are held by the queue.
        let raw = unsafe { rdma::ibv_create_cq(device.context(), depth, std::ptr::null_mut(), raw_channel, 0) };
        let raw = refused(raw, || format!("making a completion queue of {depth} on {}", device.info().name))?;
        Ok(Arc::new(Self { raw, device: Arc::clone(device), _channel: channel.cloned() }))
    }

    pub(super) fn raw(&self) -> *mut rdma::ibv_cq {
        self.raw.as_ptr()
    }

    /// Hands completions to `take`, as many as there are.
    #[inline]
    pub(crate) fn poll(&self, mut take: impl FnMut(Finished)) {
        let mut entries = [const { MaybeUninit::<rdma::ibv_wc>::uninit() }; POLL_MAX];
        loop {
            // SAFETY: the queue is alive; there is room for `POLL_MAX` entries.
            let count = unsafe { rdma::ibv_poll_cq(self.raw.as_ptr(), POLL_MAX as i32, entries.as_mut_ptr().cast()) };
            let count = usize::try_from(count).unwrap_or(0);
            for entry in &entries[..count] {
                // SAFETY: the call has filled the first `count` entries with integers.
                take(finished(unsafe { entry.assume_init_ref() }));
            }
            if count < POLL_MAX {
                return;
            }
        }
    }

    /// Has the channel tell of the next completion. Poll once more afterwards: one may have come just before.
    pub(crate) fn arm(&self) -> Result<(), Error> {
        // SAFETY: the queue is alive.
        check(unsafe { rdma::ibv_req_notify_cq(self.raw.as_ptr(), 0) }, || "asking for a completion event".into())
    }
}

#[inline]
fn finished(entry: &rdma::ibv_wc) -> Finished {
    use rdma::ibv_wc_opcode as opcode;
    let status = Status(entry.status);
    // Of a failed one, only name, status and queue pair are valid.
    let received = (status.is_success() && entry.opcode >= opcode::IBV_WC_RECV).then(|| {
        let has_immediate = entry.wc_flags & rdma::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        // SAFETY: both sides of the union are 32-bit integers.
        let immediate = unsafe { entry.imm_data_invalidated_rkey_union.imm_data };
        Received {
            bytes: entry.byte_len,
            immediate: has_immediate.then(|| u32::from_be(immediate)),
            is_write: entry.opcode == opcode::IBV_WC_RECV_RDMA_WITH_IMM,
        }
    });
    Finished { id: entry.wr_id, status, queue_pair: entry.qp_num, received }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made in `new`; its queue pairs hold it, so none is left.
        unsafe { rdma::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// Buffers that the messages of many connections arrive in.
pub(crate) struct ReceiveQueue {
    // Declared after nothing that it needs: `drop` destroys the queue before the memory goes.
    raw: NonNull<rdma::ibv_srq>,
    memory: Memory,
    slots: usize,
    slot_words: usize,
    _domain: Arc<Domain>,
}

// SAFETY: libibverbs locks a receive queue that several threads post to; the memory is reached by slot, and a slot
// belongs to the device from its post to its completion.
unsafe impl Send for ReceiveQueue {}
// SAFETY: as above; `load`s of a slot that the device owns are of no use and no harm.
unsafe impl Sync for ReceiveQueue {}

impl fmt::Debug for ReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiveQueue({} slots of {} bytes)", self.slots, self.slot_words * 8)
    }
}

impl ReceiveQueue {
    /// A queue of `slots` buffers of `slot_bytes`, all of them posted.
    pub(crate) fn new(domain: &Arc<Domain>, slots: usize, slot_bytes: usize) -> Result<Arc<Self>, Error> {
        let slot_words = slot_bytes.div_ceil(8).max(1);
        let memory = Memory::new(domain, slots * slot_words, super::Access::Local)?;
        let attributes = rdma::ibv_srq_attr { max_wr: slots as u32, max_sge: 1, srq_limit: 0 };
        let mut options = rdma::ibv_srq_init_attr { srq_context: std::ptr::null_mut(), attr: attributes };
        // SAFETY: the domain is alive and held by the queue; the options outlive the call.
        let raw = unsafe { rdma::ibv_create_srq(domain.raw(), &raw mut options) };
        let name = &domain.device().info().name;
        let raw = refused(raw, || format!("making a shared receive queue of {slots} buffers on {name}"))?;
        let queue = Self { raw, memory, slots, slot_words, _domain: Arc::clone(domain) };
        (0..slots).try_for_each(|slot| queue.post(slot))?;
        Ok(Arc::new(queue))
    }

    pub(super) fn raw(&self) -> *mut rdma::ibv_srq {
        self.raw.as_ptr()
    }

    /// Gives a slot to the device, which writes the next message to it. Its name in the completion is its number.
    pub(crate) fn post(&self, slot: usize) -> Result<(), Error> {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let mut piece = rdma::ibv_sge {
            addr: self.memory.address(slot * self.slot_words),
            length: (self.slot_words * 8) as u32,
            lkey: self.memory.key().0,
        };
        let mut request =
            rdma::ibv_recv_wr { wr_id: slot as u64, next: std::ptr::null_mut(), sg_list: &raw mut piece, num_sge: 1 };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is alive; the request and its piece are copied by the call; the slot's memory is this queue's,
        // registered, and freed after the queue is destroyed.
        let code = unsafe { rdma::ibv_post_srq_recv(self.raw.as_ptr(), &raw mut request, &raw mut bad) };
        check(code, || "posting a receive buffer".into())
    }

    /// Copies the first bytes of a slot, as many as fit into both.
    pub(crate) fn copy_out(&self, slot: usize, bytes: &mut [u8]) {
        assert!(slot < self.slots && bytes.len() <= self.slot_words * 8);
        self.memory.copy_out(slot * self.slot_words, bytes);
    }

    /// Has what a completion tells of a SEND to one of its slots handed out; none if there was none, and then the slot goes
    /// back.
    #[inline]
    pub(crate) fn arrived(self: &Arc<Self>, finished: Finished, from: ServerId) -> Option<Arrived> {
        let slot = finished.id as usize;
        match finished.received {
            Some(Received { bytes, is_write: false, .. }) => {
                Some(Arrived::new(from, Arc::clone(self) as Arc<dyn ReceiveBuffers>, slot, bytes as usize))
            }
            _ => {
                self.give_back(slot);
                None
            }
        }
    }

    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_words * 8
    }
}

impl ReceiveBuffers for ReceiveQueue {
    fn words(&self, buffer: usize) -> &[AtomicU64] {
        self.memory.words(buffer * self.slot_words..(buffer + 1) * self.slot_words)
    }

    fn give_back(&self, buffer: usize) {
        if let Err(error) = self.post(buffer) {
            tracing::warn!(%error, "a receive buffer is lost");
        }
    }
}

impl Drop for ReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: made in `new`; its queue pairs hold it, so none is left.
        unsafe { rdma::ibv_destroy_srq(self.raw.as_ptr()) };
    }
}
