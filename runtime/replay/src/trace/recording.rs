//! Validated trace in memory.

use glake_units::Bytes;

use super::event::{BlockId, Event, StreamIndex};

/// Peaks of torch's own allocator on the recorded run, from the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Peak of live memory as torch counts it.
    pub active_peak: Bytes,
    /// Peak of memory taken from the device.
    pub reserved_peak: Bytes,
}

/// Peaks of live memory, the same for every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Peak in requested bytes.
    pub requested: Bytes,
    /// Peak with each block rounded up to 512 bytes.
    pub active: Bytes,
}

/// Recorded allocator calls of a program. See the [module](crate::trace) for its invariants.
#[derive(Clone, Debug)]
pub struct Trace {
    pub(super) name: String,
    pub(super) events: Vec<Event>,
    pub(super) lines: Vec<u32>,
    pub(super) blocks: Vec<Bytes>,
    pub(super) streams: Vec<u64>,
    pub(super) peaks: Peaks,
    pub(super) recorded: Option<Recorded>,
    pub(super) clock_steps_back: u32,
}

impl Trace {
    /// Returns the file name without its folder and extensions.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns all events in order.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the line of an event in a text trace, or its entry in a snapshot's history; `None` if there is no such event.
    pub fn line_of(&self, event: usize) -> Option<u32> {
        self.lines.get(event).copied()
    }

    /// Returns the number of allocations.
    #[allow(clippy::cast_possible_truncation)] // the builder counts blocks in 32 bits
    pub fn allocations(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Returns the requested size of a block; zero if there is no such block.
    pub fn size_of(&self, block: BlockId) -> Bytes {
        self.blocks.get(block.index()).copied().unwrap_or(Bytes::ZERO)
    }

    /// Returns the recorder's names of the streams, by index.
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// Returns the recorder's name of a stream.
    pub fn stream_name(&self, stream: StreamIndex) -> Option<u64> {
        self.streams.get(usize::from(stream.0)).copied()
    }

    /// Returns the peaks of live memory.
    pub fn peaks(&self) -> Peaks {
        self.peaks
    }

    /// Returns the peaks of torch's own allocator on the recorded run, if the header names them.
    pub fn recorded(&self) -> Option<Recorded> {
        self.recorded
    }

    /// Returns the duration of the recording in microseconds.
    pub fn duration_us(&self) -> u64 {
        match (self.events.first(), self.events.last()) {
            (Some(first), Some(last)) => last.at_us() - first.at_us(),
            _ => 0,
        }
    }

    /// Returns the number of events with an earlier time than the preceding event. Events keep the order of their lines, and such an event
    /// takes the time of the preceding one.
    pub fn clock_steps_back(&self) -> u32 {
        self.clock_steps_back
    }
}
