//! Memory of a GPU that no pool gave, as `cudaMalloc` does: peers touch it by kernels alone.

use std::sync::Arc;

use glake_device::owned::DeviceSet;
use glake_device::{Address, DeviceId};
use glake_sim::Simulator;
use glake_units::Bytes;

use super::place::Place;

#[derive(Debug)]
pub(super) struct Plain {
    sim: Arc<Simulator>,
    start: Address,
    pub(super) place: Place,
}

#[allow(clippy::unwrap_used)]
impl Plain {
    pub(super) fn new(sim: &Arc<Simulator>, device: DeviceId, size: Bytes) -> Plain {
        let start = sim.plain_alloc(device, size).unwrap();
        let place = Place::new(sim.span(start, size, DeviceSet::of(device)).unwrap());
        Plain { sim: sim.clone(), start, place }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // A refusal is seen in what is left at the end.
        let _ = self.sim.plain_free(self.start);
    }
}
