//! Copies in the host's memory go to files, while nobody needs what they are of.

use glake_tiers::{Demotion, HostPool};
use glake_units::Bytes;

use super::super::Result;
use super::RegionSet;
use super::ask::Tier;

impl RegionSet {
    /// Writes copies of evicted memory to files until at least `amount` of the host's is free; returns how much is. What comes back last goes
    /// first. As much is unpinned, as far as whole arenas are free: the host has it again. Ends early where it is not to go on, which whoever
    /// calls says of refills too.
    ///
    /// # Errors
    /// [`super::super::ProcessError::NoFiles`]; what files meet: what was written by then counts.
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

/// Unpins at least so much, arena by arena, where so much is free in whole ones: who needs pinned memory meanwhile waits for one of them.
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
