//! The owners of a pool's extents.

use glake_device::ExtentProperties;
use glake_stitch::{DomainId, DomainOptions};

use super::{GpuPool, PlanState, Result};

impl GpuPool {
    /// A new owner of extents, with properties of its own; `None`: those of the default domain.
    pub fn add_domain(&self, options: DomainOptions, properties: Option<ExtentProperties>) -> DomainId {
        self.new_domain(&mut self.held.lock(), options, properties.unwrap_or(self.properties))
    }

    pub(super) fn new_domain(
        &self,
        held: &mut PlanState,
        options: DomainOptions,
        properties: ExtentProperties,
    ) -> DomainId {
        let domain = self.core.lock().add_domain(options);
        held.properties.insert(domain, properties);
        domain
    }

    /// A CUDA graph is captured in a domain: its memory keeps its addresses from now on, nothing of it is stitched or lent.
    pub fn keep_addresses(&self, domain: DomainId) {
        self.core.lock().keep_addresses(domain);
    }

    /// Gives a domain up: its memory goes back once its blocks are freed and all work enqueued before is done.
    ///
    /// # Errors
    /// [`super::PoolError::Refused`] where there is no such domain.
    pub fn release_domain(&self, domain: DomainId) -> Result<()> {
        let released = self.core.lock().release_domain(domain);
        released.map_err(|source| self.refused(source))?;
        self.note_freed();
        Ok(())
    }
}
