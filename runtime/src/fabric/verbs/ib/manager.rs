//! The system's connection manager (librdmacm): it finds the way to an IP address and exchanges what queue pairs need.
//!
//! Queue pairs stay ours: they are made and moved from state to state as those that are connected by hand, only that the
//! attributes come from the manager. Both sides keep its handle, an [`Id`], for as long as the queue pair lives. An event is
//! copied and acknowledged when it is taken, so nothing that drops an id waits for anybody.

use std::{
    fmt,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::{
        fd::{AsRawFd, RawFd},
        unix::net::UnixStream,
    },
    path::Path,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use rdma_sys as rdma;

use super::{Device, Local, QueuePair, check, last_error};
use crate::error::Error;

/// Bytes that a request to connect can carry for us.
pub(crate) const GREETING_BYTES_MAX: usize = 56;
/// Requests to connect that may wait to be looked at.
const BACKLOG: i32 = 128;
/// The reason of a rejection that the one who listens has spoken, not the manager: nobody may be listening at all.
const REJECTED_BY_LISTENER: i32 = 28;
/// A side that lives may let the other wait for ever; one that is gone is noticed by its silence.
const RECEIVER_RETRIES: u8 = 7;

/// Why this machine cannot use the manager with this address, if it cannot.
pub(crate) fn obstacle(local: &Local) -> Option<String> {
    if !Path::new("/dev/infiniband/rdma_cm").exists() {
        return Some("there is no /dev/infiniband/rdma_cm (`modprobe rdma_ucm`)".into());
    }
    match ip_of(local) {
        Some(_) => None,
        None => Some(format!("{} is no IP address; choose another with --gid-index", local.gid.gid)),
    }
}

/// The IP address that a port's address stands for. Link-local ones are not unique among a machine's interfaces.
fn ip_of(local: &Local) -> Option<IpAddr> {
    let v6: Ipv6Addr = local.gid.gid;
    match v6.to_ipv4_mapped() {
        Some(v4) => Some(v4.into()),
        None if local.port.ethernet && !v6.is_unicast_link_local() => Some(v6.into()),
        None => None,
    }
}

/// A socket address as C has it.
struct RawAddress(libc::sockaddr_storage);

impl RawAddress {
    fn new(address: SocketAddr) -> Self {
        // SAFETY: integers and arrays of them: zero is a value of each.
        let mut raw: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let storage = (&raw mut raw).cast::<libc::sockaddr_in6>();
        match address {
            SocketAddr::V4(address) => {
                let v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
                    sin_zero: [0; 8],
                };
                // SAFETY: `sockaddr_storage` is large enough and aligned for every address family.
                unsafe { storage.cast::<libc::sockaddr_in>().write(v4) };
            }
            SocketAddr::V6(address) => {
                let v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                    sin6_scope_id: address.scope_id(),
                };
                // SAFETY: as above.
                unsafe { storage.write(v6) };
            }
        }
        Self(raw)
    }

    fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// Where the manager tells its news.
struct Events {
    raw: NonNull<rdma::rdma_event_channel>,
}

// SAFETY: a file descriptor that does not change; librdmacm may be used from several threads.
unsafe impl Send for Events {}
// SAFETY: as above.
unsafe impl Sync for Events {}

/// What it tells: a copy.
struct Event {
    kind: rdma::rdma_cm_event_type::Type,
    status: i32,
    /// Whom it concerns: of a request to connect, a new one that is the taker's to destroy.
    id: *mut rdma::rdma_cm_id,
    queue_pair: u32,
    reads_in: u8,
    reads_out: u8,
    greeting: Vec<u8>,
}

impl Events {
    fn new() -> Result<Arc<Self>, Error> {
        // SAFETY: no arguments; the channel is destroyed when this is dropped.
        let raw = unsafe { rdma::rdma_create_event_channel() };
        let events = Self { raw: NonNull::new(raw).ok_or_else(|| last_error("asking for the connection manager"))? };
        // Waiting is done by `poll`, with a limit; taking an event must not block.
        // SAFETY: the descriptor is open.
        let code = unsafe { libc::fcntl(events.descriptor(), libc::F_SETFL, libc::O_NONBLOCK) };
        check(code.min(0), || "setting up the connection manager's events".into())?;
        Ok(Arc::new(events))
    }

    fn descriptor(&self) -> RawFd {
        // SAFETY: the channel is alive.
        unsafe { self.raw.as_ref() }.fd
    }

