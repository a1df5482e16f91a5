//! Predicted time of a refill: its bytes divided by the rate of the links, plus the cost of mapping.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use glake_device::DeviceId;
use glake_tiers::Region;
use glake_transfer::paths::{Direction, PathGraph};
use glake_units::Bytes;

use super::super::device_registry::DeviceRegistry;

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
        let each = EXTENT + PEER * pool.peers_of(region.domain()).len();
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
