//! How values travel: as words, checked on arrival.
//!
//! A fixed layout of little-endian 64-bit words. Decoding takes exactly the words that encoding wrote, refuses anything
//! else, and never allocates more than the message is long.

use std::marker::PhantomData;

use crate::ptr::{Link, RemotePtr};

/// Why words are not the value that they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub struct DecodeError(pub &'static str);

/// A value that can be sent.
pub trait Wire: Sized {
    /// Appends the value's words.
    fn encode(&self, to: &mut Vec<u64>);

    /// Reads a value from the front of `from` and moves it on.
    ///
    /// # Errors
    /// [`DecodeError`] if the words are no such value.
    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError>;
}

/// Decodes a whole message.
///
/// # Errors
/// [`DecodeError`] if the words are no such value, or more than that.
pub fn decode_all<T: Wire>(mut words: &[u64]) -> Result<T, DecodeError> {
    let value = T::decode(&mut words)?;
    if words.is_empty() { Ok(value) } else { Err(DecodeError("words left over behind the value")) }
}

impl Wire for u64 {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(*self);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (&word, rest) = from.split_first().ok_or(DecodeError("it ends too early"))?;
        *from = rest;
        Ok(word)
    }
}

impl Wire for () {
    fn encode(&self, _to: &mut Vec<u64>) {}

    fn decode(_from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(())
    }
}

/// Unsigned integers that are less than a word.
macro_rules! small {
    ($($small:ty),+) => {$(
        impl Wire for $small {
            fn encode(&self, to: &mut Vec<u64>) {
                to.push(u64::from(*self));
            }

            fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
                Self::try_from(u64::decode(from)?).map_err(|_| DecodeError("a number is too large for its type"))
            }
        }
    )+};
}

small!(u8, u16, u32);

impl Wire for i64 {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(self.cast_unsigned());
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(u64::decode(from)?.cast_signed())
    }
}

/// Any bits: whoever takes numbers from afar checks them.
impl Wire for f64 {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(self.to_bits());
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self::from_bits(u64::decode(from)?))
    }
}

impl<T> Wire for PhantomData<T> {
    fn encode(&self, _to: &mut Vec<u64>) {}

    fn decode(_from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self)
    }
}

impl Wire for Link {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(self.word());
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let link = Self::from_word(u64::decode(from)?);
        match link.is_null() || link.remote().is_some() {
            true => Ok(link),
            false => Err(DecodeError("a link leads to no page")),
        }
    }
}

impl<T: Wire, const N: usize> Wire for [T; N] {
    fn encode(&self, to: &mut Vec<u64>) {
        self.iter().for_each(|value| value.encode(to));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let values = (0..N).map(|_| T::decode(from)).collect::<Result<Vec<T>, DecodeError>>()?;
        values.try_into().map_err(|_| DecodeError("it ends too early"))
    }
}

/// Makes structs of named fields [`Wire`]: their fields, one after the other.
///
/// ```
/// use farlink_fabric::wire::{Wire, decode_all, wire};
///
/// #[derive(Debug, PartialEq)]
/// struct Window { low: [f64; 2], high: [f64; 2], limit: u32 }
/// wire!(struct Window { low, high, limit });
///
/// let window = Window { low: [0.0; 2], high: [1.0, 2.0], limit: 7 };
/// let mut words = Vec::new();
/// window.encode(&mut words);
/// assert_eq!(decode_all::<Window>(&words)?, window);
/// # Ok::<(), farlink_fabric::wire::DecodeError>(())
/// ```
#[macro_export]
macro_rules! wire {
    ($(struct $name:ident $(<$($of:ident),+>)? { $($field:ident),* $(,)? })+) => {$(
        impl $(<$($of),+>)? $crate::wire::Wire for $name $(<$($of),+>)? {
            fn encode(&self, to: &mut Vec<u64>) {
                $($crate::wire::Wire::encode(&self.$field, to);)*
            }

            fn decode(from: &mut &[u64]) -> Result<Self, $crate::wire::DecodeError> {
                Ok(Self { $($field: $crate::wire::Wire::decode(from)?),* })
            }
        }
    )+};
}

#[doc(inline)]
pub use crate::wire;

impl Wire for RemotePtr {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(self.raw());
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Self::from_raw(u64::decode(from)?).map_err(|_| DecodeError("an address is null or swizzled"))
    }
}

impl Wire for bool {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(u64::from(*self));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        match u64::decode(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError("a truth value is neither 0 nor 1")),
        }
    }
}

impl<T: Wire> Wire for Option<T> {
    fn encode(&self, to: &mut Vec<u64>) {
        self.is_some().encode(to);
        if let Some(value) = self {
            value.encode(to);
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        if bool::decode(from)? { T::decode(from).map(Some) } else { Ok(None) }
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn encode(&self, to: &mut Vec<u64>) {
        self.0.encode(to);
        self.1.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok((A::decode(from)?, B::decode(from)?))
    }
}

impl<A: Wire, B: Wire, C: Wire> Wire for (A, B, C) {
    fn encode(&self, to: &mut Vec<u64>) {
        self.0.encode(to);
        self.1.encode(to);
        self.2.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok((A::decode(from)?, B::decode(from)?, C::decode(from)?))
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(self.len() as u64);
        self.iter().for_each(|value| value.encode(to));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let length = u64::decode(from)?;
        if length > from.len() as u64 {
            return Err(DecodeError("a list is longer than the message"));
        }
        (0..length).map(|_| T::decode(from)).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Everything = (Option<u64>, (Vec<(u64, u64)>, bool));

    proptest! {
        #[test]
        fn values_round_trip(value: Everything) {
            let mut words = Vec::new();
            value.encode(&mut words);
            prop_assert_eq!(decode_all::<Everything>(&words).unwrap(), value);
            prop_assert!(decode_all::<Everything>(&words[..words.len() - 1]).is_err());
        }

        #[test]
        fn random_words_do_not_panic(words in prop::collection::vec(0u64..5, 0..20)) {
            if let Ok(value) = decode_all::<Everything>(&words) {
                let mut again = Vec::new();
                value.encode(&mut again);
                prop_assert_eq!(again, words);
            }
        }
    }
}
