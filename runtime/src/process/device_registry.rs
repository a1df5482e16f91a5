//! What starting a device's pool takes.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::Epochs;

use super::device::{DeviceMemory, Started};
use super::engine::ProcessEngine;
use super::observers::Observers;
use super::{ProcessError, Result};
use crate::config;

/// The devices of a process, and what their pools are started with.
#[derive(Debug)]
pub(super) struct DeviceRegistry {
    /// Shared with the engine's thread, which opens pools to relays.
    pub(super) devices: Arc<[DeviceMemory]>,
    /// One clock for all pools: a capture on any device holds it.
    pub(super) epochs: Arc<Epochs>,
    pub(super) engine: ProcessEngine,
    pub(super) config: config::Pool,
    /// How many mappings a device can have.
    pub(super) mappings: u64,
    pub(super) observers: Arc<Observers>,
}

impl DeviceRegistry {
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
        let relays = || self.engine.awake_relays_of(memory.id(), &**self.epochs.driver());
        memory.start(&self.epochs, &self.config, self.mappings, peers, relays, &self.observers)
    }
}
