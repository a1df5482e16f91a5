//! Private pools of one device: domains by the number that the program gives them, and which allocations go there.
//!
//! Invariants: a pool that is open has a route, and `open` counts routes; a route's hold lives from before the capture
//! until the route ends, or until an allocation shows that its stream is not capturing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use glake_device::owned::CaptureHold;
use glake_device::{CaptureState, Stream};
use glake_stitch::{Allocator, DomainId, DomainOptions};
use glake_tiers::GpuPool;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::ProcessError;

/// A private pool's number, as torch numbers them: two words, of which one is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u64, pub u64);

/// Which streams' allocations go to a pool; asked on the thread that allocates.
pub type Filter = Arc<dyn Fn(Stream) -> bool + Send + Sync>;

/// The private pools of a device.
#[derive(Debug, Default)]
pub(super) struct PrivatePools {
    /// How many routes there are: all that a hit looks at while there is none.
    open: AtomicUsize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    pools: FxHashMap<PoolId, PrivatePool>,
    /// The newest last.
    routes: Vec<Route>,
    /// Who each domain was made for, released ones too: their blocks live on.
    names: FxHashMap<DomainId, PoolId>,
}

#[derive(Clone, Copy, Debug)]
struct PrivatePool {
    domain: DomainId,
    owners: u32,
}

struct Route {
    id: PoolId,
    domain: DomainId,
    filter: Option<Filter>,
    /// Epochs would break a capture; `None` once it is known that there is none.
    hold: Option<CaptureHold>,
    /// Whether it is known that there is a capture.
    captures: bool,
}

impl PrivatePools {
    /// The domain that an allocation goes to.
    #[inline]
    pub(super) fn domain_of(
        &self,
        pool: &GpuPool,
        raw: Stream,
        state: impl FnOnce() -> Option<CaptureState>,
    ) -> DomainId {
        if self.open.load(Ordering::Acquire) == 0 {
            return Allocator::default_domain();
        }
        self.routed(pool, raw, state)
    }

    /// The newest route whose filter takes the stream. Filters call the driver and the program, so no lock is held.
    #[cold]
    fn routed(&self, pool: &GpuPool, raw: Stream, state: impl FnOnce() -> Option<CaptureState>) -> DomainId {
        let routes: Vec<_> = {
            let table = self.table.lock();
            table.routes.iter().rev().map(|route| (route.id, route.domain, route.filter.clone())).collect()
        };
        let takes = |filter: &Option<Filter>| filter.as_ref().is_none_or(|filter| filter(raw));
        let Some((id, domain, _)) = routes.into_iter().find(|(.., filter)| takes(filter)) else {
            return Allocator::default_domain();
        };
        let is_open = |table: &Table| {
            let route = table.routes.iter().find(|route| route.id == id);
            route.is_some_and(|route| route.hold.is_some() && !route.captures)
        };
        if is_open(&self.table.lock()) {
            let state = state();
            let mut table = self.table.lock();
            if let Some(route) = table.routes.iter_mut().find(|route| route.id == id) {
                match state {
                    Some(CaptureState::None) => drop(route.hold.take()),
                    Some(CaptureState::Active(_)) => {
                        route.captures = true;
                        pool.keep_addresses(domain);
                    }
                    Some(CaptureState::Invalidated) | None => {}
                }
            }
        }
        domain
    }

    /// One more owner of a pool, which is made if there is none: one for whatever the program puts there, until a graph is
    /// captured in it.
    pub(super) fn create(&self, pool: &GpuPool, id: PoolId) {
        self.table.lock().own(pool, id, DomainOptions::own_pool());
    }

    /// Sends allocations to a pool from now on, and holds epochs back in case a capture begins. It adds an owner.
    pub(super) fn begin(
        &self,
        pool: &GpuPool,
        id: PoolId,
        filter: Option<Filter>,
    ) -> Result<(), ProcessError> {
        let hold = Some(pool.hold_epochs());
        let mut table = self.table.lock();
        if table.routes.iter().any(|route| route.id == id) {
            return Err(ProcessError::PoolOpen { device: pool.device(), id });
        }
        let domain = table.own(pool, id, DomainOptions::private_pool());
        table.routes.push(Route { id, domain, filter, hold, captures: false });
        self.open.store(table.routes.len(), Ordering::Release);
        Ok(())
    }

    /// Ends what [`PrivatePools::begin`] began.
    pub(super) fn end(&self, pool: &GpuPool, id: PoolId) -> Result<(), ProcessError> {
        self.close(id).ok_or(ProcessError::UnknownPool { device: pool.device(), id })
    }

    fn close(&self, id: PoolId) -> Option<()> {
        let mut table = self.table.lock();
        let at = table.routes.iter().position(|route| route.id == id)?;
        let route = table.routes.remove(at);
        self.open.store(table.routes.len(), Ordering::Release);
        drop(table);
        // The filter's end is the program's code.
        drop(route);
        Some(())
    }

    /// One owner less; the last one gives the pool up.
    pub(super) fn release(&self, pool: &GpuPool, id: PoolId) -> Result<(), ProcessError> {
        let domain = {
            let mut table = self.table.lock();
            let entry = table.pools.get_mut(&id);
            let entry = entry.ok_or(ProcessError::UnknownPool { device: pool.device(), id })?;
            entry.owners -= 1;
            if entry.owners > 0 {
                return Ok(());
            }
            let domain = entry.domain;
            table.pools.remove(&id);
            domain
        };
        self.close(id);
        Ok(pool.release_domain(domain)?)
    }

    /// How many owners a pool has; 0 where there is none.
    pub(super) fn owners(&self, id: PoolId) -> u32 {
        self.table.lock().pools.get(&id).map_or(0, |pool| pool.owners)
    }

    /// The domain of a pool.
    pub(super) fn domain(&self, pool: &GpuPool, id: PoolId) -> Result<DomainId, ProcessError> {
        let domain = self.table.lock().pools.get(&id).map(|pool| pool.domain);
        domain.ok_or(ProcessError::UnknownPool { device: pool.device(), id })
    }

    /// All domains that are private pools, or were: with whose they are.
    pub(super) fn domains(&self) -> Vec<(DomainId, PoolId)> {
        let mut domains: Vec<_> = self.table.lock().names.iter().map(|(domain, id)| (*domain, *id)).collect();
        domains.sort_unstable();
        domains
    }

    /// Whose a domain is, or was.
    pub(super) fn name(&self, domain: DomainId) -> Option<PoolId> {
        self.table.lock().names.get(&domain).copied()
    }
}

impl Table {
    fn own(&mut self, pool: &GpuPool, id: PoolId, options: DomainOptions) -> DomainId {
        if let Some(entry) = self.pools.get_mut(&id) {
            entry.owners += 1;
            return entry.domain;
        }
        let domain = pool.add_domain(options, None);
        self.pools.insert(id, PrivatePool { domain, owners: 1 });
        self.names.insert(domain, id);
        domain
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Route { id, domain, filter, hold, captures } = self;
        let mut shown = f.debug_struct("Route");
        shown.field("id", id).field("domain", domain).field("filter", &filter.is_some());
        shown.field("hold", hold).field("captures", captures).finish()
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}
