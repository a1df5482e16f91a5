//! Plain memory: extents that the driver allocated at addresses of its own (`cuMemAlloc`), for libraries that demand it. Legacy IPC handles
//! exist for such memory only, and the driver's address range of it is the whole allocation.
//!
//! ```text
//! home      ├─ e0 ─┼─ e1 ─┤··│ e7 │··                    e7 is plain: its addresses at home are reserved, and nothing is mapped there
//! addresses base + offset     └─ + shift ─► the driver's   one load for each conversion once there is plain memory
//! ```
//!
//! A domain that has served plain memory has a *twin*, a domain of plain extents with the same rules of keeping and lending. Callers see
//! the blocks of a twin as blocks of its domain. Plain extents are counted, limited, leased, lent among streams and released like others.
//! They are never stitched, moved or shared, and relays have no access to them.
//!
//! Invariants: the core's lock is taken before that of the twins. A shift is stored before a block in its extent is handed out, and cleared when the extent is released.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use glake_device::Address;
use glake_stitch::{Allocator, DomainId, DomainOptions};
use glake_units::Bytes;
use parking_lot::RwLock;
use rustc_hash::FxHashMap;

/// Addresses and domains of a pool's plain memory.
#[derive(Debug)]
pub(super) struct Plain {
    /// Unit of extents as a power of two.
    unit: u32,
    /// Size of home in units.
    units: u64,
    /// Distance of each unit's address from its address at home; 0 for mapped memory. Made with the first plain extent.
    shifts: OnceLock<Box<[AtomicU64]>>,
    /// Plain extents by address: size and offset.
    extents: RwLock<BTreeMap<u64, (u64, u64)>>,
    /// Twins by domain.
    twins: RwLock<FxHashMap<DomainId, DomainId>>,
}

impl Plain {
    /// Creates the record of a pool without plain memory, for extents that are multiples of `unit` in a home of `home` bytes.
    pub(super) fn new(unit: Bytes, home: Bytes) -> Plain {
        Plain {
            unit: unit.get().trailing_zeros(),
            units: home.get() / unit.get(),
            shifts: OnceLock::new(),
            extents: RwLock::default(),
            twins: RwLock::default(),
        }
    }

    /// Returns the distance of an offset's address from its address at home.
    #[inline]
    pub(super) fn shift(&self, offset: Bytes) -> u64 {
        self.shifts.get().map_or(0, |shifts| self.shift_in(shifts, offset))
    }

    #[allow(clippy::cast_possible_truncation)] // home has fewer units than a host has addresses
    fn shift_in(&self, shifts: &[AtomicU64], offset: Bytes) -> u64 {
        shifts.get((offset.get() >> self.unit) as usize).map_or(0, |shift| shift.load(Relaxed))
    }

    /// Returns whether the bytes at an offset are plain.
    pub(super) fn holds(&self, offset: Bytes) -> bool {
        self.shift(offset) != 0
    }

    /// Returns the offset of an address in plain memory.
    #[cold]
    pub(super) fn offset(&self, address: Address) -> Option<Bytes> {
        self.shifts.get()?;
        let extents = self.extents.read();
        let (start, (size, offset)) = extents.range(..=address.0).next_back()?;
        let inside = address.0 - start;
        (inside < *size).then(|| Bytes::new(offset + inside))
    }

    /// Records an extent at `offset` of home whose memory is at `address`; `home` is the address of that offset at home.
    pub(super) fn add(&self, offset: Bytes, size: Bytes, home: Address, address: Address) {
        self.extents.write().insert(address.0, (size.get(), offset.get()));
        self.set(offset, size, address.0.wrapping_sub(home.0));
    }

    /// Forgets the extent at an offset.
    pub(super) fn remove(&self, offset: Bytes, size: Bytes) {
        self.set(offset, size, 0);
        self.extents.write().retain(|_, (_, at)| *at != offset.get());
    }

    #[allow(clippy::cast_possible_truncation)] // as in `shift_in`
    fn set(&self, offset: Bytes, size: Bytes, shift: u64) {
        let shifts = self.shifts.get_or_init(|| (0..self.units).map(|_| AtomicU64::new(0)).collect());
        let (first, count) = ((offset.get() >> self.unit) as usize, (size.get() >> self.unit) as usize);
        shifts.iter().skip(first).take(count).for_each(|unit| unit.store(shift, Relaxed));
    }

    /// Returns the twin of a domain, if it has one.
    pub(super) fn twin(&self, domain: DomainId) -> Option<DomainId> {
        self.twins.read().get(&domain).copied()
    }

    /// Returns the domain whose twin this is, or the domain itself.
    pub(super) fn parent(&self, domain: DomainId) -> DomainId {
        let twins = self.twins.read();
        twins.iter().find(|(_, twin)| **twin == domain).map_or(domain, |(parent, _)| *parent)
    }

    /// Returns the twin of a domain, added with these options if there is none. Forgets the twins that are gone.
    pub(super) fn twin_or(&self, domain: DomainId, options: DomainOptions, core: &mut Allocator) -> DomainId {
        let mut twins = self.twins.write();
        twins.retain(|_, twin| core.has_domain(*twin));
        *twins.entry(domain).or_insert_with(|| core.add_domain(options))
    }

    /// Returns the twins of all domains.
    pub(super) fn all_twins(&self) -> Vec<DomainId> {
        self.twins.read().values().copied().collect()
    }
}
