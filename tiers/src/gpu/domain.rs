//! Domains of a pool: the owners of its extents.

use glake_device::ExtentProperties;
use glake_stitch::{DomainId, DomainOptions};

use super::Result;
use super::clock::CompletionClock;
use super::core::Core;
use super::growth::{Growing, Growth};
use super::records::ExtentRecords;

/// Domain operations of a pool.
#[derive(Debug)]
pub(crate) struct Domains<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) records: &'a ExtentRecords,
}

impl Domains<'_> {
    /// Adds a domain with its own extent properties; `None`: those of the default domain.
    pub(super) fn add(&self, options: DomainOptions, properties: Option<ExtentProperties>) -> DomainId {
        let properties = properties.unwrap_or(self.growth.properties());
        self.add_under(&mut self.growth.quiet(), options, properties)
    }

    /// Adds a domain while the caller holds the growth lock.
    pub(super) fn add_under(
        &self,
        growing: &mut Growing<'_>,
        options: DomainOptions,
        properties: ExtentProperties,
    ) -> DomainId {
        let domain = self.core.lock().add_domain(options);
        growing.set_properties(domain, properties);
        domain
    }

    /// Releases a domain: its memory is freed once its blocks are.
    pub(super) fn release(&self, domain: DomainId) -> Result<()> {
        let (released, emptied) = {
            let mut core = self.core.lock();
            (core.release_domain(domain), core.take_emptied())
        };
        if !emptied.is_empty() {
            self.records.drop_emptied(&emptied);
        }
        released.map_err(|source| self.core.refused(source))?;
        self.clock.note_freed();
        Ok(())
    }

    /// Returns whether the domain exists.
    pub(super) fn has(&self, domain: DomainId) -> bool {
        self.core.lock().has_domain(domain)
    }

    /// Keeps the domain's memory at its addresses from now on.
    pub(super) fn keep_addresses(&self, domain: DomainId) {
        self.core.lock().keep_addresses(domain);
    }

    /// Returns whether all memory of a domain must be kept, even without live blocks: a graph's pool, whose graph uses its addresses.
    pub(crate) fn is_held(&self, domain: DomainId) -> bool {
        self.core.lock().extents().is_held(domain)
    }
}
