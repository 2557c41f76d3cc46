//! A network card and a memory server's processors as arithmetic over counts, for the figure `to-copy`: no clock.
//!
//! The machine of Kesavan et al., "To Copy or Not to Copy" (2016), table 1: a ConnectX-3 of 56 Gb/s over PCIe 3.0 x8, and eight
//! cores of 2.1 GHz. The card works in two stages at the same time, and the slower one sets the pace: it takes descriptors and
//! their lists, a time for each; and it moves bytes. Copies are made before a descriptor can be posted, so they add to the first.
//!
//! Each constant is from what the paper says; what is derived from two statements is computed below from both. What the model
//! says of anything else is not put in: where copying catches up, what small deltas cost beside a large page, cycles per byte.

/// What was sent, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Descriptors: requests that move data.
    pub(crate) descriptors: u64,
    /// Entries of their lists.
    pub(crate) entries: u64,
    /// Bytes that they move.
    pub(crate) bytes: u64,
    /// Bytes that the processor copies, in so many pieces.
    pub(crate) copied_bytes: u64,
    pub(crate) copied_pieces: u64,
}

/// Entries of a list at most (section 3).
pub(crate) const LIST_MAX: u64 = 32;

/// The line's rate (table 1): 56 Gb/s.
const LINE_BYTES_PER_S: f64 = 56e9 / 8.0;
/// What of it arrives as payload at best: 5.8 GB/s (section 5.2).
const WIRE_BYTES_PER_S: f64 = 5.8e9;
const _: () = assert!(WIRE_BYTES_PER_S < LINE_BYTES_PER_S);
/// The most that scattered records of 128 B come to, 32 at a time: 3.4 GB/s (section 5.3; section 5.1 says 3.5).
const SCATTERED_BYTES_PER_S: f64 = 3.4e9;
/// With so many records of 1 KiB the card just keeps the wire busy (section 5.1).
const SATURATING_RECORDS: f64 = 6.0;
/// What 32 records of 128 B take, in nanoseconds,
const FULL_LIST_NS: f64 = 32.0 * 128.0 / SCATTERED_BYTES_PER_S * 1e9;
/// and what 6 of 1 KiB do.
const SATURATING_NS: f64 = SATURATING_RECORDS * 1024.0 / WIRE_BYTES_PER_S * 1e9;
/// An entry of a list: of the two, the difference by the entries.
const ENTRY_NS: f64 = (FULL_LIST_NS - SATURATING_NS) / (LIST_MAX as f64 - SATURATING_RECORDS);
/// A descriptor without its entries: what is left of either.
const DESCRIPTOR_NS: f64 = FULL_LIST_NS - LIST_MAX as f64 * ENTRY_NS;

/// Cycles of all cores (table 1).
const CYCLES_PER_S: f64 = 8.0 * 2.1e9;
/// Copy-out at its peak, 5.6 GB/s, spends 6.8% of them on copying records of 1 KiB (section 5.2).
const COPY_PEAK_BYTES_PER_S: f64 = 5.6e9;
const COPY_CYCLES_PER_BYTE: f64 = 0.068 * CYCLES_PER_S / COPY_PEAK_BYTES_PER_S;
/// What a core copies in a nanosecond, by the same: 16 KiB in 1.6 us (section 5.5: 1 to 2 us).
const COPY_NS_PER_BYTE: f64 = 0.068 * 8.0 / COPY_PEAK_BYTES_PER_S * 1e9;
/// Posting a base page with a delta or none takes 1% of the cycles at most (section 5.3): 2 entries,
const POST_TWO_CYCLES: f64 = 0.01 * CYCLES_PER_S * (16.0 * 1024.0 + 128.0) / WIRE_BYTES_PER_S;
/// and posting 32 records of 128 B takes 5.5% (section 5.2).
const POST_FULL_LIST_CYCLES: f64 = 0.055 * CYCLES_PER_S * FULL_LIST_NS / 1e9;
const ENTRY_CYCLES: f64 = (POST_FULL_LIST_CYCLES - POST_TWO_CYCLES) / (LIST_MAX as f64 - 2.0);
const DESCRIPTOR_CYCLES: f64 = POST_TWO_CYCLES - 2.0 * ENTRY_CYCLES;
/// Records of 128 B take 10.8% of the cycles, posting included (section 5.2): what they take more than bytes do, each, where one of
/// 1 KiB takes as much.
const COPY_CYCLES_PER_PIECE: f64 = {
    let posting = (DESCRIPTOR_CYCLES + ENTRY_CYCLES) / (16.0 * 1024.0);
    let small = 0.108 * CYCLES_PER_S / COPY_PEAK_BYTES_PER_S - posting;
    (small - COPY_CYCLES_PER_BYTE) / (1.0 / 128.0 - 1.0 / 1024.0)
};
/// Making a new base page of 16 KiB: 340,000 a second for 8% of the cycles (section 5.4).
pub(crate) const CONSOLIDATION_CYCLES: f64 = 0.08 * CYCLES_PER_S / 340e3;

