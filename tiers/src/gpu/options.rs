//! How a pool is made.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::CompletionEvents;
use glake_stitch::Settings;

use super::{Lease, MappingObserver};

/// How a pool is made.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// The core's knobs; `None`: the defaults for the device's memory.
    pub settings: Option<Settings>,
    /// The clock of the driver's completions; `None`: one of its own. Pools of one process share one: a pool whose memory
    /// peers may touch records events in their contexts too, so a `CaptureHold` of any pool must stop them all.
    pub completion_events: Option<Arc<CompletionEvents>>,
    /// Devices whose work may touch the pool's memory from the start: see [`super::GpuPool::enable_peer`].
    pub peers: Vec<DeviceId>,
    /// Whether other processes may be given the memory of the default domain, and of domains that name no properties: see
    /// [`super::GpuPool::export`]. Without effect where the driver exports no memory of the device.
    pub exportable: bool,
    /// Told of every range that is mapped and unmapped.
    pub observer: Option<Arc<dyn MappingObserver>>,
    /// What bounds how much memory is made; `None`: nothing but the limit.
    pub lease: Option<Arc<Lease>>,
}
