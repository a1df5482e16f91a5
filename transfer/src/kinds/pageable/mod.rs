//! Copies between a GPU and memory that the driver does not know: through pinned slots that a few threads fill or empty.
//!
//! ```text
//!   user's stream ──work──┤mark├          the host waits for the mark: not before is a byte read or written
//!   threads       ─────────────┤█████├    slots, and the links of the server
//!   the call      ────────────────────┤   returns when every byte is there
//! ```
//!
//! Invariants:
//! - The call returns without an error only when all bytes are there; so the next work of the user's stream comes after them.
//! - While the host waits for the user's stream, nothing is held that another call needs.

mod job;
mod staging;
mod threads;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::owned::{DeviceSet, OwnedEvent, Span};
use glake_device::{CaptureState, DeviceId, EventKind};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::Result;
use crate::engine::counters::Path;
use crate::paths::{Ask, Direction, Way, split};
use crate::schedule::prioritized::Prioritized;
use crate::{Engine, Priority, UserStream};
use job::{Job, Outcome};
pub(crate) use staging::StagingStream;
use staging::{StagingBuffers, StagingHold};
use threads::{Threads, Work};

/// Smaller copies are the driver's: waking threads takes as long.
pub(crate) const LEAST: Bytes = Bytes::mib(2);
/// How often the user's stream is asked before the host goes to sleep: some 50 us.
const GLANCES: u32 = 40;

/// What pageable copies use.
#[derive(Debug)]
pub(crate) struct Pageable {
    threads: Threads,
    staging: OnceLock<Arc<StagingBuffers>>,
    /// Events on which the host sleeps, by whose streams they mark.
    marks: Mutex<FxHashMap<DeviceId, Vec<OwnedEvent>>>,
    stopped: AtomicBool,
}

impl Pageable {
    /// For so many threads, of which the caller is one.
    pub(crate) fn new(threads: usize) -> Pageable {
        let threads = Threads::new(threads.saturating_sub(1));
        let (staging, marks) = (OnceLock::new(), Mutex::default());
        Pageable { threads, staging, marks, stopped: AtomicBool::new(false) }
    }

    /// Host memory that is pinned for it.
    pub(crate) fn pinned(&self) -> Bytes {
        self.staging.get().map_or(Bytes::ZERO, |staging| staging.pinned())
    }

    /// Ends the threads; copies are the driver's from now on.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.threads.stop();
    }
}

impl Engine {
    /// Makes what pageable copies of a GPU's memory need: slots, and a stream on it.
    pub(crate) fn open_pageable(&self, device: DeviceId) -> Result<()> {
        self.staging()?.map_or(Ok(()), |staging| staging.open_target(&self.driver, device))
    }

    /// Makes what a relay needs for them.
    pub(crate) fn open_pageable_relay(&self, device: DeviceId) -> Result<()> {
        self.staging()?.map_or(Ok(()), |staging| staging.open_relay(self.relay_driver(), device))
    }

    /// The slots, made now if they were not.
    fn staging(&self) -> Result<Option<&Arc<StagingBuffers>>> {
        let (threads, memory) = (self.options.pageable_threads, self.options.pageable_slots);
        if threads == 0 {
            return Ok(None);
        }
        if self.pageable.staging.get().is_none()
            && let Some(staging) = StagingBuffers::new(&self.epochs, self.devices, threads, memory)?
        {
            let _ = self.pageable.staging.set(staging);
        }
        Ok(self.pageable.staging.get())
    }

    /// Takes what pageable copies have on a relay out of use: those that use it have it until they end.
    pub(crate) fn close_pageable(&self, device: DeviceId) -> Option<Arc<StagingStream>> {
        self.pageable.staging.get()?.close_relay(device)
    }