    /// The next event; `None` if there is none now.
    fn take(&self) -> Result<Option<Event>, Error> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel is alive and does not block; `raw` outlives the call.
        if unsafe { rdma::rdma_get_cm_event(self.raw.as_ptr(), &raw mut raw) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(None),
                _ => Err(Error::io("taking an event of the connection manager")(error)),
            };
        }
        use rdma::rdma_cm_event_type as kind;
        // SAFETY: the library returned an event, valid until it is acknowledged below.
        let event = unsafe { &*raw };
        let mut copy = Event {
            kind: event.event,
            status: event.status,
            id: event.id,
            queue_pair: 0,
            reads_in: 0,
            reads_out: 0,
            greeting: Vec::new(),
        };
        if event.event == kind::RDMA_CM_EVENT_CONNECT_REQUEST {
            // SAFETY: all ids are of the reliable port space, whose events have this side of the union.
            let connection = unsafe { event.param.conn };
            copy.queue_pair = connection.qp_num;
            (copy.reads_in, copy.reads_out) = (connection.responder_resources, connection.initiator_depth);
            if !connection.private_data.is_null() {
                let bytes = usize::from(connection.private_data_len);
                // SAFETY: the library says that so many bytes are there until the event is acknowledged.
                let data = unsafe { std::slice::from_raw_parts(connection.private_data.cast::<u8>(), bytes) };
                copy.greeting = data.to_vec();
            }
        }
        // SAFETY: taken above and acknowledged once; nothing of it is used after this.
        unsafe { rdma::rdma_ack_cm_event(raw) };
        Ok(Some(copy))
    }

    /// Sleeps until there may be an event, `end` is closed, or the time is over. False once `end` is closed.
    fn sleep(&self, limit: Option<Duration>, end: Option<&UnixStream>) -> bool {
        let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut polled = [watch(self.descriptor()), watch(end.map_or(-1, AsRawFd::as_raw_fd))];
        let milliseconds = limit.map_or(-1, |limit| i32::try_from(limit.as_millis() + 1).unwrap_or(i32::MAX));
        // SAFETY: two entries, which outlive the call; one with a negative descriptor is passed over.
        unsafe { libc::poll(polled.as_mut_ptr(), 2, milliseconds) };
        polled[1].revents == 0
    }

    /// Waits for the event that is due.
    fn expect(&self, due: rdma::rdma_cm_event_type::Type, deadline: Instant) -> Result<(), Failure> {
        loop {
            match self.take()? {
                Some(event) if event.kind == due && event.status == 0 => return Ok(()),
                Some(event) => return Err(Failure::of(&event)),
                None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Unreachable("the connection manager there does not answer".into()));
            }
            self.sleep(Some(left), None);
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: made in `new`; ids hold it, so none is left.
        unsafe { rdma::rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

/// Why no connection came about.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The other side has refused it.
    Refused,
    /// The other side does not answer, nobody listens there, or no way leads there.
    Unreachable(String),
    /// This machine could not do its part.
    Here(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Here(error)
    }
}

impl Failure {
    fn of(event: &Event) -> Self {
        let is_rejected = event.kind == rdma::rdma_cm_event_type::RDMA_CM_EVENT_REJECTED;
        if is_rejected && event.status == REJECTED_BY_LISTENER {
            return Self::Refused;
        }
        // SAFETY: the library answers every number with a string that lives for ever.
        let name = unsafe { std::ffi::CStr::from_ptr(rdma::rdma_event_str(event.kind)) };
        let status = match event.status {
            0 => String::new(),
            ..0 => format!(": {}", io::Error::from_raw_os_error(event.status.saturating_neg())),
            status => format!(" ({status})"),
        };
        Self::Unreachable(format!("the connection manager says {}{status}", name.to_string_lossy()))
    }
}

/// The manager's handle of a connection, or of a place where connections are asked for.
pub(crate) struct Id {
    raw: NonNull<rdma::rdma_cm_id>,
    // Goes after it.
    events: Arc<Events>,
}

// SAFETY: librdmacm may be used from several threads; an id is destroyed once, by its owner.
unsafe impl Send for Id {}
// SAFETY: as above; through a shared reference its calls only read it.
unsafe impl Sync for Id {}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Id(..)")
    }
}

impl Id {
    fn new(events: &Arc<Events>) -> Result<Self, Error> {
        let mut raw = std::ptr::null_mut();
        let space = rdma::rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel is alive and held by the id; `raw` outlives the call.
        let code = unsafe { rdma::rdma_create_id(events.raw.as_ptr(), &raw mut raw, std::ptr::null_mut(), space) };
        check(code, || "asking the connection manager for a handle".into())?;
        let raw = NonNull::new(raw).ok_or_else(|| last_error("asking the connection manager for a handle"))?;
        Ok(Self { raw, events: Arc::clone(events) })
    }

