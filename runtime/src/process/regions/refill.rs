//! Refills: the regions in their order, on all devices in parallel.
//!
//! ```text
//! refill   hook ─► in order, devices in parallel ─► hook           a tag's uses continue as soon as all of it is back
//! ```
//!
//! A refill without memory waits for a running shrink or for a grant of the lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::Address;
use glake_stitch::DomainId;
use glake_tiers::{Credits, PoolError, Refilled, Region, RegionError, TransferContext, WaitPolicy};
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use serde_json::json;

use super::super::gate::Tags;
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::ask::{Refill, Tier};
use super::background::{RefillRequest, Wanted};
use super::report::{Moved, RefillReport};
use super::shrink::{Job, on_each_device};
use super::table::{Tagged, in_order, wanting};
use crate::sync::{Condvar, Mutex};

impl RegionSet {
    /// Implements [`super::Regions::refill`] without the background.
    pub(in super::super) fn refill(&self, ask: &Refill) -> Result<RefillReport> {
        self.refill_requested(ask, None)
    }

    /// Refills like [`RegionSet::refill`]; for a request, only the memory that is still wanted.
    pub(super) fn refill_requested(
        &self,
        ask: &Refill,
        request: Option<&RefillRequest>,
    ) -> Result<RefillReport> {
        let begin = Instant::now();
        self.table.cover(&self.registry.devices);
        let mut tags = self.table.named(ask.tags.as_deref())?;
        self.table.sort(&mut tags);
        let mut event = json!({ "event": "refill", "tags": ask.tags, "bytes": ask.bytes.map(Bytes::get) });
        self.hooks.before(&event)?;
        let refilling = self.registry.observers.refill_begins();
        let moved = self.move_in(&tags, ask, request);
        refilling.end(&moved);
        self.relays.resume();
        let report = moved.map(|moved| RefillReport::of(moved, begin.elapsed()));
        self.hooks.after_report(&mut event, report.as_ref().map(RefillReport::json));
        report
    }

    /// Refills one region whose memory is about to be used. The caller may hold locks that a hook needs, so hooks are called but not waited
    /// for.
    pub(super) fn bring_back(&self, tagged: &Arc<Tagged>, region: &Arc<Region>) -> Result<()> {
        if wanting(region).is_zero() {
            return Ok(());
        }
        let begin = Instant::now();
        let device = region.pool().device();
        self.relays.count_refill();
        let mut event = json!({ "event": "refill", "tags": [tagged.tag()], "bytes": null, "device": device.0, "touched": true });
        let first = tagged.touch_first(device);
        let beside = first.as_ref().map(|_| self.hooks.beside(&event));
        let refilling = self.registry.observers.refill_begins();
        region.pool().lease().want(region.sizes().1);
        // A process with active uses must not wait long for grants: the holders may be waiting for it in turn.
        let credits = match self.gate.view().uses {
            0 => self.registry.refill_timeout,
            _ => self.registry.refill_timeout.min(region.pool().lease().grow_timeout()),
        };
        let (verify, wanted) = (None, Wanted::default());
        let moved = RegionRefill { regions: self, tagged, region, verify, credits, wanted, since: begin }
            .run(Bytes::MAX);
        refilling.end(&moved);
        self.relays.resume();
        if let Some(beside) = beside {
            match &moved {
                Ok(moved) => event["report"] = RefillReport::of(vec![moved.clone()], begin.elapsed()).json(),
                Err(error) => event["error"] = error.to_string().into(),
            }
            beside.over(event);
        }
        moved.map(|_| ())
    }

