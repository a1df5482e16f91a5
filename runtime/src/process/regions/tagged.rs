//! One tag: what its regions are made with, and its region on each device.
//!
//! Invariant: `is_away` is true from before a shrink begins until all memory of the tag is known to be back, by what the pools'
//! records say; whoever ends a move looks last ([`Tagged::settle`]). The gate and the flags say nothing else: the gate reads it, the
//! flags count it.

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

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A region that the program defined.
    Defined,
    /// Private pools of a number.
    Graph,
    /// The default domain.
    Default,
}

/// A tag, and what is tagged with it.
#[derive(Debug)]
pub(super) struct Tagged {
    pub(super) options: RegionOptions,
    pub(super) kind: Kind,
    /// The domains of a defined region, by device, where something was allocated.
    domains: Box<[OnceLock<DomainId>]>,
    /// In the order in which they were made. Of a defined region one a device.
    regions: Mutex<Vec<Arc<Region>>>,
    /// Whether it is sealed, and strictly: what is made of it is sealed too.
    seal: Mutex<Option<bool>>,
    /// When it was first allocated in, among all; `u64::MAX`: never.
    first: AtomicU64,
    /// Shrinks that are under way.
    out: Mutex<u32>,
    /// How many moved it, or found nothing to move, by device.
    shrinks: Box<[AtomicU64]>,
    is_away: AtomicBool,
    /// Devices where somebody who touched it brings it back, and hooks are told: the bits of a [`DeviceSet`].
    touched: AtomicU64,
}

/// Is the first to touch a region that is evicted.
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

    /// The domain for allocations on a device, made now if there is none.
    #[inline]
    pub(super) fn domain(&self, pool: &Arc<GpuPool>, clock: &AtomicU64) -> Option<DomainId> {
        let place = self.domains.get(usize::try_from(pool.device().0).ok()?)?;
        Some(*place.get_or_init(|| {
            let region = Arc::new(Region::new(pool, self.options.clone()));
            let domain = region.domain();
            let seal = self.seal.lock();
            if let Some(strict) = *seal {
                // A pool that refuses that refuses what is asked for next as well.
                let _ = region.seal(strict);
            }
            self.regions.lock().push(region);
            self.note_first(clock);
            domain
        }))
    }

    /// Seals its regions, and those that are made from now on.
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

    /// Takes that back.
    ///
    /// # Errors
    /// As [`Region::unseal`]; it is sealed still.
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

    /// The region of a domain that exists, made now if there is none.
    pub(super) fn cover(&self, pool: &Arc<GpuPool>, domain: DomainId, clock: &AtomicU64) {
        let mut regions = self.regions.lock();
        let known =
            |region: &Arc<Region>| region.domain() == domain && region.pool().device() == pool.device();
        if !regions.iter().any(known) {
            regions.push(Arc::new(Region::over(pool, domain, self.options.clone())));
            self.note_first(clock);
        }
    }

    /// Forgets the regions of a device whose domains are gone: they were given up, and nothing was left of them.
    pub(super) fn forget(&self, device: DeviceId, is_own: impl Fn(DomainId) -> bool) {
        self.regions.lock().retain(|region| region.pool().device() != device || is_own(region.domain()));
    }

    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.lock().clone()
    }

    /// The region of a domain of a device.
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

    /// Whether some of it is evicted, or is about to be.
    #[inline]
    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Acquire)
    }

    /// A shrink of a device is carried out: refills that were requested before it bring nothing back there any more that nobody waits for.
    pub(super) fn count_shrink(&self, device: DeviceId) {
        if let Some(count) = usize::try_from(device.0).ok().and_then(|place| self.shrinks.get(place)) {
            count.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How many there were, by device.
    pub(super) fn shrinks(&self) -> impl Iterator<Item = u64> + '_ {
        self.shrinks.iter().map(|count| count.load(Ordering::Acquire))
    }

    /// A shrink of a device begins: whoever touches it from now on asks for it back.
    pub(super) fn begin_out(&self, flags: &RegionFlags, device: DeviceId) {
        self.count_shrink(device);
        self.out_begins(flags);
    }

    /// Some of it is on its way out, until [`Tagged::end_out`]; refills that were requested before are wanted as ever.
    pub(super) fn out_begins(&self, flags: &RegionFlags) {
        let mut out = self.out.lock();
        *out += 1;
        if !self.is_away.swap(true, Ordering::AcqRel) {
            flags.add_evicted();
        }
    }

    /// It has ended.
    pub(super) fn end_out(&self, flags: &RegionFlags, gate: &Gate) {
        *self.out.lock() -= 1;
        self.settle(flags, gate);
    }

    /// Looks at what is evicted, after something was moved, freed or given up.
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

    /// Whether nobody else who touched its region of a device brings that back.
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

/// How much a refill of a region has to do: at least one byte where something of it is interrupted.
pub(super) fn wanting(region: &Region) -> Bytes {
    if region.is_whole() { Bytes::ZERO } else { region.sizes().1.max(Bytes::new(1)) }
}
