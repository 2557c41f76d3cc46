//! Protection domains and registered memory.

use std::{fmt, fs, io, ptr::NonNull, sync::Arc};

use rdma_sys as rdma;

use super::{Device, device::refused};
use crate::{buffer::LocalKey, error::Error};

/// Who is let at registered memory, besides the owner's own requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nobody; and the owner's requests only read it.
    LocalRead,
    /// Nobody.
    Local,
    /// Peers, to read, write and change atomically.
    Peers,
    /// The other side of a message connection, to read and write.
    Attach,
}

/// What belongs together: a queue pair reaches only memory of its own domain.
pub(crate) struct Domain {
    raw: NonNull<rdma::ibv_pd>,
    device: Arc<Device>,
}

// SAFETY: libibverbs locks what its objects share (ibv_* manual pages).
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({:?})", self.device)
    }
}

impl Domain {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Arc<Self>, Error> {
        // SAFETY: the device is open and held by the domain.
        let raw = unsafe { rdma::ibv_alloc_pd(device.context()) };
        let raw = refused(raw, || format!("making a protection domain on {}", device.info().name))?;
        Ok(Arc::new(Self { raw, device: Arc::clone(device) }))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn raw(&self) -> *mut rdma::ibv_pd {
        self.raw.as_ptr()
    }

    /// Lets the device at `words` words from `base`. Blocks while the system pins them.
    ///
    /// # Safety
    /// The memory stays allocated until the registration is dropped. Unless with [`Access::Local`] or [`Access::LocalRead`], other
    /// machines write to it at any time: this process reaches it through atomics alone.
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        base: NonNull<u64>,
        words: usize,
        access: Access,
    ) -> Result<Registered, Error> {
        use rdma::ibv_access_flags as flags;
        let allowed = match access {
            // What every registration allows.
            Access::LocalRead => flags(0),
            Access::Local => flags::IBV_ACCESS_LOCAL_WRITE,
            // No relaxed ordering: WRITEs are placed as they were posted.
            Access::Peers => {
                flags::IBV_ACCESS_LOCAL_WRITE
                    | flags::IBV_ACCESS_REMOTE_READ
                    | flags::IBV_ACCESS_REMOTE_WRITE
                    | flags::IBV_ACCESS_REMOTE_ATOMIC
            }
            Access::Attach => {
                flags::IBV_ACCESS_LOCAL_WRITE | flags::IBV_ACCESS_REMOTE_READ | flags::IBV_ACCESS_REMOTE_WRITE
            }
        };
        // SAFETY: the domain is alive; the caller keeps the memory.
        let raw = unsafe { rdma::ibv_reg_mr(self.raw(), base.as_ptr().cast(), words * 8, allowed.0 as i32) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Registered { raw, _domain: Arc::clone(self) }),
            None => Err(self.refusal(words * 8, io::Error::last_os_error())),
        }
    }

    fn refusal(&self, bytes: usize, cause: io::Error) -> Error {
        let device = self.device.info();
        let remedy = match cause.raw_os_error() {
            Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => remedy(memlock_limit()),
            _ => format!("the device takes at most {} bytes at once", device.registration_bytes_max),
        };
        Error::RegistrationRefused { bytes: bytes as u64, device: device.name.clone(), cause, remedy }
    }
}

/// What to do where memory cannot be locked, under this limit.
fn remedy(limit: Option<u64>) -> String {
    match limit {
        Some(bytes) => format!(
            "locked memory is limited to {bytes} bytes: raise it (`ulimit -l unlimited`, LimitMEMLOCK= of a service, \
             /etc/security/limits.conf), or free memory"
        ),
        None => "nothing limits locked memory here: the machine has no more, or the device, for its page tables; free memory, use huge \
                 pages, or ask for less"
            .into(),
    }
}

/// How many bytes this process may lock; none, if it may lock all.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    let code = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    let bytes = (code == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur);
    bytes.filter(|_| !fs::read_to_string("/proc/self/status").is_ok_and(|status| may_lock_all(&status)))
}

