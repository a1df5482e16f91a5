//! Validated trace in memory: its events, and the builder that adds them one by one and refuses impossible ones.

use std::fmt;

use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::bounds::Budget;
use super::error::Fault;

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

/// Granularity of live memory, as in torch.
const GRAIN: Bytes = Bytes::new(512);

/// Size from which blocks are refused: no GPU can address that much.
const ADDRESS_SPACE: u64 = 1 << 47;

/// Maximum number of streams. Torch makes 128 for a device; a replay makes each of them on the device.
const MOST_STREAMS: usize = 1024;

/// Memory that a replay needs for each block that is live at the same time, and that the table of recorder's numbers needs for each block.
const PER_LIVE: usize = 256;
const PER_NUMBER: usize = 40;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    Requested,
    Completed,
}

/// Trace under construction. Blocks and streams have the recorder's numbers; a number may be reused once its block is free.
pub(super) struct Builder {
    budget: Budget,
    events: Vec<Event>,
    lines: Vec<u32>,
    blocks: Vec<Bytes>,
    states: Vec<State>,
    by_id: FxHashMap<u64, BlockId>,
    streams: Vec<u64>,
    live: Peaks,
    peaks: Peaks,
    live_blocks: usize,
    most_live_blocks: usize,
    now_us: u64,
    clock_steps_back: u32,
    /// Peaks of torch's own allocator, from the header.
    pub(super) recorded: Option<Recorded>,
}

