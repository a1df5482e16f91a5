//! Shrinks: the regions in their order, on all devices in parallel.
//!
//! ```text
//! shrink   hook ─► choose ─► gate closed, uses waited for, votes asked ─► live bytes queried
//!              ─► devices in parallel, each region by region ─► gate open, hook
//!                    ▲                                            │ less than requested, and other candidates are left
//!                    └────────────────────────────────────────────┘
//! ```
//!
//! A move closes the gate first: uses have ended or are parked, their work has finished, and the votes agree.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_device::owned::Digests;
use glake_tiers::{GpuPool, Region, RegionError, Shrunk, SkipReason, Skipped, TransferContext};
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use serde_json::json;

use super::super::device::DeviceMemory;
use super::super::gate::{Closing, PARKED_IN_VAIN, Tags};
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::ask::Shrink;
use super::report::{Moved, ShrinkReport, SkippedExtent, after_all};
use super::table::{Tagged, in_order};
use crate::process::sharing::Imported;

/// A region and the bytes of it to move.
pub(super) type Job = (Arc<Tagged>, Arc<Region>, Bytes);

/// Moved regions and the first error.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) moved: Vec<Moved>,
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

    pub(super) fn whole(self) -> Result<Vec<Moved>> {
        self.failed.map_or(Ok(self.moved), Err)
    }
}