/// Whether a process of this status is not limited (`CAP_IPC_LOCK`), as those of root are in general.
fn may_lock_all(status: &str) -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let effective = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    effective.is_some_and(|effective| effective >> CAP_IPC_LOCK & 1 == 1)
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made in `new`; registrations and queue pairs hold the domain, so none is left.
        unsafe { rdma::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// A registration; dropping it takes the memory from the device again.
pub(crate) struct Registered {
    raw: NonNull<rdma::ibv_mr>,
    _domain: Arc<Domain>,
}

// SAFETY: keys and addresses do not change, and libibverbs deregisters from any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({} bytes)", self.bytes())
    }
}

impl Registered {
    /// Names the memory in this process's own requests.
    pub(crate) fn local_key(&self) -> LocalKey {
        // SAFETY: the registration is alive.
        LocalKey(unsafe { self.raw.as_ref() }.lkey)
    }

    /// Names the memory in peers' requests.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the registration is alive.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// The address that peers name its first byte by.
    pub(crate) fn address(&self) -> u64 {
        // SAFETY: the registration is alive.
        unsafe { self.raw.as_ref() }.addr.expose_provenance() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        // SAFETY: the registration is alive.
        unsafe { self.raw.as_ref() }.length
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_reg_mr`, and dropped once.
        unsafe { rdma::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}

/// Zeroed words of its own that are registered: what the device writes results to, and reads single words from.
#[derive(Debug)]
pub(crate) struct Memory {
    // Before the words: deregistered first.
    registered: Registered,
    words: Words,
}

#[derive(Debug)]
struct Words {
    base: NonNull<u64>,
    layout: std::alloc::Layout,
}

// SAFETY: the words are reached only through `Memory`, whose methods say who may touch which.
unsafe impl Send for Words {}

impl Words {
    fn new(count: usize) -> Self {
        let layout = std::alloc::Layout::array::<u64>(count.max(1)).and_then(|layout| layout.align_to(64));
        let layout = layout.expect("a few megabytes at most");
        // SAFETY: the layout has a non-zero size.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base.cast::<u64>()) else { std::alloc::handle_alloc_error(layout) };
        Self { base, layout }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr().cast(), self.layout) };
    }
}

impl Memory {
    pub(crate) fn new(domain: &Arc<Domain>, words: usize) -> Result<Self, Error> {
        let memory = Words::new(words);
        // SAFETY: the words are freed after the registration, by the order of the fields; they are read and written only
        // with the volatile accesses below.
        let registered = unsafe { domain.register(memory.base, words.max(1), Access::Local) }?;
        Ok(Self { registered, words: memory })
    }

    pub(crate) fn key(&self) -> LocalKey {
        self.registered.local_key()
    }

    /// The address of the word at `index`.
    pub(crate) fn address(&self, index: usize) -> u64 {
        self.registered.address() + index as u64 * 8
    }

    fn at(&self, index: usize) -> NonNull<u64> {
        assert!(index < self.registered.bytes() / 8, "word {index} of {} bytes", self.registered.bytes());
        // SAFETY: in bounds, by the assertion.
        unsafe { self.words.base.add(index) }
    }

    /// The word at `index`; of a word that the device is just writing, any mixture of old and new.
    #[inline]
    pub(crate) fn load(&self, index: usize) -> u64 {
        // SAFETY: in bounds and aligned. Volatile: the device writes behind the compiler's back.
        unsafe { self.at(index).read_volatile() }
    }

    /// Sets the word at `index`.
    #[inline]
    pub(crate) fn store(&mut self, index: usize, word: u64) {
        // SAFETY: in bounds and aligned; volatile as above, and `&mut self` excludes other threads.
        unsafe { self.at(index).write_volatile(word) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_is_limited_is_told_to_raise_the_limit() {
        assert!(remedy(Some(65536)).contains("65536 bytes") && remedy(Some(0)).contains("ulimit"));
        assert!(!remedy(None).contains("ulimit"));
        let status = |capabilities| {
            format!("Name:\tfarlink\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\nNoNewPrivs:\t0\n")
        };
        assert!(may_lock_all(&status("0000000000004000")) && may_lock_all(&status("000001ffffffffff")));
        assert!(!may_lock_all(&status("0000000000000000")) && !may_lock_all(&status("000001ffffffbfff")));
        assert!(!may_lock_all("") && !may_lock_all(&status("none")));
    }
}
