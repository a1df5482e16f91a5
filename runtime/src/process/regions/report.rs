//! Reports of shrinks and refills, and the state of regions for a program.
//!
//! The predicted time of a refill is its bytes divided by the rate of the links, plus the cost of mapping.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use glake_device::{Address, DeviceId};
use glake_tiers::{CleanCounts, CopyPolicy, Place, Policy, Region, SkipReason};
use glake_transfer::paths::{Direction, PathGraph};
use glake_units::Bytes;
use serde_json::{Value, json};

use super::super::ProcessError;
use super::super::device_registry::DeviceRegistry;
use super::ask::place_name;
use super::holdings::MemoryUsage;

/// Result of a move for one region on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Tag of the region.
    pub tag: String,
    /// Device of the region.
    pub device: DeviceId,
    /// GPU memory that was released (shrink) or created (refill).
    pub memory: Bytes,
    /// Bytes copied by this call.
    pub copied: Bytes,
    /// Bytes that were not copied because a copy made while the region was idle was still valid.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied because the program declared them not live.
    pub undefined: Bytes,
    /// Bytes on the GPU afterwards.
    pub resident: Bytes,
    /// Bytes evicted afterwards.
    pub evicted: Bytes,
    /// Destination of a shrink's copies; `None` for a refill.
    pub place: Option<Place>,
    /// Memory that could not be evicted.
    pub skipped: Vec<SkippedExtent>,
}

/// Memory that could not be evicted: an extent, or imported memory at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedExtent {
    /// Device of the memory.
    pub device: DeviceId,
    /// Start address of the memory.
    pub address: Address,
    /// Size of the memory.
    pub size: Bytes,
    /// Reason why the memory stays on the GPU.
    pub reason: SkipReason,
}

/// Result of a shrink.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShrinkReport {
    /// Memory returned to the driver.
    pub freed: Bytes,
    /// Bytes copied by this call.
    pub copied: Bytes,
    /// Bytes that were not copied because a copy made while their region was idle was still valid.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied because the program declared them not live; undefined after a refill.
    pub undefined: Bytes,
    /// Bytes of these regions that are still on GPUs.
    pub resident: Bytes,
    /// Results by region and device.
    pub regions: Vec<Moved>,
    /// Memory outside regions that could not be evicted, for a shrink of everything.
    pub skipped: Vec<SkippedExtent>,
    /// Deviations from the program's request.
    pub warnings: Vec<String>,
    /// Memory in use on each GPU afterwards, by holder.
    pub gpu: Vec<MemoryUsage>,
    /// Duration of the shrink.
    pub took: Duration,
    /// Predicted time to refill everything that is evicted now.
    pub predicted_refill: Duration,
}

/// Result of a refill.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RefillReport {
    /// Memory created and mapped.
    pub mapped: Bytes,
    /// Bytes copied by this call.
    pub copied: Bytes,
    /// Bytes of these regions that are still evicted.
    pub evicted: Bytes,
    /// Results by region and device.
    pub regions: Vec<Moved>,
    /// Duration of the refill.
    pub took: Duration,
}

impl ShrinkReport {
    pub(super) fn of(regions: Vec<Moved>) -> ShrinkReport {
        ShrinkReport {
            freed: regions.iter().map(|moved| moved.memory).sum(),
            copied: regions.iter().map(|moved| moved.copied).sum(),
            clean: regions.iter().map(|moved| moved.clean).sum(),
            undefined: regions.iter().map(|moved| moved.undefined).sum(),
            resident: regions.iter().map(|moved| moved.resident).sum(),
            regions,
            ..ShrinkReport::default()
        }
    }

