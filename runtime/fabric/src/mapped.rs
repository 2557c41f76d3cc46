//! Mapped files that somebody shortens.
//!
//! Who touches a page of a mapping that its file no longer has gets SIGBUS, which ends the process unless it is handled. No
//! lock and no copy of the file's descriptor prevents that: whoever may write the file may shorten it. So, with the first file
//! that it maps, **this library installs a handler for SIGBUS** (on Linux). The handler marks the mapping as cut off and
//! puts zeroed memory of this process in the place of all of it; the access is repeated there and goes on. Whoever reads such
//! a mapping asks [`Watch::is_cut_off`] *after* the access, and gives out nothing that was read if it is. A SIGBUS of any
//! other cause goes to the handler that was there before. The standard library's, and this one where there was none, bring
//! the system's default back: an access is repeated then, and ends the process. One that was *sent* (`kill -BUS`) has none: the
//! process goes on, without this handler.
//!
//! The mappings are in a list whose entries are never freed, only used again: a signal handler can walk it at any time.

use std::io;

/// A mapping that the handler looks after, until this is dropped; then it may be unmapped.
pub(crate) struct Watch(&'static imp::Range);

impl Watch {
    /// Looks after `bytes` from `start` on: a mapping of whole pages that nothing else replaces.
    ///
    /// # Errors
    /// If the system refuses the handler.
    pub(crate) fn new(start: *const u8, bytes: usize) -> io::Result<Self> {
        imp::install()?;
        Ok(Self(imp::enter(start as usize, bytes)))
    }

    /// Whether the mapping is memory of this process alone by now: what is read there means nothing. The same thread that
    /// made an access may rely on the answer after it, and so may any other.
    #[inline]
    pub(crate) fn is_cut_off(&self) -> bool {
        self.0.is_cut_off()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(all(target_os = "linux", not(any(miri, loom))))]
mod imp {
    use std::{
        cell::UnsafeCell,
        io,
        mem::MaybeUninit,
        ptr,
        sync::{
            Mutex, OnceLock, PoisonError,
            atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence},
        },
    };

    /// Addresses of a mapping; none while `end` is 0.
    pub(super) struct Range {
        start: AtomicUsize,
        end: AtomicUsize,
        cut_off: AtomicBool,
        next: *const Self,
    }

    // SAFETY: `next` is written before the range is published and never again, and ranges are never freed.
    unsafe impl Sync for Range {}
    // SAFETY: as above.
    unsafe impl Send for Range {}

    static FIRST: AtomicPtr<Range> = AtomicPtr::new(ptr::null_mut());
    static ENTERING: Mutex<()> = Mutex::new(());

    fn all() -> impl Iterator<Item = &'static Range> {
        // SAFETY: published ranges are never freed.
        let first = unsafe { FIRST.load(Ordering::Acquire).cast_const().as_ref() };
        // SAFETY: as above.
        std::iter::successors(first, |range| unsafe { range.next.as_ref() })
    }

    pub(super) fn enter(start: usize, bytes: usize) -> &'static Range {
        let _alone = ENTERING.lock().unwrap_or_else(PoisonError::into_inner);
        let range = all().find(|range| range.end.load(Ordering::Acquire) == 0).unwrap_or_else(|| {
            let next = FIRST.load(Ordering::Acquire);
            let (start, end, cut_off) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
            let range = Box::leak(Box::new(Range { start, end, cut_off, next }));
            FIRST.store(range, Ordering::Release);
            range
        });
        range.cut_off.store(false, Ordering::Relaxed);
        range.start.store(start, Ordering::Release);
        range.end.store(start + bytes, Ordering::Release);
        range
    }

    impl Range {
        #[inline]
        pub(super) fn is_cut_off(&self) -> bool {
            // The handler runs in the thread whose access it interrupts: no later than that access.
            compiler_fence(Ordering::SeqCst);
            // In another thread's it was before the memory that this one has read there.
            fence(Ordering::Acquire);
            self.cut_off.load(Ordering::Relaxed)
        }

        pub(super) fn leave(&self) {
            self.end.store(0, Ordering::Release);
        }

        /// Its addresses, if it is one mapping's at this moment and has this address.
        fn holding(&self, address: usize) -> Option<(usize, usize)> {
            let start = self.start.load(Ordering::Acquire);
            let end = self.end.load(Ordering::Acquire);
            let is_one = self.start.load(Ordering::Acquire) == start;
            (is_one && (start..end).contains(&address)).then_some((start, end))
        }
    }

    /// What was there before this library's handler.
    struct Previous(UnsafeCell<MaybeUninit<libc::sigaction>>);

    // SAFETY: written once, before `INSTALLED` is set, and only read after that.
    unsafe impl Sync for Previous {}

    static PREVIOUS: Previous = Previous(UnsafeCell::new(MaybeUninit::uninit()));
    static IS_PREVIOUS_KNOWN: AtomicBool = AtomicBool::new(false);

    pub(super) fn install() -> io::Result<()> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        let installed = INSTALLED.get_or_init(|| {
            // SAFETY: all-zero is a valid `sigaction`: the default action, no flags, an empty mask.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = handle as *const () as usize;
            // On the alternate stack where there is one, as the standard library's handler wants it for its own part.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: `handle` has the type that SA_SIGINFO asks for and does only what a handler may; the previous action is
            // written to memory that nobody reads yet.
            let failed = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, (*PREVIOUS.0.get()).as_mut_ptr()) };
            if failed != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or_default());
            }
            IS_PREVIOUS_KNOWN.store(true, Ordering::Release);
            Ok(())
        });
        installed.map_err(io::Error::from_raw_os_error)
    }

    /// Handles SIGBUS: atomics and system calls, nothing else.
    extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: with SA_SIGINFO the system hands over a valid `siginfo_t`; SIGBUS has an address.
        let address = unsafe { (*info).si_addr() } as usize;
        for range in all() {
            let Some((start, end)) = range.holding(address) else { continue };
            range.cut_off.store(true, Ordering::SeqCst);
            // SAFETY: errno is this thread's.
            let errno = unsafe { *libc::__errno_location() };
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
            // SAFETY: the addresses are those of a mapping that its owner has entered here and not yet unmapped: it takes the
            // entry out first, and this very access keeps it. Its words are atomics, which stay valid with any contents.
            let mapped = unsafe {
                libc::mmap(start as *mut libc::c_void, end - start, protection, flags | libc::MAP_FIXED, -1, 0)
            };
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = errno };
            if mapped != libc::MAP_FAILED {
                return;
            }
        }
        pass_on(signal, info, context);
    }

    /// Does what would have been done without this library.
    fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        if IS_PREVIOUS_KNOWN.load(Ordering::Acquire) {
            // SAFETY: written before it was said to be known, and not since.
            let previous = unsafe { (*PREVIOUS.0.get()).assume_init_ref() };
            match previous.sa_sigaction {
                libc::SIG_DFL | libc::SIG_IGN => {}
                handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
                    // SAFETY: it was installed with SA_SIGINFO, so it has this type.
                    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        unsafe { std::mem::transmute(handler) };
                    return handler(signal, info, context);
                }
                handler => {
                    // SAFETY: it was installed without SA_SIGINFO, so it has this type.
                    let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
                    return handler(signal);
                }
            }
        }
        // The access is repeated, and ends the process.
        // SAFETY: the default action is always allowed.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

#[cfg(not(all(target_os = "linux", not(any(miri, loom)))))]
mod imp {
    use std::io;

    /// Nothing is looked after here.
    pub(super) struct Range;

    impl Range {
        pub(super) fn is_cut_off(&self) -> bool {
            false
        }

        pub(super) fn leave(&self) {}
    }

    pub(super) fn install() -> io::Result<()> {
        Ok(())
    }

    pub(super) fn enter(_start: usize, _bytes: usize) -> &'static Range {
        &Range
    }
}
