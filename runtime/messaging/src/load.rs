//! A memory server's load, as it tells its peers: one word, so that it is whole.

/// How busy a memory server is. Reported at an interval; the last report stays with the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// Counts reports, from 1, and wraps: tells whether there is a new one.
    pub report: u16,
    /// Of a thousand parts of the time since the last report, how many the server's threads spent with requests, on average.
    pub busy_permille: u16,
    /// How many threads serve messages.
    pub threads: u16,
    /// How many peers they have.
    pub peers: u16,
}

impl Load {
    /// The share of time that was spent with requests, 0 to 1.
    pub fn utilisation(&self) -> f64 {
        f64::from(self.busy_permille) / 1000.0
    }

    pub(crate) fn word(&self) -> u64 {
        let Self { report, busy_permille, threads, peers } = *self;
        u64::from(report.max(1)) << 48 | u64::from(busy_permille) << 32 | u64::from(threads) << 16 | u64::from(peers)
    }

    /// None while there is no report.
    pub(crate) fn read(word: u64) -> Option<Self> {
        let report = (word >> 48) as u16;
        let busy_permille = ((word >> 32) as u16).min(1000);
        (report != 0).then_some(Self { report, busy_permille, threads: (word >> 16) as u16, peers: word as u16 })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_word() {
        let load = Load { report: 7, busy_permille: 950, threads: 2, peers: 300 };
        assert_eq!(Load::read(load.word()), Some(load));
        assert_eq!(Load::read(0), None);
        assert!(Load::read(u64::MAX).is_some_and(|load| load.utilisation() <= 1.0));
    }
}
