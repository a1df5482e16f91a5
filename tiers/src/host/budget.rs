//! The most that the host pools of a process pin together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::HostPool;

/// One budget for as many pools as are made under it.
#[derive(Debug)]
pub struct Budget {
    most: Bytes,
    pinned: AtomicU64,
    pools: Mutex<Vec<Weak<HostPool>>>,
}

/// A part of a budget that was taken for memory that is about to be pinned; what is left of it goes back.
#[derive(Debug)]
pub(super) struct Taken<'a> {
    budget: &'a Budget,
    left: Mutex<Bytes>,
}

impl Budget {
    /// So much. Zero: nothing; [`Bytes::MAX`]: what the host has.
    pub fn new(most: Bytes) -> Arc<Budget> {
        Arc::new(Budget { most, pinned: AtomicU64::new(0), pools: Mutex::default() })
    }

    /// All of it.
    pub fn most(&self) -> Bytes {
        self.most
    }

    /// What may still be pinned.
    pub fn room(&self) -> Bytes {
        self.most.saturating_sub(Bytes::new(self.pinned.load(Ordering::Acquire)))
    }

    /// Takes so much; `None`: there is not so much.
    pub(super) fn take(&self, size: Bytes) -> Option<Taken<'_>> {
        let taken = |pinned: u64| pinned.checked_add(size.get()).filter(|pinned| *pinned <= self.most.get());
        self.pinned.try_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        Some(Taken { budget: self, left: Mutex::new(size) })
    }

    /// So much is pinned no more.
    pub(super) fn give_back(&self, size: Bytes) {
        self.pinned.fetch_sub(size.get(), Ordering::AcqRel);
    }

    pub(super) fn add(&self, pool: &Arc<HostPool>) {
        let mut pools = self.pools.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// The pools but one.
    pub(super) fn others(&self, but: &HostPool) -> Vec<Arc<HostPool>> {
        let pools = self.pools.lock();
        pools.iter().filter_map(Weak::upgrade).filter(|pool| !std::ptr::eq(&raw const **pool, but)).collect()
    }
}

impl Taken<'_> {
    /// So much of it is pinned.
    pub(super) fn arrived(&self, size: Bytes) {
        let left = &mut *self.left.lock();
        *left = left.saturating_sub(size);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.budget.give_back(*self.left.get_mut());
    }
}
