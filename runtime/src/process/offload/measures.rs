//! What plans are made from: what the pool holds and the GPU shows beside it, what links give, what the host has room for.

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

/// What a link is taken to carry where nothing is known of it.
pub(super) const LINK: Bandwidth = Bandwidth(50.0);
/// What is left of a link's rate while it carries both ways, where nothing was measured.
const AT_ONCE: f64 = 0.92;
/// So much has to have been moved before what it took counts.
const ENOUGH: Bytes = Bytes::mib(64);
/// What is beside the pool is told in steps, so that plans need not follow every module that the driver loads.
const STEP: u64 = 16 << 20;

/// What is measured of a process's devices.
#[derive(Debug)]
pub(super) struct Measures {
    registry: Arc<DeviceRegistry>,
    nvml: OnceLock<Option<Nvml>>,
    paths: OnceLock<PathGraph>,
    /// Sites that sample, with the most that each has not been told yet.
    samples: Mutex<FxHashMap<(DeviceId, u64), Bytes>>,
    /// The budgets of sites for their pools.
    budgets: Mutex<FxHashMap<u64, (DeviceId, Bytes)>>,
    /// What queues had moved when rates were taken from it last, and the rates.
    moved: Mutex<FxHashMap<(DeviceId, bool), (Moved, Bandwidth)>>,
}

impl Measures {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Measures {
        let (samples, budgets, moved) = Default::default();
        let (nvml, paths) = (OnceLock::new(), OnceLock::new());
        Measures { registry: registry.clone(), nvml, paths, samples, budgets, moved }
    }

    /// The pool of a device, if it has started.
    pub(super) fn pool(&self, device: DeviceId) -> Option<&Arc<GpuPool>> {
        self.memory(device)?.started().map(|started| &started.pool)
    }

    /// How often streams waited for memory of a device that something else still used.
    pub(super) fn waits_for_memory(&self, device: DeviceId) -> u64 {
        self.pool(device).map_or(0, |pool| pool.report().gpu_waits_made())
    }

    fn memory(&self, device: DeviceId) -> Option<&DeviceMemory> {
        self.registry.device(device.0.into()).ok()
    }

    /// What a pool holds now, and held at most since the same site asked last.
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

    /// What the GPU shows of this process beside the pool: contexts, modules, memory that others took. Where it tells of no processes, as in
    /// some containers, all that is taken of the GPU counts as this one's.
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

    /// What the links of a device give, by what its queues have moved where that is enough; and what they would with those of other GPUs.
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

    /// What a host pool may still pin, beside what it has pinned for what is offloaded.
    pub(super) fn host_room(left: Bytes, own: Bytes) -> Bytes {
        let room = AvailableMemory::of_host().least().map_or(left, |least| least.min(left));
        room.saturating_add(own)
    }

    /// What a site lets its pool reserve; the least of all sites counts.
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
