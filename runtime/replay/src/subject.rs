//! Interface of a replayed allocator, real or modelled.

use std::error::Error;

use glake_units::Bytes;

use crate::trace::{BlockId, StreamIndex};

/// Allocator that a trace is replayed on. Every call carries the trace's time, which never decreases.
///
/// A block is allocated once. If its allocation succeeded, `free_requested` and then `free_completed` follow at most once each. Models of
/// torch reuse memory at `free_completed`, as torch does. GLake uses `free_requested`, `record_stream` and its own completion points.
pub trait Subject {
    /// Allocates a block.
    ///
    /// # Errors
    ///
    /// After [`Refusal::OutOfMemory`] the replay continues; [`Refusal::Failed`] ends it.
    fn allocate(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        now_us: u64,
    ) -> Result<(), Refusal>;

    /// Records that the program freed a block.
    ///
    /// # Errors
    ///
    /// [`Refusal::Failed`] ends the replay.
    fn free_requested(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        let _ = (block, now_us);
        Ok(())
    }

    /// Records that all streams recorded on a block have passed its last use.
    ///
    /// # Errors
    ///
    /// [`Refusal::Failed`] ends the replay.
    fn free_completed(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        let _ = (block, now_us);
        Ok(())
    }

    /// Records the use of a block on another stream.
    ///
    /// # Errors
    ///
    /// [`Refusal::Failed`] ends the replay.
    fn record_stream(&mut self, block: BlockId, stream: StreamIndex, now_us: u64) -> Result<(), Refusal> {
        let _ = (block, stream, now_us);
        Ok(())
    }

    /// Returns the physical memory currently taken from the device.
    fn reserved(&self) -> Bytes;

    /// Returns the counters since the start.
    fn counters(&self) -> Counters;
}

/// Reason why a subject refused a call.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Not enough memory: the replay counts this and continues without the block.
    #[error("out of memory: {wanted} wanted, {reserved} reserved of {limit}")]
    OutOfMemory {
        /// Requested size of the block.
        wanted: Bytes,
        /// Memory currently taken from the device.
        reserved: Bytes,
        /// Limit of reserved memory; [`Bytes::MAX`] if there is none.
        limit: Bytes,
    },
    /// The subject itself failed: its figures would be meaningless.
    #[error("the replay failed: {0}")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}

/// Operations of a subject since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Number of ranges made of pieces that were not neighbours.
    pub stitches: u64,
    /// Number of mappings of physical pieces; a piece mapped at two addresses counts twice.
    pub extent_maps: u64,
    /// Number of waits of one stream for another.
    pub stream_waits: u64,
    /// Number of driver calls for memory.
    pub driver_calls: u64,
    /// Cost of these calls in nanoseconds.
    pub driver_ns: u64,
}
