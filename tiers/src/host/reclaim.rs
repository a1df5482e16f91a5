//! Memory that its holders can give up without loss: what is taken back first where host memory is short.

use std::fmt;
use std::sync::{Arc, Weak};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::{HostBlock, HostPool, PAGE, Result};

/// Holds memory of a pool that it can give up at any time.
pub trait Reclaim: Send + Sync + fmt::Debug {
    /// Gives up so much, or all; returns how much. Takes nothing of any pool.
    fn reclaim(&self, wanted: Bytes) -> Bytes;
}

/// Who is asked, in this order. None is kept alive.
#[derive(Debug, Default)]
pub(super) struct Reclaimers(Mutex<Vec<Weak<dyn Reclaim>>>);

impl HostPool {
    /// Somebody to ask where memory is short.
    pub fn add_reclaimer(&self, holder: &Arc<impl Reclaim + 'static>) {
        let holder: Arc<dyn Reclaim> = holder.clone();
        let mut known = self.reclaimers.0.lock();
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(&holder));
    }

    /// Memory that nobody else wants: what is free, or is so soon, or what the budget has room for. `None`: there is none, or somebody is
    /// pinning. Waits in nobody's way.
    ///
    /// # Errors
    /// What the driver answers.
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

    /// Whether anybody gave anything up; what was given up can be had once work on it is done.
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
