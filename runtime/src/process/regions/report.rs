//! What a shrink and a refill have done.

use std::time::Duration;

use glake_device::{Address, DeviceId};
use glake_tiers::{Place, SkipReason};
use glake_units::Bytes;
use serde_json::{Value, json};

use super::super::ProcessError;
use super::ask::place_name;
use super::memory_usage::MemoryUsage;

/// What was moved of one region on one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Which region.
    pub tag: String,
    /// Of which device.
    pub device: DeviceId,
    /// Memory of the GPU that was given back, or made.
    pub memory: Bytes,
    /// Bytes that were copied.
    pub copied: Bytes,
    /// Bytes that had been copied while the region was idle, and were still the same.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied, because the program says that they do not count.
    pub undefined: Bytes,
    /// Memory that is on the GPU after it.
    pub resident: Bytes,
    /// Memory that is evicted after it.
    pub evicted: Bytes,
    /// Where a shrink put copies; none: nowhere, it was a refill.
    pub place: Option<Place>,
    /// What had to stay.
    pub skipped: Vec<SkippedExtent>,
}

/// Memory that had to stay on its GPU: an extent, or what was imported at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedExtent {
    /// On which.
    pub device: DeviceId,
    /// Where it begins.
    pub address: Address,
    /// How large it is.
    pub size: Bytes,
    /// Why.
    pub reason: SkipReason,
}

/// What a shrink has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShrinkReport {
    /// Memory that went back to the driver.
    pub freed: Bytes,
    /// Bytes that were copied.
    pub copied: Bytes,
    /// Bytes that had been copied while regions were idle, and were still the same.
    pub clean: Bytes,
    /// Bytes in blocks that were not copied, because the program says that they do not count: they have any value after a refill.
    pub undefined: Bytes,
    /// Memory of these regions that is on GPUs still.
    pub resident: Bytes,
    /// By region and device.
    pub regions: Vec<Moved>,
    /// What lies in no region and had to stay, where everything was to leave.
    pub skipped: Vec<SkippedExtent>,
    /// What was done otherwise than the program asked.
    pub warnings: Vec<String>,
    /// What is on each GPU now.
    pub gpu: Vec<MemoryUsage>,
    /// How long it took.
    pub took: Duration,
    /// How long a refill of what is evicted now should take.
    pub predicted_refill: Duration,
}

/// What a refill has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RefillReport {
    /// Memory that was made and mapped.
    pub mapped: Bytes,
    /// Bytes that were copied.
    pub copied: Bytes,
    /// Memory of these regions that is evicted still.
    pub evicted: Bytes,
    /// By region and device.
    pub regions: Vec<Moved>,
    /// How long it took.
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

    /// As the C interface gives it.
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

    /// As the C interface gives it.
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

/// What keeps an extent on its GPU, in a word.
fn reason_name(reason: SkipReason) -> &'static str {
    match reason {
        SkipReason::Exported => "exported",
        SkipReason::Imported => "imported",
        SkipReason::Withheld => "withheld",
        // Whatever else keeps it there.
        _ => "fixed",
    }
}

/// What a shrink tells that failed after something had left.
pub(super) fn after_all(moved: Vec<Moved>, error: ProcessError) -> ProcessError {
    let ShrinkReport { freed, copied, regions, .. } = ShrinkReport::of(moved);
    match freed.is_zero() && copied.is_zero() {
        true => error,
        false => ProcessError::Partly { freed, copied, regions, source: Box::new(error) },
    }
}