    /// The manager chooses a device by addresses: it must be the one whose memory is registered.
    fn require_device(&self, device: &Device) -> Result<(), Error> {
        // SAFETY: the id is alive.
        let context = unsafe { self.raw.as_ref() }.verbs;
        let name = match NonNull::new(context) {
            // SAFETY: an open device of the library's, which has a name.
            Some(context) => unsafe {
                std::ffi::CStr::from_ptr(rdma::ibv_get_device_name(context.as_ref().device)).to_string_lossy()
            },
            None => "no device".into(),
        };
        if name == device.info().name {
            return Ok(());
        }
        Err(Error::NoDevice {
            wanted: format!("way through RDMA device {}", device.info().name),
            why: format!("the connection manager would use {name}; name that device, or connect with --setup tcp"),
        })
    }

    /// What the queue pair of this id is to be set to in a state, and which of it.
    pub(super) fn attributes(&self, attributes: &mut rdma::ibv_qp_attr) -> Result<i32, Error> {
        let mut set = 0;
        // SAFETY: the id is alive; attributes and mask outlive the call.
        let code = unsafe { rdma::rdma_init_qp_attr(self.raw.as_ptr(), attributes, &raw mut set) };
        check(code, || "asking the connection manager how to connect a queue pair".into())?;
        Ok(set)
    }

    fn parameters(queue_pair: u32, retries: u8, reads_in: u8, reads_out: u8, greeting: &[u8]) -> rdma::rdma_conn_param {
        rdma::rdma_conn_param {
            private_data: if greeting.is_empty() { std::ptr::null() } else { greeting.as_ptr().cast() },
            private_data_len: greeting.len() as u8,
            responder_resources: reads_in,
            initiator_depth: reads_out,
            flow_control: 1,
            retry_count: retries.min(6),
            rnr_retry_count: RECEIVER_RETRIES,
            srq: 0,
            qp_num: queue_pair,
        }
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: made in `new`, or came with a request to connect; destroyed once. All its events are acknowledged.
        unsafe { rdma::rdma_destroy_id(self.raw.as_ptr()) };
    }
}

/// Where to connect to, and how.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) device: &'a Device,
    pub(crate) local: &'a Local,
    pub(crate) to: SocketAddr,
    /// What the other side is told; at most [`GREETING_BYTES_MAX`].
    pub(crate) greeting: &'a [u8],
    pub(crate) reliability: super::Reliability,
    pub(crate) deadline: Instant,
}

impl Call<'_> {
    /// Connects a queue pair. Blocks. Returns the handle to keep, and the number of the other side's queue pair.
    pub(crate) fn connect(&self, queue_pair: &QueuePair) -> Result<(Id, u32), Failure> {
        use rdma::rdma_cm_event_type as kind;
        let from = ip_of(self.local).ok_or_else(|| Failure::Unreachable("the device has no IP address".into()))?;
        assert!(self.greeting.len() <= GREETING_BYTES_MAX, "a greeting of {} bytes", self.greeting.len());
        let events = Events::new()?;
        let id = Id::new(&events)?;
        let (mut from, mut to) = (RawAddress::new((from, 0).into()), RawAddress::new(self.to));
        let left = || {
            let left = self.deadline.saturating_duration_since(Instant::now()).as_millis();
            i32::try_from(left).unwrap_or(i32::MAX).max(1)
        };
        // SAFETY: the id is alive; the addresses outlive the call.
        let code = unsafe { rdma::rdma_resolve_addr(id.raw.as_ptr(), from.as_mut_ptr(), to.as_mut_ptr(), left()) };
        check(code, || format!("looking for the way to {}", self.to))?;
        events.expect(kind::RDMA_CM_EVENT_ADDR_RESOLVED, self.deadline)?;
        id.require_device(self.device)?;
        // SAFETY: the id is alive and has an address.
        check(unsafe { rdma::rdma_resolve_route(id.raw.as_ptr(), left()) }, || {
            format!("looking for the way to {}", self.to)
        })?;
        events.expect(kind::RDMA_CM_EVENT_ROUTE_RESOLVED, self.deadline)?;
        let info = self.device.info();
        let retries = self.reliability.retries;
        let mut parameters =
            Id::parameters(queue_pair.number(), retries, info.reads_in_max, info.reads_out_max, self.greeting);
        // SAFETY: the id is alive and has a route; the parameters, and what they point to, outlive the call.
        check(unsafe { rdma::rdma_connect(id.raw.as_ptr(), &raw mut parameters) }, || {
            format!("connecting to {}", self.to)
        })?;
        events.expect(kind::RDMA_CM_EVENT_CONNECT_RESPONSE, self.deadline)?;
        let theirs = queue_pair.connect_through(&id, super::Access::Local, self.reliability)?;
        // SAFETY: the id is alive, and its queue pair is ready.
        check(unsafe { rdma::rdma_establish(id.raw.as_ptr()) }, || format!("connecting to {}", self.to))?;
        Ok((id, theirs))
    }
}

