//! Work that begins before all bytes are back, behind them.
//!
//! ```text
//! refill   made, mapped ─► copies enqueued ─► mark ─► all there
//! wait     ░░░░░ on the host ░░░░░░░░░░░░░░░│ its stream, on the GPU │ nothing to wait for
//! ```

use std::sync::Arc;

use glake_device::{DeviceId, Stream};
use parking_lot::{Condvar, Mutex};

use super::{Mark, Region, RegionError, Result};
use crate::{Place, Residency};

/// How far refills of a region are, for those who wait for it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Refills that have begun, those that wait for their turn too.
    refills: usize,
    /// The point behind all copies of the one whose turn it is, once they are enqueued.
    mark: Option<Arc<dyn Mark>>,
}

/// A refill that has begun; dropping it ends it.
#[derive(Debug)]
pub(super) struct BegunRefill<'a>(&'a Progress);

impl Progress {
    pub(super) fn begin(&self) -> BegunRefill<'_> {
        self.state.lock().refills += 1;
        BegunRefill(self)
    }

    /// Whether a refill has begun.
    pub(super) fn is_refilling(&self) -> bool {
        self.state.lock().refills > 0
    }
}

impl BegunRefill<'_> {
    /// All its copies are enqueued before this point.
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
    /// Whether a refill has begun, or waits for its turn.
    pub fn is_refilling(&self) -> bool {
        self.progress.is_refilling()
    }

    /// Work that is enqueued on a stream from now on finds the region's bytes at their addresses: waits on the host while a refill
    /// makes and maps memory, and on the stream for what it copies. Where nothing is evicted it returns at once.
    ///
    /// A copy that fails on the GPU after that is told by the refill.
    ///
    /// # Errors
    /// [`RegionError::Evicted`] where some of it is evicted, and nobody refills it, or not all of it; [`RegionError::Unordered`].
    pub fn wait(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let mut state = self.progress.state.lock();
        loop {
            let mark = state.mark.clone();
            let in_order = mark.is_some();
            let is_apart = |residency: Residency| match residency {
                Residency::Resident { .. } => false,
                // Nobody finds anything there.
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
