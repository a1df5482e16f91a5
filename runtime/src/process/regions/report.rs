//! Reports of shrinks and refills.

use std::time::Duration;

use glake_device::{Address, DeviceId};
use glake_tiers::{Place, SkipReason};
use glake_units::Bytes;
use serde_json::{Value, json};

use super::super::ProcessError;
use super::ask::place_name;
use super::memory_usage::MemoryUsage;

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
    /// Reason why it stays on the GPU.
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
