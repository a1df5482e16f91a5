//! Private pools of one device: their domains by the program's numbers, and the routes of allocations.
//!
//! Invariants: an open pool has a route, and `open` counts routes. Each hold on completion points has an owner that ends it, because torch
//! never reports a failed capture: neither the end of its pool nor the release is called then.
//!
//! ```text
//!   Expected: holds of the route and its thread ──┬─ allocation in it on a capturing stream ────────────► Captures: the capture's own
//!      └ until the thread has ended               ├─ allocation in it on another stream ────────────────► Free
//!                                                 └─ its thread allocates elsewhere, captured nowhere ──► Missed
//! ```
//!
//! A route ends with its `end`, with its pool's last owner, or with a `begin` of the same pool after its capture is over.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use glake_device::owned::{CaptureHold, SeenCapture, may_ask, this_thread};
use glake_device::{Address, CaptureState, Stream};
use glake_stitch::{Allocator, DomainId, DomainOptions};
use glake_tiers::GpuPool;
use rustc_hash::FxHashMap;

use super::ProcessError;
use crate::sync::Mutex;

/// Number of a private pool in torch's form: two words, one of them zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u64, pub u64);

/// Filter for the streams whose allocations go to a pool, called on the allocating thread.
pub type Filter = Arc<dyn Fn(Stream) -> bool + Send + Sync>;

/// Numbers of the private pools whose memory stays on its GPU, on every device and before they exist, with the number of times each was
/// fixed.
#[derive(Debug, Default)]
pub(super) struct FixedPools(Mutex<FxHashMap<PoolId, u32>>);

impl FixedPools {
    /// Changes the number of times that a pool was fixed by one; `None` if it was not fixed. Returns whether it is fixed now.
    pub(super) fn fix(&self, id: PoolId, fixed: bool) -> Option<bool> {
        let mut pools = self.0.lock();
        if fixed {
            *pools.entry(id).or_default() += 1;
            return Some(true);
        }
        let count = pools.get_mut(&id)?;
        *count -= 1;
        let stays = *count > 0;
        if !stays {
            pools.remove(&id);
        }
        Some(stays)
    }

    fn holds(&self, id: PoolId) -> bool {
        self.0.lock().contains_key(&id)
    }
}

/// Private pools of a device.
#[derive(Debug, Default)]
pub(super) struct PrivatePools {
    fixed: Arc<FixedPools>,
    /// Number of routes; while it is 0, a hit reads nothing else.
    open: AtomicUsize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    pools: FxHashMap<PoolId, PrivatePool>,
    /// Routes in order of creation.
    routes: Vec<Route>,
    /// Pool number of each domain, including released pools whose blocks are still live.
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
    /// Thread that began the route, while it lives.
    thread: Weak<()>,
    /// Stream on which the capture starts, if the program has named it.
    stream: Option<Stream>,
    phase: Phase,
}

/// Knowledge about the capture of a route.
#[derive(Debug)]
enum Phase {
    /// The capture may start or have started.
    Expected { _hold: CaptureHold },
    /// The capture was seen; it holds completion points back until it is over.
    Captures(SeenCapture),
    /// There is no capture: the pool serves ordinary allocations.
    Free,
    /// The capture never started, or ended without being seen.
    Missed,
}

impl PrivatePools {
    /// Creates the record of a device without private pools.
    pub(super) fn new(fixed: Arc<FixedPools>) -> PrivatePools {
        PrivatePools { fixed, ..PrivatePools::default() }
    }

    /// Fixes or releases the memory of a pool, if it exists.
    ///
    /// # Errors
    /// [`ProcessError::Pool`] if part of it is evicted.
    pub(super) fn fix(&self, pool: &GpuPool, id: PoolId, fixed: bool) -> Result<(), ProcessError> {
        let table = self.table.lock();
        match table.pools.get(&id) {
            Some(entry) => Ok(pool.fix_domain(entry.domain, fixed)?),
            None => Ok(()),
        }
    }

    /// Returns the domain for an allocation.
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

