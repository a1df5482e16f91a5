//! Moves host copies of evicted memory to files while the memory is not needed.

use glake_tiers::{Demotion, HostPool};
use glake_units::Bytes;

use super::super::Result;
use super::RegionSet;
use super::ask::Tier;

impl RegionSet {
    /// Writes host copies of evicted memory to files until at least `amount` bytes of host memory are free; returns the free bytes. Regions
    /// that are refilled last go first. Unpins the freed memory in whole arenas. Ends early once `keep_going` returns `false`, which it
    /// must do as soon as a refill begins.
    ///
    /// # Errors
    /// [`super::super::ProcessError::NoFiles`]; errors of files: the bytes written so far count.
    pub(in super::super) fn demote(&self, amount: Bytes, keep_going: &dyn Fn() -> bool) -> Result<Bytes> {
        self.stores.check(Tier::File)?;
        let (files, mut tags) = (self.stores.files()?, self.table.named(None)?);
        self.table.sort(&mut tags);
        let mut freed = Bytes::ZERO;
        for region in tags.iter().rev().flat_map(|tagged| tagged.regions()) {
            let left = amount.saturating_sub(freed);
            if left.is_zero() || !keep_going() {
                break;
            }
            let host = &self.stores.host(region.pool().device())?;
            let moved = region.demote(left, Demotion { files: &files, host, keep_going })?;
            freed = freed.saturating_add(moved);
            unpin(host, moved, keep_going);
        }
        Ok(freed)
    }
}

/// Unpins at least `amount` bytes, arena by arena, as far as whole arenas are free; a request for pinned memory waits for at most one of
/// them.
fn unpin(host: &HostPool, amount: Bytes, keep_going: &dyn Fn() -> bool) {
    let mut unpinned = Bytes::ZERO;
    while unpinned < amount && keep_going() {
        let one = host.trim(host.statistics().pinned.saturating_sub(Bytes::new(1)));
        if one.is_zero() {
            break;
        }
        unpinned = unpinned.saturating_add(one);
    }
}