    fn move_in(
        &self,
        tags: &[Arc<Tagged>],
        ask: &Refill,
        request: Option<&RefillRequest>,
    ) -> Result<Vec<Moved>> {
        let bytes = ask.bytes;
        let evicted: Vec<(Arc<Tagged>, Arc<Region>)> = tags
            .iter()
            .flat_map(|tagged| tagged.regions().into_iter().map(|region| (tagged.clone(), region)))
            .filter(|(tagged, region)| Wanted::by(request, tagged, region.pool().device()).is_still())
            .collect();
        let wanted: Vec<(usize, Bytes)> =
            evicted.iter().enumerate().map(|(at, (_, region))| (at, wanting(region))).collect();
        let chosen = in_order(&wanted, bytes.unwrap_or(Bytes::MAX));
        self.relays.count_refill();
        let jobs: Vec<Job> = chosen
            .into_iter()
            .map(|(at, amount)| {
                let (tagged, region) = &evicted[at];
                (tagged.clone(), region.clone(), if bytes.is_some() { amount } else { Bytes::MAX })
            })
            .collect();
        self.want(&jobs);
        let (verify, credits) = (ask.verify, self.registry.refill_timeout);
        // Without memory for one region there is none for the next ones; a lost copy concerns only its own region.
        let goes_on = |error: &ProcessError| {
            matches!(error, ProcessError::Region(RegionError::Damaged { .. } | RegionError::Unread { .. }))
        };
        let moved = on_each_device(&jobs, goes_on, |job, moved| {
            let (tagged, region, amount) = job;
            let wanted = Wanted::by(request, tagged, region.pool().device());
            let since = Instant::now();
            let refill = RegionRefill { regions: self, tagged, region, verify, credits, wanted, since };
            refill.run(*amount).map(|one| moved.push(one))
        });
        // Also for tags that are whole: the thread that completed them may not have settled them yet.
        self.settle(tags);
        moved.whole()
    }

    /// Implements [`super::Regions::commit`].
    pub(super) fn commit(
        &self,
        tagged: &Tagged,
        region: &Region,
        address: Address,
        size: Bytes,
    ) -> Result<Bytes> {
        let lease = region.pool().lease();
        let refilling = self.registry.observers.refill_begins();
        // This is new memory, not refilled memory.
        lease.forget_wanted();
        let credits = self.registry.refill_timeout.min(lease.grow_timeout());
        let (verify, wanted) = (None, Wanted::default());
        let since = Instant::now();
        let refill = RegionRefill { regions: self, tagged, region, verify, credits, wanted, since };
        let made = refill.make_room(|context, waiting| Ok(region.commit(address, size, context, waiting)?));
        refilling.end(&made);
        made
    }

    /// Reports the bytes that must be granted for a refill.
    fn want(&self, jobs: &[Job]) {
        for memory in self.registry.devices.iter() {
            let own = jobs.iter().filter(|(_, region, _)| region.pool().device() == memory.id());
            let evicted: Bytes = own.map(|(_, region, amount)| region.sizes().1.min(*amount)).sum();
            if !evicted.is_zero() {
                memory.lease.want(evicted);
            }
        }
    }
}

/// Refill of one region in progress.
struct RegionRefill<'r> {
    regions: &'r RegionSet,
    tagged: &'r Tagged,
    region: &'r Region,
    /// Whether bytes are compared with the evicted ones; `None`: as configured.
    verify: Option<bool>,
    /// Timeout of the wait for grants.
    credits: Duration,
    wanted: Wanted<'r>,
    /// Begin of the refill.
    since: Instant,
}

