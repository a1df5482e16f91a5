//! Memory of one device: its pool, started at first use, the thread that polls its completion points, and its private pools.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{DeviceId, DeviceInfo};
use glake_tiers::{GpuPool, Lease, PoolOptions, Ticker};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::ProcessError;
use super::observers::Observers;
use super::private::{FixedPools, PrivatePools};
use super::shortage::Denial;
use crate::{config, pool};

/// A device, and its pool once started.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    pub(super) info: DeviceInfo,
    /// Fraction of the memory that may be reserved, as the bits of an `f64`.
    fraction: AtomicU64,
    /// Bytes that an agent lets the process hold on the device; exists before the pool.
    pub(super) lease: Arc<Lease>,
    /// Last denial of the agent, and its time.
    pub(super) denial: Mutex<Option<(Instant, Denial)>>,
    fixed_pools: Arc<FixedPools>,
    started: OnceLock<Started>,
    starting: Mutex<()>,
}

/// A started pool and its thread.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) pool: Arc<GpuPool>,
    pub(super) private: PrivatePools,
    /// Bytes in use on the device before the pool started.
    pub(super) before: Bytes,
    /// Number of waits for all freed memory.
    settled: AtomicU64,
    ticker: Mutex<Option<Ticker>>,
}

impl DeviceMemory {
    pub(super) fn new(info: DeviceInfo, lease: Arc<Lease>, fixed_pools: Arc<FixedPools>) -> Self {
        let fraction = AtomicU64::new(1.0_f64.to_bits());
        let (started, starting) = Default::default();
        DeviceMemory { info, fraction, lease, denial: Mutex::default(), fixed_pools, started, starting }
    }

    /// Ends the agent's lease of the device.
    pub(super) fn end_lease(&self) {
        self.lease.set(None);
        *self.denial.lock() = None;
    }

    pub(super) fn id(&self) -> DeviceId {
        self.info.id
    }

    /// Returns the device's name in meters: its PCI address, or its number.
    pub(super) fn gpu(&self) -> String {
        self.info.pci.clone().unwrap_or_else(|| self.id().0.to_string())
    }

    /// Returns the pool if it has started.
    #[inline]
    pub(super) fn started(&self) -> Option<&Started> {
        self.started.get()
    }

    /// Returns the pool, starting it if needed.
    ///
    /// # Errors
    /// The error of the driver or the operating system; the next call tries again.
    pub(super) fn start(
        &self,
        completion_events: &Arc<CompletionEvents>,
        config: &config::Pool,
        mappings: u64,
        peers: Vec<DeviceId>,
        relays: impl FnOnce() -> DeviceSet,
        observers: &Arc<Observers>,
    ) -> Result<&Started, ProcessError> {
        let _starting = self.starting.lock();
        if let Some(started) = self.started.get() {
            return Ok(started);
        }
        let mut settings = pool::settings(config, self.info.memory, mappings);
        settings.limit = settings.limit.min(pool::part(self.info.memory, self.fraction()));
        let options = PoolOptions {
            settings: Some(settings),
            completion_events: Some(completion_events.clone()),
            peers,
            exportable: config.exportable,
            observer: Some(observers.clone()),
            lease: Some(self.lease.clone()),
        };
        let info = completion_events.driver().memory_info(self.info.id)?;
        let before = info.total.saturating_sub(info.free);
        let pool = GpuPool::new(completion_events.driver().clone(), self.info.id, options)?;
        // Relays are read under the lock: a later caller finds a started pool.
        open(&pool, relays());
        let pool = Arc::new(pool);
        let interval = Duration::from_micros(config.completion_interval_us);
        let (counters, mut is_registered) = (observers.counters.clone(), false);
        let look = move |has_ticked| {
            if !std::mem::replace(&mut is_registered, true) {
                counters.looks();
            }
            counters.look(has_ticked, Instant::now())
        };
        observers.counters.add_pool(&pool);
        let ticker = Ticker::start_with(&pool, interval, look)
            .map_err(|source| ProcessError::NoThread { what: "completion points", source })?;
        let private = PrivatePools::new(self.fixed_pools.clone());
        let settled = AtomicU64::new(0);
        let started = Started { pool, private, before, settled, ticker: Mutex::new(Some(ticker)) };
        Ok(self.started.get_or_init(|| started))
    }

    /// Opens the current and future memory of a started or starting pool to relays.
    pub(super) fn open_to(&self, relays: DeviceSet) {
        let _starting = self.starting.lock();
        if let Some(started) = self.started.get() {
            open(&started.pool, relays);
        }
    }

    /// Returns the fraction of the memory that may be reserved.
    pub(super) fn fraction(&self) -> f64 {
        f64::from_bits(self.fraction.load(Ordering::Relaxed))
    }

    /// Sets the fraction for a running pool and for one that starts later. A configured limit still applies.
    pub(super) fn set_fraction(&self, fraction: f64, limit: Option<Bytes>) {
        let _starting = self.starting.lock();
        self.fraction.store(fraction.to_bits(), Ordering::Relaxed);
        if let Some(started) = self.started.get() {
            let most = limit.map_or(1.0, |limit| limit.fraction_of(self.info.memory));
            started.pool.set_memory_fraction(fraction.min(most));
        }
    }
}

/// Opens a pool to relays; a relay without access only fails to relay copies, so errors are ignored.
fn open(pool: &GpuPool, relays: DeviceSet) {
    for relay in relays.without(DeviceSet::of(pool.device())).iter() {
        if let Err(error) = pool.peer_access().lend_to(relay) {
            let device = pool.device();
            tracing::warn!(target: "glake::copies", %relay, %device, %error, "no relay of copies to this memory");
        }
    }
}

impl Started {
    /// Stops the thread that polls completion points.
    pub(super) fn stop(&self) {
        if let Some(ticker) = self.ticker.lock().take() {
            ticker.stop();
        }
    }

    /// Waits until all memory freed before can be released, except memory that a capture holds.
    pub(super) fn settle(&self) -> Result<(), ProcessError> {
        use glake_device::DriverError::Capturing;
        self.settled.fetch_add(1, Ordering::Relaxed);
        match self.pool.settle() {
            Ok(()) | Err(glake_tiers::PoolError::Driver(Capturing { .. })) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the number of waits for all freed memory.
    pub(super) fn times_settled(&self) -> u64 {
        self.settled.load(Ordering::Relaxed)
    }

    /// Resets totals and counters to zero.
    pub(super) fn reset_totals(&self) {
        self.settled.store(0, Ordering::Relaxed);
        self.pool.report().reset_totals();
    }
}
