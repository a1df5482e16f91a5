//! Memory that its holders can give up without loss: reclaimed first if host memory is short.

use std::fmt;
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{HostBlock, HostPool, PAGE, Result};

/// Holder of pool memory that it can give up at any time.
pub trait Reclaim: Send + Sync + fmt::Debug {
    /// Gives up at least `wanted` bytes, or all; returns the number given up. Must not take memory from any pool.
    fn reclaim(&self, wanted: Bytes) -> Bytes;
}

/// Holders of reclaimable memory, asked in this order. Held weakly.
#[derive(Debug, Default)]
pub(super) struct Reclaimers(Mutex<Vec<Weak<dyn Reclaim>>>);

impl HostPool {
    /// Registers a holder of reclaimable memory.
    pub fn add_reclaimer(&self, holder: &Arc<impl Reclaim + 'static>) {
        let holder: Arc<dyn Reclaim> = holder.clone();
        let mut known = self.reclaimers.0.lock();
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(&holder));
    }

    /// Takes memory that is free, free soon, or within the budget, without reclaiming any. `None` if there is none, or another thread pins.
    /// Does not delay other threads.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn take_spare(self: &Arc<Self>, size: Bytes) -> Result<Option<HostBlock>> {
        let Some(rounded) = size.max(PAGE).align_up(PAGE) else { return Ok(None) };
        let found = match self.hit(rounded)? {
            None => self.hit_soon(rounded)?,
            found => found,
        };
        let range = match found {
            Some(range) => range,
            None => {
                let Some(_turn) = self.try_turn() else { return Ok(None) };
                match self.grow(rounded) {
                    Ok(range) => range,
                    Err(error) if error.is_shortage() => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        };
        Ok(Some(HostBlock::new(self, range, size)))
    }

    /// Asks the holders for memory. Returns whether any was given up; it is available once the work on it has completed.
    pub(super) fn reclaim(&self, wanted: Bytes) -> bool {
        let holders = self.reclaimers.0.lock().clone();
        let mut given = Bytes::ZERO;
        for holder in holders.iter().filter_map(Weak::upgrade) {
            if given < wanted {
                given = given.saturating_add(holder.reclaim(wanted.saturating_sub(given)));
            }
        }
        self.absorb();
        !given.is_zero()
    }
}
