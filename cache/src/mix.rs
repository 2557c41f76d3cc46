//! One hash for numbers.

/// Spreads the bits of a number (the finalizer of MurmurHash3).
#[inline]
pub(crate) const fn mix(number: u64) -> u64 {
    let mut x = number;
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}
