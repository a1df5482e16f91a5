//! Copy engine of a process: created at first use; its relays start in the background if they are enabled.
//!
//! ```text
//! first use ─► Engine (no context, no thread; every copy native)
//! relays on ─► thread of the engine: contexts, streams, slots ─► pools opened to them ─► the server's paths
//!                                          copies use one link until all of that is ready
//! all evicted ─► relays suspended: their contexts are destroyed ─► first refill: contexts created again, pools opened to them
//! ```
//!
//! Invariants: access for relays is decided when an extent is created, or on the engine's thread; a copy opens memory only if no device
//! could make it otherwise (`copies::opening`). A pool is opened to a relay by [`glake_tiers::PeerAccess::lend_to`]: its completion points
//! do not wait for the program's work there. Memory freed during an unfinished copy is kept until the copy is done, because the copy's lanes
//! are joined on its stream or reported to the clock.

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
use super::{ProcessError, Result};
use crate::calibrations::Calibrations;
use crate::config::{MultiPath, Transfer};

/// Minimum size of a copy over several links while no paths are known.
const LEAST: Bytes = Bytes::mib(1);
/// Default maximum number of threads for pageable memory; more did not make copies faster.
const THREADS: u32 = 8;
/// Pinned memory per thread for pageable copies.
const SLOTS: Bytes = Bytes::mib(4);

/// The engine, once created, and the candidate relays.
#[derive(Debug)]
pub(super) struct ProcessEngine {
    config: Transfer,
    /// Devices that are visible and not excluded from relaying.
    candidates: DeviceSet,
    /// Links between the devices; `None` for those of this machine, discovered on demand.
    model: Option<Topology>,
    engine: OnceLock<Arc<Engine>>,
    /// Whether relays were ever started.
    starting: Mutex<bool>,
    /// Whether relays are enabled now.
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
            // The topology is not that of the request.
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

    /// Returns the size below which every copy is native.
    #[inline]
    pub(super) fn least(&self) -> Bytes {
        Bytes::new(self.least.load(Ordering::Relaxed))
    }

    /// Returns the condition under which a copy between a pool and the host suits the engine. The first copy that is large enough creates
    /// the engine.
    #[inline]
    pub(super) fn benefit(&self, of_gpu: PointerKind, direction: Direction, size: Bytes) -> Benefit {
        match (self.made(), of_gpu) {
            (Some(engine), PointerKind::Device { device, .. }) => engine.benefit(device, direction, size),
            _ => self.benefit_of_other(size),
        }
    }

    /// Returns the condition for memory outside pools, as [`ProcessEngine::benefit`] does.
    #[inline]
    pub(super) fn benefit_of_other(&self, size: Bytes) -> Benefit {
        self.made().map_or(Benefit::Anything, |engine| engine.benefit_of_other(size))
    }

    /// Returns the relays to which a new pool of a device is opened. Excluded are suspended relays, whose contexts this would create, and
    /// GPUs on which the program has a context of its own, unless GPUs are shared.
    pub(super) fn awake_relays_of(&self, device: DeviceId, driver: &dyn Driver) -> DeviceSet {
        let suspended = self.made().map_or(DeviceSet::EMPTY, |engine| engine.suspended());
        let relays = self.relays_of(device).without(suspended);
        // An error is no permission.
        let open =
            |relay: &DeviceId| self.config.shared_gpus || matches!(driver.has_context(*relay), Ok(false));
        relays.iter().filter(open).collect()
    }

    /// Returns the relays for copies of a device's memory, including suspended ones.
    pub(super) fn relays_of(&self, device: DeviceId) -> DeviceSet {
        match self.on.load(Ordering::Acquire) {
            true => self.candidates.without(DeviceSet::of(device)),
            false => DeviceSet::EMPTY,
        }
    }

    /// Returns the engine if it was created.
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

    /// Starts or resumes the relays.
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

    /// Suspends relays whose devices have no pool, in the background, to free their contexts.
    pub(super) fn suspend_relays(&self, devices: &[DeviceMemory]) {
        let Some(engine) = self.made() else { return };
        let used: DeviceSet =
            devices.iter().filter(|memory| memory.started().is_some()).map(DeviceMemory::id).collect();
        engine.suspend(self.candidates.without(used));
    }

    /// Resumes suspended relays in the background.
    pub(super) fn resume_relays(&self, devices: &Arc<[DeviceMemory]>) {
        let Some(engine) = self.made() else { return };
        let (devices, relays) =
            (devices.clone(), if self.is_on() { self.candidates } else { DeviceSet::EMPTY });
        // Pools created meanwhile are not open to them.
        let woken = engine.resume(move |_| devices.iter().for_each(|memory| memory.open_to(relays)));
        if let Err(error) = woken {
            tracing::warn!(target: "glake::copies", %error, "relays are not made ready again: copies take one link");
        }
    }

    /// Enables or disables the links of other GPUs for copies. The relays start in the background; until they are ready a copy uses one
    /// link and does not wait.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the configuration forbids it; [`ProcessError::Transfer`] if no thread can be created.
    pub(super) fn multi_path(
        &self,
        on: bool,
        completion_events: &Arc<CompletionEvents>,
        pinning: &Arc<Pinning>,
        devices: &Arc<[DeviceMemory]>,
    ) -> Result<()> {
        if on && !self.config.allows_relays() {
            let configured = self.config.multi_path;
            let ranks = self.config.local_ranks.filter(|_| configured != MultiPath::Never);
            let ranks = ranks.map_or(String::new(), |ranks| {
                format!(", and {ranks} processes of this program run on the machine")
            });
            return Err(ProcessError::invalid(format!(
                "copies cannot use other GPUs' links: transfer.multi_path is {configured}{ranks}; set transfer.multi_path = \"always\" to \
                 use them all the same"
            )));
        }
        self.on.store(on, Ordering::Release);
        if on {
            let engine = self.make(completion_events, pinning)?;
            return self.start(engine, devices);
        }
        if let Some(engine) = self.made() {
            engine.set_relays(DeviceSet::EMPTY);
        }
        Ok(())
    }

    /// Creates the engine unless it exists; its relays start with it if they are enabled.
    #[cold]
    pub(super) fn get_or_make(
        &self,
        completion_events: &Arc<CompletionEvents>,
        pinning: &Arc<Pinning>,
        devices: &Arc<[DeviceMemory]>,
    ) -> Result<&Arc<Engine>> {
        let engine = self.make(completion_events, pinning)?;
        if self.is_on() {
            self.start(engine, devices)?;
        }
        Ok(engine)
    }

    /// Returns the links of this server.
    pub(super) fn topology(&self, devices: &[DeviceMemory]) -> Topology {
        self.model.clone().unwrap_or_else(|| topology_of(devices))
    }

    /// Returns the configured or assumed bandwidths, for use before an engine has measured them.
    pub(super) fn assumed_paths(&self, devices: &[DeviceMemory]) -> PathGraph {
        calibrations_of(devices, self.model.clone(), self.config.calibrations.as_deref()).graph()
    }
}

/// Returns the stored calibrations of the server's paths.
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
