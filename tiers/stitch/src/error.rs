//! Errors of the core.

use glake_units::Bytes;

use crate::extent::ExtentState;
use crate::ids::{DomainId, ExtentId};

/// Refused request; the variant says what the caller can do about it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StitchError {
    /// Not enough memory after everything reclaimable was reclaimed: ask for less, free memory, or raise the limit.
    #[error(
        "out of memory: {wanted} wanted; {reserved} of at most {limit} reserved, {free} of it free, of which {stitchable} could be stitched"
    )]
    OutOfMemory {
        /// Size of the request.
        wanted: Bytes,
        /// Physical memory reserved so far.
        reserved: Bytes,
        /// Limit of reserved memory.
        limit: Bytes,
        /// Reserved memory not in use.
        free: Bytes,
        /// Part of the free memory that lies in whole free extents.
        stitchable: Bytes,
    },
    /// The request exceeds the memory of the device.
    #[error("{wanted} wanted of a device with {memory}")]
    LargerThanDevice {
        /// Size of the request.
        wanted: Bytes,
        /// Memory of the device.
        memory: Bytes,
    },
    /// No live block begins at the offset: it was freed before, or never handed out.
    #[error("no block begins at offset {offset:?}: it was freed before, or never handed out")]
    UnknownBlock {
        /// Offset of the call.
        offset: Bytes,
    },
    /// No block can be made live at the given place; nothing has changed.
    #[error("no block of {wanted} can be made live at offset {offset:?}: {obstacle}")]
    NotClaimable {
        /// Offset of the claim.
        offset: Bytes,
        /// Size of the claim.
        wanted: Bytes,
        /// Reason of the refusal.
        obstacle: Obstacle,
    },
    /// The domain does not exist.
    #[error("domain {} was released", domain.number())]
    UnknownDomain {
        /// Domain of the call.
        domain: DomainId,
    },
    /// Some memory of the domain is evicted: refill it first.
    #[error("some of the memory of domain {} is not on its GPU: refill it first", domain.number())]
    Evicted {
        /// Domain of the call.
        domain: DomainId,
    },
    /// The domain is sealed and serves no requests: unseal it first.
    #[error("domain {} is sealed: unseal it before asking for more of it", domain.number())]
    Sealed {
        /// Domain of the call.
        domain: DomainId,
    },
    /// Other streams may still use blocks freed in the extent: wait for their completion point.
    #[error("blocks of extent {} were freed while other streams used them: wait for their completion point", extent.index())]
    Withheld {
        /// Extent of the call.
        extent: ExtentId,
    },
    /// The extent is in the wrong state for the operation.
    #[error(
        "extent {} is {}: it is evicted when it is resident, and refilled when it is evicted",
        extent.index(), state.map_or("gone", ExtentState::name)
    )]
    WrongExtentState {
        /// Extent of the call.
        extent: ExtentId,
        /// State of the extent; `None`: no such extent.
        state: Option<ExtentState>,
    },
    /// A setting has an invalid value.
    #[error("{knob} = {value:?} is out of range: {allowed}")]
    BadSetting {
        /// Name of the setting.
        knob: &'static str,
        /// Value of the setting.
        value: Bytes,
        /// Description of the allowed values.
        allowed: &'static str,
    },
}

/// Reason why a block cannot be made live at one place.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// The memory returned to the driver, or belongs to another domain.
    #[error("the domain has no memory there")]
    OtherMemory,
    /// Some of the bytes belong to a live block.
    #[error("some of its bytes are in use")]
    InUse,
    /// No block can begin there: not a multiple of 512, a small block outside of the slabs, or a large block inside.
    #[error("no block of this size begins there")]
    Misplaced,
    /// The block would cross the end of a slab, or the slab belongs to another stream.
    #[error("the slab there is another one")]
    OtherSlab,
    /// Another stream may still use the bytes of the new slab; the claim works once that work has completed.
    #[error("another stream may still use it")]
    Pending,
    /// The block is stitched: its address is not permanent.
    #[error("it is stitched")]
    Stitched,
}
