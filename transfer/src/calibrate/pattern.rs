//! Byte pattern that identifies the source of a copy: every 64-bit word is unique.

use glake_device::owned::Registration;

/// Bytes that one thread fills at a time.
const PART: usize = 4 << 20;

/// Fills memory with the pattern, using `threads` threads.
pub(super) fn fill(memory: &mut Registration, threads: usize) {
    let bytes = memory.as_mut_slice();
    let share = bytes.len().div_ceil(threads.max(1)).next_multiple_of(PART);
    std::thread::scope(|scope| {
        for (index, part) in bytes.chunks_mut(share).enumerate() {
            scope.spawn(move || {
                let first = (index * share / 8) as u64;
                for (word, place) in (first..).zip(part.chunks_exact_mut(8)) {
                    place.copy_from_slice(&mix(word).to_le_bytes());
                }
            });
        }
    });
}

/// Mixing step of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), a bijection.
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
