//! Shape classes: passes with the same order and sizes in the same buckets.

use std::fmt;

use glake_units::Bytes;

use super::{LeafPart, Pack, Step, Tape};

/// Key of a shape class, stable across processes and versions.
///
/// A bucket is an eighth of an octave: sizes in it differ by less than an eighth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShapeClass(u64);

/// Offset basis of FNV-1a, implemented here so that no dependency can change the key.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

impl ShapeClass {
    /// Returns the class of `tape`.
    pub(super) fn of(tape: &Tape) -> Self {
        let mut hash = OFFSET;
        let mut eat = |word: u64| {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(PRIME);
            }
        };
        for step in tape.steps() {
            match *step {
                Step::Pack(item) => {
                    let Pack { bytes, link_bytes, scope, leaf } = tape.items()[item.index()].pack;
                    eat(match leaf {
                        None => 0,
                        Some(LeafPart::Output) => 2,
                        Some(LeafPart::Beside) => 3,
                    });
                    eat(bucket(bytes));
                    eat(bucket(link_bytes));
                    eat(scope.map_or(u64::MAX, |scope| u64::from(scope.0)));
                }
                Step::Unpack(item) => {
                    eat(1);
                    eat(item.index() as u64);
                }
            }
        }
        ShapeClass(hash)
    }

    /// Returns the key as a number.
    pub const fn key(self) -> u64 {
        self.0
    }
}

impl fmt::Display for ShapeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Returns the bucket of a size: octave and eighth.
pub(super) fn bucket(bytes: Bytes) -> u64 {
    let bytes = bytes.get();
    if bytes < 16 {
        return bytes;
    }
    let octave = u64::from(bytes.ilog2());
    (octave << 3) | ((bytes >> (octave - 3)) & 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_an_eighth_of_an_octave() {
        let of = |bytes| bucket(Bytes::new(bytes));
        assert_eq!(of(1024), of(1024 + 127));
        assert_ne!(of(1024), of(1024 + 128));
        assert_ne!(of(1024), of(1023));
        let buckets: Vec<u64> = (0..1 << 14).map(of).collect();
        assert!(buckets.is_sorted());
    }
}
