//! Regions that others than their own GPU have to touch after all.
//!
//! Memory of regions is closed to relays, for it comes and goes faster so: parts of single copies go through slots. Small blocks of a list
//! are copied by relays' kernels, which have to touch them, and a broadcast by the GPUs that it goes to. So a region is opened with the
//! first of these, on the engine's thread, and stays open; until then its GPU's own link copies. One that could not be opened is asked for
//! again by the next, a few times. A copy between regions of two GPUs, which neither could make, opens them first.

use std::sync::Arc;

use glake_device::{CopyRequest, DeviceId};
use glake_stitch::DomainId;
use rustc_hash::FxHashMap;

use super::super::Result;
use super::Copies;
use crate::sync::Mutex;

/// So often the opening of a region may fail.
const MOST: u32 = 3;

/// The regions that are to be opened and are not yet.
#[derive(Debug, Default)]
pub(super) struct Opening {
    asked: Arc<Mutex<FxHashMap<(DeviceId, DomainId), Asked>>>,
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

    /// Opens the memory of a copy that nobody could make else.
    ///
    /// # Errors
    /// What the driver answers.
    #[cold]
    pub(super) fn open_now(&self, request: &CopyRequest) -> Result<()> {
        for start in [request.to, request.from] {
            if let Some(pool) = self.ends.pool_of(start, request.size)
                && let Some(domain) = pool.closed_at(start)
            {
                pool.open_domain(domain)?;
            }
        }
        Ok(())
    }
}
