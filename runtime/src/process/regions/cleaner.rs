//! Thread that copies idle regions to the host ahead of evictions ([`glake_tiers::Region::clean`]) and pins host memory for them, if any
//! region's options ask for it.
//!
//! ```text
//! each step, each region   look ─► Idleness ─► mark its work │ clean it, pin for it │ nothing
//! ```
//!
//! Invariants: nothing of it runs after [`Cleaner::stop`] has returned. No use or allocation waits for it: an overtaken copy is void. A
//! shrink waits for at most one piece of an extent. The thread creates no pool memory and changes no lease.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glake_device::owned::DeviceSet;
use glake_device::{DeviceId, DriverError};
use glake_stitch::DomainId;
use glake_tiers::{Clean, CopyPolicy, PendingWork, Region};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;

use super::super::{ProcessError, Result};
use super::RegionSet;
use super::idle::{Idleness, Look, Todo};
use super::tagged::Tagged;

/// Shortest and longest interval between two looks.
const STEPS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// Interval between retries if host memory is short or another thread pins.
const AGAIN: Duration = Duration::from_secs(5);
/// Maximum time for which a piece yields to other copies, and the polling interval.
const LET_OTHERS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(1));

/// Cleaner thread, once it is started.
#[derive(Debug, Default)]
pub(in super::super) struct Cleaner {
    running: Mutex<Option<JoinHandle<()>>>,
    end: Arc<End>,
}

#[derive(Debug, Default)]
struct End {
    is_over: Mutex<bool>,
    changed: Condvar,
}

/// Cleaning state of a region.
#[derive(Debug, Default)]
struct Watched {
    idleness: Idleness,
    /// Mark of the region's pending work.
    work: Option<PendingWork>,
}

type AllWatched = FxHashMap<(DeviceId, DomainId), Watched>;

impl Cleaner {
    /// Starts the thread unless it runs or was stopped.
    ///
    /// # Errors
    /// [`ProcessError::NoThread`].
    pub(super) fn start(&self, regions: &Arc<RegionSet>) -> Result<()> {
        let mut running = self.running.lock();
        if running.is_some() || self.end.is_over() {
            return Ok(());
        }
        let (regions, end) = (regions.clone(), self.end.clone());
        let wait = Duration::from_millis(regions.config.clean_after_ms);
        let run = move || {
            let (begin, mut watched) = (Instant::now(), AllWatched::default());
            let step = (wait / 4).clamp(STEPS.0, STEPS.1);
            while !end.waits(step) {
                regions.look_at_all(&mut watched, &end, begin, wait);
            }
        };
        let named = std::thread::Builder::new().name("glake-cleaner".to_owned());
        *running = Some(
            named
                .spawn(run)
                .map_err(|source| ProcessError::NoThread { what: "copies of idle memory", source })?,
        );
        Ok(())
    }

