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

/// Leases of a process, for an agent outside the library.
#[derive(Debug)]
pub struct Leases {
    registry: Arc<DeviceRegistry>,
}

impl Leases {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Leases {
        Leases { registry: registry.clone() }
    }

    /// Sets a device's lease to `lease` bytes; its pool need not have started. `None` removes the lease, so that only the limit bounds the
    /// pool. If more memory exists already, nothing new is created until it fits.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; [`AgentError::LeasesAreTheAgents`].
    pub fn set(&self, device: i64, lease: Option<Bytes>) -> Result<()> {
        self.refuse_beside_an_agent()?;
        self.registry.device(device)?.lease.set(lease);
        Ok(())
    }

    /// Adds to a device's lease. A grant of 0 bytes is a denial: waiting callers give up.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] without a lease; [`AgentError::LeasesAreTheAgents`].
    pub fn grant(&self, device: i64, bytes: Bytes) -> Result<()> {
        self.refuse_beside_an_agent()?;
        let memory = self.registry.device(device)?;
        memory.lease.grant(bytes).then_some(()).ok_or_else(|| {
            ProcessError::invalid(format!(
                "{} has no lease to add to: set one first (glake.lease.set, glake_lease_set)",
                memory.id()
            ))
        })
    }

    /// Lowers a device's lease by at most `most` bytes: first unused lease, then free memory, which is returned to the driver. Returns the
    /// bytes. Does not wait: pending frees stay.
    ///
    /// # Errors
    /// The driver's error, with the lease unchanged; [`AgentError::LeasesAreTheAgents`].
    pub fn take(&self, device: i64, most: Bytes) -> Result<Bytes> {
        self.refuse_beside_an_agent()?;
        let memory = self.registry.device(device)?;
        match memory.started() {
            Some(started) => Ok(started.pool.take_lease(most)?),
            None => Ok(memory.lease.take_unused(most)),
        }
    }

    /// Refuses a change while an agent controls the leases, because its numbers would become wrong.
    fn refuse_beside_an_agent(&self) -> Result<()> {
        match self.registry.observers.agent().is_on() {
            true => Err(AgentError::LeasesAreTheAgents.into()),
            false => Ok(()),
        }
    }

    /// Sets the observer of wanted and returned memory, replacing the previous one. Without an observer, requests do not wait for grants.
    pub fn watch(&self, watcher: Option<OnLease>) {
        self.registry.observers.on_lease(watcher);
    }

    /// Returns the state of a device's lease.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn view(&self, device: i64) -> Result<LeaseView> {
        Ok(self.registry.device(device)?.lease.view())
    }
}
