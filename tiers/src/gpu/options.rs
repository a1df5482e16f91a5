//! Options of a pool.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::CompletionEvents;
use glake_stitch::Settings;

use super::{Lease, MappingObserver};

/// Options of a pool at its creation.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// Settings of the allocator; `None`: the defaults for the device's memory.
    pub settings: Option<Settings>,
    /// Source of completion events; `None`: the pool creates its own. The pools of one process should share one: a pool that peers access
    /// records events in their contexts too, so that a `CaptureHold` must stop all pools.
    pub completion_events: Option<Arc<CompletionEvents>>,
    /// Devices whose work may access the pool's memory from the start: see [`super::GpuPool::enable_peer`].
    pub peers: Vec<DeviceId>,
    /// Whether memory of the default domain, and of domains without their own properties, can be exported to other processes: see
    /// [`super::GpuPool::export`]. Without effect if the driver cannot export memory of the device.
    pub exportable: bool,
    /// Observer of mappings; `None`: there is none.
    pub observer: Option<Arc<dyn MappingObserver>>,
    /// Lease that bounds physical memory; `None`: only the limit applies.
    pub lease: Option<Arc<Lease>>,
}
