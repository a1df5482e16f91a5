//! Why a region does not do what it is asked.

use std::io;

use glake_device::{Address, DeviceId};
use glake_units::Bytes;

use super::MoveError;
use crate::{FileError, HostError, Place, PoolError};

/// A refusal of a region; a variant is what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The pool or the driver refused.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// There is no host memory for the bytes.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A file could not be written or read.
    #[error(transparent)]
    File(#[from] FileError),
    /// Another GPU has no memory for the bytes: free some there, shrink less, or shrink to the host or to files.
    #[error(
        "{device}: {size} of region '{tag}' were to go to {peer}, which has no memory for them: {source}; free memory there, shrink \
         less, or shrink to the host or to files"
    )]
    Peer {
        /// Of whose memory.
        device: DeviceId,
        /// Of which region.
        tag: String,
        /// Who was to take it.
        peer: DeviceId,
        /// How much.
        size: Bytes,
        /// Its pool's answer.
        #[source]
        source: PoolError,
    },
    /// Its own GPU is no place for copies.
    #[error("{device}: region '{tag}' was to be shrunk to the memory of its own GPU: name another one")]
    OwnMemory {
        /// Which.
        device: DeviceId,
        /// Of which region.
        tag: String,
    },
    /// What came back is not what was evicted. The extent stays interrupted, with its copy; all others go on.
    #[error(
        "{device}: {size} of region '{tag}' at {address} came back from {place} damaged{}; load these bytes from their source again{}",
        because(.source),
        what_else(.place)
    )]
    Damaged {
        /// Of whose memory.
        device: DeviceId,
        /// Of which region.
        tag: String,
        /// Where the extent begins.
        address: Address,
        /// How long it is.
        size: Bytes,
        /// Where the copy is.
        place: Place,
        /// What was found of a file; `None`: its digest is another.
        #[source]
        source: Option<FileError>,
    },
    /// The disk could not read a copy back. Its file stays, and the extent interrupted; all others go on.
    #[error("{device}: {size} of region '{tag}' at {address} did not come back: {source}")]
    Unread {
        /// Of whose memory.
        device: DeviceId,
        /// Of which region.
        tag: String,
        /// Where the extent begins.
        address: Address,
        /// How long it is.
        size: Bytes,
        /// What could not be read.
        #[source]
        source: FileError,
    },
    /// The operating system gives no thread to write or read files with.
    #[error("region '{tag}': no thread could be started for its files: {source}; raise the limit of tasks")]
    NoThread {
        /// Of which region.
        tag: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The bytes could not be copied.
    #[error("{device}: {size} of region '{tag}' could not be copied: {source}")]
    Move {
        /// Of whose memory.
        device: DeviceId,
        /// Of which region.
        tag: String,
        /// How many of them.
        size: Bytes,
        /// Why not.
        #[source]
        source: MoveError,
    },
    /// Some of it is evicted, and nobody brings it back.
    #[error("{device}: some of region '{tag}' is evicted, and nobody brings all of it back: refill it first")]
    Evicted {
        /// From which device.
        device: DeviceId,
        /// Of which region.
        tag: String,
    },
    /// A stream could not be made to wait for the copies of a refill.
    #[error("{device}: its stream could not be made to wait for region '{tag}': {source}")]
    Unordered {
        /// Whose stream.
        device: DeviceId,
        /// For which region.
        tag: String,
        /// Why not.
        #[source]
        source: MoveError,
    },
    /// It was made for bytes that change: make it with the policy sealed.
    #[error("region '{tag}' was not made to be sealed: make it with the policy sealed")]
    NotSealable {
        /// Which.
        tag: String,
    },
    /// Its bytes stay as they are until it is unsealed.
    #[error("region '{tag}' is sealed: unseal it before memory of it is decommitted or committed")]
    Sealed {
        /// Which.
        tag: String,
    },
    /// A captured graph may write to all of its memory.
    #[error(
        "'{tag}' is the memory of a captured graph, which may write to all of it: none of it is decommitted"
    )]
    Captured {
        /// Which.
        tag: String,
    },
    /// It stopped in between. Nothing is lost: every extent has one good copy, and a shrink or a refill goes on from there.
    #[error(
        "region '{tag}' stopped after {moved}, with {copied} copied and {resident} of it on the GPU: {source}; no bytes are lost: shrink or \
         refill it to go on"
    )]
    Stopped {
        /// Which.
        tag: String,
        /// How much went, or came back, before.
        moved: Bytes,
        /// How many bytes were copied by then.
        copied: Bytes,
        /// How much of its memory is on the GPU now.
        resident: Bytes,
        /// Why.
        #[source]
        source: Box<RegionError>,
    },
}

fn because(source: &Option<FileError>) -> String {
    source.as_ref().map_or_else(String::new, |source| format!(" ({source})"))
}

/// A file's pages are checked whatever a caller asks for.
fn what_else(place: &Place) -> &'static str {
    match place {
        Place::File => "",
        _ => ", or refill without checks to have them as they are",
    }
}