    /// Returns the report as JSON for the C interface.
    pub fn json(&self) -> Value {
        json!({
            "freed": self.freed.get(),
            "copied": self.copied.get(),
            "clean": self.clean.get(),
            "undefined": self.undefined.get(),
            "resident": self.resident.get(),
            "regions": self.regions.iter().map(|moved| moved.json("freed")).collect::<Vec<Value>>(),
            "skipped": self.skipped.iter().map(SkippedExtent::json).collect::<Vec<Value>>(),
            "warnings": self.warnings,
            "gpu": self.gpu.iter().map(MemoryUsage::json).collect::<Vec<Value>>(),
            "seconds": self.took.as_secs_f64(),
            "predicted_refill_seconds": self.predicted_refill.as_secs_f64(),
        })
    }
}

impl RefillReport {
    pub(super) fn of(regions: Vec<Moved>, took: Duration) -> RefillReport {
        RefillReport {
            mapped: regions.iter().map(|moved| moved.memory).sum(),
            copied: regions.iter().map(|moved| moved.copied).sum(),
            evicted: regions.iter().map(|moved| moved.evicted).sum(),
            regions,
            took,
        }
    }

    /// Returns the report as JSON for the C interface.
    pub fn json(&self) -> Value {
        json!({
            "mapped": self.mapped.get(),
            "copied": self.copied.get(),
            "evicted": self.evicted.get(),
            "regions": self.regions.iter().map(|moved| moved.json("mapped")).collect::<Vec<Value>>(),
            "seconds": self.took.as_secs_f64(),
        })
    }
}

impl Moved {
    fn json(&self, memory: &str) -> Value {
        let mut shown = json!({
            "tag": self.tag,
            "device": self.device.0,
            "copied": self.copied.get(),
            "resident": self.resident.get(),
            "evicted": self.evicted.get(),
        });
        shown[memory] = self.memory.get().into();
        if memory == "freed" {
            shown["clean"] = self.clean.get().into();
        }
        if let Some(place) = self.place {
            shown["place"] = place_name(place).into();
        }
        if memory == "freed" {
            shown["undefined"] = self.undefined.get().into();
        }
        if !self.skipped.is_empty() || memory == "freed" {
            shown["skipped"] = self.skipped.iter().map(SkippedExtent::json).collect();
        }
        shown
    }
}

impl SkippedExtent {
    fn json(&self) -> Value {
        json!({
            "device": self.device.0,
            "address": self.address.0,
            "size": self.size.get(),
            "reason": reason_name(self.reason),
        })
    }
}

/// Returns the word for the reason that keeps an extent on its GPU.
fn reason_name(reason: SkipReason) -> &'static str {
    match reason {
        SkipReason::Exported => "exported",
        SkipReason::Imported => "imported",
        SkipReason::Withheld => "withheld",
        // Any other reason.
        _ => "fixed",
    }
}

/// Builds the error of a shrink that failed halfway.
pub(super) fn after_all(moved: Vec<Moved>, error: ProcessError) -> ProcessError {
    let ShrinkReport { freed, copied, regions, .. } = ShrinkReport::of(moved);
    match freed.is_zero() && copied.is_zero() {
        true => error,
        false => ProcessError::Partly { freed, copied, regions, source: Box::new(error) },
    }
}

/// State of a region on one device. A region without allocations has no device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// Tag of the region.
    pub tag: String,
    /// Policy for its bytes at an eviction.
    pub policy: Policy,
    /// Policy for its host copy after a refill.
    pub host_copy: CopyPolicy,
    /// Whether the program promised not to write to its bytes.
    pub sealed: bool,
    /// Counters of cleaning; `None` if the region is not cleaned.
    pub clean: Option<CleanCounts>,
    /// Device of the memory; `None` without allocations.
    pub device: Option<DeviceId>,
    /// Bytes on the GPU.
    pub resident: Bytes,
    /// Bytes that are evicted.
    pub evicted: Bytes,
    /// Bytes that the program decommitted within live blocks.
    pub decommitted: Bytes,
    /// Bytes in live blocks, on the GPU or evicted.
    pub live: Bytes,
    /// Places of the evicted bytes, largest amount first.
    pub places: Vec<(Place, Bytes)>,
    /// Predicted time to refill the region.
    pub predicted_refill: Duration,
}

type Places = serde_json::Map<String, Value>;

