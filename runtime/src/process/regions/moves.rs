//! Shrinks and refills: the regions in their order, on all devices in parallel.
//!
//! ```text
//! shrink   hook ─► choose ─► gate closed, uses waited for, votes asked ─► live bytes queried
//!              ─► devices in parallel, each region by region ─► gate open, hook
//!                    ▲                                            │ less than requested, and other candidates are left
//!                    └────────────────────────────────────────────┘
//! refill   hook ─► in order, devices in parallel ─► hook           a tag's uses continue as soon as all of it is back
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::{Address, DeviceId};
use glake_tiers::{PoolError, Refilled, Region, RegionError, Shrunk, SkipReason, Skipped, TransferContext};
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use serde_json::{Value, json};

use super::super::gate::Tags;
use super::super::imports::Imported;
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::ask::{Refill, Shrink, Tier};
use super::background_refills::{RefillRequest, Wanted};
use super::choose::in_order;
use super::ongoing_shrinks::Waiting;
use super::report::{Moved, RefillReport, ShrinkReport, SkippedExtent, after_all};
use super::tagged::{Tagged, wanting};

/// A region and the bytes of it to move.
pub(super) type Job = (Arc<Tagged>, Arc<Region>, Bytes);

/// Moved regions and the first error.
#[derive(Debug, Default)]
struct Batch {
    moved: Vec<Moved>,
    failed: Option<ProcessError>,
    /// Warnings for the report.
    warnings: Vec<String>,
}

impl Batch {
    /// Keeps the first error; later ones are logged.
    fn fail(&mut self, error: ProcessError) {
        if self.failed.is_none() {
            self.failed = Some(error);
        } else {
            tracing::warn!(target: "glake::regions", %error, "more memory could not be moved");
        }
    }

    fn whole(self) -> Result<Vec<Moved>> {
        self.failed.map_or(Ok(self.moved), Err)
    }
}

impl RegionSet {
    /// Implements [`super::Regions::shrink`].
    pub(super) fn shrink(&self, ask: &Shrink) -> Result<ShrinkReport> {
        self.shrink_while(ask, &|| true)
    }

