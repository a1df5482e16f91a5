//! The copy engine of a process: made at first use, its relays started in the background where they are on.
//!
//! ```text
//! first use ─► Engine (no context, no thread; every copy native)
//! relays on ─► thread of the engine: contexts, streams, slots ─► pools opened to them ─► the server's paths
//!                                          copies go over one link until all of that is there
//! all is evicted ─► relays suspended: their contexts go ─► something comes back: made ready again, pools opened to them
//! ```
//!
//! Invariants: what relays may touch is decided when an extent is made, or on the engine's thread; a copy opens memory only where nobody
//! could make it else (`copies::opening`). A pool is opened to a relay by [`glake_tiers::GpuPool::lend_to`]: its completion points wait for no work of the program there.
//! What is freed under an unfinished copy stays until that is done, because its lanes are joined on the copy's stream, or told of to
//! the clock.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::topology::Topology;
use glake_device::{DeviceId, DeviceInfo, Driver, PointerKind};
use glake_tiers::Pinning;
use glake_transfer::paths::{Direction, PathGraph};
use glake_transfer::{Benefit, Engine, EngineOptions};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::device::DeviceMemory;
use super::device_registry::DeviceRegistry;
use super::{ProcessError, Result};
use crate::calibrations::Calibrations;
use crate::config::{MultiPath, Transfer};

/// The least that goes over several links as long as no paths are known.
const LEAST: Bytes = Bytes::mib(1);
/// Threads for pageable memory at most, where nobody says: more of them no longer made copies faster.
const THREADS: u32 = 8;
/// Pinned memory for each of them.
const SLOTS: Bytes = Bytes::mib(4);

/// The engine, once it is made, and who may be its relays.
#[derive(Debug)]
pub(super) struct ProcessEngine {
    config: Transfer,
    /// Visible and not excluded.
    candidates: DeviceSet,
    /// The links; `None`: those of this machine, found when they are needed.
    model: Option<Topology>,
    engine: OnceLock<Arc<Engine>>,
    /// Whether relays were ever started.
    starting: Mutex<bool>,
    /// Whether relays are wanted now.
    on: AtomicBool,
    least: Arc<AtomicU64>,
}

impl ProcessEngine {
    pub(super) fn new(config: Transfer, devices: &[DeviceInfo], model: Option<Topology>) -> Self {
        for named in &config.exclude {
            if !devices.iter().any(|info| named.is(info.id.0, info.pci.as_deref())) {
                tracing::warn!(target: "glake::copies", gpu = %named, "transfer.exclude names a GPU that is not visible");
            }
        }
        let is_off = config.multi_path == MultiPath::FromStart && !config.starts_relays();
        if let (true, Some(ranks)) = (is_off, config.local_ranks) {
            // It is not what was asked for.
            tracing::warn!(
                target: "glake::copies",
                ranks,
                "copies take one link each, for this program's processes share them; transfer.multi_path = \"always\" overrules this"
            );
        }
        let excluded =
            |info: &&DeviceInfo| !config.exclude.iter().any(|named| named.is(info.id.0, info.pci.as_deref()));
        ProcessEngine {
            candidates: devices.iter().filter(excluded).map(|info| info.id).collect(),
            model,
            engine: OnceLock::new(),
            starting: Mutex::new(false),
            on: AtomicBool::new(config.starts_relays()),
            least: Arc::new(AtomicU64::new(LEAST.get())),
            config,
        }
    }

    /// Smaller copies are native, whatever they are between.
    #[inline]
    pub(super) fn least(&self) -> Bytes {
        Bytes::new(self.least.load(Ordering::Relaxed))
    }

    /// What a copy between a pool and the host has to be for the engine, which is made for the first that is large enough.
    #[inline]
    pub(super) fn benefit(&self, of_gpu: PointerKind, direction: Direction, size: Bytes) -> Benefit {
        match (self.made(), of_gpu) {
            (Some(engine), PointerKind::Device { device, .. }) => engine.benefit(device, direction, size),
            _ => self.benefit_of_other(size),
        }
    }

