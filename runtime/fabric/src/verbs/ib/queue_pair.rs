//! Queue pairs: the ends of reliable connections.

use std::{fmt, mem::MaybeUninit, ptr::NonNull, sync::Arc, time::Duration};

use rdma_sys as rdma;

use super::{CompletionQueue, Domain, Local, ReceiveQueue, check, device::refused};
use crate::error::Error;

/// The packet sequence numbers and queue pair numbers of InfiniBand have 24 bits.
pub(crate) const NUMBER_MASK: u32 = (1 << 24) - 1;

/// A receiver asks the sender to wait so long for a buffer: 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;

/// How large a queue pair is to be.
#[derive(Debug, Clone)]
pub(crate) struct QueuePairOptions {
    /// Requests that it holds.
    pub(crate) send_depth: u32,
    /// Bytes that a request can carry itself.
    pub(crate) inline_bytes: u32,
    /// Local segments that a request can gather from.
    pub(crate) gather_max: u32,
    /// What notifications use up; without it none can come.
    pub(crate) receive: Option<Arc<ReceiveQueue>>,
}

/// What one end tells the other to connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    /// The number of the queue pair.
    pub(crate) queue_pair: u32,
    /// Where its packet numbers begin.
    pub(crate) first_packet: u32,
    /// Its port's address in an InfiniBand subnet; 0 on Ethernet.
    pub(crate) lid: u16,
    /// Its port's global address.
    pub(crate) gid: [u8; 16],
    /// The largest packet it takes, as the exponent of 128 bytes (1 to 5).
    pub(crate) mtu: u8,
    /// READs and atomics that it can have under way as requester.
    pub(crate) reads_out: u8,
    /// The same, as responder.
    pub(crate) reads_in: u8,
}

/// How long a sender tries before it gives a connection up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reliability {
    /// How long it waits for an answer before it sends again; rounded up to 4.096 us times a power of two.
    pub answer_within: Duration,
    /// How often it sends again: 0 to 6. (7 would mean for ever.)
    pub retries: u8,
}

impl Default for Reliability {
    /// Gives up after a second at the least: a card may wait up to four times as long. Survives a loss of one packet in ten.
    fn default() -> Self {
        Self { answer_within: Duration::from_millis(100), retries: 6 }
    }
}

impl Reliability {
    /// How long it takes at the most until a connection is given up.
    pub(crate) fn longest(self) -> Duration {
        let longest_wait = Duration::from_nanos(4096 << self.timeout_exponent()) * 4;
        longest_wait.saturating_mul(u32::from(self.retries) + 1)
    }

    fn timeout_exponent(self) -> u8 {
        const UNIT_NS: u128 = 4096;
        let units = self.answer_within.as_nanos().div_ceil(UNIT_NS).max(1);
        // 0 would mean for ever.
        (units.next_power_of_two().trailing_zeros() as u8).clamp(1, 31)
    }

    pub(crate) fn validate(self) -> Result<(), Error> {
        if self.retries > 6 {
            let why = format!("{}; it must be 0 to 6, because 7 means for ever", self.retries);
            return Err(Error::BadOption { option: "retries", why });
        }
        Ok(())
    }
}

/// One end of a reliable connection.
pub(crate) struct QueuePair {
    raw: NonNull<rdma::ibv_qp>,
    inline_bytes: u32,
    first_packet: u32,
    is_destroyed: bool,
    // What it needs goes after it.
    _send: Arc<CompletionQueue>,
    receive: (Arc<CompletionQueue>, Option<Arc<ReceiveQueue>>),
    domain: Arc<Domain>,
}

// SAFETY: libibverbs locks a queue pair's queues (ibv_* manual pages).
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({})", self.number())
    }
}

