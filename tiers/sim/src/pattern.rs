//! Byte patterns that encode their position and writer, so that misplaced or foreign bytes are detected. Tests, demo and benches write and
//! compare them by the gigabyte: this crate is optimized in tests too (`profile.dev` of the workspace).

/// Fills bytes with the pattern of `seed`, beginning at position `from`, a multiple of 8.
pub fn fill(bytes: &mut [u8], from: u64, seed: u64) {
    let (words, rest) = bytes.as_chunks_mut();
    let end = from / 8 + words.len() as u64;
    for (place, bytes) in (from / 8..).zip(words) {
        *bytes = word(place, seed);
    }
    rest.copy_from_slice(&word(end, seed)[..rest.len()]);
}

/// Returns the number of leading bytes that match the pattern written by [`fill`], up to the first wrong word.
#[must_use]
pub fn matching(bytes: &[u8], from: u64, seed: u64) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let end = from / 8 + words.len() as u64;
    let wrong = (from / 8..).zip(words).position(|(place, bytes)| *bytes != word(place, seed));
    let all = if *rest == word(end, seed)[..rest.len()] { bytes.len() } else { words.len() * 8 };
    wrong.map_or(all, |words| words * 8) as u64
}

/// Returns whether all bytes match the pattern of `seed` from position 0 on.
#[must_use]
pub fn matches(bytes: &[u8], seed: u64) -> bool {
    matching(bytes, 0, seed) == bytes.len() as u64
}

fn word(place: u64, seed: u64) -> [u8; 8] {
    // Odd multipliers without a pattern, so that words at nearby positions or of nearby seeds are unrelated.
    let writer = seed.wrapping_mul(0xd134_2543_de82_ef95);
    (place ^ writer).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_another_place_or_writer_do_not_match() {
        let mut bytes = [0; 61];
        fill(&mut bytes, 64, 3);
        assert_eq!(matching(&bytes, 64, 3), 61);
        assert_eq!((matching(&bytes, 64, 4), matching(&bytes, 0, 3)), (0, 0));
        assert_eq!(matching(&bytes[8..], 72, 3), 53);
        bytes[60] ^= 1;
        assert_eq!(matching(&bytes, 64, 3), 56);
        bytes[17] ^= 1;
        assert_eq!(matching(&bytes, 64, 3), 16);
    }
}
