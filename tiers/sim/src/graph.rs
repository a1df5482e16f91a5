//! Graphs: recorded work that can be launched repeatedly.
//!
//! Invariant: an operation runs in its own context, after the operations that it depends on and after nothing else of its graph; a launch
//! is one piece of work on its stream.

use super::context::ContextId;
use super::denial::Checked;
use super::order::{Position, VectorClock};
use super::request::Request;
use super::state::State;
use super::timeline::{Cost, Point};
use super::world::Work;
use glake_device::Stream;

/// Recorded work that can be launched repeatedly.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Node>,
}

/// One recorded operation of a graph.
#[derive(Clone, Debug)]
struct Node {
    context: ContextId,
    request: Request,
    /// Earlier operations that it depends on.
    after: Vec<usize>,
}

impl Graph {
    /// Returns the number of recorded operations.
    pub fn operations(&self) -> usize {
        self.nodes.len()
    }

    /// Records an operation and returns its number.
    pub(super) fn add(&mut self, context: ContextId, request: Request, after: Vec<usize>) -> usize {
        self.nodes.push(Node { context, request, after });
        self.nodes.len() - 1
    }

    /// Returns whether all of `nodes` are in `tail` or precede it.
    pub(super) fn leads_to(&self, tail: &[usize], nodes: &[usize]) -> bool {
        let mut before = vec![false; self.nodes.len()];
        let mut next = tail.to_vec();
        while let Some(node) = next.pop() {
            if !std::mem::replace(&mut before[node], true) {
                next.extend_from_slice(&self.nodes[node].after);
            }
        }
        nodes.iter().all(|node| before[*node])
    }
}

impl State {
    pub(super) fn launch_graph(&mut self, graph: &Graph, context: ContextId, stream: Stream) -> Checked<()> {
        let origin = self.lane(context, stream)?;
        self.not_capturing(origin)?;
        let mut start = self.implied_points(origin);
        start.push(self.timeline.last(origin));
        let begun = self.streams.order(origin).clock;
        let mut done: Vec<(Point, VectorClock)> = Vec::new();
        let mut outcome = Ok(());
        for node in &graph.nodes {
            let own = self.add_branch(node.context)?;
            let mut points = start.clone();
            let mut clock = begun.clone();
            for (point, before) in node.after.iter().filter_map(|node| done.get(*node)) {
                points.push(*point);
                clock.join(before);
            }
            self.come_after(own.0, points, &clock);
            outcome = self.enqueue(node.context, own, node.request.clone()).map(drop);
            let clock = self.streams.get(own.0).map(|state| state.clock.clone()).unwrap_or_default();
            done.push((self.timeline.last(own.0), clock));
            self.remove_stream(node.context, own)?;
            if outcome.is_err() {
                break;
            }
        }
        let mut clock = VectorClock::default();
        done.iter().for_each(|(_, of)| clock.join(of));
        self.come_after(origin, done.into_iter().map(|(point, _)| point).collect(), &clock);
        outcome
    }

    /// Makes work enqueued on a lane from now on follow these points and everything ordered before them.
    pub(super) fn come_after(&mut self, lane: u64, points: Vec<Point>, clock: &VectorClock) {
        let mut order = self.streams.order(lane);
        order.completes(clock);
        let mut after = self.implied_points(lane);
        after.extend(points);
        let point = self.timeline.issue(lane, after, Cost::None, Work::nothing());
        self.streams.enqueued(Position { lane, n: point.n }, order);
        self.timeline.settle(&mut self.world);
    }
}
