//! Copies of what is evicted go from the host's memory to files.
//!
//! ```text
//! per extent   its block written to a file, piece by piece ─► the file is the copy that counts ─► the block is free
//! ```
//!
//! Nothing waits for it: an extent may come back, and its blocks may be freed meanwhile. The file is dropped then.

use std::sync::Arc;

use glake_stitch::ExtentView;
use glake_units::Bytes;

use super::{Region, Result};
use crate::store::write_block;
use crate::{FileTier, HostPool};

/// How copies go to files.
#[derive(Clone, Copy)]
pub struct Demotion<'a> {
    /// Where to.
    pub files: &'a FileTier,
    /// What bytes pass through on their way back: as [`crate::Store::File`] has it.
    pub host: &'a Arc<HostPool>,
    /// Whether it goes on: asked before each piece of 16 MiB, and after the last of a file.
    pub keep_going: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for Demotion<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Demotion").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Region {
    /// Writes copies of what is evicted of the region from the host's memory to files, until at least `amount` of that memory is free;
    /// returns how much is. Ends early where it is not to go on, and where a refill of the region begins.
    ///
    /// # Errors
    /// [`crate::RegionError::File`]: the copy that was being written stays in the host's memory, with those that were to follow.
    pub fn demote(&self, amount: Bytes, demotion: Demotion<'_>) -> Result<Bytes> {
        let Demotion { files, host, keep_going } = demotion;
        let goes_on = || keep_going() && !self.progress.is_refilling();
        let standing = self.pool.records().standing(self.domain);
        let mut evicted: Vec<ExtentView> = standing.into_iter().map(|(view, _)| view).collect();
        // A refill begins with the first addresses: they stay where it is fast.
        evicted.sort_by_key(|view| std::cmp::Reverse(view.offset));
        let mut freed = Bytes::ZERO;
        for view in evicted {
            if freed >= amount || !goes_on() {
                break;
            }
            let Some(block) = self.pool.records().evicted_to_host(view.extent) else { continue };
            let Some(file) = write_block(files, &block, &goes_on)? else { break };
            if self.pool.records().demote(view.extent, &block, file, host)? {
                freed = freed.saturating_add(block.size());
            }
        }
        Ok(freed)
    }
}