impl RegionView {
    /// Returns the place with most of the evicted bytes.
    pub fn place(&self) -> Option<Place> {
        self.places.first().map(|(place, _)| *place)
    }

    /// Returns the state as JSON for the C interface.
    pub fn json(&self) -> Value {
        json!({
            "tag": self.tag,
            "policy": policy_name(self.policy),
            "host_copy": copy_name(self.host_copy),
            "sealed": self.sealed,
            "clean": self.clean.map(clean_json),
            "device": self.device.map(|device| device.0),
            "resident": self.resident.get(),
            "evicted": self.evicted.get(),
            "decommitted": self.decommitted.get(),
            "live": self.live.get(),
            "place": self.place().map(place_name),
            "places": self.places.iter().map(|(place, size)| (place_name(*place), size.get().into())).collect::<Places>(),
            "predicted_refill_seconds": self.predicted_refill.as_secs_f64(),
        })
    }
}

fn clean_json(counts: CleanCounts) -> Value {
    let CleanCounts { clean, copied, voided, released, refused, reclaimed } = counts;
    json!({
        "now": clean.get(),
        "copied": copied.get(),
        "voided": voided.get(),
        "released": released.get(),
        "refused": refused.get(),
        "reclaimed": reclaimed.get(),
    })
}

/// Returns the name of a policy as programs spell it.
pub(in super::super) fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Keep => "keep",
        Policy::Sealed => "sealed",
        Policy::Discard => "discard",
    }
}

/// Returns the name of a copy policy as programs spell it.
pub(in super::super) fn copy_name(policy: CopyPolicy) -> &'static str {
    match policy {
        CopyPolicy::Drop => "drop",
        CopyPolicy::Retain => "retain",
        CopyPolicy::Prepare => "prepare",
    }
}

/// Time to create and map an extent for its own GPU, on an H200.
const EXTENT: Duration = Duration::from_micros(40);
/// Time to map an extent for one further GPU.
const PEER: Duration = Duration::from_micros(15);

/// Predictor with access to the rates of the links.
#[derive(Debug)]
pub(super) struct Prediction {
    registry: Arc<DeviceRegistry>,
    /// Assumed rates, used until the engine has measured some.
    assumed: OnceLock<PathGraph>,
}

impl Prediction {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Prediction {
        Prediction { registry: registry.clone(), assumed: OnceLock::new() }
    }

    /// Returns the time to refill the evicted memory of a region.
    pub(super) fn refill(&self, region: &Region) -> Duration {
        let (_, evicted) = region.sizes();
        if evicted.is_zero() {
            return Duration::ZERO;
        }
        let pool = region.pool();
        let extents = evicted.get().div_ceil(region.options().extent.get().max(1));
        let extents = u32::try_from(extents).unwrap_or(u32::MAX);
        let each = EXTENT + PEER * pool.peer_access().devices_of(region.domain()).len();
        each * extents + self.copying(pool.device(), evicted)
    }

    fn copying(&self, device: DeviceId, bytes: Bytes) -> Duration {
        let rate = self.rate(device);
        #[allow(clippy::cast_precision_loss)] // a prediction
        let seconds = if rate > 0.0 { bytes.get() as f64 / (rate * 1e9) } else { 0.0 };
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Returns the rate to a device over all links that are not suspended, in GB/s.
    fn rate(&self, device: DeviceId) -> f64 {
        let known = self.registry.engine.made().map(|engine| engine.graph());
        let graph = match &known {
            Some(graph) if !graph.paths().links.is_empty() => graph,
            _ => self.assumed.get_or_init(|| self.registry.assumed_paths()),
        };
        let own = graph.rates(device, Direction::ToGpu).next().map_or(0.0, |path| path.rate.0);
        let engine = self.registry.engine.made().filter(|_| self.registry.engine.is_on());
        match engine.is_some_and(|engine| engine.suspended().is_empty()) {
            true => graph.together(device, Direction::ToGpu).0.max(own),
            false => own,
        }
    }
}
