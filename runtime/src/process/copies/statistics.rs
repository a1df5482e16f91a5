//! What copies did, as text.

use glake_device::owned::DeviceSet;
use glake_transfer::{PathStatistics, RelayCost};
use serde_json::{Value, json};

use super::Copies;

impl Copies {
    /// What copies did, and what their relays cost; see `glake_copy_stats_json`.
    pub fn statistics(&self) -> Value {
        let engine = self.registry.engine.made();
        let done = engine.map(|engine| engine.statistics()).unwrap_or_default();
        let (native_copies, native_bytes) = self.native.get();
        let path = |path: &PathStatistics| {
            json!({
                "relay": path.relay.0,
                "target": path.target.0,
                "direction": path.direction,
                "way": path.way,
                "bytes": path.bytes.get(),
                "slices": path.slices,
                "busy_us": u64::try_from(path.busy.as_micros()).unwrap_or(u64::MAX),
                "retries": path.retries,
                "fenced": path.fenced,
            })
        };
        let cost = |cost: &RelayCost| json!({ "relay": cost.relay.0, "context_bytes": cost.context.get(), "slot_bytes": cost.slots.get() });
        let costs = engine.map(|engine| engine.relay_cost()).unwrap_or_default();
        let relays = engine.map_or(DeviceSet::EMPTY, |engine| engine.relays());
        json!({
            "multi_path": self.registry.engine.is_on(),
            "relays": relays.iter().map(|relay| relay.0).collect::<Vec<u32>>(),
            "ready": !relays.is_empty() && engine.is_some_and(|engine| !engine.graph().paths().links.is_empty()),
            "relay_costs": costs.iter().map(cost).collect::<Vec<Value>>(),
            "calibrated": engine.is_some_and(|engine| engine.graph().is_calibrated()),
            "break_even": self.registry.engine.least().get(),
            "native_copies": native_copies + done.native_copies,
            "native_bytes": native_bytes + done.native_bytes.get(),
            "split_copies": done.split_copies,
            "lost_copies": done.lost_copies,
            "paths": done.paths.iter().map(path).collect::<Vec<Value>>(),
        })
    }
}
