//! Patterns that blocks are marked with, so that a byte that somebody else wrote is seen.
//!
//! Small blocks are marked whole; large ones at their ends, around every boundary that an extent may have, and a little
//! every 64 KiB.

use std::sync::Arc;
use std::time::Duration;

use glake_device::{Address, DriverError, KernelMemory, Touch};
use glake_sim::{Simulator, pattern};
use glake_tiers::{Block, GpuPool, PoolError};
use parking_lot::Mutex;

use super::Lane;
use super::fixture::GPU;

const WHOLE: u64 = 128 << 10;
const END: u64 = 1 << 10;
const STRIDE: u64 = 64 << 10;
const GRANULE: u64 = 2 << 20;

/// The pattern of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Where.
    pub block: Block,
    /// Which pattern.
    pub seed: u64,
}

/// What kernels found that was not as it should be.
#[derive(Clone, Debug, Default)]
pub struct Verdicts(Arc<Mutex<Vec<String>>>);

impl Verdicts {
    /// Nothing wrong was found so far.
    ///
    /// # Panics
    /// Something was.
    pub fn assert_clean(&self) {
        let found = self.0.lock();
        assert!(found.is_empty(), "{} blocks were disturbed, the first: {}", found.len(), found[0]);
    }
}

impl Stamp {
    /// Enqueues the writing of the pattern.
    ///
    /// # Errors
    /// The device's: above all, that the memory is in use elsewhere.
    pub fn write(self, lane: &Lane, time: Duration) -> Result<(), DriverError> {
        let body = move |memory: &mut dyn KernelMemory| {
            for (offset, length) in self.marks() {
                // A stray touch is told of by the next wait.
                let _ = memory.write(self.at(offset), &self.pattern(offset, length));
            }
        };
        sim(lane).enqueue_kernel(GPU, lane.pool.raw, &[], &self.touch(), time, body)
    }

    /// Enqueues a look at the pattern.
    ///
    /// # Errors
    /// The device's: above all, that somebody wrote there without order.
    pub fn verify(self, lane: &Lane, time: Duration, verdicts: &Verdicts) -> Result<(), DriverError> {
        let verdicts = verdicts.clone();
        let body = move |memory: &mut dyn KernelMemory| {
            let wrong = self.wrong(|at, bytes| memory.read(at, bytes).is_ok());
            verdicts.0.lock().extend(wrong);
        };
        sim(lane).enqueue_kernel(GPU, lane.pool.raw, &self.touch(), &[], time, body)
    }

    /// Writes the pattern from the host.
    ///
    /// # Errors
    /// The pool's.
    pub fn write_now(self, pool: &GpuPool) -> Result<(), PoolError> {
        let mut marks = self.marks().into_iter();
        marks.try_for_each(|(offset, length)| pool.write(self.at(offset), &self.pattern(offset, length)))
    }

    /// Looks at the pattern from the host.
    ///
    /// # Panics
    /// It is not there.
    pub fn assert_on(self, pool: &GpuPool) {
        let wrong = self.wrong(|at, bytes| pool.read(at, bytes).is_ok());
        assert_eq!(wrong, None);
    }

    fn wrong(self, mut read: impl FnMut(Address, &mut [u8]) -> bool) -> Option<String> {
        let mut bytes = Vec::new();
        self.marks().into_iter().find_map(|(offset, length)| {
            let pattern = self.pattern(offset, length);
            bytes.clear();
            bytes.resize(pattern.len(), 0);
            let same = read(self.at(offset), &mut bytes) && bytes == pattern;
            (!same).then(|| format!("{:?} of pattern {} at {offset:#x}", self.block, self.seed))
        })
    }

    fn at(self, offset: u64) -> Address {
        Address(self.block.address.0 + offset)
    }

    fn touch(self) -> [Touch; 1] {
        [Touch { address: self.block.address, size: self.block.size }]
    }

    /// The marked ranges, by offset and length, all of whole words.
    fn marks(self) -> Vec<(u64, u64)> {
        let size = self.block.size.get();
        if size <= WHOLE {
            return vec![(0, size)];
        }
        let mut marks = vec![(0, END), (size - END, END)];
        let first = self.block.address.0.next_multiple_of(GRANULE) - self.block.address.0;
        let inside = |offset: &u64| *offset >= END && offset + END <= size;
        marks.extend((first..size).step_by(2 << 20).filter(inside).map(|at| (at - END / 2, END)));
        marks.extend((STRIDE..size - END).step_by(64 << 10).map(|at| (at, 64)));
        marks
    }

    #[allow(clippy::unwrap_used)]
    fn pattern(self, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        pattern::fill(&mut bytes, offset, self.seed);
        bytes
    }
}

fn sim(lane: &Lane) -> &Simulator {
    lane.sim()
}
