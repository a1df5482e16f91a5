//! The owners of a pool's extents.

use glake_device::ExtentProperties;
use glake_stitch::{DomainId, DomainOptions};

use super::Result;
use super::clock::CompletionClock;
use super::core::Core;
use super::growth::{Growing, Growth};
use super::records::ExtentRecords;

/// The domains of a pool.
#[derive(Debug)]
pub(crate) struct Domains<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) records: &'a ExtentRecords,
}

impl Domains<'_> {
    /// A new one, with properties of its own; `None`: those of the default domain.
    pub(super) fn add(&self, options: DomainOptions, properties: Option<ExtentProperties>) -> DomainId {
        let properties = properties.unwrap_or(self.growth.properties());
        self.add_under(&mut self.growth.quiet(), options, properties)
    }

    /// As [`Domains::add`], under the growth lock.
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

    /// Gives a domain up.
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

    /// Whether there is anything of it.
    pub(super) fn has(&self, domain: DomainId) -> bool {
        self.core.lock().has_domain(domain)
    }

    /// Its memory keeps its addresses from now on.
    pub(super) fn keep_addresses(&self, domain: DomainId) {
        self.core.lock().keep_addresses(domain);
    }

    /// Whether all memory of a domain counts and stays, though nothing is live in it: it has an owner, whose graph knows its
    /// addresses.
    pub(crate) fn is_held(&self, domain: DomainId) -> bool {
        self.core.lock().extents().is_held(domain)
    }
}
