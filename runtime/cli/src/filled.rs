//! A region whose bytes tell their places, as `glake demo` and `glake bench shrink` move one out and back.
//!
//! ```text
//! blocks ─ filled ─► shrink ─► … ─► refill ─► compared: every byte, by several threads
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use glake_device::Address;
use glake_sim::pattern::{fill, matching};
use glake_tiers::{Block, NoWait, PoolError, Refilled, Region, RegionError, Shrunk, Store, TransferContext};
use glake_units::Bytes;
use parking_lot::Mutex;

/// Bytes written and compared at a time.
const CHUNK: usize = 4 << 20;
/// Threads that write and compare bytes at most: more of them wait for the same link.
const THREADS: usize = 8;

/// A region and its blocks.
#[derive(Debug)]
pub(crate) struct Filled {
    region: Region,
    blocks: Vec<Block>,
}

/// A byte that is not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// In which block, counted from 0.
    pub(crate) block: u64,
    /// Offset in the block.
    pub(crate) at: u64,
    /// Address of the block.
    pub(crate) address: Address,
}

/// A part of a block: where it is, where it lies in its block, which block, how long.
type Part = (Address, u64, u64, usize);

impl Filled {
    /// A region with blocks of it, which are written now.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn new(region: Region, blocks: Vec<Block>) -> Result<Filled, PoolError> {
        let filled = Filled { region, blocks };
        filled.each_part(|bytes, (address, at, block, length)| {
            fill(&mut bytes[..length], at, block);
            filled.region.pool().write(address, &bytes[..length])
        })?;
        Ok(filled)
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// The bytes of its blocks.
    pub(crate) fn live(&self) -> Bytes {
        self.blocks.iter().map(|block| block.size).sum()
    }

    /// Evicts the whole region.
    ///
    /// # Errors
    /// See [`Region::shrink`].
    pub(crate) fn shrink(&self, to: &Store, context: TransferContext<'_>) -> Result<Shrunk, RegionError> {
        self.region.shrink(Bytes::MAX, to, context)
    }

    /// Refills the whole region.
    ///
    /// # Errors
    /// See [`Region::refill`].
    pub(crate) fn refill(&self, context: TransferContext<'_>) -> Result<Refilled, RegionError> {
        self.region.refill(Bytes::MAX, context, &NoWait)
    }

    /// Compares every byte with what was written, and tells of one that differs.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn compare(&self) -> Result<Option<Difference>, PoolError> {
        let found = Mutex::new(None);
        self.each_part(|bytes, (address, at, block, length)| {
            bytes[..length].fill(0);
            self.region.pool().read(address, &mut bytes[..length])?;
            let same = matching(&bytes[..length], at, block);
            if same < length as u64 {
                *found.lock() = Some(Difference { block, at: at + same, address: Address(address.0 - at) });
            }
            Ok(())
        })?;
        Ok(found.into_inner())
    }

    /// Visits every part once, by several threads, each with memory of its own.
    fn each_part(
        &self,
        visit: impl Fn(&mut [u8], Part) -> Result<(), PoolError> + Sync,
    ) -> Result<(), PoolError> {
        let parts: Vec<Part> =
            (0..).zip(&self.blocks).flat_map(|(number, block)| parts(number, *block)).collect();
        let (next, cores) = (AtomicU64::new(0), thread::available_parallelism().map_or(1, usize::from));
        let work = || {
            let mut bytes = vec![0; CHUNK];
            loop {
                let mine = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap_or(usize::MAX);
                let Some(part) = parts.get(mine) else { return Ok(()) };
                visit(&mut bytes, *part)?;
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..cores.min(THREADS)).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Frees all blocks of the region.
    ///
    /// # Errors
    /// See [`glake_tiers::GpuPool::free`].
    pub(crate) fn end(self) -> Result<(), PoolError> {
        self.blocks.iter().try_for_each(|block| self.region.pool().free(block.address).map(|_| ()))
    }
}

fn parts(number: u64, block: Block) -> impl Iterator<Item = Part> {
    (0..block.size.get()).step_by(CHUNK).map(move |at| {
        let length = usize::try_from(block.size.get() - at).unwrap_or(CHUNK).min(CHUNK);
        (Address(block.address.0 + at), at, number, length)
    })
}
