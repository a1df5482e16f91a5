//! Devices of a process: their pools and the settings with which they start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_device::owned::CompletionEvents;
use glake_device::topology::Topology;
use glake_device::{Address, DeviceId, DeviceInfo, Driver};
use glake_tiers::{Lease, LeaseOptions, LiveBlock, Pinning};
use glake_transfer::Engine;
use glake_transfer::paths::PathGraph;

use super::device::{DeviceMemory, Started};
use super::engine::ProcessEngine;
use super::observers::Observers;
use super::private::FixedPools;
use super::{Found, ProcessError, Result};
use crate::config;

/// An opened driver and the facts known about its devices.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) devices: Vec<DeviceInfo>,
    /// Links between the devices; `None` for those of this machine.
    pub(super) links: Option<Topology>,
    /// Maximum number of mappings of a device.
    pub(super) mappings: u64,
}

/// Devices of a process and the settings with which their pools start.
#[derive(Debug)]
pub(super) struct DeviceRegistry {
    /// Devices, shared with the engine's thread, which opens pools to relays.
    pub(super) devices: Arc<[DeviceMemory]>,
    /// Completion clock shared by all pools, because a capture on any device holds it.
    pub(super) completion_events: Arc<CompletionEvents>,
    pub(super) engine: ProcessEngine,
    /// Pinning in progress, reported by the pools of host memory; the engine ignores timings meanwhile.
    pub(super) pinning: Arc<Pinning>,
    pub(super) config: config::Pool,
    /// Maximum number of mappings of a device.
    pub(super) mappings: u64,
    /// Private pools whose memory stays, on all devices.
    pub(super) fixed_pools: Arc<FixedPools>,
    pub(super) observers: Arc<Observers>,
    /// Maximum wait of a refill for the next grant.
    pub(super) refill_timeout: Duration,
    /// Set at exit: no library thread may call the driver, and bookkeeping stops.
    stopped: AtomicBool,
}

impl DeviceRegistry {
    pub(super) fn new(
        opened: Opened,
        observers: Arc<Observers>,
        config: config::Pool,
        transfer: config::Transfer,
        lease: &config::Lease,
    ) -> DeviceRegistry {
        let Opened { driver, devices, links, mappings } = opened;
        let engine = ProcessEngine::new(transfer, &devices, links);
        let leased = |device: DeviceId| {
            let grow_timeout = Duration::from_millis(lease.grow_timeout_ms);
            let observer = Some(observers.clone() as _);
            Lease::new(device, LeaseOptions { grow_timeout, growth: lease.growth, observer })
        };
        let fixed_pools = Arc::<FixedPools>::default();
        let memory = |info: DeviceInfo| {
            let lease = leased(info.id);
            DeviceMemory::new(info, lease, fixed_pools.clone())
        };
        let devices: Arc<[DeviceMemory]> = devices.into_iter().map(memory).collect();
        observers.counters.set_devices(devices.iter().map(|of| (of.id(), of.gpu(), of.info.memory)));
        let completion_events = CompletionEvents::new(driver);
        let activity = observers.activity.clone();
        completion_events.watch_holds(move |captures| activity.captures(captures));
        DeviceRegistry {
            refill_timeout: Duration::from_millis(lease.refill_timeout_ms),
            observers,
            fixed_pools: fixed_pools.clone(),
            devices,
            completion_events,
            engine,
            pinning: Arc::default(),
            config,
            mappings,
            stopped: AtomicBool::new(false),
        }
    }

    /// Forbids driver calls by library threads from now on.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.devices.iter().for_each(|memory| memory.lease.stop());
    }

    /// Returns whether library threads may no longer call the driver.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Returns the live block that contains an address.
    pub(super) fn find(&self, address: Address) -> Option<Found> {
        self.devices.iter().find_map(|memory| {
            let LiveBlock { address, size, requested, .. } = memory.started()?.pool.find(address)?;
            Some(Found { device: memory.id(), address, size, requested })
        })
    }

    #[inline]
    pub(super) fn device(&self, device: i64) -> Result<&DeviceMemory> {
        // Builds the error only if there is no such device.
        match usize::try_from(device).ok().and_then(|index| self.devices.get(index)) {
            Some(found) => Ok(found),
            None => Err(ProcessError::NoSuchDevice { device, count: self.devices.len() }),
        }
    }

    /// Returns a device's pool, starting it if needed.
    #[inline]
    pub(super) fn started<'a>(&self, memory: &'a DeviceMemory) -> Result<&'a Started> {
        match memory.started() {
            Some(started) => Ok(started),
            None => self.start(memory),
        }
    }

    #[cold]
    fn start<'a>(&self, memory: &'a DeviceMemory) -> Result<&'a Started> {
        let others = self.devices.iter().map(DeviceMemory::id).filter(|id| *id != memory.id());
        let peers: Vec<DeviceId> = if self.config.peer_access { others.collect() } else { Vec::new() };
        let relays = || self.engine.awake_relays_of(memory.id(), &**self.completion_events.driver());
        // Under no lock: it may wait for the agent.
        self.observers.agent().pool_starts(memory.id(), &self.observers);
        let started = memory.start(
            &self.completion_events,
            &self.config,
            self.mappings,
            peers,
            relays,
            &self.observers,
        )?;
        self.observers.agent().changed();
        Ok(started)
    }

    /// Enables or disables the links of other GPUs for copies, as [`ProcessEngine::multi_path`] does.
    pub(super) fn multi_path(&self, on: bool) -> Result<()> {
        self.engine.multi_path(on, &self.completion_events, &self.pinning, &self.devices)?;
        self.engine.made().into_iter().for_each(|engine| self.observers.counters.add_engine(engine));
        Ok(())
    }

    /// Returns the engine, creating it if needed; its relays start with it if they are enabled.
    #[inline]
    pub(super) fn engine(&self) -> Result<&Arc<Engine>> {
        match self.engine.made() {
            Some(engine) => Ok(engine),
            None => {
                let engine =
                    self.engine.get_or_make(&self.completion_events, &self.pinning, &self.devices)?;
                self.observers.counters.add_engine(engine);
                Ok(engine)
            }
        }
    }

    /// Returns the configured or assumed bandwidths, for use before an engine has measured them.
    pub(super) fn assumed_paths(&self) -> PathGraph {
        self.engine.assumed_paths(&self.devices)
    }
}
