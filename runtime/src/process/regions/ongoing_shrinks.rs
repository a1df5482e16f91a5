//! Refills without memory wait for a running shrink or for a grant of the lease.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_stitch::DomainId;
use glake_tiers::{Credits, PoolError, WaitPolicy};

use super::background_refills::Wanted;
use crate::sync::{Condvar, Mutex};

/// Interval between two attempts of a refill; an extent of a shrink takes longer.
const STEP: Duration = Duration::from_millis(1);

/// Shrinks in progress on one device.
#[derive(Debug, Default)]
pub(super) struct OngoingShrinks {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Domains that are being shrunk.
    under_way: Vec<DomainId>,
    ended: u64,
}

/// Guard of a shrink in progress.
#[derive(Debug)]
pub(super) struct UnderWay<'f>(&'f OngoingShrinks, DomainId);

/// Wait of a refill: first for running shrinks, then for grants. A shrink of the same region waits for the refill and therefore ends the
/// wait; the refill may begin again after the shrink.
#[derive(Debug)]
pub(super) struct Waiting<'f> {
    ongoing_shrinks: &'f OngoingShrinks,
    own: DomainId,
    credits: Credits,
    /// Number of shrinks ended at the last check.
    seen: AtomicU64,
    /// Whether a shrink of the same region ended the wait.
    gave_way: AtomicBool,
    wanted: Wanted<'f>,
}

impl OngoingShrinks {
    pub(super) fn begin(&self, domain: DomainId) -> UnderWay<'_> {
        self.state.lock().under_way.push(domain);
        UnderWay(self, domain)
    }

    pub(super) fn waiting<'f>(&'f self, own: DomainId, credits: Credits, wanted: Wanted<'f>) -> Waiting<'f> {
        let seen = AtomicU64::new(self.state.lock().ended);
        Waiting { ongoing_shrinks: self, own, credits, seen, gave_way: AtomicBool::new(false), wanted }
    }

    /// Waits until no shrink of a domain is in progress; returns `false` after `most`.
    pub(super) fn wait_for(&self, domain: DomainId, most: Duration) -> bool {
        let until = Instant::now() + most;
        let mut state = self.state.lock();
        while state.under_way.contains(&domain) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut state, left);
        }
        true
    }

    /// Returns whether a shrink of a domain is in progress or waits for its turn.
    pub(super) fn has(&self, domain: DomainId) -> bool {
        self.state.lock().under_way.contains(&domain)
    }
}

impl Waiting<'_> {
    /// Returns whether the wait ended to let a shrink of the same region go first.
    pub(super) fn gave_way(&self) -> bool {
        self.gave_way.load(Ordering::Relaxed)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        if let Some(at) = state.under_way.iter().position(|domain| *domain == self.1) {
            state.under_way.swap_remove(at);
        }
        state.ended += 1;
        drop(state);
        self.0.changed.notify_all();
    }
}

impl WaitPolicy for Waiting<'_> {
    fn wait(&self, refused: &PoolError) -> bool {
        if !self.goes_on() {
            return false;
        }
        let mut state = self.ongoing_shrinks.state.lock();
        if state.under_way.contains(&self.own) {
            self.gave_way.store(true, Ordering::Relaxed);
            return false;
        }
        if self.seen.swap(state.ended, Ordering::Relaxed) != state.ended {
            return true;
        }
        if !state.under_way.is_empty() {
            self.ongoing_shrinks.changed.wait_for(&mut state, STEP);
            return true;
        }
        drop(state);
        self.credits.wait(refused, &|| {
            let has = self.ongoing_shrinks.has(self.own);
            self.gave_way.fetch_or(has, Ordering::Relaxed);
            has || !self.goes_on()
        })
    }

    fn goes_on(&self) -> bool {
        self.wanted.is_still()
    }
}

#[cfg(test)]
#[cfg(not(schedules))]
mod tests {
    use glake_device::{DeviceId, DriverError, Verb};
    use glake_stitch::{Allocator, DomainOptions, Settings};
    use glake_tiers::{Lease, LeaseOptions};
    use glake_units::Bytes;

    use super::*;

    const OWN: DomainId = Allocator::default_domain();
    const SHORT: PoolError =
        PoolError::Driver(DriverError::OutOfMemory { verb: Verb::Create, wanted: Bytes::ZERO });

    fn other() -> DomainId {
        let settings = Settings::for_memory(Bytes::mib(64));
        Allocator::new(settings).unwrap().add_domain(DomainOptions::region(Bytes::mib(2)))
    }

    fn waiting(ongoing_shrinks: &OngoingShrinks) -> Waiting<'_> {
        let lease = Lease::new(DeviceId(0), LeaseOptions::default());
        ongoing_shrinks.waiting(OWN, lease.credits(Duration::ZERO), Wanted::default())
    }

    #[test]
    fn it_is_worth_waiting_while_and_once_after_a_shrink() {
        let ongoing_shrinks = OngoingShrinks::default();
        let refill = waiting(&ongoing_shrinks);
        assert!(!refill.wait(&SHORT));
        let under_way = ongoing_shrinks.begin(other());
        assert!(refill.wait(&SHORT) && refill.wait(&SHORT));
        drop(under_way);
        assert!(refill.wait(&SHORT), "what it gave back last was not looked at");
        assert!(!refill.wait(&SHORT) && !waiting(&ongoing_shrinks).wait(&SHORT));
    }

    /// The refill holds the turn that the shrink waits for.
    #[test]
    fn a_refill_does_not_wait_for_a_shrink_that_waits_for_it() {
        let ongoing_shrinks = OngoingShrinks::default();
        let refill = waiting(&ongoing_shrinks);
        let _other = ongoing_shrinks.begin(other());
        let own = ongoing_shrinks.begin(OWN);
        assert!(!refill.gave_way() && !refill.wait(&SHORT) && refill.gave_way());
        assert!(!ongoing_shrinks.wait_for(OWN, Duration::ZERO));
        drop(own);
        assert!(ongoing_shrinks.wait_for(OWN, Duration::ZERO));
        assert!(refill.wait(&SHORT));
    }
}
