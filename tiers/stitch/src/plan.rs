//! What the driver has to do before a block can be handed out, or memory given back.

use glake_units::Bytes;
use smallvec::SmallVec;

use crate::ids::{AliasId, DomainId, ExtentId, HoldId, PlanId, PointNumber, StreamKey};

/// A wish for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How much.
    pub size: Bytes,
    /// The stream whose work will use it first.
    pub stream: StreamKey,
    /// From whose extents.
    pub domain: DomainId,
}

/// A block handed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Where it begins, from the start of the device's reservation.
    pub offset: Bytes,
    /// How long it is: the request rounded up to 512 bytes.
    pub size: Bytes,
    /// Its bytes were last used at another address, and that work may still run: before the block is used, its
    /// stream must pass an event recorded on itself (a completion edge).
    pub edge: bool,
    /// What its stream must wait for on the device.
    pub waits: SmallVec<[Wait; 1]>,
}

/// Work that a block's bytes are still used by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// All that is enqueued on the stream that freed them.
    Stream(StreamKey),
    /// What a hold names.
    Hold(HoldId),
}

/// What a request that is no hit needs.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// Nothing: here it is.
    Ready(Grant),
    /// Driver work: execute the plan and commit it, or abort it. Without a grant after the commit, ask again.
    Work(Plan),
    /// Time: wait until this completion point has passed, then ask again.
    Wait(PointNumber),
}

/// One step of a plan, for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make an extent.
    Create {
        /// Which.
        extent: ExtentId,
        /// How large.
        size: Bytes,
        /// For whom.
        domain: DomainId,
    },
    /// Map an extent.
    Map {
        /// Which.
        extent: ExtentId,
        /// Where.
        offset: Bytes,
        /// How large it is.
        size: Bytes,
    },
    /// Give access to a mapped range.
    Access {
        /// From where.
        offset: Bytes,
        /// How far.
        size: Bytes,
        /// Whose all of it is.
        domain: DomainId,
    },
    /// Unmap a range.
    Unmap {
        /// From where.
        offset: Bytes,
        /// How far.
        size: Bytes,
        /// The extents in it, in order.
        extents: Vec<ExtentId>,
    },
    /// Release an extent that is mapped nowhere.
    Release {
        /// Which.
        extent: ExtentId,
        /// How large.
        size: Bytes,
        /// Whose it was.
        domain: DomainId,
    },
}

/// A new alias in figures, for whoever tunes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stitch {
    /// The alias.
    pub alias: AliasId,
    /// What was asked for.
    pub wanted: Bytes,
    /// How many free ranges were joined.
    pub ranges: usize,
    /// How many extents it maps.
    pub extents: usize,
    /// How much of it is new memory.
    pub grown: Bytes,
}

/// Driver work, with everything that it needs set aside in the core.
#[derive(Debug, PartialEq)]
pub struct Plan {
    /// For the commit or the abort.
    pub id: PlanId,
    /// In this order.
    pub steps: Vec<Step>,
    /// The alias that it makes.
    pub stitch: Option<Stitch>,
}

impl Plan {
    /// How much new memory it needs.
    pub fn created(&self) -> Bytes {
        let created = |step: &Step| if let Step::Create { size, .. } = step { *size } else { Bytes::ZERO };
        self.steps.iter().map(created).sum()
    }
}
