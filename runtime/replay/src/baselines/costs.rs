//! What the driver's calls cost, as measured on an H200 (docs/benchmarks/driver-time.md): nanoseconds.

use crate::Counters;

/// `cudaMalloc` of a segment.
const MALLOC: u64 = 180_000;
/// `cudaFree` of a segment.
const FREE: u64 = 76_000;
/// `cuMemCreate`, `cuMemMap`, `cuMemSetAccess` of one piece: the cost is per piece, not per byte.
const CREATE: u64 = 6_800;
const MAP: u64 = 800;
const ACCESS: u64 = 27_000;
/// `cuMemUnmap` and `cuMemRelease` of one piece.
const UNMAP: u64 = 15_000;
const RELEASE: u64 = 11_000;

/// Counts driver calls and what they cost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costs {
    counted: Counters,
}

impl Costs {
    pub(super) const fn counters(&self) -> Counters {
        self.counted
    }

    pub(super) const fn malloc(&mut self) {
        self.calls(1, MALLOC);
    }

    pub(super) const fn free(&mut self) {
        self.calls(1, FREE);
    }

    /// Pieces of memory made.
    pub(super) const fn create(&mut self, pieces: u64) {
        self.calls(pieces, CREATE);
    }

    /// Pieces of memory mapped and made accessible.
    pub(super) const fn map(&mut self, pieces: u64) {
        self.calls(pieces, MAP);
        self.calls(pieces, ACCESS);
        self.counted.extent_maps += pieces;
    }

    pub(super) const fn unmap(&mut self, pieces: u64) {
        self.calls(pieces, UNMAP);
    }

    pub(super) const fn release(&mut self, pieces: u64) {
        self.calls(pieces, RELEASE);
    }

    const fn calls(&mut self, calls: u64, each_ns: u64) {
        self.counted.driver_calls += calls;
        self.counted.driver_ns += calls * each_ns;
    }
}