    /// Returns the domain of the newest route whose filter accepts the stream. Filters call the driver and the program, so no lock is held.
    #[cold]
    fn routed(&self, pool: &GpuPool, raw: Stream, state: impl FnOnce() -> Option<CaptureState>) -> DomainId {
        let routes: Vec<_> = {
            let table = self.table.lock();
            table.routes.iter().rev().map(|route| (route.id, route.domain, route.filter.clone())).collect()
        };
        let takes = |filter: &Option<Filter>| filter.as_ref().is_none_or(|filter| filter(raw));
        let taken = routes.into_iter().find(|(.., filter)| takes(filter));
        let (id, domain) = match taken {
            Some((id, domain, _)) => (Some(id), domain),
            None => (None, Allocator::default_domain()),
        };
        let thread = this_thread();
        let learn: Vec<(PoolId, Stream)> = {
            let table = self.table.lock();
            let learn = table.routes.iter().filter(|route| route.learns(id, &thread));
            learn.map(|route| (route.id, route.tells(raw, id))).collect()
        };
        if learn.is_empty() {
            return domain;
        }
        // Not under the lock: it asks the driver.
        let (asked, driver) = (state(), pool.completion_events().driver());
        for (learns, stream) in learn {
            let state = if stream == raw { asked } else { driver.capture_state(pool.device(), stream).ok() };
            let mut table = self.table.lock();
            let route = table.routes.iter_mut().find(|route| route.id == learns && route.learns(id, &thread));
            if let (Some(route), Some(state)) = (route, state) {
                route.learn(pool, stream, state, Some(learns) == id);
            }
        }
        domain
    }

    /// Names the stream on which the capture of the route starts.
    pub(super) fn expect(&self, pool: &GpuPool, id: PoolId, stream: Stream) -> Result<(), ProcessError> {
        let mut table = self.table.lock();
        let route = table.routes.iter_mut().find(|route| route.id == id);
        let route = route.ok_or_else(|| ProcessError::unknown_pool(pool.device(), id))?;
        // The handle of a thread's default stream means nothing to other threads.
        route.stream = (stream != Stream::PER_THREAD).then_some(stream);
        Ok(())
    }

    /// Adds an owner to a pool, creating it if needed: an ordinary pool until a graph is captured in it.
    pub(super) fn create(&self, pool: &GpuPool, id: PoolId) {
        self.table.lock().own(pool, id, DomainOptions::own_pool(), &self.fixed);
    }

    /// Routes allocations to a pool and holds completion points back in case a capture starts. Adds an owner. Replaces a route whose
    /// capture is over and which was not ended.
    pub(super) fn begin(
        &self,
        pool: &GpuPool,
        id: PoolId,
        filter: Option<Filter>,
    ) -> Result<(), ProcessError> {
        let thread = this_thread();
        let hold = pool.completion_events().hold_for(thread.clone());
        let seen =
            self.table.lock().route(id).filter(|route| may_ask(&route.thread)).and_then(Route::capture);
        // Not under the lock: it asks the driver.
        let over = seen.filter(|capture| pool.completion_events().is_over(capture));
        let mut table = self.table.lock();
        let earlier = match table.routes.iter().position(|route| route.id == id) {
            Some(at) if table.routes[at].gives_way(&thread, over) => Some(table.routes.remove(at)),
            Some(_) => {
                return Err(ProcessError::invalid(format!(
                    "allocations of {} go to private pool {id} already: end that first",
                    pool.device()
                )));
            }
            None => None,
        };
        let domain = table.own(pool, id, DomainOptions::private_pool(), &self.fixed);
        table.routes.push(Route {
            id,
            domain,
            filter,
            thread,
            stream: None,
            phase: Phase::Expected { _hold: hold },
        });
        self.open.store(table.routes.len(), Ordering::Release);
        drop(table);
        // The filter's destructor is the program's code.
        drop(earlier);
        Ok(())
    }

    /// Ends the route of [`PrivatePools::begin`].
    pub(super) fn end(&self, pool: &GpuPool, id: PoolId) -> Result<(), ProcessError> {
        let ended = self.close(id).ok_or_else(|| ProcessError::unknown_pool(pool.device(), id));
        // Its capture has ended before, if it had one.
        pool.completion_events().sweep_holds();
        ended
    }

    fn close(&self, id: PoolId) -> Option<()> {
        let mut table = self.table.lock();
        let at = table.routes.iter().position(|route| route.id == id)?;
        let route = table.routes.remove(at);
        self.open.store(table.routes.len(), Ordering::Release);
        drop(table);
        // The filter's destructor is the program's code.
        drop(route);
        Some(())
    }

