//! Recording of events, waits for them and queries.
//!
//! An event of a whole context is a lane of its own, with one piece of work that waits for all other lanes: so work enqueued later does not
//! delay it, and nothing waits for it.

use super::context::ContextId;
use super::denial::{Checked, Denial, refuse};
use super::event::Mark;
use super::order::{Position, VectorClock};
use super::state::State;
use super::stream::fresh_lane;
use super::timeline::{Cost, Point};
use super::world::Work;
use glake_device::{Address, Event, Refusal, Stream};

impl State {
    pub(super) fn record_event(&mut self, context: ContextId, event: Event, stream: Stream) -> Checked<()> {
        let lane = self.lane(context, stream)?;
        self.world.events.of(context, event)?;
        let mut order = self.streams.order(lane);
        if let Some(id) = self.streams.get(lane).and_then(|state| state.capture) {
            self.intact(id)?;
            let tail = self.captures.tail(id, lane);
            self.world.events.record(event, Mark::Captured(id, tail), order.clock);
            return Ok(());
        }
        let n = self.timeline.last(lane).n + 1;
        order.clock.see(Position { lane, n });
        let record = self.world.events.record(event, Mark::Never, order.clock.clone());
        let work = Work::record(event, record);
        let after = self.implied_points(lane);
        let point = self.timeline.issue(lane, after, Cost::None, work);
        self.world.events.place(event, vec![point]);
        self.streams.enqueued(Position { lane, n }, order);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    /// Marks the end of all work of a context so far, on a new lane that waits for all others.
    pub(super) fn record_context(&mut self, context: ContextId, event: Event) -> Checked<()> {
        self.world.events.of(context, event)?;
        self.no_capture(context)?;
        let clock = self.streams.clock_of(context);
        let record = self.world.events.record(event, Mark::Never, clock);
        let after = self.points_of(context);
        let lane = fresh_lane();
        self.timeline.open(lane);
        let work = Work::record(event, record);
        let point = self.timeline.issue(lane, after, Cost::None, work);
        self.timeline.close(lane);
        self.world.events.place(event, vec![point]);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    pub(super) fn wait_event(&mut self, context: ContextId, stream: Stream, event: Event) -> Checked<()> {
        let lane = self.lane(context, stream)?;
        let marked = self.world.events.get(event)?;
        let capture = self.streams.get(lane).and_then(|state| state.capture);
        let points = match (&marked.mark, capture) {
            (Mark::Captured(id, tail), _) => {
                let (id, tail) = (*id, tail.clone());
                return self.join_capture(lane, id, tail);
            }
            (Mark::Never, _) => return Ok(()),
            (Mark::At(_), Some(_)) => {
                self.captures.invalidate(context);
                return Err(Denial::Failed(super::capture::ISOLATION));
            }
            (Mark::At(points), None) => points.clone(),
        };
        let clock = marked.clock.clone();
        self.come_after(lane, points, &clock);
        Ok(())
    }

    /// Returns whether an event has completed, which the host has then observed.
    pub(super) fn query(&mut self, context: ContextId, event: Event) -> Checked<bool> {
        let (points, clock) = self.event_points(context, event)?;
        let passed = points.iter().all(|point| self.timeline.passed(*point));
        if passed {
            self.streams.observe(&clock);
        }
        Ok(passed)
    }

    /// Returns the points that an event waits for and the work ordered before it.
    pub(super) fn event_points(
        &mut self,
        context: ContextId,
        event: Event,
    ) -> Checked<(Vec<Point>, VectorClock)> {
        let marked = self.world.events.of(context, event)?;
        match &marked.mark {
            Mark::Never => Ok(Default::default()),
            Mark::At(points) => Ok((points.clone(), marked.clock.clone())),
            Mark::Captured(..) => {
                self.captures.invalidate(context);
                refuse(Address(0), Refusal::CapturedEvent)
            }
        }
    }

    /// Returns the microseconds between two completed events.
    pub(super) fn elapsed(&self, context: ContextId, from: Event, to: Event) -> Checked<f64> {
        let time = |event| {
            let marked = self.world.events.of(context, event)?;
            match (marked.timed, &marked.mark, marked.at) {
                (true, Mark::At(_), Some(at)) => Ok(at as f64 / 1e3),
                (true, Mark::At(_), None) => Err(Denial::NotReady),
                _ => refuse(Address(0), Refusal::InvalidValue),
            }
        };
        Ok(time(to)? - time(from)?)
    }
}
