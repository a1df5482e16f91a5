//! Captures: streams whose work is recorded instead of run.
//!
//! As on CUDA, in relaxed mode: a stream that waits for an event of a capture joins it; a call that is not allowed
//! breaks every capture of its device, which is told when it ends.

use std::collections::HashMap;

use super::request::Request;
use crate::DeviceId;

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
