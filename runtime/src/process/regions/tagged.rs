//! A tag: the options of its regions, and its region on each device.
//!
//! Invariant: `is_away` is true from before a shrink begins until the pools' records show that all memory of the tag is back. Every move
//! ends with a check of the records ([`Tagged::settle`]). The gate reads `is_away`, and the flags count it; neither stores anything else
//! about evictions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_stitch::DomainId;
use glake_tiers::{GpuPool, Policy, Region, RegionError, RegionOptions};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::super::gate::Gate;
use super::choose::EvictionCost;
use super::flags::RegionFlags;

/// Origin of a tag's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Region that the program defined.
    Defined,
    /// Private pools with one number.
    Graph,
    /// Default domain: memory outside regions.
    Default,
}

/// A tag and its regions.
#[derive(Debug)]
pub(super) struct Tagged {
    pub(super) options: RegionOptions,
    pub(super) kind: Kind,
    /// Domains of a defined region by device, created at the first allocation.
    domains: Box<[OnceLock<DomainId>]>,
    /// Regions in order of creation; a defined tag has one for each device.
    regions: Mutex<Vec<Arc<Region>>>,
    /// Whether the tag is sealed, and strictly; also applies to regions created later.
    seal: Mutex<Option<bool>>,
    /// Position among first allocations of all tags; `u64::MAX` if there was none.
    first: AtomicU64,
    /// Number of shrinks in progress.
    out: Mutex<u32>,
    /// Number of shrinks by device, including those that found nothing to move.
    shrinks: Box<[AtomicU64]>,
    is_away: AtomicBool,
    /// Devices on which a touching thread runs a refill whose hooks were called, as the bits of a [`DeviceSet`].
    touched: AtomicU64,
}

/// Guard of the first thread to touch an evicted region.
#[derive(Debug)]
pub(super) struct FirstTouch<'s> {
    tagged: &'s Tagged,
    device: DeviceSet,
}

impl Tagged {
    pub(super) fn new(options: RegionOptions, kind: Kind, devices: usize) -> Tagged {
        Tagged {
            options,
            kind,
            domains: (0..devices).map(|_| OnceLock::new()).collect(),
            regions: Mutex::default(),
            seal: Mutex::default(),
            first: AtomicU64::new(u64::MAX),
            out: Mutex::default(),
            shrinks: (0..devices).map(|_| AtomicU64::new(0)).collect(),
            is_away: AtomicBool::new(false),
            touched: AtomicU64::new(0),
        }
    }

    pub(super) fn tag(&self) -> &str {
        &self.options.tag
    }

    /// Returns the domain for allocations on a device, creating it if needed.
    #[inline]
    pub(super) fn domain(&self, pool: &Arc<GpuPool>, clock: &AtomicU64) -> Option<DomainId> {
        let place = self.domains.get(usize::try_from(pool.device().0).ok()?)?;
        Some(*place.get_or_init(|| {
            let region = Arc::new(Region::new(pool, self.options.clone()));
            let domain = region.domain();
            let seal = self.seal.lock();
            if let Some(strict) = *seal {
                // A pool that refuses this also refuses the next request.
                let _ = region.seal(strict);
            }
            self.regions.lock().push(region);
            self.note_first(clock);
            domain
        }))
    }

    /// Seals its current and future regions.
    ///
    /// # Errors
    /// As [`Region::seal`].
    pub(super) fn seal(&self, strict: bool) -> Result<(), RegionError> {
        if self.options.policy != Policy::Sealed {
            return Err(RegionError::NotSealable { tag: self.options.tag.clone() });
        }
        let mut seal = self.seal.lock();
        *seal = Some(strict);
        self.regions().iter().try_for_each(|region| region.seal(strict))
    }

    /// Unseals its regions.
    ///
    /// # Errors
    /// As [`Region::unseal`]; it stays sealed then.
    pub(super) fn unseal(&self) -> Result<(), RegionError> {
        let mut seal = self.seal.lock();
        self.regions().iter().try_for_each(|region| region.unseal())?;
        *seal = None;
        Ok(())
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.seal.lock().is_some()
    }

    fn note_first(&self, clock: &AtomicU64) {
        let now = clock.fetch_add(1, Ordering::Relaxed);
        self.first.fetch_min(now, Ordering::Relaxed);
    }

