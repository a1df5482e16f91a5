//! Cost of driver calls in nanoseconds, measured on an H200 (docs/benchmarks/driver-time.md).

use crate::Counters;

/// Cost of `cudaMalloc` for a segment.
const MALLOC: u64 = 180_000;
/// Cost of `cudaFree` for a segment.
const FREE: u64 = 76_000;
/// Cost of `cuMemCreate`, `cuMemMap` and `cuMemSetAccess` for one piece. It does not depend on the size.
const CREATE: u64 = 6_800;
const MAP: u64 = 800;
const ACCESS: u64 = 27_000;
/// Cost of `cuMemUnmap` and `cuMemRelease` for one piece.
const UNMAP: u64 = 15_000;
const RELEASE: u64 = 11_000;

/// Number of driver calls and their total cost.
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

    /// Records the creation of `pieces` pieces of physical memory.
    pub(super) const fn create(&mut self, pieces: u64) {
        self.calls(pieces, CREATE);
    }

    /// Records the mapping of `pieces` pieces, including access rights.
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
