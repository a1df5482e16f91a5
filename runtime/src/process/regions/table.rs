//! Table of the tags of a process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use glake_device::DeviceId;
use glake_stitch::{Allocator, DomainId};
use glake_tiers::{Region, RegionOptions};
use glake_units::Bytes;

use super::super::device::DeviceMemory;
use super::super::gate::{DEFAULT, Evicted, GRAPH, Tags, is_reserved};
use super::super::{ProcessError, Result};
use super::tagged::{Kind, Tagged};
use crate::sync::RwLock;

/// All tags, by name.
#[derive(Debug)]
pub(super) struct Table {
    devices: usize,
    extent: Bytes,
    /// Counter that orders first allocations.
    pub(super) clock: AtomicU64,
    inner: RwLock<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    tagged: BTreeMap<String, Arc<Tagged>>,
    /// Order of refills as the program set it.
    order: Vec<String>,
}

impl Table {
    pub(super) fn new(devices: usize, extent: Bytes) -> Table {
        Table { devices, extent, clock: AtomicU64::new(0), inner: RwLock::default() }
    }

    /// Defines a tag, or confirms an equal definition.
    pub(super) fn define(&self, options: RegionOptions) -> Result<()> {
        if options.tag.is_empty() || is_reserved(&options.tag) {
            return Err(ProcessError::ReservedTag { tag: options.tag });
        }
        let mut inner = self.inner.write();
        match inner.tagged.get(&options.tag) {
            Some(tagged) if tagged.options == options => Ok(()),
            Some(tagged) => Err(ProcessError::OtherOptions {
                tag: options.tag.clone(),
                defined: Box::new(tagged.options.clone()),
                asked: Box::new(options),
            }),
            None => {
                let tagged = Tagged::new(options.clone(), Kind::Defined, self.devices);
                inner.tagged.insert(options.tag, Arc::new(tagged));
                Ok(())
            }
        }
    }

    /// Returns an existing tag.
    pub(super) fn get(&self, tag: &str) -> Result<Arc<Tagged>> {
        let inner = self.inner.read();
        inner.tagged.get(tag).cloned().ok_or_else(|| ProcessError::UnknownTag {
            tag: tag.to_owned(),
            known: inner.tagged.keys().cloned().collect(),
        })
    }

    /// Returns an existing tag; the default one always exists.
    pub(super) fn known(&self, tag: &str) -> Result<Arc<Tagged>> {
        if tag == DEFAULT { Ok(self.reserved(tag.to_owned(), Kind::Default)) } else { self.get(tag) }
    }

    /// Returns the named tags in the given order, or all.
    pub(super) fn named(&self, tags: Option<&[String]>) -> Result<Vec<Arc<Tagged>>> {
        match tags {
            None => Ok(self.inner.read().tagged.values().cloned().collect()),
            Some(tags) => {
                let mut found: Vec<Arc<Tagged>> = Vec::new();
                for tag in tags {
                    let tagged = self.known(tag)?;
                    if !found.iter().any(|other| Arc::ptr_eq(other, &tagged)) {
                        found.push(tagged);
                    }
                }
                Ok(found)
            }
        }
    }

    /// Creates tags for memory outside regions: the default domain and the private pools of each started pool. Tags of released private
    /// pools stay, because a use may name one.
    pub(super) fn cover(&self, devices: &[DeviceMemory]) {
        for started in devices.iter().filter_map(DeviceMemory::started) {
            let default = self.reserved(DEFAULT.to_owned(), Kind::Default);
            default.cover(&started.pool, Allocator::default_domain(), &self.clock);
            let device = started.pool.device();
            let domains: Vec<(DomainId, String)> = started
                .private
                .domains(&started.pool)
                .into_iter()
                .map(|(domain, id)| (domain, format!("{GRAPH}{id}")))
                .collect();
            for tagged in self.inner.read().tagged.values().filter(|tagged| tagged.kind == Kind::Graph) {
                let is_own = |own| domains.iter().any(|(domain, tag)| *domain == own && tag == tagged.tag());
                tagged.forget(device, is_own);
            }
            for (domain, tag) in domains {
                self.reserved(tag, Kind::Graph).cover(&started.pool, domain, &self.clock);
            }
        }
    }

    fn reserved(&self, tag: String, kind: Kind) -> Arc<Tagged> {
        if let Some(tagged) = self.inner.read().tagged.get(&tag) {
            return tagged.clone();
        }
        let options = RegionOptions { extent: self.extent, ..RegionOptions::of(tag.clone()) };
        let mut inner = self.inner.write();
        inner.tagged.entry(tag).or_insert_with(|| Arc::new(Tagged::new(options, kind, self.devices))).clone()
    }

    /// Returns the tag and the region of a domain of a device.
    pub(super) fn of_domain(&self, device: DeviceId, domain: DomainId) -> Option<(Arc<Tagged>, Arc<Region>)> {
        let inner = self.inner.read();
        inner.tagged.values().find_map(|tagged| Some((tagged.clone(), tagged.region_of(device, domain)?)))
    }

    /// Sets the order of refills; tags that are not named follow.
    pub(super) fn set_order(&self, tags: &[String]) -> Result<()> {
        tags.iter().try_for_each(|tag| self.known(tag).map(|_| ()))?;
        self.inner.write().order = tags.to_vec();
        Ok(())
    }

    /// Sorts into the order of refills: the program's order, then regions by first allocation, then graph pools, then memory outside
    /// regions.
    pub(super) fn sort(&self, tags: &mut [Arc<Tagged>]) {
        let inner = self.inner.read();
        let said = |tagged: &Arc<Tagged>| inner.order.iter().position(|tag| tag == tagged.tag());
        tags.sort_by_key(|tagged| {
            let kind = match tagged.kind {
                Kind::Defined => 0,
                Kind::Graph => 1,
                Kind::Default => 2,
            };
            (said(tagged).unwrap_or(usize::MAX), kind, tagged.first())
        });
    }
}

impl Evicted for Table {
    fn evicted(&self, tags: &Tags) -> Vec<String> {
        let inner = self.inner.read();
        let evicted = inner.tagged.values().filter(|tagged| tagged.is_away() && tags.use_of(tagged.tag()));
        evicted.map(|tagged| tagged.tag().to_owned()).collect()
    }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules {
    use shuttle::thread;

    use super::*;
    use crate::sync::schedules;

    /// A name refers to one tag, even if several threads define and look it up at once.
    #[test]
    fn a_name_means_one_tag() {
        schedules(|| {
            let table = Arc::new(Table::new(1, Bytes::mib(64)));
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let table = table.clone();
                    thread::spawn(move || {
                        table.define(RegionOptions::of("weights".to_owned())).unwrap();
                        let graph = table.reserved(format!("{GRAPH}(1, 0)"), Kind::Graph);
                        table.set_order(&["weights".to_owned()]).unwrap();
                        let mut all = table.named(None).unwrap();
                        table.sort(&mut all);
                        assert_eq!(all[0].tag(), "weights");
                        (table.get("weights").unwrap(), graph)
                    })
                })
                .collect();
            let found: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            let same = |one: &Arc<Tagged>, other: &Arc<Tagged>| Arc::ptr_eq(one, other);
            assert!(found.windows(2).all(|two| same(&two[0].0, &two[1].0) && same(&two[0].1, &two[1].1)));
            assert_eq!(table.named(None).unwrap().len(), 2);
        });
    }
}