    /// Creates the region of an existing domain if there is none.
    pub(super) fn cover(&self, pool: &Arc<GpuPool>, domain: DomainId, clock: &AtomicU64) {
        let mut regions = self.regions.lock();
        let known =
            |region: &Arc<Region>| region.domain() == domain && region.pool().device() == pool.device();
        if !regions.iter().any(known) {
            regions.push(Arc::new(Region::over(pool, domain, self.options.clone())));
            self.note_first(clock);
        }
    }

    /// Drops the regions of a device whose domains no longer exist.
    pub(super) fn forget(&self, device: DeviceId, is_own: impl Fn(DomainId) -> bool) {
        self.regions.lock().retain(|region| region.pool().device() != device || is_own(region.domain()));
    }

    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.lock().clone()
    }

    /// Returns the region of a domain of a device.
    pub(super) fn region_of(&self, device: DeviceId, domain: DomainId) -> Option<Arc<Region>> {
        let regions = self.regions.lock();
        regions.iter().find(|region| region.domain() == domain && region.pool().device() == device).cloned()
    }

    pub(super) fn first(&self) -> u64 {
        self.first.load(Ordering::Relaxed)
    }

    pub(super) fn eviction_cost(&self, region: &Region) -> EvictionCost {
        match self.kind {
            Kind::Defined => {
                EvictionCost::of(self.options.policy, self.options.host_copy, region.is_sealed())
            }
            Kind::Graph => EvictionCost::Graph,
            Kind::Default => EvictionCost::Default,
        }
    }

    /// Returns whether some of its memory is evicted or about to be.
    #[inline]
    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Acquire)
    }

    /// Counts a shrink on a device: earlier refill requests without a waiter no longer apply there.
    pub(super) fn count_shrink(&self, device: DeviceId) {
        if let Some(count) = usize::try_from(device.0).ok().and_then(|place| self.shrinks.get(place)) {
            count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Returns the number of shrinks by device.
    pub(super) fn shrinks(&self) -> impl Iterator<Item = u64> + '_ {
        self.shrinks.iter().map(|count| count.load(Ordering::Acquire))
    }

    /// Begins a shrink on a device: a thread that touches the memory from now on requests a refill.
    pub(super) fn begin_out(&self, flags: &RegionFlags, device: DeviceId) {
        self.count_shrink(device);
        self.out_begins(flags);
    }

    /// Marks memory as leaving until [`Tagged::end_out`]; earlier refill requests stay valid.
    pub(super) fn out_begins(&self, flags: &RegionFlags) {
        let mut out = self.out.lock();
        *out += 1;
        if !self.is_away.swap(true, Ordering::AcqRel) {
            flags.add_evicted();
        }
    }

    /// Ends a shrink and updates the mark.
    pub(super) fn end_out(&self, flags: &RegionFlags, gate: &Gate) {
        *self.out.lock() -= 1;
        self.settle(flags, gate);
    }

    /// Updates the mark of evicted memory from the pools' records, after a move, a free or a release.
    pub(super) fn settle(&self, flags: &RegionFlags, gate: &Gate) {
        let out = self.out.lock();
        let is_away = *out > 0 || !self.regions().iter().all(|region| region.is_usable());
        match (self.is_away.swap(is_away, Ordering::AcqRel), is_away) {
            (false, true) => flags.add_evicted(),
            (true, false) => flags.sub_evicted(),
            _ => {}
        }
        drop(out);
        gate.changed();
    }

    /// Claims the first touch of its region on a device; `None` if another thread has it.
    pub(super) fn touch_first(&self, device: DeviceId) -> Option<FirstTouch<'_>> {
        let device = DeviceSet::of(device);
        let touched = self.touched.fetch_or(device.bits(), Ordering::Relaxed);
        device
            .intersection(DeviceSet::from_bits(touched))
            .is_empty()
            .then_some(FirstTouch { tagged: self, device })
    }
}

impl Drop for FirstTouch<'_> {
    fn drop(&mut self) {
        self.tagged.touched.fetch_and(!self.device.bits(), Ordering::Relaxed);
    }
}

/// Returns the bytes that a refill of a region must move: at least 1 if a move was interrupted.
pub(super) fn wanting(region: &Region) -> Bytes {
    if region.is_whole() { Bytes::ZERO } else { region.sizes().1.max(Bytes::new(1)) }
}
