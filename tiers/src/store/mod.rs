//! Where copies of a GPU's bytes go, and how they get there: places as data.
//!
//! ```text
//!  shrink   extent ──copies──► HostBlock | block of a peer's pool                       StoredCopy: place, ranges, digest
//!                  ──copies──► slot ──written──► Draft ──seal──► SealedFile             a thread an extent
//!  demote   HostBlock ──written──► Draft ──seal──► SealedFile
//!  refill   the same way back: from wherever its copy is, pages of files checked
//! ```
//!
//! Invariants:
//! - A copy that was not completed is nobody's: its block, its draft and its slots go back, once what was enqueued on them is done.
//! - A digest is taken of an extent's own memory: before anything of it is given up, and after all of it has come back.

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

/// Where copies go.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Store {
    /// Pinned memory of the host.
    Host(Arc<HostPool>),
    /// Memory of another GPU, of a domain of its own in that GPU's pool. When a copy goes, its memory is free there: it goes back to
    /// the driver when the pool needs it for others or is trimmed.
    Peer(Arc<GpuPool>),
    /// Files, one an extent, each brought to the disk before its extent is given up.
    File {
        /// The files' directory.
        files: Arc<FileTier>,
        /// What bytes pass through: 2 MiB at least, better 96.
        host: Arc<HostPool>,
    },
}

impl Store {
    /// What it is of.
    pub fn place(&self) -> Place {
        match self {
            Store::Host(_) => Place::Host,
            Store::Peer(pool) => Place::Peer(pool.device()),
            Store::File { .. } => Place::File,
        }
    }
}

/// How bytes are moved, and whether they are checked.
#[derive(Clone, Copy, Debug)]
pub struct TransferContext<'a> {
    /// By whom.
    pub mover: &'a dyn Mover,
    /// Digests on the region's own GPU. On the way out one is taken of each extent's bytes and kept with the copy; on the way back
    /// the bytes are compared with it. A copy that was made without has none, and is not compared.
    pub checks: Option<&'a Digests>,
}
