//! Events of a trace: a program's calls of its allocator.

use std::fmt;

use glake_units::Bytes;

/// Block of a trace: blocks are numbered from zero in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Returns the block's index in a table with one entry per block.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// Stream of a trace: streams are numbered from zero in the order of their first appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamIndex(pub u16);

impl fmt::Display for StreamIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}

/// Single event of a trace. Times are microseconds since the recorder's zero and never decrease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The program allocated a block.
    Allocate {
        /// ID of the block.
        block: BlockId,
        /// Stream of the allocation.
        stream: StreamIndex,
        /// Requested size, before any rounding.
        bytes: Bytes,
        /// Time in microseconds.
        at_us: u64,
    },
    /// The program freed the block; streams that used it may still access it.
    FreeRequested {
        /// ID of the block.
        block: BlockId,
        /// Time in microseconds.
        at_us: u64,
    },
    /// Every stream that was recorded on the block had passed its last use.
    FreeCompleted {
        /// ID of the block.
        block: BlockId,
        /// Time in microseconds.
        at_us: u64,
    },
    /// The program told its allocator that the block is used on another stream too.
    RecordStream {
        /// ID of the block.
        block: BlockId,
        /// Stream of the use.
        stream: StreamIndex,
        /// Time in microseconds.
        at_us: u64,
    },
}

impl Event {
    /// Returns the time of the event, in microseconds.
    pub const fn at_us(self) -> u64 {
        match self {
            Event::Allocate { at_us, .. }
            | Event::FreeRequested { at_us, .. }
            | Event::FreeCompleted { at_us, .. }
            | Event::RecordStream { at_us, .. } => at_us,
        }
    }

    /// Returns the block of the event.
    pub const fn block(self) -> BlockId {
        match self {
            Event::Allocate { block, .. }
            | Event::FreeRequested { block, .. }
            | Event::FreeCompleted { block, .. }
            | Event::RecordStream { block, .. } => block,
        }
    }
}
