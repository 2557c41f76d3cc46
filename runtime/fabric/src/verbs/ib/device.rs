//! Devices: which there are, what they can do, and how to open one.

use std::{
    ffi::CStr,
    fmt, fs,
    mem::MaybeUninit,
    ptr::NonNull,
    sync::{Arc, OnceLock},
};

use rdma_sys as rdma;

use super::{CompletionQueue, Domain, QueuePair, QueuePairOptions, check, last_error};
use crate::error::Error;

/// GIDs looked at for each port. Tables are longer, and mostly empty behind the first few.
const GIDS_MAX: i32 = 256;
/// What is asked of a device to learn how much it takes inline.
const INLINE_PROBES: [u32; 6] = [512, 256, 128, 64, 32, 0];

/// What a device's atomics are atomic against; what is less is weaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Atomics {
    /// It has none.
    None,
    /// Only other atomics through the same device.
    Device,
    /// Every access to the memory: by the CPUs, and by WRITEs.
    Global,
}

impl fmt::Display for Atomics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Device => "against other atomics of the device",
            Self::Global => "against everything",
        })
    }
}

/// The state of a port's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// Ready for use.
    Active,
    /// No connection.
    Down,
    /// The connection is coming up.
    Starting,
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Active => "active",
            Self::Down => "down",
            Self::Starting => "starting",
        })
    }
}

/// One address of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidInfo {
    /// Its place in the port's table.
    pub index: u8,
    /// The address.
    pub gid: std::net::Ipv6Addr,
    /// What it is for, as the system calls it: `RoCE v2`, `IB/RoCE v1`; empty if it does not say.
    pub kind: String,
}

impl GidInfo {
    /// How well it serves to reach other machines; more is better. A mapped IPv4 address is routed as IP is; a connection-local
    /// one reaches neighbours at best.
    fn rank(&self) -> u32 {
        let routed = match self.gid.segments() {
            [0, 0, 0, 0, 0, 0xffff, ..] => 2,
            [0xfe80, ..] => 0,
            _ => 1,
        };
        let version = if self.kind.contains("v1") { 0 } else { 1 };
        version * 4 + routed
    }
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Its connection.
    pub state: PortState,
    /// Whether it is Ethernet (RoCE) rather than InfiniBand.
    pub ethernet: bool,
    /// Largest payload of a packet, in bytes.
    pub mtu_bytes: u32,
    /// Its addresses.
    pub gids: Vec<GidInfo>,
    pub(super) mtu: u8,
    pub(super) lid: u16,
}

/// What matters about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, such as `rxe0` or `mlx5_0`.
    pub name: String,
    /// Its ports.
    pub ports: Vec<PortInfo>,
    /// Its atomics.
    pub atomics: Atomics,
    /// READs and atomics that one connection can have under way as requester.
    pub reads_out_max: u8,
    /// The same, as responder.
    pub reads_in_max: u8,
    /// Bytes that a request can carry itself.
    pub inline_bytes: u32,
    /// Local pieces that a request can gather from.
    pub gather_max: u32,
    /// Requests that one queue pair can hold.
    pub queue_depth_max: u32,
    /// Completions that one completion queue can hold.
    pub completions_max: u32,
    /// Connections it can have.
    pub queue_pairs_max: u32,
    /// Bytes that can be registered at once.
    pub registration_bytes_max: u64,
    /// Whether receivers can share a queue.
    pub shared_receive: bool,
}

impl DeviceInfo {
    /// Those of memory servers carry atomics out, and those of compute servers post them: one that has none may refuse, or hand on what it
    /// gets back in another order of bytes.
    pub(crate) fn require_atomics(&self) -> Result<(), Error> {
        match self.atomics {
            Atomics::None => Err(Error::NoDevice {
                wanted: format!("atomics on RDMA device {}", self.name),
                why: "pages are locked by them, on both sides; use another device, or SoftRoCE".into(),
            }),
            Atomics::Device | Atomics::Global => Ok(()),
        }
    }
}

/// The RDMA devices of this machine. One that cannot be opened is passed over, with a warning.
///
/// # Errors
/// If the system has no RDMA at all, or there are devices and none can be opened.
pub fn devices() -> Result<Vec<DeviceInfo>, Error> {
    let list = DeviceList::read()?;
    those_that_answer(list.iter().map(|device| Ok(Device::open_raw(device)?.info().clone())))
}