    /// Removes an owner; the last one releases the pool.
    pub(super) fn release(&self, pool: &GpuPool, id: PoolId) -> Result<(), ProcessError> {
        let domain = {
            let mut table = self.table.lock();
            let entry = table.pools.get_mut(&id);
            let entry = entry.ok_or_else(|| ProcessError::unknown_pool(pool.device(), id))?;
            entry.owners -= 1;
            if entry.owners > 0 {
                return Ok(());
            }
            let domain = entry.domain;
            table.pools.remove(&id);
            domain
        };
        self.close(id);
        pool.completion_events().sweep_holds();
        Ok(pool.release_domain(domain)?)
    }

    /// Returns the number of owners of a pool; 0 if it does not exist.
    pub(super) fn owners(&self, id: PoolId) -> u32 {
        self.table.lock().pools.get(&id).map_or(0, |pool| pool.owners)
    }

    /// Returns the domain of a pool.
    pub(super) fn domain(&self, pool: &GpuPool, id: PoolId) -> Result<DomainId, ProcessError> {
        let domain = self.table.lock().pools.get(&id).map(|pool| pool.domain);
        domain.ok_or_else(|| ProcessError::unknown_pool(pool.device(), id))
    }

    /// Returns all domains of private pools, including released ones with memory, with their numbers. Forgets the others.
    pub(super) fn domains(&self, pool: &GpuPool) -> Vec<(DomainId, PoolId)> {
        let mut table = self.table.lock();
        table.names.retain(|domain, _| pool.has_domain(*domain));
        let mut domains: Vec<_> = table.names.iter().map(|(domain, id)| (*domain, *id)).collect();
        drop(table);
        domains.sort_unstable();
        domains
    }

    /// Returns the private pool of the live block that contains an address; `None` if it is in none.
    pub(super) fn pool_at(&self, pool: &GpuPool, address: Address) -> Option<PoolId> {
        let domain = pool.find(address)?.domain;
        if domain == Allocator::default_domain() { None } else { self.name(domain) }
    }

    /// Returns the pool number of a domain, also after its release.
    pub(super) fn name(&self, domain: DomainId) -> Option<PoolId> {
        self.table.lock().names.get(&domain).copied()
    }
}

impl Table {
    fn route(&self, id: PoolId) -> Option<&Route> {
        self.routes.iter().find(|route| route.id == id)
    }

    fn own(&mut self, pool: &GpuPool, id: PoolId, options: DomainOptions, fixed: &FixedPools) -> DomainId {
        if let Some(entry) = self.pools.get_mut(&id) {
            entry.owners += 1;
            return entry.domain;
        }
        let domain = pool.add_domain(options, None);
        if fixed.holds(id) {
            let done = pool.fix_domain(domain, true);
            debug_assert!(done.is_ok(), "a domain without memory: {done:?}");
        }
        self.pools.insert(id, PrivatePool { domain, owners: 1 });
        self.names.insert(domain, id);
        domain
    }
}

impl Route {
    /// Returns whether an allocation of `thread` in the pool `taken`, or in none, can reveal anything about the route's capture.
    fn learns(&self, taken: Option<PoolId>, thread: &Weak<()>) -> bool {
        match self.phase {
            Phase::Expected { .. } | Phase::Captures(_) => {
                Some(self.id) == taken || self.thread.ptr_eq(thread)
            }
            // Another capture may have begun in it.
            Phase::Missed => Some(self.id) == taken,
            Phase::Free => false,
        }
    }

    /// Returns the stream whose capture state concerns this route, for a request on `raw`.
    fn tells(&self, raw: Stream, taken: Option<PoolId>) -> Stream {
        match self.phase {
            _ if taken == Some(self.id) => raw,
            Phase::Captures(capture) => capture.stream,
            _ => self.stream.unwrap_or(raw),
        }
    }

    /// Updates the phase from the capture state of a stream at a request. `takes`: the request goes to this pool.
    fn learn(&mut self, pool: &GpuPool, stream: Stream, state: CaptureState, takes: bool) {
        match state {
            CaptureState::Active(id) => {
                if takes {
                    pool.keep_addresses(self.domain);
                }
                // The handle of a thread's default stream means nothing to other threads: the route keeps the hold then.
                if stream != Stream::PER_THREAD {
                    let capture = SeenCapture { device: pool.device(), stream, id };
                    pool.completion_events().follow(capture, self.thread.clone());
                    self.phase = Phase::Captures(capture);
                }
            }
            // If the stream is the capture's own, the capture is over; otherwise the state says nothing about it.
            CaptureState::None | CaptureState::Invalidated if self.capture().is_some() => {
                if let Some(capture) = self.capture().filter(|capture| capture.stream == stream) {
                    pool.completion_events().captured(capture);
                    self.phase = Phase::Missed;
                }
            }
            CaptureState::None if takes => self.phase = Phase::Free,
            CaptureState::None | CaptureState::Invalidated => self.phase = Phase::Missed,
        }
    }