impl Builder {
    /// Creates a builder whose events may use this memory.
    pub(super) fn new(budget: Budget) -> Self {
        Builder {
            budget,
            events: Vec::new(),
            lines: Vec::new(),
            blocks: Vec::new(),
            states: Vec::new(),
            by_id: FxHashMap::default(),
            streams: Vec::new(),
            live: Peaks::default(),
            peaks: Peaks::default(),
            live_blocks: 0,
            most_live_blocks: 0,
            now_us: 0,
            clock_steps_back: 0,
            recorded: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Returns whether the block is allocated and its free is not completed.
    pub(super) fn is_held(&self, id: u64) -> bool {
        self.find(id).is_some_and(|block| self.state(block) != State::Completed)
    }

    pub(super) fn allocate(
        &mut self,
        line: u32,
        id: u64,
        bytes: u64,
        stream: u64,
        at_us: u64,
    ) -> Result<(), Fault> {
        if bytes == 0 {
            return Err(Fault::NoBytes { id });
        }
        if bytes > ADDRESS_SPACE {
            return Err(Fault::TooLarge { field: "size", found: bytes.to_string() });
        }
        if self.is_held(id) {
            return Err(Fault::AllocatedTwice { id });
        }
        let stream = self.stream(stream)?;
        let block = match u32::try_from(self.blocks.len()) {
            Ok(next) if next < u32::MAX => BlockId(next),
            _ => return Err(Fault::TooMany { what: "blocks", limit: u64::from(u32::MAX) }),
        };
        let bytes = Bytes::new(bytes);
        self.budget.push(&mut self.blocks, bytes)?;
        self.budget.push(&mut self.states, State::Live)?;
        if self.by_id.insert(id, block).is_none() {
            self.budget.charge(PER_NUMBER)?;
        }
        self.live_blocks += 1;
        if self.live_blocks > self.most_live_blocks {
            self.most_live_blocks = self.live_blocks;
            self.budget.charge(PER_LIVE)?;
        }
        self.live.requested = self.live.requested.saturating_add(bytes);
        self.live.active = self.live.active.saturating_add(rounded(bytes));
        if self.live.active.get() > ADDRESS_SPACE {
            return Err(Fault::TooMuchLive { id, limit: Bytes::new(ADDRESS_SPACE) });
        }
        self.peaks.requested = self.peaks.requested.max(self.live.requested);
        self.peaks.active = self.peaks.active.max(self.live.active);
        let at_us = self.tick(at_us);
        self.push(line, Event::Allocate { block, stream, bytes, at_us })
    }

    pub(super) fn free_requested(&mut self, line: u32, id: u64, at_us: u64) -> Result<(), Fault> {
        let block = self.find(id).ok_or(Fault::UnknownBlock { id })?;
        if self.state(block) != State::Live {
            return Err(Fault::DoubleFree { id });
        }
        self.set(block, State::Requested);
        let at_us = self.tick(at_us);
        self.push(line, Event::FreeRequested { block, at_us })
    }

    /// Adds a completed free. A free without a request counts as requested at the same moment.
    pub(super) fn free_completed(&mut self, line: u32, id: u64, at_us: u64) -> Result<(), Fault> {
        let block = self.find(id).ok_or(Fault::UnknownBlock { id })?;
        match self.state(block) {
            State::Completed => return Err(Fault::DoubleFree { id }),
            State::Live => self.free_requested(line, id, at_us)?,
            State::Requested => {}
        }
        self.set(block, State::Completed);
        self.live_blocks = self.live_blocks.saturating_sub(1);
        let bytes = self.blocks.get(block.index()).copied().unwrap_or(Bytes::ZERO);
        self.live.requested = self.live.requested.saturating_sub(bytes);
        self.live.active = self.live.active.saturating_sub(rounded(bytes));
        let at_us = self.tick(at_us);
        self.push(line, Event::FreeCompleted { block, at_us })
    }

    pub(super) fn record_stream(&mut self, line: u32, id: u64, stream: u64, at_us: u64) -> Result<(), Fault> {
        let block = self.find(id).ok_or(Fault::UnknownBlock { id })?;
        if self.state(block) != State::Live {
            return Err(Fault::RecordedAfterFree { id });
        }
        let stream = self.stream(stream)?;
        let at_us = self.tick(at_us);
        self.push(line, Event::RecordStream { block, stream, at_us })
    }

    pub(super) fn finish(self, name: String) -> Trace {
        Trace {
            name,
            events: self.events,
            lines: self.lines,
            blocks: self.blocks,
            streams: self.streams,
            peaks: self.peaks,
            recorded: self.recorded,
            clock_steps_back: self.clock_steps_back,
        }
    }

    fn find(&self, id: u64) -> Option<BlockId> {
        self.by_id.get(&id).copied()
    }

    fn state(&self, block: BlockId) -> State {
        self.states.get(block.index()).copied().unwrap_or(State::Completed)
    }

    fn set(&mut self, block: BlockId, state: State) {
        if let Some(slot) = self.states.get_mut(block.index()) {
            *slot = state;
        }
    }

    /// Returns the index of a stream. There are few streams: a scan is faster than a map.
    fn stream(&mut self, name: u64) -> Result<StreamIndex, Fault> {
        let known = self.streams.iter().position(|&known| known == name);
        let place = known.unwrap_or(self.streams.len());
        let index = u16::try_from(place).ok().filter(|_| place < MOST_STREAMS).map(StreamIndex);
        let index = index.ok_or(Fault::TooMany { what: "streams", limit: MOST_STREAMS as u64 })?;
        if known.is_none() {
            self.streams.push(name);
        }
        Ok(index)
    }

    fn tick(&mut self, at_us: u64) -> u64 {
        if at_us < self.now_us {
            self.clock_steps_back = self.clock_steps_back.saturating_add(1);
        } else {
            self.now_us = at_us;
        }
        self.now_us
    }

    fn push(&mut self, line: u32, event: Event) -> Result<(), Fault> {
        self.budget.push(&mut self.events, event)?;
        self.budget.push(&mut self.lines, line)?;
        Ok(())
    }
}

fn rounded(bytes: Bytes) -> Bytes {
    bytes.align_up(GRAIN).unwrap_or(Bytes::MAX)
}

#[cfg(test)]
mod build_tests {
    use super::*;

    #[test]
    fn a_number_may_be_used_again_once_its_block_is_free() {
        let mut build = Builder::new(Budget::new(Bytes::mib(64)));
        build.allocate(1, 7, 700, 40, 5).unwrap();
        build.free_completed(2, 7, 6).unwrap();
        build.allocate(3, 7, 100, 41, 4).unwrap();
        let trace = build.finish("t".into());
        assert_eq!(trace.allocations(), 2);
        assert_eq!(trace.events().len(), 4, "the completed free brought its request along");
        assert_eq!(trace.streams(), [40, 41]);
        assert_eq!(trace.clock_steps_back(), 1);
        assert_eq!(trace.events()[3].at_us(), 6);
        assert_eq!(trace.peaks(), Peaks { requested: Bytes::new(700), active: Bytes::new(1024) });
        assert_eq!(trace.line_of(3), Some(3));
    }

    #[test]
    fn impossible_events_are_refused() {
        let mut build = Builder::new(Budget::new(Bytes::mib(64)));
        assert_eq!(build.free_requested(1, 3, 0), Err(Fault::UnknownBlock { id: 3 }));
        build.allocate(1, 3, 1, 0, 0).unwrap();
        assert_eq!(build.allocate(1, 3, 1, 0, 0), Err(Fault::AllocatedTwice { id: 3 }));
        build.free_requested(1, 3, 0).unwrap();
        assert_eq!(build.free_requested(1, 3, 0), Err(Fault::DoubleFree { id: 3 }));
        assert_eq!(build.record_stream(1, 3, 1, 0), Err(Fault::RecordedAfterFree { id: 3 }));
        build.free_completed(1, 3, 0).unwrap();
        assert_eq!(build.free_completed(1, 3, 0), Err(Fault::DoubleFree { id: 3 }));
        assert_eq!(build.allocate(1, 4, 0, 0, 0), Err(Fault::NoBytes { id: 4 }));
        assert!(matches!(build.allocate(1, 4, u64::MAX, 0, 0), Err(Fault::TooLarge { .. })));
    }
}
