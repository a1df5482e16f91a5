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
    /// Fixed latency of every operation, per device, in nanoseconds.
    pub(super) latencies: Vec<u64>,
    pub(super) strict: bool,
    /// Whether a kernel that accesses memory out of its context's reach is accepted and its context then lost.
    pub(super) faults_kill: bool,
    /// Number of hardware queues shared by the streams of a context; `None`: one per stream.
    pub(super) hardware_queues: Option<u32>,
}

impl State {
    /// Runs the work that is due by now.
    pub(super) fn catch_up(&mut self) {
        match self.clock.read() {
            Some(now) => self.timeline.advance(now, &mut self.world),
            None => self.timeline.settle(&mut self.world),
        }
    }

    /// Returns whether a copy is leaving one of these GPUs over its link.
    pub(super) fn is_any_leaving(&self, access: &[Access]) -> bool {
        let link = |one: &Access| self.plumbing.link_from(one.device.0 as usize);
        access.iter().filter_map(link).any(|pipe| self.timeline.is_in(pipe))
    }

    /// Returns the lane of a stream.
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

    /// Adds a stream for a branch of a graph, which shares no hardware queue.
    pub(super) fn add_branch(&mut self, context: ContextId) -> Checked<Stream> {
        self.use_context(context)?;
        let lane = self.streams.add(context, false);
        self.timeline.open(lane);
        Ok(Stream(lane))
    }

    /// Returns whether a stream with this capacity has room for another piece of work.
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
        // The object is destroyed even if the context is lost.
        self.alive(context)
    }

    /// Returns the unfinished ends of the lanes that this one waits for implicitly.
    pub(super) fn implied_points(&self, lane: u64) -> Vec<Point> {
        let points = self.streams.implied(lane).into_iter().map(|other| self.timeline.last(other));
        points.filter(|point| !self.timeline.passed(*point)).collect()
    }

    /// Returns the unfinished ends of a context's lanes.
    pub(super) fn points_of(&self, context: ContextId) -> Vec<Point> {
        let points = self.streams.of(context).map(|(lane, _)| self.timeline.last(lane));
        points.filter(|point| !self.timeline.passed(*point)).collect()
    }
}