/// Where others ask for connections.
#[derive(Debug)]
pub(crate) struct Listener {
    id: Id,
    address: SocketAddr,
}

/// Somebody asks for a connection. Dropped, it is refused.
#[derive(Debug)]
pub(crate) struct Asked {
    id: Option<Id>,
    /// The number of the asker's queue pair, as it says.
    pub(crate) queue_pair: u32,
    pub(crate) greeting: Vec<u8>,
    reads_in: u8,
    reads_out: u8,
}

impl Listener {
    /// Listens at the address of the device, on a port that the system chooses.
    pub(crate) fn new(device: &Device, local: &Local) -> Result<Self, Error> {
        let ip = ip_of(local).ok_or_else(|| Error::NoDevice {
            wanted: format!("IP address of RDMA device {}", device.info().name),
            why: format!("{} is none", local.gid.gid),
        })?;
        let id = Id::new(&Events::new()?)?;
        let what = || format!("having the connection manager listen at {ip}");
        let mut address = RawAddress::new((ip, 0).into());
        // SAFETY: the id is alive; the address outlives the call.
        check(unsafe { rdma::rdma_bind_addr(id.raw.as_ptr(), address.as_mut_ptr()) }, what)?;
        id.require_device(device)?;
        // SAFETY: the id is alive and bound.
        check(unsafe { rdma::rdma_listen(id.raw.as_ptr(), BACKLOG) }, what)?;
        // SAFETY: the id is alive and bound.
        let port = u16::from_be(unsafe { rdma::rdma_get_src_port(id.raw.as_ptr()) });
        Ok(Self { id, address: (ip, port).into() })
    }

    /// Where to connect to.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next who asks; `None` once `end` is closed. Other news is passed over: what becomes of a connection is told by
    /// the control connection it belongs to.
    pub(crate) fn next(&self, end: &UnixStream) -> Result<Option<Asked>, Error> {
        let events = &self.id.events;
        loop {
            while let Some(event) = events.take()? {
                if event.kind != rdma::rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST {
                    continue;
                }
                let id = NonNull::new(event.id).map(|raw| Id { raw, events: Arc::clone(events) });
                return Ok(Some(Asked {
                    id,
                    queue_pair: event.queue_pair,
                    greeting: event.greeting,
                    reads_in: event.reads_in,
                    reads_out: event.reads_out,
                }));
            }
            if !events.sleep(None, Some(end)) {
                return Ok(None);
            }
        }
    }
}

impl Asked {
    /// Connects a queue pair to the asker's, which is told with [`Asked::accept`].
    pub(crate) fn prepare(&self, queue_pair: &QueuePair, reliability: super::Reliability) -> Result<(), Error> {
        let id = self.id.as_ref().ok_or(Error::Malformed("a request to connect names nobody"))?;
        queue_pair.connect_through(id, super::Access::Peers, reliability).map(drop)
    }

    /// Tells the asker that the queue pair is ready. The handle is to be kept as long as that is.
    pub(crate) fn accept(mut self, queue_pair: &QueuePair, reliability: super::Reliability) -> Result<Id, Error> {
        let id = self.id.take().ok_or(Error::Malformed("a request to connect names nobody"))?;
        let device = queue_pair.device();
        let (reads_in, reads_out) = (self.reads_in.min(device.reads_in_max), self.reads_out.min(device.reads_out_max));
        let mut parameters = Id::parameters(queue_pair.number(), reliability.retries, reads_in, reads_out, &[]);
        // SAFETY: the id is alive and came with a request to connect; the parameters outlive the call.
        check(unsafe { rdma::rdma_accept(id.raw.as_ptr(), &raw mut parameters) }, || "accepting a connection".into())?;
        Ok(id)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            // SAFETY: the id is alive, and its request was not accepted. Who is refused is told nothing.
            unsafe { rdma::rdma_reject(id.raw.as_ptr(), std::ptr::null(), 0) };
        }
    }
}
