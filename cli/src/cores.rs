//! Which core a thread runs on.

/// Keeps the calling thread on one of the cores that the program may use, if it has several: two threads on one core would
/// measure the scheduler.
pub(crate) fn stay_on_core(number: usize) {
    #[cfg(target_os = "linux")]
    {
        use std::sync::OnceLock;

        // Of the first thread that comes: those that it starts later may use no more than it does by then.
        static ALLOWED: OnceLock<Vec<usize>> = OnceLock::new();
        let cores = ALLOWED.get_or_init(allowed);
        if let (Some(&core), true) = (cores.get(number), cores.len() > 1) {
            // SAFETY: the set is plain bits on the stack, as large as the call is told, and used by nobody else.
            unsafe {
                let mut one: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(core, &mut one);
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const one);
            }
        }
    }
    let _ = number;
}

#[cfg(target_os = "linux")]
fn allowed() -> Vec<usize> {
    // SAFETY: as above.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut allowed) {
            0 => (0..libc::CPU_SETSIZE as usize).filter(|core| libc::CPU_ISSET(*core, &allowed)).collect(),
            _ => Vec::new(),
        }
    }
}
