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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Scope};

use glake_device::owned::Digests;
use glake_units::Bytes;

use crate::{FileTier, GpuPool, HostPool, Mover, Place};

pub(crate) use clean::{ResidentCopies, ResidentCopy};
pub(crate) use copy::{HostPart, Return, StoredCopy, home as packed_home};
pub(crate) use extent_transfer::{EvictionCopy, ExtentTransfer, RefillCopy};
pub(crate) use files::write_block;

mod clean;
mod copy;
mod extent_transfer;
mod files;
mod peer;
#[cfg(test)]
mod tests;

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
    /// Whether a refill fills bytes without a copy, so that a program that relies on them fails visibly.
    pub fill: bool,
}

impl Store {
    /// Starts a thread that pins host memory for copies of these sizes, until `over` is set. If it cannot, callers that take memory pin it
    /// themselves.
    pub(crate) fn pin_ahead<'s>(&'s self, scope: &'s Scope<'s, '_>, sizes: &[Bytes], over: &'s AtomicBool) {
        let Store::Host(host) = self else { return };
        let Some(expected) = host.expect(sizes) else { return };
        let work = move || expected.pin(|| !over.load(Ordering::Relaxed));
        if let Err(error) = Builder::new().name("glake-pin".to_owned()).spawn_scoped(scope, work) {
            tracing::debug!(target: "glake::host", %error, "no thread pins memory ahead");
        }
    }
}