/// The devices that can be opened; an error only if there are some and none can.
fn those_that_answer<T>(all: impl Iterator<Item = Result<T, Error>>) -> Result<Vec<T>, Error> {
    let (mut opened, mut silent) = (Vec::new(), None);
    for device in all {
        match device {
            Ok(device) => opened.push(device),
            Err(error) => {
                tracing::warn!(%error, "an RDMA device is passed over");
                silent = Some(error);
            }
        }
    }
    silent.filter(|_| opened.is_empty()).map_or(Ok(opened), Err)
}

/// Which of these serves best, of equals the first: one with an active port, and with atomics, which both sides need. None
/// without an active port.
fn best<'a>(all: impl DoubleEndedIterator<Item = &'a DeviceInfo>) -> Option<&'a DeviceInfo> {
    let usable = all.filter(|device| device.ports.iter().any(|port| port.state == PortState::Active));
    usable.rev().max_by_key(|device| device.atomics != Atomics::None)
}

struct DeviceList {
    list: NonNull<*mut rdma::ibv_device>,
    count: usize,
}

/// What helps where there is no card.
const SOFTWARE_DEVICE: &str =
    "or make a software device: `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`";

impl DeviceList {
    fn read() -> Result<Self, Error> {
        let mut count = 0;
        // SAFETY: `count` outlives the call; the list is freed when this is dropped.
        let list = unsafe { rdma::ibv_get_device_list(&raw mut count) };
        let Some(list) = NonNull::new(list) else {
            let cause = std::io::Error::last_os_error();
            return Err(Error::NoDevice {
                wanted: "RDMA device".into(),
                why: format!(
                    "this system offers none ({cause}); load the card's driver and `ib_uverbs`, {SOFTWARE_DEVICE}"
                ),
            });
        };
        Ok(Self { list, count: usize::try_from(count).unwrap_or(0) })
    }

    fn iter(&self) -> impl Iterator<Item = *mut rdma::ibv_device> {
        // SAFETY: the library returned a list of `count` devices, which lives until this is dropped.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr(), self.count) }.iter().copied()
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from `ibv_get_device_list`; opened devices stay valid without it.
        unsafe { rdma::ibv_free_device_list(self.list.as_ptr()) };
    }
}

fn name_of(device: *mut rdma::ibv_device) -> String {
    // SAFETY: the device is of a list that is not yet freed; its name is a C string inside it.
    let name = unsafe { CStr::from_ptr(rdma::ibv_get_device_name(device)) };
    name.to_string_lossy().into_owned()
}

/// What an open device is closed by.
struct Context(NonNull<rdma::ibv_context>);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened in `open_raw`; whatever was made from it holds the device, so nothing is left.
        unsafe { rdma::ibv_close_device(self.0.as_ptr()) };
    }
}

/// An open device.
pub(crate) struct Device {
    context: Context,
    info: DeviceInfo,
    failure: OnceLock<&'static str>,
}

// SAFETY: libibverbs may be used from several threads at once (ibv_* manual pages, "thread safe"); the context is not
// changed after it was opened.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.info.name)
    }
}

/// The port and address that connections of this machine use.
#[derive(Debug, Clone)]
pub(crate) struct Local {
    pub(crate) port: PortInfo,
    pub(crate) gid: GidInfo,
}

impl Device {
    /// Opens the device of this name, or, without one, the first that has an active port; if there is one that has atomics, too, that.
    pub(crate) fn open(name: Option<&str>) -> Result<Arc<Self>, Error> {
        let list = DeviceList::read()?;
        let all: Vec<_> = list.iter().map(|device| (name_of(device), device)).collect();
        let known = all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        let known = if known.is_empty() { "none at all".into() } else { known };
        if let Some(name) = name {
            return match all.iter().find(|(found, _)| found == name) {
                Some(&(_, device)) => Self::open_raw(device).map(Arc::new),
                None => Err(Error::NoDevice {
                    wanted: format!("RDMA device {name}"),
                    why: format!("this system has {known}; `farlink devices` tells what they can do"),
                }),
            };
        }
        let mut opened = those_that_answer(all.iter().map(|&(_, device)| Self::open_raw(device)))?;
        let best = best(opened.iter().map(|device| &device.info)).map(|info| info.name.clone());
        if let Some(best) = opened.iter().position(|device| Some(&device.info.name) == best.as_ref()) {
            return Ok(Arc::new(opened.swap_remove(best)));
        }
        let why = match all.len() {
            0 => format!("this system has none; load the card's driver, {SOFTWARE_DEVICE}"),
            _ => format!("of {known} none has an active port; set its network interface up (`rdma link`, `ip link`)"),
        };
        Err(Error::NoDevice { wanted: "RDMA device".into(), why })
    }

