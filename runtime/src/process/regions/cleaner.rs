//! Thread that copies idle regions to the host ahead of evictions ([`glake_tiers::Region::clean`]) and pins host memory for them, if any
//! region's options ask for it.
//!
//! ```text
//! each step, each region   look ─► Idleness ─► mark its work │ clean it, pin for it │ nothing
//! ```
//!
//! Invariants: nothing of it runs after [`Cleaner::stop`] has returned. No use or allocation waits for it: an overtaken copy is void. A
//! shrink waits for at most one piece of an extent. The thread creates no pool memory and changes no lease.
//!
//! ```text
//! idle state of a region (pure):
//! busy ──no use runs──► working ──all work done──► quiet ──long enough──► cleaned, prepared ──► clean
//!   ▲                      ▲                          │                                       │
//!   └── a use begins ──────┴── something changed ─────┴───────────────────────────────────────┘
//! ```

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
use super::table::Tagged;

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
                IdleWork { regions: &regions, end: &end }.look_at_all(&mut watched, begin, wait);
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

/// Work for idle regions.
struct IdleWork<'a> {
    regions: &'a RegionSet,
    end: &'a End,
}

impl IdleWork<'_> {
    /// Looks at every region with work to do while idle, and does the work for those that have been idle long enough.
    fn look_at_all(&self, all: &mut AllWatched, begin: Instant, wait: Duration) {
        let Ok(tags) = self.regions.table.named(None) else { return };
        for tagged in tags.iter().filter(|tagged| tagged.options.clean || is_prepared(tagged)) {
            for region in tagged.regions() {
                if self.end.is_over() {
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
                        let done = self.work_on(tagged, &region, look);
                        watched.idleness = after_work(tagged, look, done, begin.elapsed());
                    }
                    _ => {}
                }
            }
        }
    }

    /// Returns the state of an idle region; `None` if it is in use, evicted or about to be, or a capture is open.
    fn look_at(&self, tagged: &Tagged, region: &Region) -> Option<Look> {
        let after_use = self
            .regions
            .gate
            .idle_since(tagged.tag())
            .filter(|_| !tagged.is_away() && !self.is_capturing())?;
        if tagged.options.clean {
            region.void_clean(after_use);
        }
        Some(Look { after_use, state: region.state_number().ok()? })
    }

    /// Does the work for an idle region; returns whether all of it is done.
    fn work_on(&self, tagged: &Tagged, region: &Region, look: Look) -> Result<bool> {
        let cleaned = !tagged.options.clean || self.clean_one(tagged, region, look)?;
        let prepared = !is_prepared(tagged) || self.prepare_all(region.pool().device())?;
        Ok(cleaned && prepared)
    }

    fn clean_one(&self, tagged: &Tagged, region: &Region, look: Look) -> Result<bool> {
        let device = region.pool().device();
        let host = self.regions.stores.host(device)?;
        let mover = self.regions.stores.idle_mover(device)?;
        let Some(digests) = &self.regions.stores.digests(true, device)? else { return Ok(true) };
        let after_use = look.after_use;
        let keep_going = &|| self.may_go_on(tagged, after_use);
        Ok(region.clean(Clean { host: &host, mover: &*mover, digests, after_use, keep_going })?.whole)
    }

    /// Returns whether the region is still idle before a piece, after yielding to other copies for a while.
    fn may_go_on(&self, tagged: &Tagged, after_use: u64) -> bool {
        let begin = Instant::now();
        loop {
            let is_idle = !tagged.is_away()
                && self.regions.gate.idle_since(tagged.tag()) == Some(after_use)
                && !self.is_capturing();
            if !is_idle || self.end.is_over() {
                return false;
            }
            if begin.elapsed() >= LET_OTHERS.0 || !self.regions.stores.are_links_busy() {
                return true;
            }
            self.end.waits(LET_OTHERS.1);
        }
    }

    /// Pins host memory for all regions of a device whose options ask for it, while no use runs. Returns `false` if some is left to do.
    fn prepare_all(&self, device: DeviceId) -> Result<bool> {
        let is_idle = || !self.end.is_over() && self.regions.gate.is_idle() && !self.is_capturing();
        if !is_idle() {
            return Ok(false);
        }
        let host = self.regions.stores.host(device)?;
        let mut sizes: Vec<Bytes> = Vec::new();
        for region in self.regions.table.named(None)?.iter().flat_map(|tagged| tagged.regions()) {
            if Arc::ptr_eq(&self.regions.stores.host(region.pool().device())?, &host) {
                sizes.extend(region.sizes_to_prepare());
            }
        }
        Ok(host.prepare_while(&sizes, is_idle) && is_idle())
    }

    /// Returns whether a capture is open, which pinning memory or marking work would break.
    fn is_capturing(&self) -> bool {
        let asked = self.regions.registry.completion_events.record(DeviceSet::EMPTY);
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

/// Observed state of a region without a running use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Number of the region's last use.
    pub(super) after_use: u64,
    /// Version of the region's contents ([`glake_tiers::Region::state_number`]).
    pub(super) state: u64,
}

