//! Ordering of a stream after the last use of its new bytes: its own earlier work if the address changes, the work of lending streams, and
//! read holds.
//!
//! Invariant: a block whose stream could not be ordered is withheld from all streams, its own included, until its completion point has
//! passed.

use std::sync::Arc;

use glake_device::owned::OwnedEvent;
use glake_device::{CaptureState, DriverError, EventKind, Stream};
use glake_stitch::{Grant, HoldId, StreamKey, Wait};
use parking_lot::Mutex;

use super::clock::CompletionClock;
use super::core::Core;
use super::growth::Growth;
use super::retry::retry;
use super::waits::WaitTimer;
use super::{PoolStream, Result};

fn lender(wait: &Wait) -> Option<StreamKey> {
    if let Wait::Stream(stream) = wait { Some(*stream) } else { None }
}

fn hold(wait: &Wait) -> Option<HoldId> {
    if let Wait::Hold(hold) = wait { Some(*hold) } else { None }
}

/// Makes streams wait for other work on their GPU.
#[derive(Debug)]
pub(super) struct StreamOrder {
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    growth: Arc<Growth>,
    waits: Arc<WaitTimer>,
    /// Event that is recorded and waited for in one critical section.
    event: Mutex<OwnedEvent>,
}

impl StreamOrder {
    pub(super) fn new(
        core: Arc<Core>,
        clock: Arc<CompletionClock>,
        growth: Arc<Growth>,
        waits: Arc<WaitTimer>,
    ) -> glake_device::Result<Self> {
        let event = Mutex::new(OwnedEvent::new(core.driver(), core.device(), EventKind::Plain)?);
        Ok(StreamOrder { core, clock, growth, waits, event })
    }

    /// Makes a stream wait, on the device, for the last use of its new block's bytes. Capturing streams neither lend nor borrow: for these
    /// it returns false, and the block is withheld until its completion point, so that another is found.
    pub(super) fn order(&self, grant: &Grant, stream: PoolStream) -> Result<bool> {
        let ordered = self.wait_for_all(grant, stream);
        if !matches!(ordered, Ok(true)) {
            self.withhold(grant);
        }
        ordered.map_err(|error| self.core.failed(error))
    }

    fn wait_for_all(&self, grant: &Grant, stream: PoolStream) -> std::result::Result<bool, DriverError> {
        if grant.edge {
            self.wait_for(stream.raw, stream)?;
            self.core.owed().made(stream.key);
        }
        if grant.waits.is_empty() {
            return Ok(true);
        }
        let keys: Vec<StreamKey> = grant.waits.iter().filter_map(lender).collect();
        let held = grant.waits.iter().filter_map(hold);
        let lenders = self.growth.streams(&keys);
        for &party in lenders.iter().chain([&stream.raw]) {
            match retry(|| self.core.driver().capture_state(self.core.device(), party)) {
                // Its work may still be running; only a completion point tells when it has completed.
                Err(error) if error.is_gone() && party != stream.raw => return Ok(false),
                state => {
                    if state? != CaptureState::None {
                        return Ok(false);
                    }
                }
            }
        }
        let timed = self.waits.begin(stream.raw);
        for lender in lenders {
            match self.wait_for(lender, stream) {
                Err(error) if error.is_gone() => return Ok(false),
                waits => waits?,
            }
        }
        for event in held.filter_map(|hold| self.core.holds().event(hold)) {
            retry(|| self.core.driver().stream_wait_event(self.core.device(), stream.raw, event.id()))?;
        }
        self.waits.end(timed, stream.raw);
        Ok(true)
    }

    fn wait_for(&self, source: Stream, stream: PoolStream) -> std::result::Result<(), DriverError> {
        let event = self.event.lock();
        retry(|| event.record(source))?;
        retry(|| self.core.driver().stream_wait_event(self.core.device(), stream.raw, event.id()))
    }

    /// Frees a block that could not be ordered: no stream, its own included, may reuse the bytes before their completion point.
    fn withhold(&self, grant: &Grant) {
        let mut core = self.core.lock();
        core.record_stream(grant.offset, StreamKey::UNKNOWN);
        let freed = core.free(grant.offset);
        drop(core);
        debug_assert!(freed.is_ok(), "it was just handed out");
        self.clock.note_freed();
    }
}
