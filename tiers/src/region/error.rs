//! Why a region does not do what it is asked.

use glake_device::DeviceId;
use glake_units::Bytes;

use super::MoveError;
use crate::{HostError, PoolError};

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
    /// Some of it is away, and nobody brings it back.
    #[error("{device}: some of region '{tag}' is away, and nobody brings all of it back: refill it first")]
    Away {
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
    /// It stopped in between. Nothing is lost: every extent has one good copy, and a shrink or a refill goes on from there.
    #[error(
        "region '{tag}' stopped after {moved}, with {left} of it on the GPU: {source}; no bytes are lost: shrink or refill it to \
         go on"
    )]
    Stopped {
        /// Which.
        tag: String,
        /// How much went, or came back, before.
        moved: Bytes,
        /// How much of its memory is on the GPU now.
        left: Bytes,
        /// Why.
        #[source]
        source: Box<RegionError>,
    },
}
