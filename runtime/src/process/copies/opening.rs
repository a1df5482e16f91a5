//! Memory that others than its own GPU have to touch after all.
//!
//! Memory of regions is closed to relays, for it comes and goes faster so: parts of single copies go through slots. Small blocks of a list
//! are copied by relays' kernels, which have to touch them, and a broadcast by the GPUs that it goes to. So a region is opened with the
//! first of these, on the engine's thread, and stays open; until then its GPU's own link copies. One that could not be opened is asked for
//! again by the next, a few times.
//!
//! A copy between two GPUs, which neither could make, opens the pool of one to the other first, and a region where it lies in one.

use std::sync::Arc;

use glake_device::{CopyRequest, DeviceId};
use glake_stitch::DomainId;
use rustc_hash::FxHashMap;

use super::Copies;
use crate::sync::Mutex;

/// So often the opening of a region, or of a pool to a device, may fail.
const MOST: u32 = 3;

/// The memory that is to be opened and is not yet.
#[derive(Debug, Default)]
pub(super) struct Opening {
    /// Regions, by their device.
    asked: Arc<Mutex<FxHashMap<(DeviceId, DomainId), Asked>>>,
    /// How often each pool's memory could not be opened to a device.
    refused: Mutex<FxHashMap<(DeviceId, DeviceId), u32>>,
}

#[derive(Debug, Default)]
struct Asked {
    /// Whether the engine's thread is to open it.
    is_pending: bool,
    failed: u32,
}

impl Copies {
    /// Has the memory of a copy opened to relays where it is closed; waits for nothing.
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

    /// Opens the pool memory of a copy to a device, where it is closed to it. A pool that could not be opened is not tried for ever: the copy
    /// goes another way.
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