    /// As above, of memory that is no pool's.
    #[inline]
    pub(super) fn benefit_of_other(&self, size: Bytes) -> Benefit {
        self.made().map_or(Benefit::Anything, |engine| engine.benefit_of_other(size))
    }

    /// What a pool of a device is opened to when it is made: not to suspended relays, which would make their contexts.
    /// Nor to GPUs that the program has to itself.
    pub(super) fn awake_relays_of(&self, device: DeviceId, driver: &dyn Driver) -> DeviceSet {
        let suspended = self.made().map_or(DeviceSet::EMPTY, |engine| engine.suspended());
        let relays = self.relays_of(device).without(suspended);
        // An answer that says nothing is no permission.
        let open =
            |relay: &DeviceId| self.config.shared_gpus || matches!(driver.has_context(*relay), Ok(false));
        relays.iter().filter(open).collect()
    }

    /// The relays that copies of a device's memory may go over, those that rest too.
    pub(super) fn relays_of(&self, device: DeviceId) -> DeviceSet {
        match self.on.load(Ordering::Acquire) {
            true => self.candidates.without(DeviceSet::of(device)),
            false => DeviceSet::EMPTY,
        }
    }

    /// The engine, if it was made.
    #[inline]
    pub(super) fn made(&self) -> Option<&Arc<Engine>> {
        self.engine.get()
    }

    pub(super) fn config(&self) -> &Transfer {
        &self.config
    }

    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    fn make(
        &self,
        completion_events: &Arc<CompletionEvents>,
        pinning: &Arc<Pinning>,
    ) -> Result<&Arc<Engine>> {
        let _starting = self.starting.lock();
        if let Some(engine) = self.engine.get() {
            return Ok(engine);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cores = u32::try_from(cores).unwrap_or(u32::MAX);
        let threads = self.config.pageable_threads.unwrap_or((cores / 2).clamp(1, THREADS));
        let options = EngineOptions {
            relays: self.candidates,
            pageable_threads: threads as usize,
            pageable_slots: Bytes::new(SLOTS.get() * u64::from(threads)),
            graphs: self.config.graphs,
            shared_gpus: self.config.shared_gpus,
            ..EngineOptions::default()
        };
        let engine = Engine::new(completion_events.clone(), PathGraph::empty(), options)?;
        engine.ignore_while_pinning(pinning);
        Ok(self.engine.get_or_init(|| engine))
    }

    /// Starts the relays, or takes them up again.
    fn start(&self, engine: &Arc<Engine>, devices: &Arc<[DeviceMemory]>) -> Result<()> {
        let mut started = self.starting.lock();
        engine.set_relays(self.candidates);
        if *started {
            drop(started);
            self.resume_relays(devices);
            return Ok(());
        }
        let (devices, candidates, model) = (devices.clone(), self.candidates, self.model.clone());
        let (least, folder) = (self.least.clone(), self.config.calibrations.clone());
        engine.start_relays(move |engine| {
            for memory in devices.iter() {
                memory.open_to(candidates);
            }
            let calibrations = calibrations_of(&devices, model, folder.as_deref());
            let graph = calibrations.graph();
            least.store(least_of(&graph).get(), Ordering::Relaxed);
            engine.replace_graph(graph);
            engine.when_stale(move |_| {
                if let Err(error) = calibrations.drop_kept() {
                    tracing::warn!(target: "glake::copies", %error, "a calibration that no longer holds is kept");
                }
            });
            tell(engine);
        })?;
        *started = true;
        Ok(())
    }

    /// Relays of no pool's device give back what they cost, in the background.
    pub(super) fn suspend_relays(&self, devices: &[DeviceMemory]) {
        let Some(engine) = self.made() else { return };
        let used: DeviceSet =
            devices.iter().filter(|memory| memory.started().is_some()).map(DeviceMemory::id).collect();
        engine.suspend(self.candidates.without(used));
    }

    /// Relays are made ready again in the background.
    pub(super) fn resume_relays(&self, devices: &Arc<[DeviceMemory]>) {
        let Some(engine) = self.made() else { return };
        let (devices, relays) =
            (devices.clone(), if self.is_on() { self.candidates } else { DeviceSet::EMPTY });
        // Pools that were made meanwhile are not open to them.
        let woken = engine.resume(move |_| devices.iter().for_each(|memory| memory.open_to(relays)));
        if let Err(error) = woken {
            tracing::warn!(target: "glake::copies", %error, "relays are not made ready again: copies take one link");
        }
    }
}

impl DeviceRegistry {
    /// Lets copies use the links of other GPUs, or no longer. They are made ready in the background: a copy takes one link
    /// until then, and no copy waits for it.
    ///
    /// # Errors
    /// [`ProcessError::NoRelays`]; [`ProcessError::Transfer`] where there is no thread.
    pub(super) fn multi_path(&self, on: bool) -> Result<()> {
        let config = self.engine.config();
        if on && !config.allows_relays() {
            let configured = config.multi_path;
            let ranks = config.local_ranks.filter(|_| configured != MultiPath::Never);
            return Err(ProcessError::NoRelays { configured, ranks });
        }
        self.engine.on.store(on, Ordering::Release);
        if on {
            let engine = self.engine.make(&self.completion_events, &self.pinning)?;
            return self.engine.start(engine, &self.devices);
        }
        if let Some(engine) = self.engine.made() {
            engine.set_relays(DeviceSet::EMPTY);
        }
        Ok(())
    }