impl Sent {
    /// What it takes, in nanoseconds.
    fn ns(&self) -> f64 {
        let posted = self.descriptors as f64 * DESCRIPTOR_NS + self.entries as f64 * ENTRY_NS;
        let copied = self.copied_bytes as f64 * COPY_NS_PER_BYTE;
        (self.bytes as f64 / WIRE_BYTES_PER_S * 1e9).max(posted + copied)
    }

    /// Bytes a nanosecond, which are GB a second.
    pub(crate) fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.ns()
    }

    fn copy_cycles(&self) -> f64 {
        let more = COPY_CYCLES_PER_PIECE * (self.copied_pieces as f64 - self.copied_bytes as f64 / 1024.0);
        self.copied_bytes as f64 * COPY_CYCLES_PER_BYTE + more
    }

    fn cycles(&self) -> f64 {
        self.descriptors as f64 * DESCRIPTOR_CYCLES + self.entries as f64 * ENTRY_CYCLES + self.copy_cycles()
    }

    /// Processor cycles for each byte.
    pub(crate) fn cycles_per_byte(&self) -> f64 {
        self.cycles() / self.bytes as f64
    }

    /// The share of all cores' cycles that sending takes, at the pace of this; in percent.
    pub(crate) fn processor_percent(&self) -> f64 {
        self.percent(self.cycles())
    }

    /// What of that is copying.
    pub(crate) fn copying_percent(&self) -> f64 {
        self.percent(self.copy_cycles())
    }

    fn percent(&self, cycles: f64) -> f64 {
        cycles / (self.ns() / 1e9 * CYCLES_PER_S) * 100.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(records: u64, bytes: u64) -> Sent {
        Sent { descriptors: 1, entries: records, bytes: records * bytes, ..Sent::default() }
    }

    fn copied(records: u64, bytes: u64) -> Sent {
        Sent { entries: 1, copied_bytes: records * bytes, copied_pieces: records, ..gathered(records, bytes) }
    }

    fn is_near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 0.01, "{found}, not {expected}");
    }

    /// What was put in comes out.
    #[test]
    fn the_model_says_what_its_sources_say() {
        is_near(gathered(32, 128).gb_per_s(), 3.4);
        is_near(gathered(6, 1024).gb_per_s(), 5.8);
        assert!(gathered(5, 1024).gb_per_s() < 5.0);
        is_near(gathered(32, 128).processor_percent(), 5.5);
        let ample = copied(128, 128);
        is_near(ample.cycles() / ample.bytes as f64 * 5.6e9 / CYCLES_PER_S, 0.108);
        is_near(copied(16, 1024).copy_cycles() / 16384.0 * 5.6e9 / CYCLES_PER_S, 0.068);
        for constant in [ENTRY_NS, DESCRIPTOR_NS, ENTRY_CYCLES, DESCRIPTOR_CYCLES, COPY_CYCLES_PER_PIECE] {
            assert!(constant > 0.0, "{constant}");
        }
    }
}
