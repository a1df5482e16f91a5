//! Streams that start work before a refill has completed.
//!
//! ```text
//! refill   made, mapped ─► copies enqueued ─► mark ─► all bytes arrived
//! wait     ░░░░░ on the host ░░░░░░░░░░░░░░░│ its stream, on the GPU │ nothing to wait for
//! ```

use std::sync::Arc;

use glake_device::{DeviceId, Stream};
use parking_lot::{Condvar, Mutex};

use super::{Mark, Region, RegionError, Result};
use crate::{Place, Residency};

/// Progress of a region's refills, for threads that wait for them.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of refills that have begun, including those waiting for their turn.
    refills: usize,
    /// Mark behind all copies of the current refill, once they are enqueued.
    mark: Option<Arc<dyn Mark>>,
}

/// Guard of a refill in progress; dropping it ends the refill.
#[derive(Debug)]
pub(super) struct BegunRefill<'a>(&'a Progress);

impl Progress {
    pub(super) fn begin(&self) -> BegunRefill<'_> {
        self.state.lock().refills += 1;
        BegunRefill(self)
    }

    /// Returns whether a refill has begun.
    pub(super) fn is_refilling(&self) -> bool {
        self.state.lock().refills > 0
    }
}

impl BegunRefill<'_> {
    /// Publishes a mark behind all copies of the refill.
    pub(super) fn enqueued(&self, mark: Arc<dyn Mark>) {
        self.0.state.lock().mark = Some(mark);
        self.0.changed.notify_all();
    }
}

impl Drop for BegunRefill<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.refills -= 1;
        state.mark = None;
        self.0.changed.notify_all();
    }
}

impl Region {
    /// Returns whether a refill is in progress or waits for its turn.
    pub fn is_refilling(&self) -> bool {
        self.progress.is_refilling()
    }

    /// Orders later work of a stream after the region's refill: waits on the host while the refill makes and maps memory, and on the stream
    /// for its copies. Returns at once if nothing is evicted.
    ///
    /// If a copy fails on the GPU later, the refill reports it.
    ///
    /// # Errors
    /// [`RegionError::Evicted`] if part of the region is evicted and no refill of all of it is in progress; [`RegionError::Unordered`].
    pub fn wait(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let mut state = self.progress.state.lock();
        loop {
            let mark = state.mark.clone();
            let in_order = mark.is_some();
            let is_apart = |residency: Residency| match residency {
                Residency::Resident { .. } => false,
                // A decommitted extent has no bytes to wait for.
                _ if residency.authority() == Place::Nowhere => false,
                Residency::Refilling { .. } => !in_order,
                _ => true,
            };
            if !self.pool.records().has_any(self.domain, is_apart) {
                drop(state);
                let followed = mark.map_or(Ok(()), |mark| mark.follow(device, stream));
                return followed.map_err(|source| RegionError::Unordered {
                    device,
                    tag: self.options.tag.clone(),
                    source,
                });
            }
            if state.refills == usize::from(in_order) {
                return Err(RegionError::Evicted {
                    device: self.pool.device(),
                    tag: self.options.tag.clone(),
                });
            }
            self.progress.changed.wait(&mut state);
        }
    }
}