    /// Returns whether the thread runs.
    #[cfg(test)]
    #[cfg(not(schedules))]
    pub(super) fn is_running(&self) -> bool {
        self.running.lock().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Stops the thread and waits for the piece that it copies, or the arena that it pins.
    pub(in super::super) fn stop(&self) {
        *self.end.is_over.lock() = true;
        self.end.changed.notify_all();
        if let Some(thread) = self.running.lock().take() {
            // The thread has reported its panic itself.
            let _ = thread.join();
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.stop();
    }
}

impl End {
    fn is_over(&self) -> bool {
        *self.is_over.lock()
    }

    /// Waits for `step` or the stop; returns whether the stop has come.
    fn waits(&self, step: Duration) -> bool {
        let mut is_over = self.is_over.lock();
        if !*is_over {
            self.changed.wait_for(&mut is_over, step);
        }
        *is_over
    }
}

impl RegionSet {
    /// Looks at every region with work to do while idle, and does the work for those that have been idle long enough.
    fn look_at_all(&self, all: &mut AllWatched, end: &End, begin: Instant, wait: Duration) {
        let Ok(tags) = self.table.named(None) else { return };
        for tagged in tags.iter().filter(|tagged| tagged.options.clean || is_prepared(tagged)) {
            for region in tagged.regions() {
                if end.is_over() {
                    return;
                }
                let watched = all.entry((region.pool().device(), region.domain())).or_default();
                let is_done = watched.is_done();
                let look = self.look_at(tagged, &region);
                let (next, todo) = watched.idleness.next(look, is_done, begin.elapsed(), wait);
                watched.idleness = next;
                match (todo, look) {
                    (Todo::Mark, _) => watched.mark(&region),
                    (Todo::Clean, Some(look)) => {
                        let done = self.work_on(tagged, &region, look, end);
                        watched.idleness = after_work(tagged, look, done, begin.elapsed());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Returns the state of an idle region; `None` if it is in use, evicted or about to be, or a capture is open.
    fn look_at(&self, tagged: &Tagged, region: &Region) -> Option<Look> {
        let after_use =
            self.gate.idle_since(tagged.tag()).filter(|_| !tagged.is_away() && !self.is_capturing())?;
        if tagged.options.clean {
            region.void_clean(after_use);
        }
        Some(Look { after_use, state: region.state_number().ok()? })
    }

    /// Does the work for an idle region; returns whether all of it is done.
    fn work_on(&self, tagged: &Tagged, region: &Region, look: Look, end: &End) -> Result<bool> {
        let cleaned = !tagged.options.clean || self.clean_one(tagged, region, look, end)?;
        let prepared = !is_prepared(tagged) || self.prepare_all(region.pool().device(), end)?;
        Ok(cleaned && prepared)
    }

    fn clean_one(&self, tagged: &Tagged, region: &Region, look: Look, end: &End) -> Result<bool> {
        let device = region.pool().device();
        let host = self.stores.host(device)?;
        let mover = self.stores.idle_mover(device)?;
        let Some(digests) = &self.stores.digests(true, device)? else { return Ok(true) };
        let after_use = look.after_use;
        let keep_going = &|| self.may_go_on(tagged, after_use, end);
        Ok(region.clean(Clean { host: &host, mover: &*mover, digests, after_use, keep_going })?.whole)
    }

    /// Returns whether the region is still idle before a piece, after yielding to other copies for a while.
    fn may_go_on(&self, tagged: &Tagged, after_use: u64, end: &End) -> bool {
        let begin = Instant::now();
        loop {
            let is_idle = !tagged.is_away()
                && self.gate.idle_since(tagged.tag()) == Some(after_use)
                && !self.is_capturing();
            if !is_idle || end.is_over() {
                return false;
            }
            if begin.elapsed() >= LET_OTHERS.0 || !self.stores.are_links_busy() {
                return true;
            }
            end.waits(LET_OTHERS.1);
        }
    }

    /// Pins host memory for all regions of a device whose options ask for it, while no use runs. Returns `false` if some is left to do.
    fn prepare_all(&self, device: DeviceId, end: &End) -> Result<bool> {
        let is_idle = || !end.is_over() && self.gate.is_idle() && !self.is_capturing();
        if !is_idle() {
            return Ok(false);
        }
        let host = self.stores.host(device)?;
        let mut sizes: Vec<Bytes> = Vec::new();
        for region in self.table.named(None)?.iter().flat_map(|tagged| tagged.regions()) {
            if Arc::ptr_eq(&self.stores.host(region.pool().device())?, &host) {
                sizes.extend(region.sizes_to_prepare());
            }
        }
        Ok(host.prepare_while(&sizes, is_idle) && is_idle())
    }

    /// Returns whether a capture is open, which pinning memory or marking work would break.
    fn is_capturing(&self) -> bool {
        let asked = self.registry.completion_events.record(DeviceSet::EMPTY);
        matches!(asked, Err(DriverError::Capturing { .. }))
    }
}

/// Returns whether host memory is pinned for the region once it is idle.
fn is_prepared(tagged: &Tagged) -> bool {
    tagged.options.host_copy == CopyPolicy::Prepare
}

/// Returns the state after some work: unfinished work is retried after an interval, failed work once something has changed. The next look
/// detects changes made meanwhile.
fn after_work(tagged: &Tagged, look: Look, done: Result<bool>, now: Duration) -> Idleness {
    match done {
        Ok(false) => Idleness::Quiet(look, now.saturating_add(AGAIN)),
        Ok(true) => Idleness::Clean(look),
        Err(error) => {
            tracing::warn!(target: "glake::regions", tag = tagged.tag(), %error, "nothing was done ahead for an idle region");
            Idleness::Clean(look)
        }
    }
}

impl Watched {
    fn is_done(&mut self) -> bool {
        self.work.as_mut().is_some_and(|work| matches!(work.has_ended(), Ok(true)))
    }

    /// Marks the pending work. If the driver refuses, as under a capture, the next look retries.
    fn mark(&mut self, region: &Region) {
        match region.pool().pending_work() {
            Ok(work) => self.work = Some(work),
            Err(_) => (self.work, self.idleness) = (None, Idleness::Busy),
        }
    }
}
