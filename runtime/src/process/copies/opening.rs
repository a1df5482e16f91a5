//! Regions that others than their own GPU have to touch after all.
//!
//! Memory of regions is closed to relays, for it comes and goes faster so: parts of single copies go through slots. Small blocks of a list
//! are copied by relays' kernels, which have to touch them. So a region is opened with the first list, on the engine's thread, and stays
//! open; until then its GPU's own link copies. A copy between regions of two GPUs, which neither could make, opens them first.

use glake_device::{CopyRequest, DeviceId};
use glake_stitch::DomainId;
use rustc_hash::FxHashSet;

use super::super::Result;
use super::Copies;
use crate::sync::Mutex;

/// The regions that were asked to be opened.
#[derive(Debug, Default)]
pub(super) struct Opening {
    asked: Mutex<FxHashSet<(DeviceId, DomainId)>>,
}

impl Copies {
    /// Has the memory of a list's block opened to relays where it is closed; waits for nothing.
    pub(super) fn open_later(&self, request: &CopyRequest) {
        let Some(engine) = self.registry.engine.made() else { return };
        for start in [request.to, request.from] {
            let Some(pool) = self.ends.pool_of(start, request.size) else { continue };
            let Some(domain) = pool.closed_at(start) else { continue };
            if !self.opening.asked.lock().insert((pool.device(), domain)) {
                continue;
            }
            let pool = pool.clone();
            engine.call_on_thread(move |_| {
                if let Err(error) = pool.open_domain(domain) {
                    let device = pool.device();
                    tracing::warn!(target: "glake::copies", %device, %error, "lists of a region's blocks take one link");
                }
            });
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