impl QueuePair {
    pub(crate) fn new(
        domain: &Arc<Domain>,
        send: &Arc<CompletionQueue>,
        receive: &Arc<CompletionQueue>,
        options: QueuePairOptions,
    ) -> Result<Self, Error> {
        let mut init = rdma::ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: send.raw(),
            recv_cq: receive.raw(),
            srq: options.receive.as_ref().map_or(std::ptr::null_mut(), |queue| queue.raw()),
            cap: rdma::ibv_qp_cap {
                max_send_wr: options.send_depth,
                max_recv_wr: 0,
                max_send_sge: options.gather_max,
                max_recv_sge: 1,
                max_inline_data: options.inline_bytes,
            },
            qp_type: rdma::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are alive and held by the queue pair; `init` outlives the call.
        let raw = unsafe { rdma::ibv_create_qp(domain.raw(), &raw mut init) };
        let device = &domain.device().info().name;
        let raw = refused(raw, || format!("making a queue pair for {} requests on {device}", options.send_depth))?;
        Ok(Self {
            raw,
            inline_bytes: init.cap.max_inline_data,
            first_packet: rand::random::<u32>() & NUMBER_MASK,
            is_destroyed: false,
            _send: Arc::clone(send),
            receive: (Arc::clone(receive), options.receive),
            domain: Arc::clone(domain),
        })
    }

    pub(super) fn raw(&self) -> *mut rdma::ibv_qp {
        self.raw.as_ptr()
    }

    /// Its number, which completions name it by.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is alive.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Bytes that a request can carry itself.
    pub(crate) fn inline_bytes(&self) -> u32 {
        self.inline_bytes
    }

    /// What the other end must know.
    pub(crate) fn describe(&self, local: &Local) -> Peer {
        let device = self.domain.device().info();
        Peer {
            queue_pair: self.number(),
            first_packet: self.first_packet,
            lid: local.port.lid,
            gid: local.gid.gid.octets(),
            mtu: local.port.mtu,
            reads_out: device.reads_out_max,
            reads_in: device.reads_in_max,
        }
    }

    /// Connects it. `access` is what the peer may do to memory of this side.
    pub(crate) fn connect(
        &self,
        local: &Local,
        peer: &Peer,
        access: super::Access,
        reliability: Reliability,
    ) -> Result<(), Error> {
        self.to_init(local, access)?;
        self.to_receive(local, peer)?;
        self.to_send(peer, reliability)
    }

