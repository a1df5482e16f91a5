//! Refills: the regions in their order, on all devices in parallel.
//!
//! ```text
//! refill   hook ─► in order, devices in parallel ─► hook           a tag's uses continue as soon as all of it is back
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::Address;
use glake_tiers::{PoolError, Refilled, Region, RegionError, TransferContext};
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use serde_json::json;

use super::super::gate::Tags;
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::ask::{Refill, Tier};
use super::background_refills::{RefillRequest, Wanted};
use super::choose::in_order;
use super::ongoing_shrinks::Waiting;
use super::report::{Moved, RefillReport};
use super::tagged::{Tagged, wanting};

use super::shrink::{Job, on_each_device};

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
        self.resume_relays();
        let report = moved.map(|moved| RefillReport::of(moved, begin.elapsed()));
        self.tell_after(&mut event, report.as_ref().map(RefillReport::json));
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
        self.count_refill();
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
        let job = (tagged.clone(), region.clone(), Bytes::MAX);
        let moved = self.refill_one(&job, self.config.verify, credits, None);
        refilling.end(&moved);
        self.resume_relays();
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
        self.count_refill();
        let jobs: Vec<Job> = chosen
            .into_iter()
            .map(|(at, amount)| {
                let (tagged, region) = &evicted[at];
                (tagged.clone(), region.clone(), if bytes.is_some() { amount } else { Bytes::MAX })
            })
            .collect();
        self.want(&jobs);
        let (verify, credits) = (self.verifies(ask.verify), self.registry.refill_timeout);
        // Without memory for one region there is none for the next ones; a lost copy concerns only its own region.
        let goes_on = |error: &ProcessError| {
            matches!(error, ProcessError::Region(RegionError::Damaged { .. } | RegionError::Unread { .. }))
        };
        let moved = on_each_device(&jobs, goes_on, |job, moved| {
            self.refill_one(job, verify, credits, request).map(|one| moved.push(one))
        });
        // Also for tags that are whole: the thread that completed them may not have settled them yet.
        self.settle(tags);
        moved.whole()
    }

    /// Runs `bring`, which creates memory of a region and its contents, and waits while there is no memory. A shrink of the same region
    /// goes first meanwhile. On return the evicted bytes of the region are up to date.
    fn make_room<T>(
        &self,
        (tagged, region): (&Tagged, &Region),
        verify: bool,
        credits: Duration,
        wanted: Wanted<'_>,
        make: impl Fn(TransferContext<'_>, &Waiting<'_>) -> Result<T>,
    ) -> Result<T> {
        let device = region.pool().device();
        let no_device =
            ProcessError::NoSuchDevice { device: device.0.into(), count: self.registry.devices.len() };
        let ongoing_shrinks = self.ongoing_shrinks_of(device).ok_or(no_device)?;
        loop {
            let credits_of = region.pool().lease().credits(credits);
            let waiting = ongoing_shrinks.waiting(region.domain(), credits_of, wanted);
            let made = self.stores.mover(device, Direction::ToGpu).and_then(|mover| {
                let checks = self.stores.digests(verify, device)?;
                make(TransferContext { mover: &*mover, checks: checks.as_deref() }, &waiting)
            });
            tagged.settle(&self.flags, &self.gate);
            let is_over = made.is_ok() || !waiting.gave_way();
            if is_over || !ongoing_shrinks.wait_for(region.domain(), credits) {
                return made;
            }
            self.registry.observers.agent().want_again();
        }
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
        let wanted = Wanted::default();
        let made =
            self.make_room((tagged, region), self.config.verify, credits, wanted, |context, waiting| {
                Ok(region.commit(address, size, context, waiting)?)
            });
        refilling.end(&made);
        made
    }

    fn refill_one(
        &self,
        (tagged, region, amount): &Job,
        verify: bool,
        credits: Duration,
        request: Option<&RefillRequest>,
    ) -> Result<Moved> {
        let device = region.pool().device();
        let (begin, _) = region.sizes();
        let wanted = Wanted::by(request, tagged, device);
        let refilled = self.make_room((tagged, region), verify, credits, wanted, |context, waiting| {
            // Memory that returned meanwhile is no longer wanted.
            let left = begin.saturating_add(*amount).saturating_sub(region.sizes().0);
            let left = if *amount == Bytes::MAX { *amount } else { left };
            region.refill(left, context, waiting).map_err(|error| {
                if !waiting.gave_way() {
                    self.give_back(tagged, region, &error);
                }
                self.no_room(region, error)
            })
        });
        let refilled = match refilled {
            // The refill ended where it would have waited for memory.
            Err(ProcessError::NoRoom { .. }) if !wanted.is_still() => Refilled::default(),
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

    /// Evicts the part of a refill whose grants have stopped, because other workers may wait for it. Skipped if another refill has
    /// completed the region meanwhile, because uses may run.
    fn give_back(&self, tagged: &Tagged, region: &Region, error: &RegionError) {
        let RegionError::Stopped { moved, source, .. } = error else { return };
        if moved.is_zero() || !matches!(**source, RegionError::Pool(PoolError::Leased { .. })) {
            return;
        }
        let Ok(closing) = self.gate.close(&Tags::of(&[tagged.tag()]), Some(Duration::ZERO)) else { return };
        if region.is_usable() {
            return;
        }
        tagged.out_begins(&self.flags);
        let device = region.pool().device();
        let gone = self.stores.mover(device, Direction::FromGpu).and_then(|mover| {
            let store = self.stores.store(Tier::Host, device)?;
            Ok(region.shrink(*moved, &store, TransferContext { mover: &*mover, checks: None })?)
        });
        tagged.end_out(&self.flags, &self.gate);
        drop(closing);
        region.pool().lease().tell_returned(true);
        if let Err(error) = gone {
            tracing::warn!(target: "glake::regions", %device, %error, "what a stopped refill brought could not be given back");
        }
    }

    /// Builds the error of a refill without memory, which says what to do.
    fn no_room(&self, region: &Region, error: RegionError) -> ProcessError {
        if !is_out_of_memory(&error) {
            return error.into();
        }
        let device = region.pool().device();
        let free = self
            .registry
            .completion_events
            .driver()
            .memory_info(device)
            .map(|info| info.free)
            .unwrap_or_default();
        let (resident, evicted) = region.sizes();
        let tag = region.options().tag.clone();
        ProcessError::NoRoom { device, tag, resident, evicted, free, source: Box::new(error) }
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
