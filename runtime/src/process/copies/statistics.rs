//! Statistics of copies and relays.

use glake_device::owned::DeviceSet;

use super::Copies;
use crate::metrics::CopyStats;

impl Copies {
    /// Returns the statistics of copies and the cost of their relays.
    pub fn statistics(&self) -> CopyStats {
        let engine = self.registry.engine.made();
        let done = engine.map(|engine| engine.statistics()).unwrap_or_default();
        let (native_copies, native_bytes) = self.native.get();
        let relays = engine.map_or(DeviceSet::EMPTY, |engine| engine.relays());
        let costs = engine.iter().flat_map(|engine| engine.relay_cost());
        CopyStats {
            multi_path: self.registry.engine.is_on(),
            relays: relays.iter().map(|relay| relay.0).collect(),
            ready: !relays.is_empty()
                && engine.is_some_and(|engine| !engine.graph().paths().links.is_empty()),
            relay_costs: costs.map(|cost| (&cost).into()).collect(),
            calibrated: engine.is_some_and(|engine| engine.graph().is_calibrated()),
            break_even: self.registry.engine.least().get(),
            native_copies: native_copies + done.native_copies,
            native_bytes: native_bytes + done.native_bytes.get(),
            split_copies: done.split_copies,
            lost_copies: done.lost_copies,
            paths: done.paths.iter().map(Into::into).collect(),
        }
    }
}
