//! Common limit of the pinned memory of several host pools.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::HostPool;

/// Budget shared by all pools created with it.
#[derive(Debug)]
pub struct Budget {
    most: Bytes,
    pinned: AtomicU64,
    pools: Mutex<Vec<Weak<HostPool>>>,
}

/// Part of a budget reserved for memory about to be pinned; the unused rest is returned on drop.
#[derive(Debug)]
pub(super) struct BudgetReservation<'a> {
    budget: &'a Budget,
    left: Mutex<Bytes>,
}

impl Budget {
    /// Creates a budget in bytes. Zero: no memory may be pinned; [`Bytes::MAX`]: all of the host's memory.
    pub fn new(most: Bytes) -> Arc<Budget> {
        Arc::new(Budget { most, pinned: AtomicU64::new(0), pools: Mutex::default() })
    }

    /// Returns the total of the budget.
    pub fn most(&self) -> Bytes {
        self.most
    }

    /// Returns the bytes that may still be pinned.
    pub fn room(&self) -> Bytes {
        self.most.saturating_sub(Bytes::new(self.pinned.load(Ordering::Acquire)))
    }

    /// Reserves bytes of the budget; `None` if too few are left.
    pub(super) fn take(&self, size: Bytes) -> Option<BudgetReservation<'_>> {
        let taken = |pinned: u64| pinned.checked_add(size.get()).filter(|pinned| *pinned <= self.most.get());
        self.pinned.try_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        Some(BudgetReservation { budget: self, left: Mutex::new(size) })
    }

    /// Returns bytes that were unpinned to the budget.
    pub(super) fn give_back(&self, size: Bytes) {
        self.pinned.fetch_sub(size.get(), Ordering::AcqRel);
    }

    pub(super) fn add(&self, pool: &Arc<HostPool>) {
        let mut pools = self.pools.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// Returns all pools of the budget except one.
    pub(super) fn others(&self, but: &HostPool) -> Vec<Arc<HostPool>> {
        let pools = self.pools.lock();
        pools.iter().filter_map(Weak::upgrade).filter(|pool| !std::ptr::eq(&raw const **pool, but)).collect()
    }
}

impl BudgetReservation<'_> {
    /// Notes that reserved bytes have been pinned.
    pub(super) fn arrived(&self, size: Bytes) {
        let left = &mut *self.left.lock();
        *left = left.saturating_sub(size);
    }
}

impl Drop for BudgetReservation<'_> {
    fn drop(&mut self) {
        self.budget.give_back(*self.left.get_mut());
    }
}
