//! Builder of traces: adds event by event and refuses impossible ones.

use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::error::Fault;
use super::event::{BlockId, Event, StreamIndex};
use super::recording::{Peaks, Recorded, Trace};

/// Granularity of live memory, as in torch.
const GRAIN: Bytes = Bytes::new(512);

/// Size from which blocks are refused: no GPU can address that much.
const ADDRESS_SPACE: u64 = 1 << 47;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    Requested,
    Completed,
}

/// Trace under construction. Blocks and streams have the recorder's numbers; a number may be reused once its block is free.
#[derive(Default)]
pub(super) struct Builder {
    events: Vec<Event>,
    lines: Vec<u32>,
    blocks: Vec<Bytes>,
    states: Vec<State>,
    by_id: FxHashMap<u64, BlockId>,
    streams: Vec<u64>,
    live: Peaks,
    peaks: Peaks,
    now_us: u64,
    clock_steps_back: u32,
    /// Peaks of torch's own allocator, from the header.
    pub(super) recorded: Option<Recorded>,
}

impl Builder {
    /// Creates a builder for about `events` events.
    pub(super) fn with_capacity(events: usize) -> Self {
        let mut builder = Builder::default();
        builder.events.reserve(events);
        builder.lines.reserve(events);
        builder.blocks.reserve(events / 3);
        builder.states.reserve(events / 3);
        builder.by_id.reserve(events / 3);
        builder
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
        self.blocks.push(bytes);
        self.states.push(State::Live);
        self.by_id.insert(id, block);
        self.live.requested = self.live.requested.saturating_add(bytes);
        self.live.active = self.live.active.saturating_add(rounded(bytes));
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
        let place = self.streams.iter().position(|&known| known == name).unwrap_or_else(|| {
            self.streams.push(name);
            self.streams.len() - 1
        });
        u16::try_from(place)
            .map(StreamIndex)
            .map_err(|_| Fault::TooMany { what: "streams", limit: u64::from(u16::MAX) + 1 })
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
        self.events.push(event);
        self.lines.push(line);
        Ok(())
    }
}

fn rounded(bytes: Bytes) -> Bytes {
    bytes.align_up(GRAIN).unwrap_or(Bytes::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_may_be_used_again_once_its_block_is_free() {
        let mut build = Builder::default();
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
        let mut build = Builder::default();
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
