//! Copies in the host's memory go to files, while nobody needs what they are of.

use glake_tiers::Demotion;
use glake_units::Bytes;

use super::super::Result;
use super::RegionSet;
use super::ask::Tier;

impl RegionSet {
    /// Writes copies of evicted memory to files until at least `amount` of the host's is free; returns how much is. What comes back last goes
    /// first. Ends early where it is not to go on, which whoever calls says of refills too.
    ///
    /// # Errors
    /// [`super::super::ProcessError::NoFiles`]; what files meet: what was written by then counts.
    pub(in super::super) fn demote(&self, amount: Bytes, keep_going: &dyn Fn() -> bool) -> Result<Bytes> {
        self.stores.check(Tier::File)?;
        let (files, mut slots) = (self.stores.files()?, self.table.named(None)?);
        self.table.sort(&mut slots);
        let mut freed = Bytes::ZERO;
        for region in slots.iter().rev().flat_map(|slot| slot.regions()) {
            let left = amount.saturating_sub(freed);
            if left.is_zero() || !keep_going() {
                break;
            }
            let host = &self.stores.host(region.pool().device())?;
            freed = freed.saturating_add(region.demote(left, Demotion { files: &files, host, keep_going })?);
        }
        Ok(freed)
    }
}
