//! Bytes that tell their place and who wrote them: what lies elsewhere, or is another's, is told apart.

/// How much is written and compared at a time.
pub(crate) const CHUNK: usize = 4 << 20;

/// Fills bytes that lie at `from` of what `seed` names; `from` is a multiple of 8.
pub(crate) fn fill(bytes: &mut [u8], from: u64, seed: u64) {
    for (place, chunk) in (from / 8..).zip(bytes.chunks_mut(8)) {
        let length = chunk.len();
        chunk.copy_from_slice(&word(place, seed)[..length]);
    }
}

/// How many bytes are as [`fill`] wrote them, up to the first word that is not.
pub(crate) fn matching(bytes: &[u8], from: u64, seed: u64) -> u64 {
    let wrong = (from / 8..)
        .zip(bytes.chunks(8))
        .position(|(place, chunk)| *chunk != word(place, seed)[..chunk.len()]);
    wrong.map_or(bytes.len(), |words| words * 8) as u64
}

fn word(place: u64, seed: u64) -> [u8; 8] {
    (place ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
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
        bytes[17] ^= 1;
        assert_eq!(matching(&bytes, 64, 3), 16);
    }
}
