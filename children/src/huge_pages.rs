//! Huge pages for all memory of a program that compares what it measures: one side that asks for them itself would be ahead of one
//! that only allocates.

use std::{env, fs, os::unix::process::CommandExt as _, process::Command};

/// What the C library reads when a program starts.
const TUNABLES: &str = "GLIBC_TUNABLES";
/// Says that it was started again: of a program with more rights than its user the system may take the other one away.
const ANEW: &str = "FARLINK_STARTED_ANEW";
/// Huge pages; and heaps that grow by many at a time, as what grows by less than one gets none.
const ASK: &str = "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864";
/// Memory that came is of other things, too: below this nothing is said of it.
const BYTES_MIN: u64 = 4 << 20;

/// Has what this program allocates be of huge pages, where the system gives them to who asks. The C library takes that at a program's start
/// alone: so this program starts again, in the place of this process, with the same arguments. Not where the user has set
/// `GLIBC_TUNABLES`, nor with another C library. To be called before anything is done. Not every run gets what it asks for: who compares
/// says what [share](OwnMemory::huge_share_since) each side has.
pub fn for_all() {
    let is_asked = |name| env::var_os(name).is_some();
    if cfg!(not(all(target_os = "linux", target_env = "gnu"))) || is_asked(TUNABLES) || is_asked(ANEW) {
        return;
    }
    if let Ok(program) = env::current_exe() {
        // Comes back only if that fails: then all goes on as it is, and shares of memory tell.
        let _ = Command::new(program).args(env::args_os().skip(1)).env(TUNABLES, ASK).env(ANEW, "1").exec();
    }
}

/// This process's own memory, at some moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct OwnMemory {
    bytes: u64,
    huge: u64,
}

impl OwnMemory {
    /// As the system says now; nothing where it does not say.
    pub fn now() -> Self {
        let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
        let bytes = |name| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) << 10
        };
        Self { bytes: bytes("Anonymous:"), huge: bytes("AnonHugePages:") }
    }

    /// Of what has come since then, the share that is in huge pages; `None` if that is little.
    pub fn huge_share_since(self, before: Self) -> Option<f64> {
        let [bytes, huge] =
            [(self.bytes, before.bytes), (self.huge, before.huge)].map(|(now, then)| now.saturating_sub(then));
        (bytes >= BYTES_MIN).then(|| (huge as f64 / bytes as f64).min(1.0))
    }
}

/// A share in percent, or `-`.
pub fn show(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_what_has_come_since() {
        let memory = |bytes, huge| OwnMemory { bytes, huge };
        assert_eq!(memory(24 << 20, 12 << 20).huge_share_since(memory(8 << 20, 8 << 20)), Some(0.25));
        assert_eq!(memory(9 << 20, 9 << 20).huge_share_since(memory(8 << 20, 0)), None);
        assert_eq!(memory(0, 0).huge_share_since(memory(8 << 20, 0)), None);
        assert_eq!((show(Some(0.249)), show(None)), ("25%".to_owned(), "-".to_owned()));
        let before = OwnMemory::now();
        let taken = std::hint::black_box(vec![1u8; 32 << 20]);
        let share = OwnMemory::now().huge_share_since(before);
        assert!(share.is_some_and(|share| (0.0..=1.0).contains(&share)), "{share:?}");
        drop(taken);
    }
}
