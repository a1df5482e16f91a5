//! State of regions as reported to a program.

use std::time::Duration;

use glake_device::DeviceId;
use glake_tiers::{CleanCounts, CopyPolicy, Place, Policy};
use glake_units::Bytes;
use serde_json::{Value, json};

use super::ask::place_name;

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
