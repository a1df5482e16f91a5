//! Regions as a program sees them.

use std::time::Duration;

use glake_device::DeviceId;
use glake_tiers::{CleanCounts, CopyPolicy, Place, Policy};
use glake_units::Bytes;
use serde_json::{Value, json};

use super::ask::place_name;

/// A region on one device. One that nothing was allocated in is on none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionView {
    /// By what the program knows it.
    pub tag: String,
    /// What becomes of its bytes.
    pub policy: Policy,
    /// What becomes of their copy.
    pub host_copy: CopyPolicy,
    /// Whether nobody writes to its bytes.
    pub sealed: bool,
    /// What was copied while nobody used it; none: it is not cleaned.
    pub clean: Option<CleanCounts>,
    /// Whose memory; none yet.
    pub device: Option<DeviceId>,
    /// Memory on the GPU.
    pub resident: Bytes,
    /// Memory that is not.
    pub evicted: Bytes,
    /// Memory that the program gave up within live blocks.
    pub decommitted: Bytes,
    /// Bytes in live blocks, wherever they are.
    pub live: Bytes,
    /// Where what is evicted is, and how much: where most is comes first.
    pub places: Vec<(Place, Bytes)>,
    /// How long a refill of it should take.
    pub predicted_refill: Duration,
}

type Places = serde_json::Map<String, Value>;

impl RegionView {
    /// Where most of what is evicted is.
    pub fn place(&self) -> Option<Place> {
        self.places.first().map(|(place, _)| *place)
    }

    /// As the C interface gives it.
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

/// A policy as programs name it.
pub(in super::super) fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Keep => "keep",
        Policy::Sealed => "sealed",
        Policy::Discard => "discard",
    }
}

/// What becomes of a copy, as programs name it.
pub(in super::super) fn copy_name(policy: CopyPolicy) -> &'static str {
    match policy {
        CopyPolicy::Drop => "drop",
        CopyPolicy::Retain => "retain",
        CopyPolicy::Prepare => "prepare",
    }
}