    fn open_raw(device: *mut rdma::ibv_device) -> Result<Self, Error> {
        let name = name_of(device);
        // SAFETY: the device is of a list that is not yet freed.
        let context = unsafe { rdma::ibv_open_device(device) };
        let Some(context) = NonNull::new(context) else {
            let cause = std::io::Error::last_os_error();
            return Err(Error::NoDevice {
                wanted: format!("RDMA device {name}"),
                why: format!("it cannot be opened: {cause}; does this user have access to /dev/infiniband?"),
            });
        };
        let context = Context(context);
        let attributes = query_device(&context, &name)?;
        let mut opened = Self { context, info: info_of(name, &attributes), failure: OnceLock::new() };
        opened.hear_without_waiting()?;
        for number in 1..=attributes.phys_port_cnt {
            let port = opened.query_port(number)?;
            opened.info.ports.push(port);
        }
        let opened = Arc::new(opened);
        let inline_bytes = probe_inline(&opened);
        let mut opened = Arc::into_inner(opened).expect("what the probe made is gone");
        opened.info.inline_bytes = inline_bytes;
        Ok(opened)
    }

    /// Taking an event must not block.
    fn hear_without_waiting(&self) -> Result<(), Error> {
        // SAFETY: the context is open, and its descriptor with it.
        let code = unsafe { libc::fcntl(self.context.0.as_ref().async_fd, libc::F_SETFL, libc::O_NONBLOCK) };
        check(code.min(0), || format!("setting up the events of {}", self.info.name))
    }

