//! The state of a simulator, behind its one lock.

use super::capture::Captures;
use super::clock::Ticking;
use super::context::{ContextId, Contexts};
use super::denial::{Checked, refuse};
use super::kernel::Modules;
use super::route::Plumbing;
use super::stream::Streams;
use super::timeline::{Point, Timeline};
use super::world::World;
use glake_device::{Access, Address, Refusal, Stream};

#[derive(Debug)]
pub(super) struct State {
    pub(super) clock: Ticking,
    pub(super) timeline: Timeline<World>,
    pub(super) world: World,
    pub(super) streams: Streams,
    pub(super) captures: Captures,
    pub(super) contexts: Contexts,
    pub(super) modules: Modules,
    pub(super) plumbing: Plumbing,
    /// What every operation of a device takes besides its bytes, in nanoseconds.
    pub(super) latencies: Vec<u64>,
    pub(super) strict: bool,
    /// Whether a kernel that touches what its context does not reach is accepted, and its context then lost.
    pub(super) faults_kill: bool,
    /// How many queues of the hardware the streams of a context are dealt onto; each has its own where none is said.
    pub(super) hardware_queues: Option<u32>,
}

impl State {
    /// Does what is due by now.
    pub(super) fn catch_up(&mut self) {
        match self.clock.read() {
            Some(now) => self.timeline.advance(now, &mut self.world),
            None => self.timeline.settle(&mut self.world),
        }
    }

    /// Whether a copy leaves one of these GPUs over its link.
    pub(super) fn is_any_leaving(&self, access: &[Access]) -> bool {
        let link = |one: &Access| self.plumbing.link_from(one.device.0 as usize);
        access.iter().filter_map(link).any(|pipe| self.timeline.is_in(pipe))
    }

    /// The lane of a stream.
    pub(super) fn lane(&mut self, context: ContextId, stream: Stream) -> Checked<u64> {
        self.use_context(context)?;
        if let Some(lane) = self.streams.lane(context, stream)? {
            return Ok(lane);
        }
        let lane = self.streams.add_default(context, stream);
        self.open(context, lane);
        Ok(lane)
    }

    pub(super) fn add_stream(&mut self, context: ContextId, blocking: bool) -> Checked<Stream> {
        self.use_context(context)?;
        let lane = self.streams.add(context, blocking);
        self.open(context, lane);
        Ok(Stream(lane))
    }

    /// Opens the lane of a stream.
    fn open(&mut self, context: ContextId, lane: u64) {
        match self.hardware_queues {
            None => self.timeline.open(lane),
            Some(count) => self.timeline.open_on(lane, self.streams.deal(context, count.max(1))),
        }
    }

    /// A stream of a graph, which shares no queue.
    pub(super) fn add_branch(&mut self, context: ContextId) -> Checked<Stream> {
        self.use_context(context)?;
        let lane = self.streams.add(context, false);
        self.timeline.open(lane);
        Ok(Stream(lane))
    }

    /// Whether a stream takes another piece of work where it holds so many at most.
    pub(super) fn has_room(&self, lane: u64, bound: usize) -> bool {
        let recorded = self.streams.get(lane).is_some_and(|state| state.capture.is_some());
        recorded || self.timeline.queued(lane) < bound
    }

    pub(super) fn remove_stream(&mut self, context: ContextId, stream: Stream) -> Checked<()> {
        self.world.memory.device(context.device)?;
        let lane = self.streams.lane(context, stream)?.filter(|lane| !self.streams.is_default(*lane));
        let Some(lane) = lane else { return refuse(Address(0), Refusal::InvalidValue) };
        self.timeline.close(lane);
        self.streams.retire(lane);
        self.streams.sweep(|lane| self.timeline.passed(self.timeline.last(lane)));
        // What is lost is destroyed all the same.
        self.alive(context)
    }

    /// Where the lanes that this one waits for without being told to stand.
    pub(super) fn implied_points(&self, lane: u64) -> Vec<Point> {
        let points = self.streams.implied(lane).into_iter().map(|other| self.timeline.last(other));
        points.filter(|point| !self.timeline.passed(*point)).collect()
    }

    /// Where the lanes of a context that are not idle stand.
    pub(super) fn points_of(&self, context: ContextId) -> Vec<Point> {
        let points = self.streams.of(context).map(|(lane, _)| self.timeline.last(lane));
        points.filter(|point| !self.timeline.passed(*point)).collect()
    }
}
