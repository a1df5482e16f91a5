//! Amount of memory.

use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Amount of memory in bytes. Checked arithmetic returns `None` instead of wrapping.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Bytes(u64);

/// Error for text that is not an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an amount of memory: write {}", wanted(text))]
pub struct ParseBytesError {
    /// Text that was rejected.
    pub text: String,
}

fn wanted(text: &str) -> String {
    match Bytes::spelled(text) {
        Some(spelled) => format!("{spelled} (units are of 1024s), or bytes"),
        None => "bytes (1048576) or a unit of 1024s (512KiB, 16MiB, 32GiB, 2TiB)".to_owned(),
    }
}

impl Bytes {
    /// Amount of zero bytes.
    pub const ZERO: Bytes = Bytes(0);
    /// Largest amount, more than any machine has.
    pub const MAX: Bytes = Bytes(u64::MAX);

    /// Creates an amount of `bytes` bytes.
    pub const fn new(bytes: u64) -> Self {
        Bytes(bytes)
    }

    /// Returns the valid spelling of an amount that is written with another unit: `20GiB` for `20GB`, `20G` and `20gib`. Units of 1000s are not
    /// read, since GMLake's variables and torch mean units of 1024s by the same letters.
    pub fn spelled(text: &str) -> Option<String> {
        if text.parse::<Bytes>().is_ok() {
            return None;
        }
        let text = text.trim();
        let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic())?);
        let (number, unit) = (number.trim(), unit.to_ascii_lowercase());
        let unit = match unit.as_str() {
            "k" | "kb" | "ki" | "kib" => "KiB",
            "m" | "mb" | "mi" | "mib" => "MiB",
            "g" | "gb" | "gi" | "gib" => "GiB",
            "t" | "tb" | "ti" | "tib" => "TiB",
            _ => return None,
        };
        let spelled = format!("{number}{unit}");
        spelled.parse::<Bytes>().is_ok().then_some(spelled)
    }

    /// Creates `n` KiB (2^10 bytes); saturates.
    pub const fn kib(n: u64) -> Self {
        Bytes(n.saturating_mul(KIB))
    }

    /// Creates `n` MiB (2^20 bytes); saturates.
    pub const fn mib(n: u64) -> Self {
        Bytes(n.saturating_mul(MIB))
    }

    /// Creates `n` GiB (2^30 bytes); saturates.
    pub const fn gib(n: u64) -> Self {
        Bytes(n.saturating_mul(GIB))
    }

    /// Returns the number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns whether the amount is zero.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of GiB for display.
    #[allow(clippy::cast_precision_loss)]
    pub fn as_gib(self) -> f64 {
        self.0 as f64 / GIB as f64
    }

    /// Returns the sum, or `None` on overflow.
    pub const fn checked_add(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Bytes(sum)),
            None => None,
        }
    }

    /// Returns the difference, or `None` if `other` is larger.
    pub const fn checked_sub(self, other: Bytes) -> Option<Bytes> {
        match self.0.checked_sub(other.0) {
            Some(difference) => Some(Bytes(difference)),
            None => None,
        }
    }

    /// Returns the product, or `None` on overflow.
    pub const fn checked_mul(self, times: u64) -> Option<Bytes> {
        match self.0.checked_mul(times) {
            Some(product) => Some(Bytes(product)),
            None => None,
        }
    }

    /// Returns the difference, or zero if `other` is larger.
    pub const fn saturating_sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }

    /// Returns the sum, or [`Bytes::MAX`] on overflow.
    pub const fn saturating_add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }

    /// Rounds up to a multiple of `step`; `None` if `step` is zero or on overflow.
    pub const fn align_up(self, step: Bytes) -> Option<Bytes> {
        match self.0.checked_next_multiple_of(step.0) {
            Some(aligned) => Some(Bytes(aligned)),
            None => None,
        }
    }

    /// Returns whether the amount is a multiple of `step`.
    pub const fn is_aligned(self, step: Bytes) -> bool {
        step.0 != 0 && self.0.is_multiple_of(step.0)
    }

    /// Returns the ratio to `whole`; 0 if `whole` is zero.
    #[allow(clippy::cast_precision_loss)]
    pub fn fraction_of(self, whole: Bytes) -> f64 {
        if whole.0 == 0 { 0.0 } else { self.0 as f64 / whole.0 as f64 }
    }
}

impl fmt::Display for Bytes {
    #[allow(clippy::cast_precision_loss)]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = match self.0 {
            GIB.. => (GIB, "GiB"),
            MIB.. => (MIB, "MiB"),
            KIB.. => (KIB, "KiB"),
            _ => return f.pad(&format!("{} B", self.0)),
        };
        f.pad(&format!("{:.2} {name}", self.0 as f64 / unit as f64))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.0)
    }
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        let refused = || ParseBytesError { text: text.to_owned() };
        let unit = text.trim().trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').trim();
        match unit {
            "" => text.trim().parse().map(Bytes).map_err(|_| refused()),
            "B" | "KiB" | "MiB" | "GiB" | "TiB" => {
                text.parse::<bytesize::ByteSize>().map(|size| Bytes(size.as_u64())).map_err(|_| refused())
            }
            _ => Err(refused()),
        }
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(amounts: I) -> Bytes {
        amounts.fold(Bytes::ZERO, Bytes::saturating_add)
    }
}

/// Serializes as a number of bytes.
impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

/// Deserializes from a number of bytes, or from text such as `"16MiB"`.
impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Amount;
        impl de::Visitor<'_> for Amount {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes, or a size such as \"16MiB\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes).map(Bytes).map_err(|_| {
                    E::invalid_value(
                        de::Unexpected::Signed(bytes),
                        &"an amount of memory that is not negative",
                    )
                })
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Amount)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_amounts_are_parsed() {
        for (text, bytes) in
            [("0", 0), ("1048576", MIB), ("512MiB", 512 * MIB), ("32GiB", 32 * GIB), ("1.5GiB", 3 * GIB / 2)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_amounts_are_refused() {
        for text in ["", "-1", "-1MiB", "12 parsecs", "5GB", "5G", "MiB", "1..5GiB", "99999999999999999999"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn another_unit_s_spelling_is_proposed() {
        for (text, spelled) in [
            ("20GB", "20GiB"),
            ("20G", "20GiB"),
            ("1.5 gib", "1.5GiB"),
            ("512mb", "512MiB"),
            ("7k", "7KiB"),
            ("2Ti", "2TiB"),
        ] {
            let error = text.parse::<Bytes>().unwrap_err().to_string();
            assert_eq!(
                error,
                format!(
                    "{text:?} is not an amount of memory: write {spelled} (units are of 1024s), or bytes"
                )
            );
        }
        for text in ["-5GB", "GB", "5 parsecs", "1..5G", "5", "5GiB"] {
            assert_eq!(Bytes::spelled(text), None, "{text}");
        }
    }

    #[test]
    fn amounts_are_printed_for_people() {
        assert_eq!(Bytes(511).to_string(), "511 B");
        assert_eq!(Bytes::kib(3).to_string(), "3.00 KiB");
        assert_eq!(Bytes::mib(2048).to_string(), "2.00 GiB");
    }
}