    /// Why nothing works on it any more, if the system has said so since it was opened. Makes a system call or two.
    pub(crate) fn failure(&self) -> Option<&'static str> {
        loop {
            let mut event = MaybeUninit::<rdma::ibv_async_event>::zeroed();
            // SAFETY: the context is open and does not block; the event outlives the call.
            if unsafe { rdma::ibv_get_async_event(self.context(), event.as_mut_ptr()) } != 0 {
                return self.failure.get().copied();
            }
            // SAFETY: the call has filled it. As a number, because a system that is newer than these bindings may tell of what they
            // do not know.
            let kind = unsafe { (&raw const (*event.as_ptr()).event_type).cast::<u32>().read() };
            // SAFETY: the event was just taken, and what it is about is not destroyed before it is acknowledged, which is here.
            unsafe { rdma::ibv_ack_async_event(event.as_mut_ptr()) };
            let failure = failure_of(kind);
            match port_event(kind) {
                Some(what) => tracing::warn!(device = self.info.name, what),
                None => tracing::debug!(device = self.info.name, kind, failure, "an event of a device"),
            }
            if let Some(failure) = failure {
                let _ = self.failure.set(failure);
            }
        }
    }

    fn query_port(&self, number: u8) -> Result<PortInfo, Error> {
        let mut attributes = MaybeUninit::<rdma::ibv_port_attr>::zeroed();
        // SAFETY: the context is open, and the attributes outlive the call. They are zeroed because the library fills only
        // those it knows.
        let code = unsafe { rdma::___ibv_query_port(self.context(), number, attributes.as_mut_ptr()) };
        check(code, || format!("asking {} about port {number}", self.info.name))?;
        // SAFETY: zeroed, then filled; every bit pattern is valid for its integers.
        let attributes = unsafe { attributes.assume_init() };
        const ETHERNET: u8 = 2;
        let ethernet = attributes.link_layer == ETHERNET;
        let state = match attributes.state {
            rdma::ibv_port_state::IBV_PORT_ACTIVE => PortState::Active,
            rdma::ibv_port_state::IBV_PORT_DOWN | rdma::ibv_port_state::IBV_PORT_NOP => PortState::Down,
            _ => PortState::Starting,
        };
        let mtu = (attributes.active_mtu as u8).clamp(1, 5);
        Ok(PortInfo {
            number,
            state,
            ethernet,
            mtu_bytes: 128 << mtu,
            gids: self.query_gids(number, attributes.gid_tbl_len.min(GIDS_MAX)),
            mtu,
            lid: attributes.lid,
        })
    }

    fn query_gids(&self, port: u8, count: i32) -> Vec<GidInfo> {
        let mut gids = Vec::new();
        for index in 0..count {
            let mut gid = rdma::ibv_gid { raw: [0; 16] };
            // SAFETY: the context is open, and `gid` outlives the call.
            let code = unsafe { rdma::ibv_query_gid(self.context(), port, index, &raw mut gid) };
            // SAFETY: 16 bytes, all initialised above, whatever the library has written.
            let raw = unsafe { gid.raw };
            // An entry that is empty, or that cannot be read, is no address.
            if code == 0 && raw != [0; 16] {
                let path = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", self.info.name);
                let kind = fs::read_to_string(path).map(|kind| kind.trim().to_owned()).unwrap_or_default();
                gids.push(GidInfo { index: index as u8, gid: raw.into(), kind });
            }
        }
        gids
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn context(&self) -> *mut rdma::ibv_context {
        self.context.0.as_ptr()
    }

    /// The port and the address to use: those asked for, or the best there are.
    pub(crate) fn local(&self, port: Option<u8>, gid_index: Option<u8>) -> Result<Local, Error> {
        let name = &self.info.name;
        let wanted = |what: String| format!("{what} of RDMA device {name}");
        let found = match port {
            Some(number) => self.info.ports.iter().find(|port| port.number == number),
            None => self.info.ports.iter().find(|port| port.state == PortState::Active),
        };
        let Some(port) = found else {
            let wanted = wanted(port.map_or("an active port".into(), |number| format!("port {number}")));
            let why = format!("it has {} ports; `farlink devices` tells their state", self.info.ports.len());
            return Err(Error::NoDevice { wanted, why });
        };
        if port.state != PortState::Active {
            let why = format!("it is {}; set its network interface up, or plug in the cable", port.state);
            return Err(Error::NoDevice { wanted: wanted(format!("port {}", port.number)), why });
        }
        let gid = match gid_index {
            Some(index) => port.gids.iter().find(|gid| gid.index == index),
            // Of equals the first.
            None => port.gids.iter().rev().max_by_key(|gid| gid.rank()),
        };
        let Some(gid) = gid else {
            let what = gid_index.map_or("an address (GID)".into(), |index| format!("the address (GID) {index}"));
            let why = format!("port {} has {}; give its network interface an IP address", port.number, port.gids.len());
            return Err(Error::NoDevice { wanted: wanted(what), why });
        };
        Ok(Local { port: port.clone(), gid: gid.clone() })
    }
}

/// What of the events of a device is its end. Others are about a connection, which finds out itself, or a port, which may come back.
fn failure_of(kind: u32) -> Option<&'static str> {
    use rdma::ibv_event_type::{IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL};
    const COMPLETIONS: u32 = IBV_EVENT_CQ_ERR as u32;
    const DEVICE: u32 = IBV_EVENT_DEVICE_FATAL as u32;
    match kind {
        COMPLETIONS => Some("a completion queue is broken"),
        DEVICE => Some("the device has failed"),
        _ => None,
    }
}

/// What of the events of a device is said of a port.
fn port_event(kind: u32) -> Option<&'static str> {
    use rdma::ibv_event_type::{IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};
    const UP: u32 = IBV_EVENT_PORT_ACTIVE as u32;
    const DOWN: u32 = IBV_EVENT_PORT_ERR as u32;
    match kind {
        UP => Some("a port is up again"),
        DOWN => Some("a port is down: nothing reaches anybody over it until its link is up"),
        _ => None,
    }
}

fn query_device(context: &Context, name: &str) -> Result<rdma::ibv_device_attr, Error> {
    let mut attributes = MaybeUninit::<rdma::ibv_device_attr>::zeroed();
    // SAFETY: the context is open, and the attributes outlive the call.
    let code = unsafe { rdma::ibv_query_device(context.0.as_ptr(), attributes.as_mut_ptr()) };
    check(code, || format!("asking {name} what it can do"))?;
    // SAFETY: zeroed, then filled; every bit pattern is valid for its integers.
    Ok(unsafe { attributes.assume_init() })
}

