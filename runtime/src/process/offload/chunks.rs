//! Sizes of the chunks of host memory (pure).
//!
//! An entry that does not fit at the end of a chunk continues in another ([`Ranges::take_parts`](super::ranges::Ranges::take_parts)).
//! Chunks are small compared with the total, so that little more than the rest of the last one is lost.

use glake_units::Bytes;

/// Number of the smallest chunks that fill an arena of the pool.
const IN_ARENA: u64 = 4;
/// Divisor of the current total that gives the size of the next chunk.
const PART: u64 = 32;
/// Maximum size of a chunk, unless a single entry is larger.
pub(super) const MOST: Bytes = Bytes::gib(4);
/// Arena size for a pool that pins each request separately.
const ARENA: Bytes = Bytes::mib(256);

/// Sizes of the chunks taken from a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkSizes {
    arena: Bytes,
    least: Bytes,
}

impl ChunkSizes {
    /// Returns the sizes for a pool with arenas of `arena` bytes. Several of the smallest chunks fill an arena; larger chunks have arenas
    /// of their own.
    pub(super) fn of(arena: Bytes) -> ChunkSizes {
        let arena = if arena < Bytes::mib(8) { ARENA } else { arena };
        let arena = arena.align_up(Bytes::mib(8)).unwrap_or(ARENA);
        ChunkSizes { arena, least: Bytes::new(arena.get() / IN_ARENA) }
    }

    /// Returns the size of the next chunk, for an entry of `size` bytes and a current total of `there`.
    pub(super) fn next(self, size: Bytes, there: Bytes) -> Bytes {
        let part = Bytes::new(there.get() / PART).min(MOST);
        let two = self.least.saturating_add(self.least);
        let chunk = match part {
            part if part < two => self.least,
            part if part < self.arena => two,
            part => Bytes::new(part.get() / self.arena.get() * self.arena.get()),
        };
        chunk.max(size.align_up(self.least).unwrap_or(size))
    }

    /// Returns the size of the next chunk if `missing` bytes are known to be needed.
    pub(super) fn ahead(self, missing: Bytes) -> Bytes {
        missing.min(MOST).align_up(self.least).unwrap_or(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::super::ranges::Ranges;
    use super::*;

    /// Returns the sizes of the tensors that one layer of a model offloads in a step with `tokens` tokens.
    fn layer(tokens: u64, hidden: u64, inner: u64) -> Vec<u64> {
        let (small, large) = (tokens * hidden * 2, tokens * inner * 2);
        vec![
            small,
            small / 4,
            small / 4,
            small,
            large,
            tokens * 4,
            large,
            small,
            tokens * 32 * 4,
            large,
            small,
        ]
    }

    /// Returns the host memory that all steps need, relative to the largest amount offloaded at a time.
    fn pinned(steps: &[Vec<u64>]) -> f64 {
        let chunks = ChunkSizes::of(ARENA);
        let (mut ranges, mut all, mut count, mut most) = (Ranges::<u64>::default(), 0, 0, 0);
        for step in steps {
            let mut held = Vec::new();
            for &size in step {
                let taken = loop {
                    if let Some((taken, _)) = ranges.take_parts(size) {
                        break taken;
                    }
                    let missing = ranges.missing(size).unwrap();
                    let chunk = chunks.next(Bytes::new(missing), Bytes::new(all)).get();
                    (all, count) = (all + chunk, count + 1);
                    ranges.add(count, chunk);
                };
                held.push(taken);
            }
            most = most.max(step.iter().sum());
            held.into_iter().rev().flatten().for_each(|taken| ranges.put(taken, None));
        }
        all as f64 / most as f64
    }

    #[test]
    fn little_is_lost_whatever_a_step_is_like() {
        for tokens in [4096, 8000, 8192, 11_111, 16_384].into_iter().chain((500..20_000).step_by(1471)) {
            let step: Vec<u64> = (0..32).flat_map(|_| layer(tokens, 4096, 14_336)).collect();
            let lost = pinned(&[step]);
            assert!(lost <= 1.05, "{tokens} tokens: {lost}");
        }
        for (least, most) in [(6000, 9000), (500, 4000), (1000, 16_000), (8000, 8200)] {
            let lengths = (0..20_u64).map(|step| least + step * 7919 % (most - least));
            let steps = lengths.map(|tokens| (0..32).flat_map(|_| layer(tokens, 4096, 14_336)).collect());
            let lost = pinned(&steps.collect::<Vec<Vec<u64>>>());
            assert!(lost <= 1.05, "{least} to {most} tokens: {lost}");
        }
    }

    #[test]
    fn chunks_fill_arenas_and_grow_with_what_there_is() {
        let chunks = ChunkSizes::of(ARENA);
        let next = |there: u64| chunks.next(Bytes::new(1), Bytes::gib(there));
        assert_eq!([0, 1, 2, 4, 9, 100].map(next), [64, 64, 64, 128, 256, 3072].map(Bytes::mib));
        assert_eq!(chunks.next(Bytes::mib(65), Bytes::ZERO), Bytes::mib(128));
        assert_eq!(chunks.ahead(Bytes::mib(65)), Bytes::mib(128));
        assert_eq!(chunks.ahead(Bytes::gib(30)), MOST);
        assert_eq!(ChunkSizes::of(Bytes::ZERO).next(Bytes::new(1), Bytes::ZERO), Bytes::mib(64));
    }
}
