//! The digest function, identical on a GPU and on the host.
//!
//! ```text
//!  bytes    [ word 0 ][ word 1 ] ─ ─ ─ [ word n, zeros ]        of 8 bytes
//!               │ 0       │ 1               │ n                 mixed with its position
//!  sum          └────── + ┴ ─ ─ ─ ─ ─ ─ + ──┘                   in any order
//!  digest       mix(sum, length)
//! ```
//!
//! An invertible step maps each word at its position to its term, so a change of one word always changes the sum. The digest detects
//! accidental corruption; it does not resist deliberate forgery.

use std::fmt;

/// Constant of the term generator, splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
const KEY: u64 = 0x9E37_79B9_7F4A_7C15;
const FIRST: u64 = 0xBF58_476D_1CE4_E5B9;
const SECOND: u64 = 0x94D0_49BB_1331_11EB;

/// 64-bit digest of bytes: differs for any two inputs that differ in one 8-byte word, and for all but one in 2⁶⁴ of other pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest(u64);

impl Digest {
    /// Computes the digest of host bytes.
    pub fn of(bytes: &[u8]) -> Digest {
        Digest::finished(sum(bytes, 0), bytes.len() as u64)
    }

    /// Builds the digest of `length` bytes from the sum of their terms.
    pub(super) fn finished(sum: u64, length: u64) -> Digest {
        Digest(mix(sum, length))
    }
}

/// Incremental digest of host bytes that arrive in consecutive parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartialDigest {
    sum: u64,
    length: u64,
}

impl PartialDigest {
    /// Adds the next part. Every part but the last must be a multiple of 8 bytes.
    pub fn add(&mut self, part: &[u8]) {
        debug_assert!(self.length.is_multiple_of(8), "parts are whole words");
        self.sum = self.sum.wrapping_add(sum(part, self.length / 8));
        self.length += part.len() as u64;
    }

    /// Returns the digest of all parts in sequence.
    pub fn finish(self) -> Digest {
        Digest::finished(self.sum, self.length)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Returns the sum of the terms of `bytes`, whose first word has index `position`.
pub fn sum(bytes: &[u8], position: u64) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(&last);
    let terms = words.iter().chain(last).zip(position..);
    terms.fold(0, |sum, (word, position)| sum.wrapping_add(mix(u64::from_le_bytes(*word), position)))
}

fn mix(word: u64, position: u64) -> u64 {
    let mut held = word ^ position.wrapping_add(1).wrapping_mul(KEY);
    held = held.wrapping_mul(FIRST);
    held ^= held >> 32;
    held = held.wrapping_mul(SECOND);
    held ^ held >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at.wrapping_mul(167) + (at >> 8)).to_le_bytes()[0]).collect()
    }

    #[test]
    fn one_flipped_bit_is_found_wherever_it_is() {
        for length in [1, 7, 8, 9, 16, 31, 1000] {
            let mut bytes = bytes(length);
            let whole = Digest::of(&bytes);
            for bit in 0..length * 8 {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(Digest::of(&bytes), whole, "bit {bit} of {length} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn parts_have_the_digest_of_the_whole() {
        for length in [0, 5, 8, 100, 4096, 4099] {
            let bytes = bytes(length);
            for step in [8, 64, 1024] {
                let mut parts = PartialDigest::default();
                bytes.chunks(step).for_each(|part| parts.add(part));
                assert_eq!(parts.finish(), Digest::of(&bytes), "{length} bytes by {step}");
            }
        }
    }

    #[test]
    fn swapped_words_are_found() {
        let bytes = bytes(4096);
        let whole = Digest::of(&bytes);
        for step in [8, 16, 512, 2048] {
            for at in (0..4096 - step).step_by(8) {
                let mut changed = bytes.clone();
                for byte in at..at + 8 {
                    changed.swap(byte, byte + step);
                }
                assert!(changed == bytes || Digest::of(&changed) != whole, "{at} and {step} after it");
            }
        }
        let mut turned = bytes.clone();
        turned.rotate_left(8);
        assert_ne!(Digest::of(&turned), whole);
    }

    #[test]
    fn the_length_counts() {
        let digests: Vec<Digest> = (0..40).map(|length| Digest::of(&vec![0; length])).collect();
        for (at, digest) in digests.iter().enumerate() {
            assert!(!digests[..at].contains(digest), "{at} zeros");
        }
    }

    #[test]
    fn parts_add_up() {
        let bytes = bytes(1003);
        for cut in (0..1003).step_by(8) {
            let parts = sum(&bytes[..cut], 0).wrapping_add(sum(&bytes[cut..], cut as u64 / 8));
            assert_eq!(Digest::finished(parts, 1003), Digest::of(&bytes), "{cut}");
        }
    }
}
