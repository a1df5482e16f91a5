//! A trace that was read and checked.

use glake_units::Bytes;

use super::event::{BlockId, Event, StreamIndex};

/// What torch's own allocator reached on the recorded run, from the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The peak of live memory as torch counts it.
    pub active_peak: Bytes,
    /// The peak of memory taken from the device.
    pub reserved_peak: Bytes,
}

/// The most that was live at one moment: the same for every policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// In bytes as they were asked for.
    pub requested: Bytes,
    /// With each block rounded up to 512 bytes.
    pub active: Bytes,
}

/// What a program asked of its allocator. See the [module](crate::trace) for what holds of it.
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
    /// The name of the file without its folder and endings.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Everything that happened, in order.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Where the event at this place stands: its line in a text trace, its entry in a snapshot's history; `None`
    /// where there is no such event.
    pub fn line_of(&self, event: usize) -> Option<u32> {
        self.lines.get(event).copied()
    }

    /// How many blocks were allocated.
    #[allow(clippy::cast_possible_truncation)] // the builder counts blocks in 32 bits
    pub fn allocations(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// What was asked for a block; nothing where there is no such block.
    pub fn size_of(&self, block: BlockId) -> Bytes {
        self.blocks.get(block.index()).copied().unwrap_or(Bytes::ZERO)
    }

    /// The streams by index, as the recorder named them.
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// The recorder's name of a stream.
    pub fn stream_name(&self, stream: StreamIndex) -> Option<u64> {
        self.streams.get(usize::from(stream.0)).copied()
    }

    /// The most that was live at one moment.
    pub fn peaks(&self) -> Peaks {
        self.peaks
    }

    /// What torch's own allocator reached on the recorded run, where the header says so.
    pub fn recorded(&self) -> Option<Recorded> {
        self.recorded
    }

    /// How long the recording took, in microseconds.
    pub fn duration_us(&self) -> u64 {
        match (self.events.first(), self.events.last()) {
            (Some(first), Some(last)) => last.at_us() - first.at_us(),
            _ => 0,
        }
    }

    /// How many events were stamped earlier than the one before. The order of the lines is the order of the events,
    /// so such a stamp is read as the time of the event before.
    pub fn clock_steps_back(&self) -> u32 {
        self.clock_steps_back
    }
}