impl RegionRefill<'_> {
    /// Refills up to `amount` bytes; [`Bytes::MAX`] means everything.
    fn run(&self, amount: Bytes) -> Result<Moved> {
        let RegionRefill { tagged, region, .. } = *self;
        let device = region.pool().device();
        let (begin, _) = region.sizes();
        let refilled = self.make_room(|context, waiting| {
            // Memory that returned meanwhile is no longer wanted.
            let left = begin.saturating_add(amount).saturating_sub(region.sizes().0);
            let left = if amount == Bytes::MAX { amount } else { left };
            region.refill(left, context, waiting).map_err(|error| {
                if !waiting.gave_way() {
                    self.give_back(&error);
                }
                self.no_room(error)
            })
        });
        let refilled = match refilled {
            // The refill ended where it would have waited for memory.
            Err(ProcessError::NoRoom { .. }) if !self.wanted.is_still() => Refilled::default(),
            refilled => refilled?,
        };
        let (resident, _) = region.sizes();
        Ok(Moved {
            tag: tagged.tag().to_owned(),
            device,
            memory: refilled.mapped,
            copied: refilled.copied,
            clean: Bytes::ZERO,
            undefined: Bytes::ZERO,
            resident,
            evicted: refilled.evicted,
            place: None,
            skipped: Vec::new(),
        })
    }

    /// Runs `make`, which creates memory of the region and its contents, and waits while there is no memory. A shrink of the same region
    /// goes first meanwhile. On return the evicted bytes of the region are up to date.
    fn make_room<T>(&self, make: impl Fn(TransferContext<'_>, &Waiting<'_>) -> Result<T>) -> Result<T> {
        let RegionRefill { regions, tagged, region, verify, credits, wanted, .. } = *self;
        let device = region.pool().device();
        let no_device =
            ProcessError::NoSuchDevice { device: device.0.into(), count: regions.registry.devices.len() };
        let ongoing_shrinks = regions.ongoing_shrinks_of(device).ok_or(no_device)?;
        loop {
            let credits_of = region.pool().lease().credits(credits);
            let waiting = ongoing_shrinks.waiting(region.domain(), credits_of, wanted);
            let made = regions.stores.mover(device, Direction::ToGpu).and_then(|mover| {
                let checks = regions.digests(verify, device)?;
                let (checks, fill) = (checks.as_deref(), verify == Some(true));
                make(TransferContext { mover: &*mover, checks, fill }, &waiting)
            });
            tagged.settle(&regions.flags, &regions.gate);
            let is_over = made.is_ok() || !waiting.gave_way();
            if is_over || !ongoing_shrinks.wait_for(region.domain(), credits) {
                return made;
            }
            regions.registry.observers.agent().want_again();
        }
    }

    /// Evicts the part of a refill whose grants have stopped, because other workers may wait for it. Skipped if another refill has
    /// completed the region meanwhile, because uses may run.
    fn give_back(&self, error: &RegionError) {
        let RegionRefill { regions, tagged, region, .. } = *self;
        let RegionError::Stopped { moved, source, .. } = error else { return };
        if moved.is_zero() || !matches!(**source, RegionError::Pool(PoolError::Leased { .. })) {
            return;
        }
        let Ok(closing) = regions.gate.close(&Tags::of(&[tagged.tag()]), Some(Duration::ZERO)) else {
            return;
        };
        if region.is_usable() {
            return;
        }
        tagged.out_begins(&regions.flags);
        let device = region.pool().device();
        let gone = regions.stores.mover(device, Direction::FromGpu).and_then(|mover| {
            let store = regions.stores.store(Tier::Host, device)?;
            Ok(region.shrink(
                *moved,
                &store,
                TransferContext { mover: &*mover, checks: None, fill: false },
            )?)
        });
        tagged.end_out(&regions.flags, &regions.gate);
        drop(closing);
        region.pool().lease().tell_returned(true);
        if let Err(error) = gone {
            tracing::warn!(target: "glake::regions", %device, %error, "failed to evict the memory of a stopped refill");
        }
    }

    /// Builds the error of a refill without memory, which says what to do.
    fn no_room(&self, error: RegionError) -> ProcessError {
        let RegionRefill { regions, region, since, .. } = *self;
        if !is_out_of_memory(&error) {
            return error.into();
        }
        let device = region.pool().device();
        let free = regions
            .registry
            .completion_events
            .driver()
            .memory_info(device)
            .map(|info| info.free)
            .unwrap_or_default();
        let (resident, evicted) = region.sizes();
        let tag = region.options().tag.clone();
        let memory = regions.registry.device(device.0.into()).ok();
        let grantor = memory
            .filter(|_| is_leased(&error))
            .map(|memory| Box::new(regions.registry.grantor(memory, |at| at >= since)));
        ProcessError::NoRoom { device, tag, resident, evicted, free, grantor, source: Box::new(error) }
    }
}

/// Returns whether the lease is the reason.
fn is_leased(error: &RegionError) -> bool {
    match error {
        RegionError::Stopped { source, .. } => is_leased(source),
        RegionError::Pool(error) => matches!(error, PoolError::Leased { .. }),
        _ => false,
    }
}

fn is_out_of_memory(error: &RegionError) -> bool {
    match error {
        RegionError::Stopped { source, .. } => is_out_of_memory(source),
        RegionError::Pool(PoolError::Driver(error)) => error.is_out_of_memory(),
        RegionError::Pool(error) => error.is_out_of_memory(),
        _ => false,
    }
}

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
