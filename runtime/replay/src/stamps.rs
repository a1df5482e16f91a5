//! Stamps in every block: bytes written when the block is allocated, and compared when it is freed.
//!
//! A block has stamps at its first and last bytes and across every 16 MiB boundary of the address space, so that every extent in the block
//! has one. A stamp's bytes depend on the block and on the position in it. The check therefore detects writes of other blocks and misplaced
//! writes of the same block.

use glake_device::Address;
use glake_sim::pattern;
use glake_tiers::{Block, GpuPool, PoolError};

use crate::trace::BlockId;

/// Length of a stamp in bytes.
const LENGTH: u64 = 64;
/// Alignment of the stamps inside a block.
const STRIDE: usize = 16 << 20;

/// Writer and checker of stamps. Its buffers are reused between blocks.
#[derive(Debug, Default)]
pub struct Stamps {
    expected: Vec<u8>,
    found: Vec<u8>,
}

/// Error of writing or comparing a stamp.
#[derive(Debug, thiserror::Error)]
pub enum StampError {
    /// The pool refused the write or read.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Bytes differ from the stamp.
    #[error(
        "{block} at {address}, byte {at}: {expected:02x} was written and {found:02x} was found: the memory was given to \
         somebody else"
    )]
    Mismatch {
        /// Block with the wrong bytes.
        block: BlockId,
        /// Address of the block.
        address: Address,
        /// Offset in the block.
        at: u64,
        /// Byte that was written.
        expected: u8,
        /// Byte that was found.
        found: u8,
    },
}

impl Stamps {
    /// Writes the stamps of a block.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn write(&mut self, pool: &GpuPool, id: BlockId, block: Block) -> Result<(), StampError> {
        places(pool, block).try_for_each(|(at, length)| {
            self.expect(id, at, length);
            Ok(pool.write(address(block, at), &self.expected)?)
        })
    }

    /// Compares a block with its stamps.
    ///
    /// # Errors
    /// [`StampError::Mismatch`], or an error of the pool.
    pub fn compare(&mut self, pool: &GpuPool, id: BlockId, block: Block) -> Result<(), StampError> {
        places(pool, block).try_for_each(|(at, length)| {
            self.expect(id, at, length);
            self.found.resize(self.expected.len(), 0);
            pool.read(address(block, at), &mut self.found)?;
            if self.expected == self.found {
                return Ok(());
            }
            let mut both = self.expected.iter().zip(&self.found);
            let place = both.position(|(expected, found)| expected != found).unwrap_or_default();
            Err(StampError::Mismatch {
                block: id,
                address: block.address,
                at: at + place as u64,
                expected: self.expected[place],
                found: self.found[place],
            })
        })
    }

    /// Computes the expected bytes of a stamp.
    fn expect(&mut self, id: BlockId, at: u64, length: u64) {
        self.expected.resize(usize::try_from(length).unwrap_or(usize::MAX), 0);
        pattern::fill(&mut self.expected, at, u64::from(id.0) + 1);
    }
}

/// Returns offset and length of a block's stamps. Blocks are at least 512 bytes and multiples of that.
fn places(pool: &GpuPool, block: Block) -> impl Iterator<Item = (u64, u64)> {
    let size = block.size.get();
    let length = LENGTH.min(size);
    let stride = STRIDE as u64;
    let first_boundary = stride - (block.address.0 - pool.base().0) % stride;
    let boundaries = (first_boundary..size).step_by(STRIDE).map(|at| at.saturating_sub(LENGTH / 2));
    let inside = boundaries.filter(move |&at| at + length <= size).map(move |at| (at, length));
    [(0, length), (size - length, length)].into_iter().chain(inside)
}

fn address(block: Block, at: u64) -> Address {
    Address(block.address.0 + at)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use glake_device::{DeviceId, Driver, Stream};
    use glake_sim::{SimOptions, Simulator};
    use glake_tiers::{PoolOptions, PoolStream};
    use glake_units::Bytes;

    use super::*;

    #[test]
    fn one_wrong_byte_is_found_and_named() {
        let driver: Arc<dyn Driver> = Arc::new(Simulator::new(SimOptions::default()).unwrap());
        let gpu = DeviceId(0);
        let pool = GpuPool::new(driver.clone(), gpu, PoolOptions::default()).unwrap();
        let stream = PoolStream::of(&*driver, gpu, Stream::LEGACY).unwrap();
        let mut stamps = Stamps::default();
        for size in [1, 512, 700, 5 << 20, 40 << 20] {
            let block = pool.malloc(Bytes::new(size), stream).unwrap();
            stamps.write(&pool, BlockId(7), block).unwrap();
            stamps.compare(&pool, BlockId(7), block).unwrap();
            assert!(stamps.compare(&pool, BlockId(8), block).is_err(), "another block's stamps");
            for (at, length) in places(&pool, block) {
                let place = at + length - 1;
                let mut byte = [0];
                pool.read(address(block, place), &mut byte).unwrap();
                pool.write(address(block, place), &[!byte[0]]).unwrap();
                let error = stamps.compare(&pool, BlockId(7), block).unwrap_err().to_string();
                let says = format!("block 7 at {}, byte {place}: {:02x} was written", block.address, byte[0]);
                assert!(error.starts_with(&says), "{error}");
                pool.write(address(block, place), &byte).unwrap();
            }
            let across = places(&pool, block).count() - 2;
            assert!(across as u64 >= size / (16 << 20), "{across} boundaries in {size} bytes");
        }
    }
}
