//! Why the core refuses a request.

use glake_units::Bytes;

use crate::extent::ExtentState;
use crate::ids::{DomainId, ExtentId};

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
    /// No block can be made live at that one place; nothing has changed.
    #[error("no block of {wanted} can be made live at offset {offset:?}: {obstacle}")]
    NotClaimable {
        /// Where.
        offset: Bytes,
        /// How long it would be.
        wanted: Bytes,
        /// Why not.
        obstacle: Obstacle,
    },
    /// The domain does not exist any more.
    #[error("domain {} was released", domain.number())]
    UnknownDomain {
        /// Which.
        domain: DomainId,
    },
    /// Some of the domain's memory is not on its GPU: bring it back first.
    #[error("some of the memory of domain {} is not on its GPU: refill it first", domain.number())]
    Evicted {
        /// Which.
        domain: DomainId,
    },
    /// What is in the domain is not to change, so nothing new is handed out: unseal it first.
    #[error("domain {} is sealed: unseal it before asking for more of it", domain.number())]
    Sealed {
        /// Which.
        domain: DomainId,
    },
    /// Blocks were freed in the extent that other streams may still use: wait for their completion point.
    #[error("blocks of extent {} were freed while other streams used them: wait for their completion point", extent.index())]
    Withheld {
        /// Which.
        extent: ExtentId,
    },
    /// The extent is not where it would have to be for what was asked.
    #[error(
        "extent {} is {}: it is evicted when it is resident, and refilled when it is evicted",
        extent.index(), state.map_or("gone", ExtentState::name)
    )]
    WrongExtentState {
        /// Which.
        extent: ExtentId,
        /// Where it is; `None`: there is none.
        state: Option<ExtentState>,
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

/// Why a block cannot be made live at one place.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// There is no memory of the domain, or not so much: it went back to the driver.
    #[error("the domain has no memory there")]
    OtherMemory,
    /// Some of its bytes are in a block that is live.
    #[error("some of its bytes are in use")]
    InUse,
    /// No block begins there: it is no multiple of 512, a small block outside of the slabs, or a large one inside.
    #[error("no block of this size begins there")]
    Misplaced,
    /// It would cross the end of a slab, or the slab is another stream's.
    #[error("the slab there is another one")]
    OtherSlab,
    /// Another stream may still use what would become a slab: once that has passed, it can be claimed.
    #[error("another stream may still use it")]
    Pending,
    /// It is stitched: its address comes and goes.
    #[error("it is stitched")]
    Stitched,
}
