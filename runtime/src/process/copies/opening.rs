//! Regions that others than their own GPU have to touch after all.
//!
//! Memory of regions is closed to relays, for it comes and goes faster so: parts of single copies go through slots. Small blocks of a list
//! are copied by relays' kernels, which have to touch them, and a broadcast by the GPUs that it goes to. So a region is opened with the
//! first of these, on the engine's thread, and stays open; until then its GPU's own link copies. One that could not be opened is asked for
//! again by the next. A copy between regions of two GPUs, which neither could make, opens them first.

use std::sync::Arc;

use glake_device::{CopyRequest, DeviceId};
use glake_stitch::DomainId;
use rustc_hash::FxHashSet;

use super::super::Result;
use super::Copies;
use crate::sync::Mutex;

/// The regions that are to be opened and are not yet.
#[derive(Debug, Default)]
pub(super) struct Opening {
    asked: Arc<Mutex<FxHashSet<(DeviceId, DomainId)>>>,
}

impl Copies {
    /// Has the memory of a copy opened to relays where it is closed; waits for nothing.
    pub(super) fn open_later(&self, request: &CopyRequest) {
        let Some(engine) = self.registry.engine.made() else { return };
        for start in [request.to, request.from] {
            let Some(pool) = self.ends.pool_of(start, request.size) else { continue };
            let Some(domain) = pool.closed_at(start) else { continue };
            let (device, pool, asked) = (pool.device(), pool.clone(), self.opening.asked.clone());
            if !asked.lock().insert((device, domain)) {
                continue;
            }
            let is_called = engine.call_on_thread(move |_| {
                if let Err(error) = pool.open_domain(domain) {
                    tracing::warn!(target: "glake::copies", %device, %error, "lists of a region's blocks take one link for now");
                }
                asked.lock().remove(&(device, domain));
            });
            if !is_called {
                self.opening.asked.lock().remove(&(device, domain));
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