    /// Copies between pageable memory and a GPU; false, and nothing done, where that is better left to the driver.
    pub(crate) fn copy_pageable(
        &self,
        to: &Span,
        from: &Span,
        on: UserStream,
        own: Path,
        priority: Priority,
    ) -> Result<bool> {
        let Path { target, direction, .. } = own;
        let Pageable { staging, stopped, .. } = &self.pageable;
        let none = self.options.pageable_threads == 0 || stopped.load(Ordering::Relaxed);
        if none || to.size() < LEAST {
            return Ok(false);
        }
        let Some(staging) = staging.get().filter(|staging| staging.serves(target)) else {
            self.want_resources(target);
            return Ok(false);
        };
        if !matches!(self.driver.capture_state(on.device, on.raw), Ok(CaptureState::None)) {
            return Ok(false);
        }
        if !self.reached(on)? {
            return Ok(false);
        }
        let Some(taken) = staging.take() else { return Ok(false) };
        let paths = self.paths(&taken, to, from, target, direction);
        // Few bytes of it are under way at a time, whatever its priority; nothing keeps them from running.
        let mut prioritized = match priority {
            Priority::Background => Prioritized::alone(),
            priority => self.prioritized(priority, direction, to.size()),
        };
        prioritized.shut_now(paths.iter().copied());
        let job = Arc::new(Job::new(&self.relays, staging, (to, from), (target, direction), paths));
        let work: Arc<dyn Work> = job.clone();
        self.pageable.threads.call(&work, job.width().saturating_sub(1));
        work.help();
        let Outcome { left, carried, unjoined, .. } = job.finish();
        drop((taken, prioritized));
        let path = |relay| if relay == target { own } else { Path { relay, way: Way::ZeroStaging, ..own } };
        for (relay, bytes, copies) in carried {
            self.counters.sent(path(relay), bytes, copies);
        }
        for chunk in left {
            self.counters.retried(own);
            if let (Some(to), Some(from)) =
                (to.part(chunk.offset, chunk.size), from.part(chunk.offset, chunk.size))
            {
                self.native_twice(&to, &from, on)?;
            }
        }
        self.counters.split();
        // The bytes are there, but what a lane may still write comes after them.
        unjoined.map_or(Ok(true), |error| Err(error.into()))
    }

    /// Waits on the host until a stream has come to where it is now; false where that cannot be asked.
    fn reached(&self, on: UserStream) -> Result<bool> {
        let idle = self.pageable.marks.lock().get_mut(&on.device).and_then(Vec::pop);
        let mark = match idle {
            Some(mark) => mark,
            None => match OwnedEvent::new(&self.driver, on.device, EventKind::Sleeping) {
                Ok(mark) => mark,
                Err(_) => return Ok(false),
            },
        };
        let reached = mark.record(on.raw).is_ok() && {
            let soon = (0..GLANCES).any(|_| mark.is_passed().unwrap_or(false));
            soon || mark.synchronize().is_ok()
        };
        self.pageable.marks.lock().entry(on.device).or_default().push(mark);
        Ok(reached)
    }

    /// Whose links a copy goes over.
    fn paths(
        &self,
        taken: &StagingHold,
        to: &Span,
        from: &Span,
        target: DeviceId,
        direction: Direction,
    ) -> SmallVec<[DeviceId; 8]> {
        let memory = if direction == Direction::ToGpu { to } else { from };
        let open = |relay: &DeviceId| taken.staging().staging_stream(target, *relay).is_some();
        self.look_around();
        let usable = self.relays.usable().without(DeviceSet::of(target));
        let reach = usable.intersection(memory.reach()).iter().filter(open).collect();
        let ask = Ask {
            target,
            direction,
            size: to.size(),
            zero_staging: reach,
            staged: DeviceSet::EMPTY,
            load: &self.load,
            expected: 0,
        };
        let mut paths: SmallVec<[DeviceId; 8]> =
            split(&self.graph(), &ask).iter().map(|share| share.relay).collect();
        if paths.is_empty() {
            paths.push(target);
        }
        paths
    }
}
