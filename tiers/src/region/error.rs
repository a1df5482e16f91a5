//! Errors of a region.

use std::io;

use glake_device::{Address, DeviceId};
use glake_units::Bytes;

use super::MoveError;
use crate::{FileError, HostError, Place, PoolError};

/// Error of a region. Each variant stands for one possible reaction of the caller.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// Error of the pool or the driver.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// There is too little host memory for the bytes.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A file could not be written or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another GPU has too little memory for the bytes: free some there, shrink less, or shrink to the host or to files.
    #[error(
        "{device}: {size} of region '{tag}' were to go to {peer}, which has no memory for them: {source}; free memory there, shrink \
         less, or shrink to the host or to files"
    )]
    Peer {
        /// GPU of the region.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
        /// GPU that lacks memory.
        peer: DeviceId,
        /// Size of the bytes to be moved.
        size: Bytes,
        /// Error of that GPU's pool.
        #[source]
        source: PoolError,
    },
    /// A region cannot be evicted to the memory of its own GPU.
    #[error("{device}: region '{tag}' was to be shrunk to the memory of its own GPU: name another one")]
    OwnMemory {
        /// GPU of the region.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
    },
    /// Refilled bytes differ from the evicted ones. The extent stays interrupted, with its copy; all others were refilled.
    #[error(
        "{device}: {size} of region '{tag}' at {address} came back from {place} damaged{}; in {}; load these bytes from their source again{}",
        because(.source),
        list(.blocks),
        what_else(.place)
    )]
    Damaged {
        /// GPU of the region.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
        /// Address of the extent.
        address: Address,
        /// Size of the extent.
        size: Bytes,
        /// Location of the copy.
        place: Place,
        /// Addresses and sizes of the live blocks with bytes in the extent.
        blocks: Box<[(Address, Bytes)]>,
        /// Defect found in a file; `None`: the digest differs.
        #[source]
        source: Option<Box<FileError>>,
    },
    /// The disk could not read a copy. Its file stays, and the extent stays interrupted; all others were refilled.
    #[error("{device}: {size} of region '{tag}' at {address} did not come back: {source}")]
    Unread {
        /// GPU of the region.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
        /// Address of the extent.
        address: Address,
        /// Size of the extent.
        size: Bytes,
        /// Error of the file tier.
        #[source]
        source: FileError,
    },
    /// The operating system cannot start a thread for file access.
    #[error("region '{tag}': no thread could be started for its files: {source}; raise the limit of tasks")]
    NoThread {
        /// Tag of the region.
        tag: String,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The bytes could not be copied.
    #[error("{device}: {size} of region '{tag}' could not be copied: {source}")]
    Move {
        /// GPU of the region.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
        /// Size of the failed copy.
        size: Bytes,
        /// Error of the mover.
        #[source]
        source: MoveError,
    },
    /// Part of the region is evicted, and no refill of all of it is in progress.
    #[error(
        "{device}: some of region '{tag}' is evicted, and no refill of all of it is in progress: refill it first"
    )]
    Evicted {
        /// GPU of the region.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
    },
    /// A stream could not be ordered after the copies of a refill.
    #[error("{device}: its stream could not be made to wait for region '{tag}': {source}")]
    Unordered {
        /// GPU of the stream.
        device: DeviceId,
        /// Tag of the region.
        tag: String,
        /// Error of the mover.
        #[source]
        source: MoveError,
    },
    /// The region was not created with the sealed policy.
    #[error("region '{tag}' was not made to be sealed: make it with the policy sealed")]
    NotSealable {
        /// Tag of the region.
        tag: String,
    },
    /// The region is sealed, so that its bytes must not change.
    #[error("region '{tag}' is sealed: unseal it before memory of it is decommitted or committed")]
    Sealed {
        /// Tag of the region.
        tag: String,
    },
    /// A captured graph may write to all memory of the region.
    #[error(
        "'{tag}' is the memory of a captured graph, which may write to all of it: none of it is decommitted"
    )]
    Captured {
        /// Tag of the region.
        tag: String,
    },
    /// An eviction or a refill stopped halfway. No bytes are lost: every extent has one valid copy, and a shrink or a refill resumes.
    #[error(
        "region '{tag}' stopped after {moved}, with {copied} copied and {resident} of it on the GPU: {source}; no bytes are lost: shrink or \
         refill it to go on"
    )]
    Stopped {
        /// Tag of the region.
        tag: String,
        /// Bytes evicted or refilled before the failure.
        moved: Bytes,
        /// Bytes copied before the failure.
        copied: Bytes,
        /// Bytes of the region on the GPU now.
        resident: Bytes,
        /// Cause of the failure.
        #[source]
        source: Box<RegionError>,
    },
}

fn because(source: &Option<Box<FileError>>) -> String {
    source.as_ref().map_or_else(String::new, |source| format!(" ({source})"))
}

/// Lists the first blocks, and counts the others.
fn list(blocks: &[(Address, Bytes)]) -> String {
    const NAMED: usize = 8;
    let named = blocks.iter().take(NAMED).map(|(address, size)| format!("{size} at {address}"));
    let named = named.collect::<Vec<_>>().join(", ");
    match blocks.len() {
        0 => "no live block".to_owned(),
        1 => format!("the block of {named}"),
        count if count <= NAMED => format!("the blocks of {named}"),
        count => format!("the blocks of {named}, and {} more", count - NAMED),
    }
}

/// Returns further advice for damaged bytes; for files none, because their pages are always checked.
fn what_else(place: &Place) -> &'static str {
    match place {
        Place::File => "",
        _ => ", or refill without checks to have them as they are",
    }
}
