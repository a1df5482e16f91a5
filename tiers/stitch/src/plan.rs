//! Requests, grants and plans: driver work to be done before a block is handed out or memory is returned.

use glake_units::Bytes;
use smallvec::SmallVec;

use crate::ids::{AliasId, DomainId, ExtentId, HoldId, PlanId, PointNumber, StreamKey};

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Size of the request in bytes.
    pub size: Bytes,
    /// Stream whose work uses the memory first.
    pub stream: StreamKey,
    /// Domain whose extents serve the request.
    pub domain: DomainId,
}

/// A block handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Start, from the start of the device's reservation.
    pub offset: Bytes,
    /// Size in bytes: the request rounded up to 512.
    pub size: Bytes,
    /// Whether the bytes were last used at another address by work that may still run: before the block is used, its stream must pass an
    /// event recorded on itself (a completion edge).
    pub edge: bool,
    /// Work that the stream must wait for on the device.
    pub waits: SmallVec<[Wait; 1]>,
}

/// Pending work on the bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// Work enqueued so far on the stream that freed the bytes.
    Stream(StreamKey),
    /// Work behind a hold.
    Hold(HoldId),
}

/// Answer to a request that is a miss.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// The request is served after all.
    Ready(Grant),
    /// Driver work is needed: execute the plan, then commit or abort it. If the commit returns no grant, request again.
    Work(Plan),
    /// A wait is needed: until this completion point has passed; then request again.
    Wait(PointNumber),
}

/// Step of a plan, for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Creates an extent of physical memory.
    Create {
        /// Id of the new extent.
        extent: ExtentId,
        /// Size of the extent.
        size: Bytes,
        /// Domain that will own the extent.
        domain: DomainId,
    },
    /// Maps an extent at an address.
    Map {
        /// Extent to be mapped.
        extent: ExtentId,
        /// Address to map it at, as an offset.
        offset: Bytes,
        /// Size of the extent.
        size: Bytes,
    },
    /// Give access to a mapped range.
    Access {
        /// Start of the range.
        offset: Bytes,
        /// Size of the range.
        size: Bytes,
        /// Domain that owns the whole range.
        domain: DomainId,
    },
    /// Unmaps a range of addresses.
    Unmap {
        /// Start of the range.
        offset: Bytes,
        /// Size of the range.
        size: Bytes,
        /// Extents in the range, in order.
        extents: Vec<ExtentId>,
    },
    /// Release an extent, which is mapped nowhere.
    Release {
        /// Extent to be released.
        extent: ExtentId,
        /// Size of the extent.
        size: Bytes,
        /// Domain that owned the extent.
        domain: DomainId,
    },
}

/// Figures of a new alias, for tuning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stitch {
    /// Id of the new alias.
    pub alias: AliasId,
    /// Size of the request.
    pub wanted: Bytes,
    /// Number of free ranges joined.
    pub ranges: usize,
    /// Number of extents mapped.
    pub extents: usize,
    /// Bytes of new memory in it.
    pub grown: Bytes,
}

/// Driver work; the core has already set everything aside that it needs.
#[derive(Debug, PartialEq)]
pub struct Plan {
    /// Id for the commit or the abort.
    pub id: PlanId,
    /// Steps, to be executed in this order.
    pub steps: Vec<Step>,
    /// Alias that the plan makes, if any.
    pub stitch: Option<Stitch>,
}

impl Plan {
    /// Returns the bytes of new memory that the plan creates.
    pub fn created(&self) -> Bytes {
        let created = |step: &Step| if let Step::Create { size, .. } = step { *size } else { Bytes::ZERO };
        self.steps.iter().map(created).sum()
    }
}
