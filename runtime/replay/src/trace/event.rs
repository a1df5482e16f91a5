//! One thing that a program asked of its allocator.

use std::fmt;

use glake_units::Bytes;

/// A block of a trace: blocks are numbered from zero in the order of their allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The place of this block in a table that has one entry a block.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {}", self.0)
    }
}

/// A stream of a trace: streams are numbered from zero in the order of their first appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamIndex(pub u16);

impl fmt::Display for StreamIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}

/// One event. Times are microseconds since the recorder's zero, and never decrease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A block was allocated.
    Allocate {
        /// Which.
        block: BlockId,
        /// On which stream.
        stream: StreamIndex,
        /// How much was asked for, before any rounding.
        bytes: Bytes,
        /// When.
        at_us: u64,
    },
    /// The program gave the block back; streams that used it may still be at work on it.
    FreeRequested {
        /// Which.
        block: BlockId,
        /// When.
        at_us: u64,
    },
    /// Every stream that was recorded on the block had passed its last use.
    FreeCompleted {
        /// Which.
        block: BlockId,
        /// When.
        at_us: u64,
    },
    /// The program told its allocator that the block is used on another stream too.
    RecordStream {
        /// Which.
        block: BlockId,
        /// The other stream.
        stream: StreamIndex,
        /// When.
        at_us: u64,
    },
}

impl Event {
    /// When it happened, in microseconds.
    pub const fn at_us(self) -> u64 {
        match self {
            Event::Allocate { at_us, .. }
            | Event::FreeRequested { at_us, .. }
            | Event::FreeCompleted { at_us, .. }
            | Event::RecordStream { at_us, .. } => at_us,
        }
    }

    /// The block that it happened to.
    pub const fn block(self) -> BlockId {
        match self {
            Event::Allocate { block, .. }
            | Event::FreeRequested { block, .. }
            | Event::FreeCompleted { block, .. }
            | Event::RecordStream { block, .. } => block,
        }
    }
}
