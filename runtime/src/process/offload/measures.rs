//! Measurements for plans: bytes held by the pool and elsewhere on the GPU, rates of links, and room on the host.

use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_meter::{Meter as _, Nvml};
use glake_offload::Links;
use glake_tiers::{AvailableMemory, GpuPool};
use glake_transfer::paths::{Direction, PathGraph};
use glake_units::{Bandwidth, Bytes};
use rustc_hash::FxHashMap;

use super::super::device::DeviceMemory;
use super::super::device_registry::DeviceRegistry;
use super::queue::{Moved, Queues};
use crate::sync::Mutex;

/// Assumed rate of a link without measurements.
pub(super) const LINK: Bandwidth = Bandwidth(50.0);
/// Assumed fraction of a link's rate while it carries both directions.
const AT_ONCE: f64 = 0.92;
/// Minimum bytes moved before a measured rate counts.
const ENOUGH: Bytes = Bytes::mib(64);
/// Granularity of the memory outside the pool, so that plans do not change with every module that the driver loads.
const STEP: u64 = 16 << 20;

/// Measurements of a process's devices.
#[derive(Debug)]
pub(super) struct Measures {
    registry: Arc<DeviceRegistry>,
    nvml: OnceLock<Option<Nvml>>,
    paths: OnceLock<PathGraph>,
    /// Sampling sites with the largest sample that each has not read yet.
    samples: Mutex<FxHashMap<(DeviceId, u64), Bytes>>,
    /// Budgets of sites for their pools.
    budgets: Mutex<FxHashMap<u64, (DeviceId, Bytes)>>,
    /// Bytes moved by each queue when its rate was last computed, and the rate.
    moved: Mutex<FxHashMap<(DeviceId, bool), (Moved, Bandwidth)>>,
}

impl Measures {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Measures {
        let (samples, budgets, moved) = Default::default();
        let (nvml, paths) = (OnceLock::new(), OnceLock::new());
        Measures { registry: registry.clone(), nvml, paths, samples, budgets, moved }
    }

    /// Returns the pool of a device if it has started.
    pub(super) fn pool(&self, device: DeviceId) -> Option<&Arc<GpuPool>> {
        self.memory(device)?.started().map(|started| &started.pool)
    }

    /// Returns the number of stream waits for memory that other work on a device still used.
    pub(super) fn waits_for_memory(&self, device: DeviceId) -> u64 {
        self.pool(device).map_or(0, |pool| pool.report().gpu_waits_made())
    }

    fn memory(&self, device: DeviceId) -> Option<&DeviceMemory> {
        self.registry.device(device.0.into()).ok()
    }

    /// Returns the bytes that a pool holds now, and the maximum since the same site's last call.
    pub(super) fn sample(&self, device: DeviceId, site: u64) -> Option<(Bytes, Bytes)> {
        let pool = self.pool(device)?;
        let mut samples = self.samples.lock();
        let (now, most) = pool.take_most();
        samples.entry((device, site)).or_default();
        for ((of, _), waiting) in samples.iter_mut() {
            if *of == device {
                *waiting = most.max(*waiting);
            }
        }
        samples.insert((device, site), now).map(|most| (now, most))
    }

    /// Returns the process's memory on a GPU outside the pool: contexts, modules and other allocators. If the driver lists no processes, as
    /// in some containers, all memory in use on the GPU counts as this process's.
    pub(super) fn beside(&self, device: DeviceId) -> Bytes {
        let Some(memory) = self.memory(device) else { return Bytes::ZERO };
        let reserved = memory.started().map_or(Bytes::ZERO, |started| started.pool.reserved());
        let shown = self.shown(memory).or_else(|| {
            let info = self.registry.completion_events.driver().memory_info(device).ok()?;
            Some(info.total.saturating_sub(info.free))
        });
        let beside = shown.unwrap_or_default().saturating_sub(reserved).get();
        Bytes::new(beside.div_ceil(STEP) * STEP)
    }

    fn shown(&self, memory: &DeviceMemory) -> Option<Bytes> {
        let pci = memory.info.pci.as_deref()?;
        let nvml = self.nvml.get_or_init(Nvml::open).as_ref()?;
        let shown = nvml.read(pci).ok()?.of_process(std::process::id());
        (!shown.is_zero()).then_some(shown)
    }

    /// Returns the rates of a device's links, measured where enough was moved, and the rates together with the links of other GPUs.
    pub(super) fn links(&self, device: DeviceId, queues: &Queues) -> (Links, Links) {
        let graph = self.paths.get_or_init(|| self.registry.assumed_paths());
        let known = |direction| {
            let own = graph.rates(device, direction).map(|rate| rate.rate).next();
            let own = own.filter(|rate| rate.0 > 0.0).unwrap_or(LINK);
            (own, Bandwidth(graph.together(device, direction).0.max(own.0)))
        };
        let [out, into] = [Direction::FromGpu, Direction::ToGpu].map(known);
        let is_on = self.registry.engine.is_on();
        let live = |direction, (own, all): (Bandwidth, Bandwidth)| {
            self.live(device, direction, queues).unwrap_or(if is_on { all } else { own })
        };
        let (live_out, live_into) = (live(Direction::FromGpu, out), live(Direction::ToGpu, into));
        let links = |out: Bandwidth, into: Bandwidth| {
            Links::new(out, into).at_once(Bandwidth(out.0 * AT_ONCE), Bandwidth(into.0 * AT_ONCE))
        };
        (links(live_out, live_into), links(out.1, into.1))
    }

    fn live(&self, device: DeviceId, direction: Direction, queues: &Queues) -> Option<Bandwidth> {
        let now = queues.moved_of(device, direction)?;
        let mut moved = self.moved.lock();
        let key = (device, direction == Direction::ToGpu);
        let before = moved.get(&key).copied();
        let since = before.map_or(Moved::default(), |(moved, _)| moved);
        let bytes = now.timed.saturating_sub(since.timed);
        let busy = now.busy.saturating_sub(since.busy);
        if bytes < ENOUGH || busy.is_zero() {
            return before.map(|(_, rate)| rate);
        }
        #[allow(clippy::cast_precision_loss)] // a rate
        let rate = Bandwidth(bytes.get() as f64 / busy.as_secs_f64() / 1e9);
        moved.insert(key, (now, rate));
        Some(rate)
    }

    /// Returns the bytes that a host pool may still pin, plus the bytes already pinned for offloading.
    pub(super) fn host_room(left: Bytes, own: Bytes) -> Bytes {
        let room = AvailableMemory::of_host().least().map_or(left, |least| least.min(left));
        room.saturating_add(own)
    }

    /// Sets the budget of a site for its pool; the smallest of all sites applies.
    pub(super) fn set_budget(&self, site: u64, budget: Option<(DeviceId, Bytes)>) {
        let mut budgets = self.budgets.lock();
        let before = match budget {
            Some(budget) => budgets.insert(site, budget),
            None => {
                self.samples.lock().retain(|(_, of), _| *of != site);
                budgets.remove(&site)
            }
        };
        for device in [before, budget].into_iter().flatten().map(|(device, _)| device) {
            let least = budgets.values().filter(|(of, _)| *of == device).map(|(_, budget)| *budget).min();
            if let Some(pool) = self.pool(device) {
                pool.set_budget(least);
            }
        }
    }
}