impl RegionSet {
    /// Shrinks like [`super::Regions::shrink`]. While it waits for uses, `goes_on` is called regularly and returns whether the shrink is
    /// still wanted.
    pub(in super::super) fn shrink_while(
        &self,
        ask: &Shrink,
        goes_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<ShrinkReport> {
        let (begin, begun) = (Instant::now(), self.relays.refills_begun());
        self.table.cover(&self.registry.devices);
        let tags = self.table.named(ask.tags.as_deref())?;
        self.stores.check(ask.tier)?;
        let mut event = json!({
            "event": "shrink", "tags": ask.tags, "bytes": ask.bytes.map(Bytes::get), "tier": ask.tier.to_string(),
        });
        self.hooks.before(&event)?;
        let moved = RunningShrink { regions: self, ask, goes_on }.move_out(tags);
        let report = match moved {
            Batch { moved, failed: None, warnings } => {
                let took = begin.elapsed();
                if ask.is_everything() {
                    self.give_back_leases();
                    self.relays.suspend(begun);
                }
                self.shrink_report(moved, warnings, ask, took)
            }
            Batch { moved, failed: Some(error), .. } => Err(after_all(moved, error)),
        };
        // After all returned memory was reported.
        self.registry.observers.agent().changed();
        self.registry.observers.counters.note();
        self.hooks.after_report(&mut event, report.as_ref().map(ShrinkReport::json));
        report
    }

    /// Returns the digest kernels for a device if bytes are verified. Without a request that names it, a driver that cannot load them does not
    /// keep memory from moving: memory may be short exactly then.
    pub(super) fn digests(&self, asked: Option<bool>, device: DeviceId) -> Result<Option<Arc<Digests>>> {
        match self.stores.digests(asked.unwrap_or(self.config.verify), device) {
            Err(error) if asked.is_none() => {
                tracing::warn!(target: "glake::regions", %device, %error, "the next move is not verified: no digest kernels");
                Ok(None)
            }
            digests => digests,
        }
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

    /// Closes the gate for everything, as a shrink does, but moves nothing; memory may be moved later. `goes_on` is called regularly and
    /// returns whether the closing is still wanted.
    pub(in super::super) fn park(
        &self,
        timeout: Duration,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Closing<'_>> {
        let closing = self.gate.close_while(&Tags::All, Some(timeout), goes_on)?;
        let started = self.registry.devices.iter().find_map(DeviceMemory::started);
        agreed(closing, Tags::All, started.map(|started| &started.pool))
    }

    /// Returns the lease reserved for growth, because everything is evicted.
    fn give_back_leases(&self) {
        for memory in self.registry.devices.iter() {
            memory.lease.give_back_unused();
            memory.lease.tell_returned(true);
        }
    }
}

/// A shrink in progress.
struct RunningShrink<'r> {
    regions: &'r RegionSet,
    ask: &'r Shrink,
    /// Returns whether the shrink is still wanted.
    goes_on: &'r (dyn Fn() -> bool + Sync),
}

impl<'r> RunningShrink<'r> {
    fn move_out(&self, mut tags: Vec<Arc<Tagged>>) -> Batch {
        let RunningShrink { regions, ask, .. } = *self;
        regions.table.sort(&mut tags);
        let mut candidates: Vec<(Arc<Tagged>, Arc<Region>)> = tags
            .iter()
            .flat_map(|tagged| tagged.regions().into_iter().map(|region| (tagged.clone(), region)))
            .filter(|(_, region)| ask.device.is_none_or(|device| region.pool().device() == device))
            .collect();
        candidates.sort_by_key(|(tagged, region)| tagged.eviction_cost(region));
        let mut batch = Batch::default();
        let timeout = ask.timeout.unwrap_or(Duration::from_millis(regions.config.drain_timeout_ms));
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
                        && regions.background_refills.has_unwanted(tagged, region.pool().device()) =>
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
            let closing = self.close(&jobs, timeout.saturating_sub(waited));
            waited += begin.elapsed();
            let Batch { moved, failed, warnings } = match closing {
                Ok(closing) => {
                    closings.push(closing);
                    self.move_closed(&jobs)
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

    fn move_closed(&self, jobs: &[Job]) -> Batch {
        let regions = self.regions;
        let domains: Vec<_> =
            jobs.iter().map(|(_, region, _)| (region.pool().device(), region.domain())).collect();
        let warnings = match regions.learn_live(&domains) {
            Ok(warnings) => warnings,
            Err(error) => return Batch { failed: Some(error), ..Batch::default() },
        };
        for (tagged, region, _) in jobs {
            tagged.begin_out(&regions.flags, region.pool().device());
        }
        // The error of one region must not stop the others.
        let moved = on_each_device(jobs, |_| true, |job, moved| self.shrink_one(job, moved));
        for (tagged, ..) in jobs {
            tagged.end_out(&regions.flags, &regions.gate);
        }
        Batch { warnings, ..moved }
    }

    /// Shrinks one region and records the moved bytes, also after a failure.
    fn shrink_one(&self, (tagged, region, amount): &Job, moved: &mut Vec<Moved>) -> Result<()> {
        let RunningShrink { regions, ask, .. } = *self;
        let device = region.pool().device();
        let _under_way = regions.ongoing_shrinks_of(device).map(|shrinks| shrinks.begin(region.domain()));
        let mover = regions.stores.mover(device, Direction::FromGpu)?;
        let store = regions.stores.store(ask.tier, device)?;
        let checks = regions.digests(ask.verify, device)?;
        let context = TransferContext { mover: &*mover, checks: checks.as_deref(), fill: false };
        if tagged.options.clean {
            region.void_clean(regions.gate.last_use_of(tagged.tag()));
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

    /// Closes the gate for these jobs: all uses have ended within `timeout` or are parked, their work has finished, and no vote is against
    /// it.
    fn close(&self, jobs: &[Job], timeout: Duration) -> Result<Closing<'r>> {
        let tags = match self.ask.is_everything() {
            true => Tags::All,
            false => Tags::These(jobs.iter().map(|(tagged, ..)| tagged.tag().to_owned()).collect()),
        };
        let closing = self.regions.gate.close_while(&tags, Some(timeout), self.goes_on)?;
        agreed(closing, tags, jobs.first().map(|(_, region, _)| region.pool()))
    }
}

/// Timeout of a shrink for the GPU work of parked uses: longer work waits for another rank, or for the host.
const PARK_DRAIN: Duration = Duration::from_secs(2);

/// Interval between polls of the parked uses' work.
pub(super) const POLL: Duration = Duration::from_micros(200);

/// Waits until the work of parked uses has ended and the votes agree.
fn agreed<'g>(closing: Closing<'g>, tags: Tags, pool: Option<&Arc<GpuPool>>) -> Result<Closing<'g>> {
    if closing.parked() > 0
        && let Some(pool) = pool
    {
        let begin = Instant::now();
        let mut pending = pool.pending_work()?;
        while !pending.has_ended()? {
            let waited = begin.elapsed();
            if waited >= PARK_DRAIN {
                closing.hold_off(PARKED_IN_VAIN);
                return Err(ProcessError::timeout(format!(
                    "work of {tags} was still running on a GPU {waited:.1?} after all that use it were parked at safe points: does it wait \
                     for another rank, or for the host? Nothing was moved, they go on; shrink again later"
                )));
            }
            std::thread::sleep(POLL);
        }
    }
    // Asked even without parked uses: a use may have voted against it and run again since the gate closed.
    if !closing.is_agreed() {
        closing.hold_off(PARKED_IN_VAIN);
        return Err(ProcessError::not_agreed(&tags));
    }
    Ok(closing)
}

/// Runs the jobs of each device in order, and several devices in parallel. All devices are tried; each stops at the first error for which
/// `goes_on` returns `false`.
pub(super) fn on_each_device(
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
