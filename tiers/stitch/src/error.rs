//! Why the core refuses a request.

use glake_units::Bytes;

use crate::ids::DomainId;

/// A refusal; a variant is what the caller can do about it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StitchError {
    /// Not enough memory, after everything that can be taken back was: ask for less, free something, raise the limit.
    #[error(
        "out of memory: {wanted} wanted; {reserved} of at most {limit} reserved, {free} of it free, of which {stitchable} could be stitched"
    )]
    OutOfMemory {
        /// What was asked for.
        wanted: Bytes,
        /// Physical memory held.
        reserved: Bytes,
        /// What may be held.
        limit: Bytes,
        /// Held and not in use.
        free: Bytes,
        /// Of the free memory, what lies in whole free extents.
        stitchable: Bytes,
    },
    /// No device has so much memory.
    #[error("{wanted} wanted of a device with {memory}")]
    LargerThanDevice {
        /// What was asked for.
        wanted: Bytes,
        /// What there is.
        memory: Bytes,
    },
    /// Nothing alive begins there: freed twice, or never handed out.
    #[error("no block begins at offset {offset:?}: it was freed before, or never handed out")]
    UnknownBlock {
        /// Where.
        offset: Bytes,
    },
    /// The domain does not exist any more.
    #[error("domain {} was released", domain.index())]
    UnknownDomain {
        /// Which.
        domain: DomainId,
    },
    /// A knob's value makes no sense.
    #[error("{knob} = {value:?} is out of range: {allowed}")]
    BadSetting {
        /// Which knob.
        knob: &'static str,
        /// Its value.
        value: Bytes,
        /// What is allowed.
        allowed: &'static str,
    },
}
