//! Demotion: copies of evicted extents move from host memory to files.
//!
//! ```text
//! per extent   its block written to a file, piece by piece ─► the file becomes the valid copy ─► the block is free
//! ```
//!
//! No other operation waits for it: an extent may be refilled, and its blocks may be freed meanwhile. The file is dropped then.

use std::sync::Arc;

use glake_stitch::ExtentView;
use glake_units::Bytes;

use super::{Region, Result};
use crate::store::write_block;
use crate::{FileTier, HostPool};

/// Parameters of a demotion.
#[derive(Clone, Copy)]
pub struct Demotion<'a> {
    /// Tier for the files.
    pub files: &'a FileTier,
    /// Host pool for bytes in transit when they are read back: see [`crate::Store::File`].
    pub host: &'a Arc<HostPool>,
    /// Whether to continue; called before each piece of 16 MiB, and after the last of a file.
    pub keep_going: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for Demotion<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Demotion").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Region {
    /// Moves copies of evicted extents from host memory to files, until at least `amount` of host memory is free. Returns the number of
    /// bytes freed. Ends early if `keep_going` returns false or a refill of the region begins.
    ///
    /// # Errors
    /// [`crate::RegionError::File`]: the current copy and the following ones stay in host memory.
    pub fn demote(&self, amount: Bytes, demotion: Demotion<'_>) -> Result<Bytes> {
        let Demotion { files, host, keep_going } = demotion;
        let goes_on = || keep_going() && !self.progress.is_refilling();
        let standing = self.pool.records().standing(self.domain);
        let mut evicted: Vec<ExtentView> = standing.into_iter().map(|(view, _)| view).collect();
        // A refill begins with the first addresses, which therefore stay in host memory longest.
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
