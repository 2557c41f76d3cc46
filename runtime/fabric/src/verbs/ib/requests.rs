//! Requests on their way to a queue pair: built in place, linked, and handed over with one doorbell.

use std::{fmt, mem};

use rdma_sys as rdma;

use super::{QueuePair, check};
use crate::{buffer::LocalKey, error::Error};

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Posting {
    /// Fills the local segment.
    Read(Remote),
    /// Copies the local segment.
    Write(Remote),
    /// Copies the local segment and wakes the receiver.
    WriteNotify(Remote),
    /// Replaces a word if it has the first value by the second; the previous one comes to the local segment.
    CompareSwap(Remote, u64, u64),
    /// Adds to a word; the previous value comes to the local segment.
    FetchAdd(Remote, u64),
}

/// Memory of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// Local memory of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) key: LocalKey,
}

/// Up to a fixed number of requests, in the order of their posting, each with up to a fixed number of local segments.
pub(crate) struct PostList {
    requests: Box<[rdma::ibv_send_wr]>,
    segments: Box<[rdma::ibv_sge]>,
    length: usize,
    /// Of all requests in the list.
    segments_used: usize,
}

impl fmt::Debug for PostList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostList({} of {})", self.length, self.requests.len())
    }
}

impl PostList {
    pub(crate) fn with_capacity(capacity: usize, gather_max: usize) -> Self {
        let request = || {
            // SAFETY: integers, raw pointers and unions of integers: zero is a value of each.
            unsafe { mem::zeroed::<rdma::ibv_send_wr>() }
        };
        Self {
            requests: (0..capacity).map(|_| request()).collect(),
            segments: vec![rdma::ibv_sge { addr: 0, length: 0, lkey: 0 }; capacity * gather_max].into(),
            length: 0,
            segments_used: 0,
        }
    }

    pub(crate) fn clear(&mut self) {
        (self.length, self.segments_used) = (0, 0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Adds a request of these local segments, which are for WRITEs if there are several. It is signalled: see
    /// [`PostList::unsignal_last`].
    ///
    /// # Panics
    /// If the list is full.
    #[inline]
    pub(crate) fn push(
        &mut self,
        id: u64,
        posting: Posting,
        segments: impl IntoIterator<Item = Segment>,
        inline: bool,
    ) {
        use rdma::{ibv_send_flags as flags, ibv_wr_opcode as opcode};
        let request = &mut self.requests[self.length];
        let first = self.segments_used;
        for Segment { address, bytes, key } in segments {
            self.segments[self.segments_used] = rdma::ibv_sge { addr: address, length: bytes, lkey: key.0 };
            self.segments_used += 1;
        }
        request.wr_id = id;
        request.num_sge = (self.segments_used - first) as i32;
        request.send_flags = flags::IBV_SEND_SIGNALED.0 | if inline { flags::IBV_SEND_INLINE.0 } else { 0 };
        let rdma = |remote: Remote| rdma::rdma_t { remote_addr: remote.address, rkey: remote.key };
        let atomic = |remote: Remote, compare_add, swap| rdma::atomic_t {
            remote_addr: remote.address,
            compare_add,
            swap,
            rkey: remote.key,
        };
        match posting {
            Posting::Read(remote) => {
                request.opcode = opcode::IBV_WR_RDMA_READ;
                request.wr.rdma = rdma(remote);
            }
            Posting::Write(remote) => {
                request.opcode = opcode::IBV_WR_RDMA_WRITE;
                request.wr.rdma = rdma(remote);
            }
            Posting::WriteNotify(remote) => {
                request.opcode = opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
                request.wr.rdma = rdma(remote);
                request.imm_data_invalidated_rkey_union.imm_data = 0;
            }
            Posting::CompareSwap(remote, expected, new) => {
                request.opcode = opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
                request.wr.atomic = atomic(remote, expected, new);
            }
            Posting::FetchAdd(remote, amount) => {
                request.opcode = opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
                request.wr.atomic = atomic(remote, amount, 0);
            }
        }
        self.length += 1;
    }

    /// Has the last request complete with a later one of the same queue pair, which must be signalled.
    #[inline]
    pub(crate) fn unsignal_last(&mut self) {
        let last = self.length - 1;
        self.requests[last].send_flags &= !rdma::ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
}

impl QueuePair {
    /// Posts all requests with one doorbell, and empties the list. After an error some may be on their way; only destroying the
    /// queue pair makes sure that none is.
    ///
    /// # Safety
    /// The local segments are registered memory (or inline, and readable now). Until a request has completed, or the queue
    /// pair is destroyed, its segment stays allocated and registered, nobody else writes to it, and nobody reads one that
    /// the request fills.
    #[inline]
    pub(crate) unsafe fn ring(&self, list: &mut PostList) -> Result<(), Error> {
        let length = mem::take(&mut list.length);
        list.segments_used = 0;
        if length == 0 {
            return Ok(());
        }
        let (requests, segments) = (list.requests.as_mut_ptr(), list.segments.as_mut_ptr());
        let mut used = 0;
        for index in 0..length {
            // SAFETY: `index` is below the length of the box of requests, and `used` counts the segments of those before, which
            // `push` has placed in theirs, so the pointers stay inside or one past the end, where they are not followed: a
            // request has as many segments as it says.
            unsafe {
                let request = requests.add(index);
                (*request).sg_list = segments.add(used);
                used += (*request).num_sge as usize;
                (*request).next = if index + 1 < length { requests.add(index + 1) } else { std::ptr::null_mut() };
            }
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is alive, the chain is complete and copied by the call; the caller keeps the segments.
        let code = unsafe { rdma::ibv_post_send(self.raw(), requests, &raw mut bad) };
        check(code, || "posting requests".into())
    }
}