    /// Shrinks like [`RegionSet::shrink`]. While it waits for uses, `goes_on` is called regularly and returns whether the shrink is still
    /// wanted.
    pub(in super::super) fn shrink_while(
        &self,
        ask: &Shrink,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<ShrinkReport> {
        let (begin, begun) = (Instant::now(), self.refills_begun.get());
        self.table.cover(&self.registry.devices);
        let tags = self.table.named(ask.tags.as_deref())?;
        self.stores.check(ask.tier)?;
        let mut event = json!({
            "event": "shrink", "tags": ask.tags, "bytes": ask.bytes.map(Bytes::get), "tier": ask.tier.to_string(),
        });
        self.hooks.before(&event)?;
        let moved = self.move_out(tags, ask, goes_on);
        let report = match moved {
            Batch { moved, failed: None, warnings } => {
                let took = begin.elapsed();
                if ask.is_everything() {
                    self.give_back_leases();
                    self.suspend_relays(begun);
                }
                self.shrink_report(moved, warnings, ask, took)
            }
            Batch { moved, failed: Some(error), .. } => Err(after_all(moved, error)),
        };
        // After all returned memory was reported.
        self.registry.observers.agent().changed();
        self.tell_after(&mut event, report.as_ref().map(ShrinkReport::json));
        report
    }

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

    fn verifies(&self, asked: Option<bool>) -> bool {
        asked.unwrap_or(self.config.verify)
    }

    fn tell_after(&self, event: &mut Value, report: std::result::Result<Value, &ProcessError>) {
        match report {
            Ok(report) => event["report"] = report,
            Err(error) => event["error"] = error.to_string().into(),
        }
        self.hooks.after(event);
    }

    fn shrink_report(
        &self,
        moved: Vec<Moved>,
        mut warnings: Vec<String>,
        ask: &Shrink,
        took: Duration,
    ) -> Result<ShrinkReport> {
        let regions = self.table.named(None)?;
        let evicted = regions.iter().flat_map(|tagged| tagged.regions());
        // Devices refill in parallel, the regions of one device in sequence.
        let mut predicted = vec![Duration::ZERO; self.registry.devices.len()];
        for region in evicted {
            let place = usize::try_from(region.pool().device().0).unwrap_or(usize::MAX);
            if let Some(total) = predicted.get_mut(place) {
                *total = total.saturating_add(self.prediction.refill(&region));
            }
        }
        let predicted_refill = predicted.into_iter().max().unwrap_or_default();
        let skipped = if ask.is_everything() { self.imported() } else { Vec::new() };
        // All bytes have moved: an unknown memory usage is no failure.
        let gpu = self.memory_usage().unwrap_or_else(|error| {
            warnings.push(format!("what the GPUs hold now is not known: {error}"));
            Vec::new()
        });
        Ok(ShrinkReport { took, predicted_refill, skipped, gpu, warnings, ..ShrinkReport::of(moved) })
    }

    /// Returns memory of other processes as skipped: only they can release it.
    fn imported(&self) -> Vec<SkippedExtent> {
        let skipped = |Imported { device, address, size }| SkippedExtent {
            device,
            address,
            size,
            reason: SkipReason::Imported,
        };
        self.imports.mapped().into_iter().map(skipped).collect()
    }

    fn move_out(&self, mut tags: Vec<Arc<Tagged>>, ask: &Shrink, goes_on: &dyn Fn() -> bool) -> Batch {
        self.table.sort(&mut tags);
        let mut candidates: Vec<(Arc<Tagged>, Arc<Region>)> = tags
            .iter()
            .flat_map(|tagged| tagged.regions().into_iter().map(|region| (tagged.clone(), region)))
            .filter(|(_, region)| ask.device.is_none_or(|device| region.pool().device() == device))
            .collect();
        candidates.sort_by_key(|(tagged, region)| tagged.eviction_cost(region));
        let mut batch = Batch::default();
        let timeout = ask.timeout.unwrap_or(Duration::from_millis(self.config.drain_timeout_ms));
        let mut waited = Duration::ZERO;
        // Uses parked for one of them stay parked until all are done.
        let mut closings = Vec::new();
        let mut is_counted = false;
        loop {
            let freed: Bytes = batch.moved.iter().map(|moved| moved.memory).sum();
            let wanted = ask.bytes.unwrap_or(Bytes::MAX).saturating_sub(freed);
            let resident = |(tagged, region): &(Arc<Tagged>, Arc<Region>)| match region.sizes().0 {
                // An unwanted refill may bring back some memory until it notices.
                Bytes::ZERO
                    if is_counted
                        && region.is_refilling()
                        && self.background_refills.has_unwanted(tagged, region.pool().device()) =>
                {
                    Bytes::new(1)
                }
                size => size,
            };
            let resident: Vec<(usize, Bytes)> = candidates.iter().map(resident).enumerate().collect();
            let chosen = in_order(&resident, wanted);
            if chosen.is_empty() {
                if ask.bytes.is_some() || is_counted {
                    return batch;
                }
                candidates.iter().for_each(|(tagged, region)| tagged.count_shrink(region.pool().device()));
                is_counted = true;
                continue;
            }
            let amount = |amount| if ask.bytes.is_some() { amount } else { Bytes::MAX };
            let job = |(at, size): &(usize, Bytes)| {
                let (tagged, region) = &candidates[*at];
                (tagged.clone(), region.clone(), amount(*size))
            };
            let jobs: Vec<Job> = chosen.iter().map(job).collect();
            let begin = Instant::now();
            let closing = self.close(&jobs, ask, timeout.saturating_sub(waited), goes_on);
            waited += begin.elapsed();
            let Batch { moved, failed, warnings } = match closing {
                Ok(closing) => {
                    closings.push(closing);
                    self.move_closed(&jobs, ask)
                }
                Err(error) => Batch { failed: Some(error), ..Batch::default() },
            };
            batch.moved.extend(moved);
            batch.warnings.extend(warnings);
            batch.failed = failed;
            if batch.failed.is_some() {
                return batch;
            }
            // Other candidates replace memory that could not be evicted; in a shrink of everything, some may have been refilled meanwhile.
            let mut at = 0..candidates.len();
            candidates.retain(|_| at.next().is_some_and(|at| chosen.iter().all(|(taken, _)| *taken != at)));
        }
    }

    fn move_closed(&self, jobs: &[Job], ask: &Shrink) -> Batch {
        let domains: Vec<_> =
            jobs.iter().map(|(_, region, _)| (region.pool().device(), region.domain())).collect();
        let warnings = match self.learn_live(&domains) {
            Ok(warnings) => warnings,
            Err(error) => return Batch { failed: Some(error), ..Batch::default() },
        };
        for (tagged, region, _) in jobs {
            tagged.begin_out(&self.flags, region.pool().device());
        }
        // The error of one region must not stop the others.
        let moved = on_each_device(jobs, |_| true, |job, moved| self.shrink_one(job, ask, moved));
        for (tagged, ..) in jobs {
            tagged.end_out(&self.flags, &self.gate);
        }
        Batch { warnings, ..moved }
    }

    /// Shrinks one region and records the moved bytes, also after a failure.
    fn shrink_one(&self, (tagged, region, amount): &Job, ask: &Shrink, moved: &mut Vec<Moved>) -> Result<()> {
        let device = region.pool().device();
        let _under_way = self.ongoing_shrinks_of(device).map(|shrinks| shrinks.begin(region.domain()));
        let mover = self.stores.mover(device, Direction::FromGpu)?;
        let store = self.stores.store(ask.tier, device)?;
        let checks = self.stores.digests(self.verifies(ask.verify), device)?;
        let context = TransferContext { mover: &*mover, checks: checks.as_deref() };
        if tagged.options.clean {
            region.void_clean(self.gate.last_use_of(tagged.tag()));
        }
        let shrunk = region.shrink(*amount, &store, context);
        region.pool().lease().tell_returned(true);
        let clean = shrunk.as_ref().map_or(Bytes::ZERO, |shrunk| shrunk.clean);
        let (memory, copied, undefined, resident, skipped) = match &shrunk {
            Ok(Shrunk { freed, copied, undefined, resident, skipped, .. }) => {
                (*freed, *copied, *undefined, *resident, &**skipped)
            }
            Err(RegionError::Stopped { moved, copied, resident, .. }) => {
                (*moved, *copied, Bytes::ZERO, *resident, &[][..])
            }
            Err(_) => return Ok(shrunk.map(|_| ())?),
        };
        let (_, evicted) = region.sizes();
        let skipped = skipped.iter().map(|&Skipped { address, size, reason }| SkippedExtent {
            device,
            address,
            size,
            reason,
        });
        moved.push(Moved {
            tag: tagged.tag().to_owned(),
            device,
            memory,
            copied,
            clean,
            undefined,
            resident,
            evicted,
            place: Some(store.place()),
            skipped: skipped.collect(),
        });
        Ok(shrunk.map(|_| ())?)
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

    /// Returns the lease reserved for growth, because everything is evicted.
    fn give_back_leases(&self) {
        for memory in self.registry.devices.iter() {
            memory.lease.give_back_unused();
            memory.lease.tell_returned(true);
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

/// Runs the jobs of each device in order, and several devices in parallel. All devices are tried; each stops at the first error for which
/// `goes_on` returns `false`.
fn on_each_device(
    jobs: &[Job],
    goes_on: impl Fn(&ProcessError) -> bool + Sync,
    work: impl Fn(&Job, &mut Vec<Moved>) -> Result<()> + Sync,
) -> Batch {
    let mut devices: Vec<DeviceId> = jobs.iter().map(|(_, region, _)| region.pool().device()).collect();
    devices.sort_unstable();
    devices.dedup();
    let of = |device: DeviceId| -> Batch {
        let mut batch = Batch::default();
        for job in jobs.iter().filter(|(_, region, _)| region.pool().device() == device) {
            if let Err(error) = work(job, &mut batch.moved) {
                let goes_on = goes_on(&error);
                batch.fail(error);
                if !goes_on {
                    break;
                }
            }
        }
        batch
    };
    let [first, others @ ..] = &*devices else { return Batch::default() };
    let batches: Vec<Batch> = std::thread::scope(|scope| {
        let begun: Vec<_> = others
            .iter()
            .map(|&device| {
                let named = std::thread::Builder::new().name(format!("glake-move-{}", device.0));
                (device, named.spawn_scoped(scope, move || of(device)))
            })
            .collect();
        let mut batches = vec![of(*first)];
        for (device, thread) in begun {
            batches.push(match thread {
                // Propagate a panic of the thread.
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // No thread is available: run the jobs in sequence.
                Err(_) => of(device),
            });
        }
        batches
    });
    let mut all = Batch::default();
    for Batch { moved, failed, .. } in batches {
        all.moved.extend(moved);
        if let Some(error) = failed {
            all.fail(error);
        }
    }
    all
}
