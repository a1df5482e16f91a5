//! Captures: streams whose work is recorded instead of run.
//!
//! As on CUDA, in relaxed mode: a stream that waits for an event of a capture joins it; a call that is not allowed
//! breaks every capture of its device, which is told when it ends.

use std::collections::HashMap;

use super::denial::{Checked, Denial, refuse};
use super::request::Request;
use super::state::State;
use crate::{Address, CaptureState, DeviceId, Refusal, Stream};

/// CUDA's number for a capture that was broken.
pub(super) const INVALIDATED: u32 = 901;
/// CUDA's number for a capture that would wait for work outside of it.
pub(super) const ISOLATION: u32 = 905;
/// CUDA's number for ending what is not being captured.
pub(super) const ILLEGAL_STATE: u32 = 401;

/// Recorded work, to be launched as often as wanted.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub(super) requests: Vec<Request>,
}

impl Graph {
    /// How many operations were recorded.
    pub fn operations(&self) -> usize {
        self.requests.len()
    }
}

#[derive(Debug)]
pub(super) struct Capture {
    pub(super) device: DeviceId,
    /// The lane that it began on.
    pub(super) origin: u64,
    pub(super) lanes: Vec<u64>,
    pub(super) graph: Graph,
    pub(super) broken: bool,
}

#[derive(Debug, Default)]
pub(super) struct Captures {
    open: HashMap<u64, Capture>,
    next: u64,
}

impl Captures {
    pub(super) fn begin(&mut self, device: DeviceId, lane: u64) -> u64 {
        self.next += 1;
        let graph = Graph::default();
        self.open
            .insert(self.next, Capture { device, origin: lane, lanes: vec![lane], graph, broken: false });
        self.next
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Capture> {
        self.open.get_mut(&id)
    }

    pub(super) fn get(&self, id: u64) -> Option<&Capture> {
        self.open.get(&id)
    }

    pub(super) fn end(&mut self, id: u64) -> Option<Capture> {
        self.open.remove(&id)
    }

    /// Breaks every capture of a device; says whether there was one.
    pub(super) fn invalidate(&mut self, device: DeviceId) -> bool {
        let mut any = false;
        for capture in self.open.values_mut().filter(|capture| capture.device == device) {
            capture.broken = true;
            any = true;
        }
        any
    }
}

impl State {
    pub(super) fn begin_capture(&mut self, device: DeviceId, stream: Stream) -> Checked<()> {
        let lane = self.lane(device, stream)?;
        let Some(state) = self.streams.get_mut(lane) else { return Ok(()) };
        if state.capture.is_some() || matches!(stream, Stream(0) | Stream::LEGACY) {
            return Err(Denial::Failed(ILLEGAL_STATE));
        }
        state.capture = Some(self.captures.begin(device, lane));
        Ok(())
    }

    pub(super) fn end_capture(&mut self, device: DeviceId, stream: Stream) -> Checked<Graph> {
        let lane = self.lane(device, stream)?;
        let id = self.streams.get(lane).and_then(|state| state.capture);
        let begun_here = |id: &u64| self.captures.get(*id).is_some_and(|capture| capture.origin == lane);
        let Some(capture) = id.filter(begun_here).and_then(|id| self.captures.end(id)) else {
            return Err(Denial::Failed(ILLEGAL_STATE));
        };
        for lane in &capture.lanes {
            if let Some(state) = self.streams.get_mut(*lane) {
                state.capture = None;
            }
        }
        if capture.broken { Err(Denial::Failed(INVALIDATED)) } else { Ok(capture.graph) }
    }

    pub(super) fn capture_state(&mut self, device: DeviceId, stream: Stream) -> Checked<CaptureState> {
        let lane = self.lane(device, stream)?;
        let id = self.streams.get(lane).and_then(|state| state.capture);
        Ok(match id.and_then(|id| Some((id, self.captures.get(id)?))) {
            None => CaptureState::None,
            Some((_, capture)) if capture.broken => CaptureState::Invalidated,
            Some((id, _)) => CaptureState::Active(id),
        })
    }

    /// Refuses and breaks the capture if the lane is recorded.
    pub(super) fn not_capturing(&mut self, lane: u64) -> Checked<()> {
        match self.streams.get(lane) {
            Some(state) if state.capture.is_some() => {
                let device = state.device;
                self.captures.invalidate(device);
                Err(Denial::Capturing)
            }
            _ => Ok(()),
        }
    }

    /// Refuses and breaks captures if a device has any.
    pub(super) fn no_capture(&mut self, device: DeviceId) -> Checked<()> {
        if self.captures.invalidate(device) { Err(Denial::Capturing) } else { Ok(()) }
    }

    pub(super) fn intact(&self, id: u64) -> Checked<()> {
        match self.captures.get(id) {
            Some(capture) if !capture.broken => Ok(()),
            _ => Err(Denial::Failed(INVALIDATED)),
        }
    }

    pub(super) fn capture(&mut self, id: u64, request: Request) -> Checked<()> {
        self.intact(id)?;
        if let Some(capture) = self.captures.get_mut(id) {
            capture.graph.requests.push(request);
        }
        Ok(())
    }

    pub(super) fn join_capture(&mut self, lane: u64, id: u64) -> Checked<()> {
        if self.captures.get(id).is_none() {
            return refuse(Address(0), Refusal::CapturedEvent);
        }
        self.intact(id)?;
        let Some(state) = self.streams.get_mut(lane) else { return Ok(()) };
        match state.capture {
            Some(other) if other == id => {}
            Some(_) => return Err(Denial::Failed(ISOLATION)),
            None => {
                state.capture = Some(id);
                if let Some(capture) = self.captures.get_mut(id) {
                    capture.lanes.push(lane);
                }
            }
        }
        Ok(())
    }
}
