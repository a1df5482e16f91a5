//! Copies between a GPU and pageable memory, through pinned slots that a few threads fill or drain.
//!
//! ```text
//!   user's stream ──work──┤mark├          the host waits for the mark before any byte is read or written
//!   threads       ─────────────┤█████├    slots, and the links of the server
//!   the call      ────────────────────┤   returns when every byte has arrived
//! ```
//!
//! Invariants:
//! - The call returns success only after all bytes have arrived, so that later work of the user's stream is ordered behind the copy.
//! - While the host waits for the user's stream, the call holds no resource that another call needs.

mod job;
pub(crate) mod staging;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::owned::{DeviceSet, OwnedEvent, Span};
use glake_device::{DeviceId, EventKind};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::copies::pageable::job::{Job, Outcome, Threads, Work};
use crate::copies::pageable::staging::StagingHold;
use crate::copies::shared::{Route, Shared};
use crate::paths::{Ask, Direction, Way, split};
use crate::traffic::prioritized::Prioritized;
use crate::traffic::routes::LEAST_PAGEABLE;
use crate::{Priority, Result, UserStream};

/// Number of polls of the user's stream before the host sleeps: about 50 us.
const GLANCES: u32 = 40;

/// Pageable copies of one engine.
#[derive(Debug)]
pub(crate) struct PageableCopies {
    shared: Arc<Shared>,
    threads: Threads,
    /// Events that the host sleeps on, by the device of the marked streams.
    marks: Mutex<FxHashMap<DeviceId, Vec<OwnedEvent>>>,
    stopped: AtomicBool,
}

impl PageableCopies {
    /// Creates the pageable copies, with as many threads as the staging supports, the caller included.
    pub(crate) fn new(shared: &Arc<Shared>) -> PageableCopies {
        PageableCopies {
            threads: Threads::new(shared.resources.staging.threads.saturating_sub(1)),
            shared: shared.clone(),
            marks: Mutex::default(),
            stopped: AtomicBool::new(false),
        }
    }

    /// Stops the threads. Later copies are left to the driver.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.threads.stop();
    }

    /// Copies between pageable memory and a GPU. Returns `false`, with nothing copied, if the driver is the better choice.
    pub(crate) fn copy(
        &self,
        to: &Span,
        from: &Span,
        on: UserStream,
        route: Route,
        priority: Priority,
    ) -> Result<bool> {
        let target = route.target;
        if !self.shared.resources.staging.is_wanted()
            || self.stopped.load(Ordering::Relaxed)
            || to.size() < LEAST_PAGEABLE
        {
            return Ok(false);
        }
        let Some(staging) = self.shared.resources.staging.made.get().filter(|staging| staging.serves(target))
        else {
            self.shared.resources.want(target);
            return Ok(false);
        };
        if !self.shared.contexts.is_plain(on) {
            return Ok(false);
        }
        if !self.reached(on)? {
            return Ok(false);
        }
        let Some(taken) = staging.take() else { return Ok(false) };
        let paths = self.paths(&taken, to, from, route);
        // Few bytes are in flight at a time, whatever the priority, and no barrier delays them.
        let mut prioritized = match priority {
            Priority::Background => Prioritized::alone(),
            priority => self.shared.traffic.prioritize(
                priority,
                route.direction,
                to.size(),
                self.shared.routes.most_links(),
            ),
        };
        prioritized.shut_now(paths.iter().copied());
        let job = Arc::new(Job::new(self.shared.links.relays(), staging, (to, from), route, paths));
        let work: Arc<dyn Work> = job.clone();
        self.threads.call(&work, job.width().saturating_sub(1));
        work.help();
        let Outcome { left, carried, unjoined, unjoined_on, .. } = job.finish();
        unjoined_on.into_iter().for_each(|(of, slot)| self.shared.links.leave_unjoined(of, slot));
        drop((taken, prioritized));
        let own = route.own_path();
        let path = |relay| if relay == target { own } else { route.path(relay, Way::ZeroStaging) };
        for (relay, bytes, copies) in carried {
            self.shared.ledger.counters.sent(path(relay), bytes, copies);
        }
        for chunk in left {
            self.shared.ledger.counters.retried(own);
            if let (Some(to), Some(from)) =
                (to.part(chunk.offset, chunk.size), from.part(chunk.offset, chunk.size))
            {
                self.shared.native.copy_twice(&to, &from, on)?;
            }
        }
        self.shared.ledger.counters.split();
        // The bytes are there, but what a lane may still write comes after them.
        unjoined.map_or(Ok(true), |error| Err(error.into()))
    }

    /// Blocks until a stream has reached its current end. Returns `false` if that cannot be detected.
    fn reached(&self, on: UserStream) -> Result<bool> {
        let idle = self.marks.lock().get_mut(&on.device).and_then(Vec::pop);
        let mark = match idle {
            Some(mark) => mark,
            None => match OwnedEvent::new(self.shared.contexts.driver(), on.device, EventKind::Sleeping) {
                Ok(mark) => mark,
                Err(_) => return Ok(false),
            },
        };
        let reached = mark.record(on.raw).is_ok() && {
            let soon = (0..GLANCES).any(|_| mark.is_passed().unwrap_or(false));
            soon || mark.synchronize().is_ok()
        };
        self.marks.lock().entry(on.device).or_default().push(mark);
        Ok(reached)
    }

    /// Returns the GPUs whose links a copy uses.
    fn paths(
        &self,
        taken: &StagingHold,
        to: &Span,
        from: &Span,
        Route { target, direction, .. }: Route,
    ) -> SmallVec<[DeviceId; 8]> {
        let memory = if direction == Direction::ToGpu { to } else { from };
        let open = |relay: &DeviceId| taken.staging().staging_stream(target, *relay).is_some();
        self.shared.links.look_around();
        let usable = self.shared.links.relays().usable().without(DeviceSet::of(target));
        let reach = usable.intersection(memory.reach()).iter().filter(open).collect();
        let ask = Ask {
            target,
            direction,
            size: to.size(),
            zero_staging: reach,
            staged: DeviceSet::EMPTY,
            load: &self.shared.ledger.load,
            expected: 0,
        };
        let mut paths: SmallVec<[DeviceId; 8]> =
            split(&self.shared.routes.graph(), &ask).iter().map(|share| share.relay).collect();
        if paths.is_empty() {
            paths.push(target);
        }
        paths
    }
}
