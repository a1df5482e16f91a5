//! Leases: how much memory of each GPU an agent lets this process hold.
//!
//! ```text
//! agent ─► set, grant, take ─► Lease of a device ─► bounds what its pool makes
//!       ◄─ want, grow, returned ◄─┘ refills, misses, shrinks
//! ```
//!
//! A process without an agent has no lease, and nothing here costs it anything.

use std::sync::Arc;

use glake_tiers::LeaseView;
use glake_units::Bytes;

use super::device_registry::DeviceRegistry;
use super::{AgentError, OnLease, ProcessError, Result};

/// The leases of a process.
#[derive(Debug)]
pub struct Leases {
    registry: Arc<DeviceRegistry>,
}

impl Leases {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Leases {
        Leases { registry: registry.clone() }
    }

    /// Sets a device's lease, whole; its pool need not have started. `None`: there is none, and nothing but the limit bounds the pool.
    /// Where more is made already nothing new is until it fits again.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; [`AgentError::LeasesAreTheAgents`].
    pub fn set(&self, device: i64, lease: Option<Bytes>) -> Result<()> {
        self.refuse_beside_an_agent()?;
        self.registry.device(device)?.lease.set(lease);
        Ok(())
    }

    /// Adds to a device's lease. A grant of nothing says that there is none: whoever waits for one gives up.
    ///
    /// # Errors
    /// [`ProcessError::NoLease`]; [`AgentError::LeasesAreTheAgents`].
    pub fn grant(&self, device: i64, bytes: Bytes) -> Result<()> {
        self.refuse_beside_an_agent()?;
        let memory = self.registry.device(device)?;
        memory.lease.grant(bytes).then_some(()).ok_or(ProcessError::NoLease { device: memory.id() })
    }

    /// Lowers a device's lease by what is not made, and by free memory, which goes back to the driver for it; `most` at most. Returns by
    /// how much. Waits for nothing: what is pending stays.
    ///
    /// # Errors
    /// What the driver answers, where nothing was taken; [`AgentError::LeasesAreTheAgents`].
    pub fn take(&self, device: i64, most: Bytes) -> Result<Bytes> {
        self.refuse_beside_an_agent()?;
        let memory = self.registry.device(device)?;
        match memory.started() {
            Some(started) => Ok(started.pool.take_lease(most)?),
            None => Ok(memory.lease.take_unused(most)),
        }
    }

    /// The agent's numbers would be wrong.
    fn refuse_beside_an_agent(&self) -> Result<()> {
        match self.registry.observers.agent().is_on() {
            true => Err(AgentError::LeasesAreTheAgents.into()),
            false => Ok(()),
        }
    }

    /// Who is told of what is wanted, and of what is given back; replaces who was told before. Where nobody is, nothing is waited for.
    pub fn watch(&self, watcher: Option<OnLease>) {
        self.registry.observers.on_lease(watcher);
    }

    /// How a device's lease stands.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn view(&self, device: i64) -> Result<LeaseView> {
        Ok(self.registry.device(device)?.lease.view())
    }
}
