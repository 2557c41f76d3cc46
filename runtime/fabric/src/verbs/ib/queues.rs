//! Completion queues, the channel that wakes a sleeper, and the receives that notifications use up.

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

use super::{Device, Domain, check, device::refused};
use crate::error::Error;

/// Completions taken from a queue at a time.
const POLL_MAX: usize = 32;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(rdma::ibv_wc_status::Type);

impl Status {
    /// It was answered, and not as it should be.
    pub(crate) const BAD_RESPONSE: Self = Self(rdma::ibv_wc_status::IBV_WC_BAD_RESP_ERR);

    #[cfg(test)]
    pub(crate) const SUCCESS: Self = Self(rdma::ibv_wc_status::IBV_WC_SUCCESS);
    #[cfg(test)]
    pub(crate) const REMOTE_ACCESS: Self = Self(rdma::ibv_wc_status::IBV_WC_REM_ACCESS_ERR);

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
                                             ended, or the network between does not carry RDMA. Check `farlink devices` on both \
                                             sides (an active port, addresses of one version), UDP port 4791 in firewalls, and \
                                             `ibv_rc_pingpong`"
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

/// Sleeps until an event comes in the channel, `end` has something to read, or the time is over. Signals end it early.
///
/// # Errors
/// If the device lets nobody wait for events: then it has not slept.
pub(crate) fn sleep(channel: Option<&Channel>, limit: Duration, end: &UnixStream) -> Result<(), Error> {
    let failed = || Error::io("waiting for a completion");
    let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polled = [watch(channel.map_or(-1, Channel::descriptor)), watch(end.as_raw_fd())];
    let milliseconds = i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: two entries, which outlive the call; one with a negative descriptor is passed over.
    if unsafe { libc::poll(polled.as_mut_ptr(), 2, milliseconds) } < 0 {
        let error = std::io::Error::last_os_error();
        return match error.kind() {
            std::io::ErrorKind::Interrupted => Ok(()),
            _ => Err(failed()(error)),
        };
    }
    match polled[0].revents & !libc::POLLIN {
        0 => Ok(()),
        _ => Err(failed()(std::io::Error::other("the device has hung up"))),
    }
}

/// Where requests complete.
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
    ///
    /// # Errors
    /// If the queue is broken: what has completed since, and what is yet to, nobody hears of.
    #[inline]
    pub(crate) fn poll(&self, mut take: impl FnMut(Finished)) -> Result<(), Error> {
        let mut entries = [const { MaybeUninit::<rdma::ibv_wc>::uninit() }; POLL_MAX];
        loop {
            // SAFETY: the queue is alive; there is room for `POLL_MAX` entries.
            let count = unsafe { rdma::ibv_poll_cq(self.raw.as_ptr(), POLL_MAX as i32, entries.as_mut_ptr().cast()) };
            let Ok(count) = usize::try_from(count) else { return Err(self.broken(count)) };
            for entry in &entries[..count] {
                let entry = entry.as_ptr();
                // SAFETY: the call has set these two fields of the first `count` entries, and of a failed request no others: so no
                // reference is made to a whole entry.
                let (id, status) = unsafe { ((&raw const (*entry).wr_id).read(), (&raw const (*entry).status).read()) };
                take(Finished { id, status: Status(status) });
            }
            if count < POLL_MAX {
                return Ok(());
            }
        }
    }

    #[cold]
    fn broken(&self, code: i32) -> Error {
        // Some devices return the number, and others -1 or -2 of their own.
        let what = format!("taking completions from {} ({code})", self.device.info().name);
        Error::io(what)(std::io::Error::other("the device has failed, or lost completions"))
    }

    /// Has the channel tell of the next completion. Poll once more afterwards: one may have come just before.
    pub(crate) fn arm(&self) -> Result<(), Error> {
        // SAFETY: the queue is alive.
        check(unsafe { rdma::ibv_req_notify_cq(self.raw.as_ptr(), 0) }, || "asking for a completion event".into())
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made in `new`; its queue pairs hold it, so none is left.
        unsafe { rdma::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}

/// Receives that many connections share. They have no memory: a WRITE that notifies uses one up, and none of its bytes.
pub(crate) struct ReceiveQueue {
    raw: NonNull<rdma::ibv_srq>,
    domain: Arc<Domain>,
}

// SAFETY: libibverbs locks a receive queue that several threads post to.
unsafe impl Send for ReceiveQueue {}
// SAFETY: as above.
unsafe impl Sync for ReceiveQueue {}

impl fmt::Debug for ReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReceiveQueue({:?})", self.domain)
    }
}

impl ReceiveQueue {
    /// A queue with so many receives posted.
    pub(crate) fn new(domain: &Arc<Domain>, count: u32) -> Result<Arc<Self>, Error> {
        let attributes = rdma::ibv_srq_attr { max_wr: count, max_sge: 1, srq_limit: 0 };
        let mut options = rdma::ibv_srq_init_attr { srq_context: std::ptr::null_mut(), attr: attributes };
        // SAFETY: the domain is alive and held by the queue; the options outlive the call.
        let raw = unsafe { rdma::ibv_create_srq(domain.raw(), &raw mut options) };
        let name = &domain.device().info().name;
        let raw = refused(raw, || format!("making a shared receive queue of {count} on {name}"))?;
        let queue = Self { raw, domain: Arc::clone(domain) };
        (0..count).try_for_each(|_| queue.post())?;
        Ok(Arc::new(queue))
    }

    pub(super) fn raw(&self) -> *mut rdma::ibv_srq {
        self.raw.as_ptr()
    }

    /// Takes the notifications that have come, and gives back the receive that each has used up; whether there were any. A thread
    /// that sleeps looks at memory, too, so it does not matter who takes them.
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`].
    pub(crate) fn renew(&self, completions: &CompletionQueue) -> Result<bool, Error> {
        let mut any = false;
        completions.poll(|_| {
            any = true;
            if let Err(error) = self.post() {
                tracing::warn!(%error, "a receive is lost");
            }
        })?;
        Ok(any)
    }

    /// Posts one more.
    fn post(&self) -> Result<(), Error> {
        let mut request =
            rdma::ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue is alive; the request is copied by the call, and names no memory.
        let code = unsafe { rdma::ibv_post_srq_recv(self.raw.as_ptr(), &raw mut request, &raw mut bad) };
        check(code, || "posting a receive".into())
    }
}

impl Drop for ReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: made in `new`; its queue pairs hold it, so none is left.
        unsafe { rdma::ibv_destroy_srq(self.raw.as_ptr()) };
    }
}
