//! The devices of a process: their pools, and what starting one takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_device::owned::CompletionEvents;
use glake_device::topology::Topology;
use glake_device::{Address, DeviceId, DeviceInfo, Driver};
use glake_tiers::{Lease, LeaseOptions, LiveBlock, Pinning};

use super::agent::Port;
use super::device::{DeviceMemory, Started};
use super::engine::ProcessEngine;
use super::observers::Observers;
use super::{Found, ProcessError, Result};
use crate::config;

/// A driver, and what is known of what it drives.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) devices: Vec<DeviceInfo>,
    /// The links between the devices; `None`: those of this machine.
    pub(super) links: Option<Topology>,
    /// How many mappings a device can have.
    pub(super) mappings: u64,
}

/// The devices of a process, and what their pools are started with.
#[derive(Debug)]
pub(super) struct DeviceRegistry {
    /// Shared with the engine's thread, which opens pools to relays.
    pub(super) devices: Arc<[DeviceMemory]>,
    /// One clock for all pools: a capture on any device holds it.
    pub(super) completion_events: Arc<CompletionEvents>,
    pub(super) engine: ProcessEngine,
    /// Reported by the pools of host memory; the engine ignores timings meanwhile.
    pub(super) pinning: Arc<Pinning>,
    pub(super) config: config::Pool,
    /// How many mappings a device can have.
    pub(super) mappings: u64,
    pub(super) observers: Arc<Observers>,
    /// How long a refill waits for the next grant.
    pub(super) refill_timeout: Duration,
    /// No thread of ours may call the driver any more, nor may what only keeps books.
    stopped: AtomicBool,
}

impl DeviceRegistry {
    pub(super) fn new(
        opened: Opened,
        config: config::Pool,
        transfer: config::Transfer,
        lease: config::Lease,
    ) -> DeviceRegistry {
        let Opened { driver, devices, links, mappings } = opened;
        let engine = ProcessEngine::new(transfer, &devices, links);
        let ms = Duration::from_millis;
        let agent = Port::new(devices.len(), ms(lease.grow_timeout_ms), ms(lease.refill_timeout_ms));
        let observers = Observers::new(devices.len(), agent);
        let leased = |device: DeviceId| {
            let grow_timeout = Duration::from_millis(lease.grow_timeout_ms);
            let observer = Some(observers.clone() as _);
            Lease::new(device, LeaseOptions { grow_timeout, growth: lease.growth, observer })
        };
        let memory = |info: DeviceInfo| {
            let lease = leased(info.id);
            DeviceMemory::new(info, lease)
        };
        let devices: Arc<[DeviceMemory]> = devices.into_iter().map(memory).collect();
        let completion_events = CompletionEvents::new(driver);
        let activity = observers.agent().activity.clone();
        completion_events.watch_holds(move |captures| activity.captures(captures));
        DeviceRegistry {
            refill_timeout: Duration::from_millis(lease.refill_timeout_ms),
            observers,
            devices,
            completion_events,
            engine,
            pinning: Arc::default(),
            config,
            mappings,
            stopped: AtomicBool::new(false),
        }
    }

    /// From now on no thread of ours calls the driver.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.devices.iter().for_each(|memory| memory.lease.stop());
    }

    /// Whether no thread of ours may call the driver any more.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// The live block that an address lies in.
    pub(super) fn find(&self, address: Address) -> Option<Found> {
        self.devices.iter().find_map(|memory| {
            let LiveBlock { address, size, requested, .. } = memory.started()?.pool.find(address)?;
            Some(Found { device: memory.id(), address, size, requested })
        })
    }

    #[inline]
    pub(super) fn device(&self, device: i64) -> Result<&DeviceMemory> {
        // No error is made, and dropped, where there is such a device.
        match usize::try_from(device).ok().and_then(|index| self.devices.get(index)) {
            Some(found) => Ok(found),
            None => Err(ProcessError::NoSuchDevice { device, count: self.devices.len() }),
        }
    }

    /// A device's pool, started now if it has not.
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
}
