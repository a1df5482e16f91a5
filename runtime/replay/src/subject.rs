//! What is replayed on: an allocator, real or modelled.

use std::error::Error;

use glake_units::Bytes;

use crate::trace::{BlockId, StreamIndex};

/// An allocator that a trace is replayed on. Every call carries the trace's time, which never goes back.
///
/// A block is allocated once; `free_requested` then `free_completed` follow once each, if at all, and only where the
/// allocation succeeded. Models of torch reuse memory at `free_completed`, as torch does; the product goes by
/// `free_requested`, `record_stream` and its own completion points.
pub trait Subject {
    /// A block is asked for.
    ///
    /// # Errors
    ///
    /// [`Refusal::OutOfMemory`] leaves the subject able to go on; [`Refusal::Failed`] ends the replay.
    fn allocate(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        now_us: u64,
    ) -> Result<(), Refusal>;

    /// The program gives a block back.
    ///
    /// # Errors
    ///
    /// [`Refusal::Failed`] ends the replay.
    fn free_requested(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        let _ = (block, now_us);
        Ok(())
    }

    /// Every stream recorded on a block has passed it.
    ///
    /// # Errors
    ///
    /// [`Refusal::Failed`] ends the replay.
    fn free_completed(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        let _ = (block, now_us);
        Ok(())
    }

    /// A block is used on another stream too.
    ///
    /// # Errors
    ///
    /// [`Refusal::Failed`] ends the replay.
    fn record_stream(&mut self, block: BlockId, stream: StreamIndex, now_us: u64) -> Result<(), Refusal> {
        let _ = (block, stream, now_us);
        Ok(())
    }

    /// The physical memory taken from the device by now.
    fn reserved(&self) -> Bytes;

    /// What was done by now.
    fn counters(&self) -> Counters;
}

/// Why a subject did not do what was asked.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is no memory for it: the replay counts this and goes on without the block.
    #[error("out of memory: {wanted} wanted, {reserved} reserved of {limit}")]
    OutOfMemory {
        /// What was asked for.
        wanted: Bytes,
        /// What is taken from the device.
        reserved: Bytes,
        /// The most that may be; [`Bytes::MAX`] where nothing was set.
        limit: Bytes,
    },
    /// The subject itself failed: its figures would mean nothing.
    #[error("the replay failed: {0}")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

/// What a subject did since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Ranges made of pieces that were not neighbours.
    pub stitches: u64,
    /// Pieces of physical memory mapped, once for each address they are mapped at.
    pub extent_maps: u64,
    /// Times that a stream was made to wait for another.
    pub stream_waits: u64,
    /// Calls into the driver for memory.
    pub driver_calls: u64,
    /// What these calls cost, in nanoseconds.
    pub driver_ns: u64,
}