    fn capture(&self) -> Option<SeenCapture> {
        match self.phase {
            Phase::Captures(capture) => Some(capture),
            _ => None,
        }
    }

    /// Returns whether the capture is over, for a thread that begins the same pool again; `over` is a capture known to be over.
    fn gives_way(&self, thread: &Weak<()>, over: Option<SeenCapture>) -> bool {
        match self.phase {
            // No thread begins two captures in one pool at once.
            Phase::Expected { .. } => self.thread.ptr_eq(thread) || self.thread.strong_count() == 0,
            Phase::Captures(capture) => over == Some(capture),
            Phase::Missed => true,
            Phase::Free => false,
        }
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Route { id, domain, filter, thread: _, stream, phase } = self;
        let mut shown = f.debug_struct("Route");
        shown.field("id", id).field("domain", domain).field("filter", &filter.is_some());
        shown.field("stream", stream).field("phase", phase).finish()
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.0, self.1)
    }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules {
    use glake_device::owned::DeviceSet;
    use glake_device::{DeviceId, Driver};
    use glake_sim::{Clock, SimOptions, SimTopology, Simulator};
    use glake_tiers::{PoolOptions, PoolStream};
    use glake_units::Bytes;
    use shuttle::thread;

    use super::*;
    use crate::sync::schedules;

    /// Threads begin, use, end and release pools, one of them shared, while others allocate. Each allocation goes to an open pool whose
    /// filter accepts it, owner counts match, and at the end no hold on completion points remains.
    #[test]
    fn pools_come_and_go_under_allocations() {
        let options = SimOptions {
            topology: SimTopology::uniform(1, Bytes::mib(64)),
            clock: Clock::Wall,
            ..SimOptions::default()
        };
        let driver: Arc<dyn Driver> = Arc::new(Simulator::new(options).unwrap());
        let pool = Arc::new(GpuPool::new(driver.clone(), DeviceId(0), PoolOptions::default()).unwrap());
        let stream = PoolStream::of(&*driver, DeviceId(0), Stream::LEGACY).unwrap();
        schedules(move || {
            let private = Arc::new(PrivatePools::default());
            let common = PoolId(9, 0);
            private.create(&pool, common);
            let users = (1..=2).map(|number| {
                let (private, pool) = (private.clone(), pool.clone());
                thread::spawn(move || {
                    let (own, raw) = (PoolId(number, 0), Stream(number));
                    private.begin(&pool, own, Some(Arc::new(move |asked| asked == raw))).unwrap();
                    private.create(&pool, common);
                    let state = || Some(CaptureState::None);
                    assert_eq!(private.domain_of(&pool, raw, state), private.domain(&pool, own).unwrap());
                    private.end(&pool, own).unwrap();
                    assert_eq!(private.domain_of(&pool, raw, state), Allocator::default_domain());
                    private.release(&pool, own).unwrap();
                    private.release(&pool, common).unwrap();
                    assert!(matches!(private.release(&pool, own), Err(ref error) if error.says("has no private pool")));
                })
            });
            let allocates = {
                let (private, pool) = (private.clone(), pool.clone());
                thread::spawn(move || {
                    for _ in 0..3 {
                        let domain = private.domain_of(&pool, Stream(7), || Some(CaptureState::None));
                        assert_eq!(domain, Allocator::default_domain());
                        let block = pool.malloc_in(domain, Bytes::kib(4), stream).unwrap();
                        pool.free(block.address).unwrap();
                    }
                })
            };
            let threads: Vec<_> = users.chain([allocates]).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!((private.owners(PoolId(1, 0)), private.owners(common)), (0, 1));
            private.release(&pool, common).unwrap();
            assert_eq!(private.open.load(Ordering::Relaxed), 0);
            pool.completion_events().record(DeviceSet::of(DeviceId(0))).unwrap();
        });
    }
}