fn info_of(name: String, attributes: &rdma::ibv_device_attr) -> DeviceInfo {
    let at_least_zero = |value: i32| u32::try_from(value).unwrap_or(0);
    let small = |value: i32| u8::try_from(value.max(0)).unwrap_or(u8::MAX);
    DeviceInfo {
        name,
        ports: Vec::new(),
        atomics: match attributes.atomic_cap {
            rdma::ibv_atomic_cap::IBV_ATOMIC_NONE => Atomics::None,
            rdma::ibv_atomic_cap::IBV_ATOMIC_GLOB => Atomics::Global,
            _ => Atomics::Device,
        },
        reads_out_max: small(attributes.max_qp_init_rd_atom),
        reads_in_max: small(attributes.max_qp_rd_atom),
        inline_bytes: 0,
        gather_max: at_least_zero(attributes.max_sge),
        queue_depth_max: at_least_zero(attributes.max_qp_wr),
        completions_max: at_least_zero(attributes.max_cqe),
        queue_pairs_max: at_least_zero(attributes.max_qp),
        registration_bytes_max: attributes.max_mr_size,
        shared_receive: attributes.max_srq > 0 && attributes.max_srq_wr > 0,
    }
}

/// Learns by trying: no attribute tells it.
fn probe_inline(device: &Arc<Device>) -> u32 {
    let Ok(domain) = Domain::new(device) else { return 0 };
    let Ok(completions) = CompletionQueue::new(device, 1, None) else { return 0 };
    for inline_bytes in INLINE_PROBES {
        let options = QueuePairOptions { send_depth: 1, inline_bytes, gather_max: 1, receive: None };
        if let Ok(probe) = QueuePair::new(&domain, &completions, &completions, options) {
            return probe.inline_bytes();
        }
    }
    0
}

/// What `ibv_create_qp` and the like leave when they fail.
pub(super) fn refused<T>(raw: *mut T, what: impl FnOnce() -> String) -> Result<NonNull<T>, Error> {
    NonNull::new(raw).ok_or_else(|| last_error(what()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, atomics: Atomics, state: PortState) -> DeviceInfo {
        let port = PortInfo { number: 1, state, ethernet: true, mtu_bytes: 1024, gids: Vec::new(), mtu: 3, lid: 0 };
        DeviceInfo {
            name: name.into(),
            ports: vec![port],
            atomics,
            reads_out_max: 1,
            reads_in_max: 1,
            inline_bytes: 0,
            gather_max: 1,
            queue_depth_max: 1,
            completions_max: 1,
            queue_pairs_max: 1,
            registration_bytes_max: 1,
            shared_receive: true,
        }
    }

    #[test]
    fn a_device_with_atomics_is_preferred_and_one_without_is_better_than_none() {
        let all = [
            device("down", Atomics::Global, PortState::Down),
            device("plain", Atomics::None, PortState::Active),
            device("first", Atomics::Device, PortState::Active),
            device("second", Atomics::Global, PortState::Active),
        ];
        let best = |count| best(all[..count].iter()).map(|device| device.name.as_str());
        assert_eq!([0, 1, 2, 3, 4].map(best), [None, None, Some("plain"), Some("first"), Some("first")]);
    }

    #[test]
    fn one_without_atomics_will_do_for_neither_side() {
        let of = |atomics| device("plain0", atomics, PortState::Active).require_atomics();
        let error = of(Atomics::None).unwrap_err();
        assert!(matches!(error, Error::NoDevice { .. }) && error.to_string().contains("plain0"), "{error}");
        of(Atomics::Device).and(of(Atomics::Global)).unwrap();
    }

    #[test]
    fn of_all_events_two_are_the_end_of_a_device() {
        let ends: Vec<u32> = (0..100).filter(|&kind| failure_of(kind).is_some()).collect();
        assert_eq!(ends, [0, 8]);
        assert_eq!((0..100).filter(|&kind| port_event(kind).is_some()).collect::<Vec<_>>(), [9, 10]);
    }

    #[test]
    fn one_device_that_does_not_answer_hides_no_other() {
        let silent = || Err(Error::NoDevice { wanted: "it".into(), why: "it is silent".into() });
        assert_eq!(those_that_answer([silent(), Ok(1), silent(), Ok(2)].into_iter()).unwrap(), [1, 2]);
        assert!(those_that_answer([silent(), silent()].into_iter()).map(|found: Vec<u8>| found).is_err());
        assert_eq!(those_that_answer::<u8>([].into_iter()).unwrap(), []);
    }
}