    fn to_init(&self, local: &Local, access: super::Access) -> Result<(), Error> {
        use rdma::ibv_qp_attr_mask as mask;
        let mut attributes = attributes();
        attributes.qp_state = rdma::ibv_qp_state::IBV_QPS_INIT;
        attributes.pkey_index = 0;
        attributes.port_num = local.port.number;
        attributes.qp_access_flags = access_flags(access);
        let set = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attributes, set, "ready")
    }

    fn to_receive(&self, local: &Local, peer: &Peer) -> Result<(), Error> {
        use rdma::ibv_qp_attr_mask as mask;
        let device = self.domain.device().info();
        let mut attributes = attributes();
        attributes.qp_state = rdma::ibv_qp_state::IBV_QPS_RTR;
        attributes.path_mtu = u32::from(peer.mtu.clamp(1, local.port.mtu));
        attributes.dest_qp_num = peer.queue_pair & NUMBER_MASK;
        attributes.rq_psn = peer.first_packet & NUMBER_MASK;
        attributes.max_dest_rd_atomic = device.reads_in_max.min(peer.reads_out);
        attributes.min_rnr_timer = MIN_RNR_TIMER;
        attributes.ah_attr.dlid = peer.lid;
        attributes.ah_attr.port_num = local.port.number;
        attributes.ah_attr.is_global = u8::from(local.port.ethernet || peer.lid == 0);
        attributes.ah_attr.grh.dgid = rdma::ibv_gid { raw: peer.gid };
        attributes.ah_attr.grh.sgid_index = local.gid.index;
        attributes.ah_attr.grh.hop_limit = 64;
        let set = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attributes, set, "ready to receive")
    }

    fn to_send(&self, peer: &Peer, reliability: Reliability) -> Result<(), Error> {
        use rdma::ibv_qp_attr_mask as mask;
        let device = self.domain.device().info();
        let mut attributes = attributes();
        attributes.qp_state = rdma::ibv_qp_state::IBV_QPS_RTS;
        attributes.sq_psn = self.first_packet;
        attributes.timeout = reliability.timeout_exponent();
        attributes.retry_cnt = reliability.retries.min(6);
        // For ever: a receiver that lives may let its senders wait. One that is gone answers nothing at all, and then
        // `retry_cnt` counts.
        attributes.rnr_retry = 7;
        attributes.max_rd_atomic = device.reads_out_max.min(peer.reads_in);
        let set = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attributes, set, "ready to send")
    }

    /// Destroys it. From then on the device touches no memory on its behalf.
    ///
    /// # Errors
    /// If the device does not even end the connection: what requests of either side name it may still read and write, at any time.
    pub(crate) fn destroy(mut self) -> Result<(), Error> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_destroyed, true) {
            return Ok(());
        }
        // First what has arrived: with a queue pair some devices forget it, and the receives that it has used up.
        if let (completions, Some(receives)) = &self.receive
            && let Err(error) = self.fail().and_then(|()| receives.renew(completions))
        {
            tracing::debug!(%error, "a connection did not end");
        }
        // SAFETY: made in `new`, and destroyed once. If that fails it stays what it is, and so does what it needs, which the device
        // then refuses to let go.
        let code = unsafe { rdma::ibv_destroy_qp(self.raw.as_ptr()) };
        check(code, || format!("destroying a queue pair of {}", self.domain.device().info().name)).or_else(|error| {
            tracing::error!(%error, "a queue pair stays");
            // So it sends nothing, and takes nothing in.
            self.fail()
        })
    }

    /// Ends the connection: what is under way comes back as flushed.
    fn fail(&self) -> Result<(), Error> {
        let mut attributes = attributes();
        attributes.qp_state = rdma::ibv_qp_state::IBV_QPS_ERR;
        self.modify(&mut attributes, rdma::ibv_qp_attr_mask::IBV_QP_STATE, "ended")
    }

    fn modify(&self, attributes: &mut rdma::ibv_qp_attr, set: rdma::ibv_qp_attr_mask, to: &str) -> Result<(), Error> {
        // SAFETY: the queue pair is alive, and the attributes outlive the call.
        let code = unsafe { rdma::ibv_modify_qp(self.raw.as_ptr(), attributes, set.0 as i32) };
        let device = self.domain.device();
        check(code, || {
            format!(
                "making queue pair {} of {} {to} (is the peer's address reachable?)",
                self.number(),
                device.info().name
            )
        })
    }
}

/// What the peer may do to memory that is open to it.
fn access_flags(access: super::Access) -> u32 {
    use rdma::ibv_access_flags as flags;
    match access {
        super::Access::Local | super::Access::LocalRead => 0,
        super::Access::Attach => (flags::IBV_ACCESS_REMOTE_READ | flags::IBV_ACCESS_REMOTE_WRITE).0,
        super::Access::Peers => {
            (flags::IBV_ACCESS_REMOTE_READ | flags::IBV_ACCESS_REMOTE_WRITE | flags::IBV_ACCESS_REMOTE_ATOMIC).0
        }
    }
}

fn attributes() -> rdma::ibv_qp_attr {
    // SAFETY: integers and unions of integers; zero is a value of each.
    unsafe { MaybeUninit::<rdma::ibv_qp_attr>::zeroed().assume_init() }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "a queue pair does not end; it does with this process");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up_and_never_for_ever() {
        let exponent = |answer_within| Reliability { answer_within, retries: 0 }.timeout_exponent();
        assert_eq!(exponent(Duration::ZERO), 1);
        assert_eq!(exponent(Duration::from_millis(67)), 14);
        assert_eq!(exponent(Duration::from_millis(100)), 15);
        assert_eq!(exponent(Duration::MAX), 31);
        assert!(Reliability { retries: 7, ..Reliability::default() }.validate().is_err());
        Reliability::default().validate().unwrap();
    }
}
