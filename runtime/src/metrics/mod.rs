//! Metrics of a process, each defined once: name, unit, stability and meaning. The node agent describes its own metrics in the same way
//! (`glake_agent::METRICS`).
//!
//! ```text
//!   device_metrics!, CopyStats ──► structs and their JSON ──► glake_stats_json, glake_copy_stats_json, …, Python's dicts
//!   (one line a metric)        ├─► glake_device_stats: ffi/abi/src/statistics.rs, gmlake.h
//!                              └─► docs/METRICS.md
//! ```
//!
//! `runtime/tests/generated.rs` writes the C structures and the page. A metric's name is a field: JSON keys outside of these structs are no
//! metrics.

mod copies;
mod device;
mod offload;

use std::time::Duration;

use glake_units::metrics::Metric;

pub use copies::{CopyStats, PathStats, RelayStats};
pub use device::{Constants, Counters, DeviceStats, Oversize, OwnStats, PoolStats, Stat};
pub use offload::{ItemStats, OffloadStats, PlanStats, SiteStats};

/// Group of metrics returned by one function.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Name of the C function that returns them as JSON.
    pub function: &'static str,
    /// Alternatives for each part of their keys; `{}` stands for the name of a metric.
    pub keys: &'static [&'static [&'static str]],
    /// Metrics of the group.
    pub metrics: &'static [Metric],
}

/// All metrics of a process.
pub const GROUPS: [Group; 12] = [
    Group { function: DEVICE, keys: &[&["{}"], device::POOLS, device::STAT], metrics: PoolStats::METRICS },
    Group { function: DEVICE, keys: &[&["{}"]], metrics: Counters::METRICS },
    Group { function: DEVICE, keys: &[&["{}"], device::STAT], metrics: Oversize::METRICS },
    Group { function: DEVICE, keys: &[&["{}"]], metrics: Constants::METRICS },
    Group { function: DEVICE, keys: &[&["glake"], &["{}"]], metrics: OwnStats::METRICS },
    Group { function: COPIES, keys: &[&["{}"]], metrics: CopyStats::METRICS },
    Group { function: COPIES, keys: &[&["relay_costs[]"], &["{}"]], metrics: RelayStats::METRICS },
    Group { function: COPIES, keys: &[&["paths[]"], &["{}"]], metrics: PathStats::METRICS },
    Group { function: OFFLOAD, keys: &[&["{}"]], metrics: OffloadStats::METRICS },
    Group { function: SITE, keys: &[&["{}"]], metrics: SiteStats::METRICS },
    Group { function: SITE, keys: &[&["plan"], &["{}"]], metrics: PlanStats::METRICS },
    Group {
        function: SITE,
        keys: &[&["plan"], &["kept", "offloaded", "recomputed"], &["{}"]],
        metrics: ItemStats::METRICS,
    },
];
const DEVICE: &str = "glake_stats_json";
const COPIES: &str = "glake_copy_stats_json";
const OFFLOAD: &str = "glake_offload_stats_json";
const SITE: &str = "glake_offload_site_json";

/// Defines structs of metrics: `Name { /// meaning  name: type, Unit, Stability; }`.
macro_rules! metrics {
    ($(
        $(#[$of:meta])*
        $name:ident { $( $(#[doc = $help:literal])* $field:ident: $type:ty, $unit:ident, $stability:ident; )* }
    )*) => {$(
        $(#[$of])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $name {
            $( $(#[doc = $help])* pub $field: $type, )*
        }

        impl $name {
            /// Returns the metrics as a JSON object.
            pub fn json(&self) -> serde_json::Value {
                serde_json::to_value(self).unwrap_or_default()
            }

            /// Descriptions of the metrics, in the order of the fields.
            pub const METRICS: &'static [glake_units::metrics::Metric] = &[$(glake_units::metrics::Metric {
                name: stringify!($field),
                kind: glake_units::metrics::Kind::Field(stringify!($type)),
                unit: glake_units::metrics::Unit::$unit,
                labels: &[],
                stability: glake_units::metrics::Stability::$stability,
                help: concat!($($help),*).trim_ascii_start(),
            }),*];
        }
    )*};
}
pub(crate) use metrics;

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use glake_device::DeviceId;
    use glake_transfer::PathStatistics;
    use glake_transfer::paths::{Direction, Way};
    use serde_json::Value;

    use super::*;

    /// Returns the full keys of a metric.
    fn keys(group: &Group, metric: &Metric) -> Vec<String> {
        group.keys.iter().fold(vec![String::new()], |keys, part| {
            let each = |key: &String| {
                let dot = if key.is_empty() { "" } else { "." };
                part.iter().map(move |part| format!("{key}{dot}{part}").replace("{}", metric.name)).collect()
            };
            keys.iter().flat_map(|key| -> Vec<String> { each(key) }).collect()
        })
    }

    fn keys_of(value: &Value, before: &str, found: &mut BTreeSet<String>) {
        for (key, inner) in value.as_object().into_iter().flatten() {
            found.insert(format!("{before}{key}"));
            keys_of(inner, &format!("{before}{key}."), found);
            let listed = inner.as_array().into_iter().flatten();
            listed.for_each(|object| keys_of(object, &format!("{before}{key}[]."), found));
        }
    }

    #[test]
    fn everything_that_is_told_is_a_metric() {
        let (relay, target) = (DeviceId(1), DeviceId(0));
        let path = PathStatistics {
            relay,
            target,
            direction: Direction::ToGpu,
            way: Way::Direct,
            bytes: glake_units::Bytes::ZERO,
            slices: 0,
            busy: Duration::ZERO,
            retries: 0,
            fenced: false,
        };
        let copies = CopyStats {
            paths: vec![(&path).into()],
            relay_costs: vec![RelayStats::default()],
            ..CopyStats::default()
        };
        let offload = OffloadStats::default().json();
        let site = SiteStats { plan: Some(PlanStats::default()), ..SiteStats::default() }.json();
        let device = DeviceStats::default().json();
        for (function, told) in [(DEVICE, device), (COPIES, copies.json()), (OFFLOAD, offload), (SITE, site)]
        {
            let mut found = BTreeSet::new();
            keys_of(&told, "", &mut found);
            let groups = GROUPS.iter().filter(|group| group.function == function);
            let known = groups.flat_map(|group| group.metrics.iter().flat_map(|metric| keys(group, metric)));
            assert_eq!(found, known.collect(), "{function}");
        }
        assert!(GROUPS.iter().flat_map(|group| group.metrics).all(|metric| !metric.help.is_empty()));
    }
}