/// Idle state of a region; times are relative to an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Idleness {
    /// A use of the region runs.
    #[default]
    Busy,
    /// The region's work was marked and has not finished.
    Working(Look),
    /// All work has been finished since this time. A time in the future is that of a retry of unfinished cleaning.
    Quiet(Look, Duration),
    /// Nothing is left to do until the region changes.
    Clean(Look),
}

/// Action after a look at a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Todo {
    Nothing,
    /// Mark all work enqueued so far.
    Mark,
    /// Clean the region, which has been idle long enough.
    Clean,
}

impl Idleness {
    /// Returns the next state and action after a look; `None` means that a use runs. `is_done`: the marked work has finished.
    pub(super) fn next(
        self,
        look: Option<Look>,
        is_done: bool,
        now: Duration,
        wait: Duration,
    ) -> (Idleness, Todo) {
        let Some(look) = look else { return (Idleness::Busy, Todo::Nothing) };
        let state = match self {
            Idleness::Working(of) if of == look && is_done => Idleness::Quiet(look, now),
            Idleness::Working(of) | Idleness::Quiet(of, _) | Idleness::Clean(of) if of == look => self,
            _ => return (Idleness::Working(look), Todo::Mark),
        };
        match state {
            Idleness::Quiet(_, since) if now >= since.saturating_add(wait) => (state, Todo::Clean),
            state => (state, Todo::Nothing),
        }
    }
}

#[cfg(test)]
mod idle_tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(100);

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn it_is_cleaned_once_its_work_has_been_done_for_long_enough() {
        let look = Some(Look { after_use: 1, state: 7 });
        let mut idleness = Idleness::default();
        let mut at = |look, is_done, now| {
            let (next, todo) = idleness.next(look, is_done, ms(now), WAIT);
            idleness = next;
            todo
        };
        assert_eq!(at(None, true, 0), Todo::Nothing);
        assert_eq!(at(look, true, 10), Todo::Mark);
        assert_eq!(at(look, false, 500), Todo::Nothing, "its work is not done");
        assert_eq!(at(look, true, 600), Todo::Nothing);
        assert_eq!(at(look, false, 699), Todo::Nothing);
        assert_eq!(at(look, false, 700), Todo::Clean);
        let used = Some(Look { after_use: 2, state: 7 });
        assert_eq!(at(used, true, 710), Todo::Mark, "a use began and ended in between");
        assert_eq!(at(used, true, 720), Todo::Nothing);
        let allocated = Some(Look { after_use: 2, state: 8 });
        assert_eq!(at(allocated, true, 900), Todo::Mark);
        assert_eq!(at(None, true, 910), Todo::Nothing);
        assert_eq!(at(allocated, true, 920), Todo::Mark);
    }

    #[test]
    fn what_was_left_to_be_done_is_tried_again_later() {
        let look = Look { after_use: 1, state: 7 };
        for wait in [Duration::ZERO, WAIT] {
            let again = Idleness::Quiet(look, ms(1000));
            assert_eq!(again.next(Some(look), true, ms(900), wait), (again, Todo::Nothing));
            assert_eq!(again.next(Some(look), true, ms(1000) + wait, wait), (again, Todo::Clean));
        }
    }

    #[test]
    fn what_is_clean_stays_so_until_it_changes() {
        let look = Look { after_use: 1, state: 7 };
        let clean = Idleness::Clean(look);
        assert_eq!(clean.next(Some(look), true, ms(9999), WAIT), (clean, Todo::Nothing));
        let changed = Look { state: 8, ..look };
        assert_eq!(clean.next(Some(changed), true, ms(9999), WAIT), (Idleness::Working(changed), Todo::Mark));
    }
}