    /// The engine, made now if it was not; its relays start with it where they are on.
    #[inline]
    pub(super) fn engine(&self) -> Result<&Arc<Engine>> {
        match self.engine.made() {
            Some(engine) => Ok(engine),
            None => self.make_engine(),
        }
    }

    #[cold]
    fn make_engine(&self) -> Result<&Arc<Engine>> {
        let engine = self.engine.make(&self.completion_events, &self.pinning)?;
        if self.engine.is_on() {
            self.engine.start(engine, &self.devices)?;
        }
        Ok(engine)
    }

    /// The links of this server.
    pub(super) fn topology(&self) -> Topology {
        self.engine.model.clone().unwrap_or_else(|| topology_of(&self.devices))
    }

    /// What the links are known or assumed to give, where no engine has learned it.
    pub(super) fn assumed_paths(&self) -> PathGraph {
        Calibrations::of(&self.topology(), self.engine.config.calibrations.as_deref()).graph()
    }
}

/// What is known of the server's paths.
fn calibrations_of(devices: &[DeviceMemory], model: Option<Topology>, folder: Option<&Path>) -> Calibrations {
    Calibrations::of(&model.unwrap_or_else(|| topology_of(devices)), folder)
}

fn topology_of(devices: &[DeviceMemory]) -> Topology {
    let devices: Vec<DeviceInfo> = devices.iter().map(|memory| memory.info.clone()).collect();
    Topology::of_machine(&devices)
}

fn least_of(graph: &PathGraph) -> Bytes {
    graph.paths().links.iter().map(|link| link.break_even).min().unwrap_or(LEAST)
}

fn tell(engine: &Engine) {
    let costs = engine.relay_cost();
    let gpus: Vec<u32> = engine.relays().iter().map(|relay| relay.0).collect();
    let contexts: Bytes = costs.iter().map(|cost| cost.context).sum();
    let slots: Bytes = costs.iter().map(|cost| cost.slots).sum();
    tracing::info!(
        target: "glake::copies",
        relays = ?gpus,
        %contexts,
        %slots,
        "copies use the links of these GPUs, at the cost of this memory of theirs"
    );
}
