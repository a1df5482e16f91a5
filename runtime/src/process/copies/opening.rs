//! Peer access that is granted on demand.
//!
//! Regions are closed to relays at first, because that makes shrink and refill faster; parts of single copies go through staging slots.
//! Relay kernels that copy small blocks of a list, and broadcasts, need direct access. The engine's thread opens a region at the first such
//! copy and it stays open; until then its GPU's own link copies. A region that could not be opened is retried by the next copies, a few
//! times.
//!
//! A copy between two GPUs that neither could make first opens the pool of one to the other, and the region if the memory lies in one.

use std::sync::Arc;

use glake_device::{CopyRequest, DeviceId};
use glake_stitch::DomainId;
use rustc_hash::FxHashMap;

use super::Copies;
use crate::sync::Mutex;

/// Maximum number of failed attempts to open a region, or a pool to a device.
const MOST: u32 = 3;

/// Memory that waits to be opened.
#[derive(Debug, Default)]
pub(super) struct Opening {
    /// Requested regions by device.
    asked: Arc<Mutex<FxHashMap<(DeviceId, DomainId), Asked>>>,
    /// Failed attempts to open a pool to a device, by both devices.
    refused: Mutex<FxHashMap<(DeviceId, DeviceId), u32>>,
}

#[derive(Debug, Default)]
struct Asked {
    /// Whether a request to the engine's thread is pending.
    is_pending: bool,
    failed: u32,
}

impl Copies {
    /// Requests that the engine's thread opens the memory of a copy to relays if it is closed; does not wait.
    pub(super) fn open_later(&self, request: &CopyRequest) {
        let Some(engine) = self.registry.engine.made() else { return };
        for start in [request.to, request.from] {
            let Some(pool) = self.ends.pool_of(start, request.size) else { continue };
            let Some(domain) = pool.closed_at(start) else { continue };
            let (key, pool, asked) = ((pool.device(), domain), pool.clone(), self.opening.asked.clone());
            {
                let mut asked = asked.lock();
                let state = asked.entry(key).or_default();
                if state.is_pending || state.failed >= MOST {
                    continue;
                }
                state.is_pending = true;
            }
            let is_called = engine.call_on_thread(move |_| match pool.open_domain(domain) {
                Ok(()) => drop(asked.lock().remove(&key)),
                Err(error) => {
                    tracing::warn!(target: "glake::copies", device = %key.0, %error, "lists of a region's blocks take one link for now");
                    let mut asked = asked.lock();
                    let state = asked.entry(key).or_default();
                    (state.is_pending, state.failed) = (false, state.failed + 1);
                }
            });
            if !is_called {
                self.opening.asked.lock().remove(&key);
            }
        }
    }

    /// Opens the pool memory of a copy to a device if it is closed to it. After several failures the pool is not tried again, and the copy
    /// takes another path.
    #[cold]
    pub(super) fn open_to(&self, device: DeviceId, request: &CopyRequest) {
        for start in [request.to, request.from] {
            let Some(pool) = self.ends.pool_of(start, request.size) else { continue };
            if pool.device() == device || pool.reach_of(start, request.size).0.contains(device) {
                continue;
            }
            let key = (pool.device(), device);
            if self.opening.refused.lock().get(&key).is_some_and(|failed| *failed >= MOST) {
                continue;
            }
            let lent = if pool.peers().contains(device) { Ok(()) } else { pool.lend_to(device) };
            let opened =
                lent.and_then(|()| pool.closed_at(start).map_or(Ok(()), |domain| pool.open_domain(domain)));
            if let Err(error) = opened {
                tracing::warn!(target: "glake::copies", memory = %key.0, to = %device, %error, "copies between these go through the host for now");
                *self.opening.refused.lock().entry(key).or_default() += 1;
            }
        }
    }
}
