//! Destinations of evicted bytes, and the transfer to them.
//!
//! ```text
//!  shrink   extent ──copies──► HostBlock | block of a peer's pool                       StoredCopy: place, ranges, digest
//!                  ──copies──► slot ──written──► Draft ──seal──► SealedFile             a thread for each extent
//!  demote   HostBlock ──written──► Draft ──seal──► SealedFile
//!  refill   the reverse, from the location of the copy; pages of files are checked
//! ```
//!
//! Invariants:
//! - The block, the draft and the slots of an incomplete copy are returned once the work enqueued on them has completed.
//! - A digest covers an extent's own memory: before any of it is given up, and after all of it has been refilled.

mod ahead;
mod clean;
mod copy;
mod extent_transfer;
mod peer;
mod read;
mod slots;
#[cfg(test)]
mod tests;
mod write;

use std::sync::Arc;

use glake_device::owned::Digests;

pub(crate) use clean::{ResidentCopies, ResidentCopy};
pub(crate) use copy::{Return, StoredCopy, home as packed_home};
pub(crate) use extent_transfer::{Evicting, ExtentTransfer, Refilling};
pub(crate) use write::write_block;

use crate::{FileTier, GpuPool, HostPool, Mover, Place};

/// Destination of evicted bytes.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Store {
    /// Pinned memory of the host.
    Host(Arc<HostPool>),
    /// Memory of another GPU, in a separate domain of that GPU's pool. A dropped copy becomes free memory there, which the pool releases to
    /// the driver when it needs memory or is trimmed.
    Peer(Arc<GpuPool>),
    /// Files, one for each extent, flushed to the disk before the extent is given up.
    File {
        /// Directory of the files.
        files: Arc<FileTier>,
        /// Host pool for bytes in transit: at least 2 MiB, better 96 MiB.
        host: Arc<HostPool>,
    },
}

impl Store {
    /// Returns the place of copies in this store.
    pub fn place(&self) -> Place {
        match self {
            Store::Host(_) => Place::Host,
            Store::Peer(pool) => Place::Peer(pool.device()),
            Store::File { .. } => Place::File,
        }
    }
}

/// Mover of the bytes, and whether they are verified.
#[derive(Clone, Copy, Debug)]
pub struct TransferContext<'a> {
    /// Mover for the copies.
    pub mover: &'a dyn Mover,
    /// Digests on the region's own GPU; `None` disables checks. An eviction takes a digest of each extent's bytes and keeps it with the
    /// copy; a refill compares the bytes with it. A copy without a digest is not verified.
    pub checks: Option<&'a Digests>,
}
