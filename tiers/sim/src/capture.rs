//! Stream captures: streams whose work is recorded instead of run.
//!
//! As in CUDA's relaxed mode: a stream that waits for an event of a capture joins it, on any device. A forbidden call invalidates every
//! capture in its context; the error is reported when the capture ends, as is work that was not joined.

use std::collections::HashMap;

use super::context::ContextId;
use super::denial::{Checked, Denial, refuse};
use super::graph::Graph;
use super::request::Request;
use super::state::State;
use glake_device::{Address, CaptureState, Refusal, Stream};

/// CUDA's number for an invalidated capture.
pub(super) const INVALIDATED: u32 = 901;
/// CUDA's number for a capture that would wait for work outside of it.
pub(super) const ISOLATION: u32 = 905;
/// CUDA's number for ending a stream's capture when there is none.
pub(super) const ILLEGAL_STATE: u32 = 401;
/// CUDA's number for a capture with work that its first stream was not made to wait for.
pub(super) const UNJOINED: u32 = 904;

#[derive(Debug)]
pub(super) struct Capture {
    /// Lane that the capture began on.
    origin: u64,
    lanes: HashMap<u64, Recorded>,
    graph: Graph,
    broken: bool,
}

/// A lane whose work is recorded.
#[derive(Debug)]
struct Recorded {
    context: ContextId,
    /// Operations that the next one depends on.
    tail: Vec<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Captures {
    open: HashMap<u64, Capture>,
    next: u64,
}

impl Captures {
    pub(super) fn begin(&mut self, context: ContextId, lane: u64) -> u64 {
        self.next += 1;
        let lanes = HashMap::from([(lane, Recorded { context, tail: Vec::new() })]);
        let capture = Capture { origin: lane, lanes, graph: Graph::default(), broken: false };
        self.open.insert(self.next, capture);
        self.next
    }

    pub(super) fn get(&self, id: u64) -> Option<&Capture> {
        self.open.get(&id)
    }

    pub(super) fn end(&mut self, id: u64) -> Option<Capture> {
        self.open.remove(&id)
    }

    /// Returns the operations that the lane's next one depends on.
    pub(super) fn tail(&self, id: u64, lane: u64) -> Vec<usize> {
        let recorded = self.open.get(&id).and_then(|capture| capture.lanes.get(&lane));
        recorded.map(|recorded| recorded.tail.clone()).unwrap_or_default()
    }

    /// Invalidates every capture in a context; returns whether there was one.
    pub(super) fn invalidate(&mut self, context: ContextId) -> bool {
        let mut any = false;
        let of_context = |capture: &&mut Capture| capture.lanes.values().any(|lane| lane.context == context);
        for capture in self.open.values_mut().filter(of_context) {
            capture.broken = true;
            any = true;
        }
        any
    }
}

impl Capture {
    /// Returns whether all recorded work precedes the end of the capture's first stream.
    fn is_joined(&self) -> bool {
        let Some(origin) = self.lanes.get(&self.origin) else { return false };
        self.lanes.values().all(|lane| self.graph.leads_to(&origin.tail, &lane.tail))
    }
}

impl State {
    pub(super) fn begin_capture(&mut self, context: ContextId, stream: Stream) -> Checked<()> {
        let lane = self.lane(context, stream)?;
        let Some(state) = self.streams.get_mut(lane) else { return Ok(()) };
        if state.capture.is_some() || matches!(stream, Stream(0) | Stream::LEGACY) {
            return Err(Denial::Failed(ILLEGAL_STATE));
        }
        state.capture = Some(self.captures.begin(context, lane));
        Ok(())
    }

    pub(super) fn end_capture(&mut self, context: ContextId, stream: Stream) -> Checked<Graph> {
        let lane = self.lane(context, stream)?;
        let id = self.streams.get(lane).and_then(|state| state.capture);
        let begun_here = |id: &u64| self.captures.get(*id).is_some_and(|capture| capture.origin == lane);
        let Some(capture) = id.filter(begun_here).and_then(|id| self.captures.end(id)) else {
            return Err(Denial::Failed(ILLEGAL_STATE));
        };
        for lane in capture.lanes.keys() {
            if let Some(state) = self.streams.get_mut(*lane) {
                state.capture = None;
            }
        }
        match capture.broken {
            true => Err(Denial::Failed(INVALIDATED)),
            false if !capture.is_joined() => Err(Denial::Failed(UNJOINED)),
            false => Ok(capture.graph),
        }
    }

    pub(super) fn capture_state(&mut self, context: ContextId, stream: Stream) -> Checked<CaptureState> {
        let lane = self.lane(context, stream)?;
        let id = self.streams.get(lane).and_then(|state| state.capture);
        Ok(match id.and_then(|id| Some((id, self.captures.get(id)?))) {
            None => CaptureState::None,
            Some((_, capture)) if capture.broken => CaptureState::Invalidated,
            Some((id, _)) => CaptureState::Active(id),
        })
    }

    /// Refuses the call, and invalidates the capture, if the lane is being captured.
    pub(super) fn not_capturing(&mut self, lane: u64) -> Checked<()> {
        match self.streams.get(lane) {
            Some(state) if state.capture.is_some() => {
                let context = state.context;
                self.captures.invalidate(context);
                Err(Denial::Capturing)
            }
            _ => Ok(()),
        }
    }

    /// Refuses the call, and invalidates the captures, if the context has any.
    pub(super) fn no_capture(&mut self, context: ContextId) -> Checked<()> {
        if self.captures.invalidate(context) { Err(Denial::Capturing) } else { Ok(()) }
    }

    pub(super) fn intact(&self, id: u64) -> Checked<()> {
        match self.captures.get(id) {
            Some(capture) if !capture.broken => Ok(()),
            _ => Err(Denial::Failed(INVALIDATED)),
        }
    }

    pub(super) fn capture(&mut self, id: u64, lane: u64, request: Request) -> Checked<()> {
        self.intact(id)?;
        if let Some(Capture { lanes, graph, .. }) = self.captures.open.get_mut(&id)
            && let Some(recorded) = lanes.get_mut(&lane)
        {
            let after = std::mem::take(&mut recorded.tail);
            recorded.tail = vec![graph.add(recorded.context, request, after)];
        }
        Ok(())
    }

    /// Makes a lane wait for a place in a capture; its work is recorded there from now on.
    pub(super) fn join_capture(&mut self, lane: u64, id: u64, tail: Vec<usize>) -> Checked<()> {
        if self.captures.get(id).is_none() {
            return refuse(Address(0), Refusal::CapturedEvent);
        }
        self.intact(id)?;
        let Some(state) = self.streams.get_mut(lane) else { return Ok(()) };
        if state.capture.is_some_and(|other| other != id) {
            return Err(Denial::Failed(ISOLATION));
        }
        state.capture = Some(id);
        let context = state.context;
        if let Some(capture) = self.captures.open.get_mut(&id) {
            let recorded = capture.lanes.entry(lane).or_insert(Recorded { context, tail: Vec::new() });
            recorded.tail.extend(tail);
            recorded.tail.sort_unstable();
            recorded.tail.dedup();
        }
        Ok(())
    }
}
