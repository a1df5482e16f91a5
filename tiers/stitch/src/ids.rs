//! The names of things in the core: small integers, each its own type.

use std::fmt;

/// A stream, as the caller tells streams apart (unique for the life of the process).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(pub u64);

/// A domain: extents of one owner (the default one, a region, a private pool of a graph), never shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(
    /// Its number, then where it lies in its table: one word, because every hit compares it.
    u64,
);

/// A piece of physical memory: the unit of mapping, lending and release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentId(pub(crate) u32);

/// Addresses at which extents of free pieces are mapped side by side a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AliasId(pub(crate) u32);

/// Work that the driver still has to do before the core goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanId(pub(crate) u32);

/// A point in the order of frees: it has passed once all work enqueued on the device before it has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PointNumber(pub u64);

/// Work that still uses a block when its stream may not: an event, which the caller knows by this name, never given twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(pub u64);

/// A count of bytes changing their address; 0 is never, and the last value stays: see [`Move::is_after`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Move(pub(crate) u32);

/// A run of bytes at home: free, live or the edge of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PieceId(pub(crate) u32);

/// The free pieces that one owner has in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FreeListId(pub(crate) u32);

impl DomainId {
    /// The one that is always there.
    pub(crate) const DEFAULT: DomainId = DomainId(0);

    /// The table never holds 2^32 entries.
    pub(crate) const fn new(number: u32, place: usize) -> DomainId {
        DomainId((number as u64) << u32::BITS | place as u64)
    }

    /// How many there were before it: no other one has the same.
    pub const fn number(self) -> u32 {
        (self.0 >> u32::BITS) as u32
    }

    #[allow(clippy::cast_possible_truncation)] // the lower half
    pub(crate) const fn place(self) -> usize {
        self.0 as u32 as usize
    }
}

impl PieceId {
    pub(crate) const NONE: PieceId = PieceId(u32::MAX);
}

impl FreeListId {
    pub(crate) const NONE: FreeListId = FreeListId(u32::MAX);
}

impl Move {
    pub(crate) const fn next(self) -> Move {
        Move(self.0.saturating_add(1))
    }

    /// Whether this came after an edge; where the count is exhausted, always.
    pub(crate) const fn is_after(self, edge: Move) -> bool {
        self.0 > edge.0 || self.0 == u32::MAX
    }
}

impl PointNumber {
    pub(crate) const fn next(self) -> PointNumber {
        PointNumber(self.0 + 1)
    }
}

impl StreamKey {
    /// The key of no stream: unknown work, which is known to have completed once a completion point has passed.
    pub const UNKNOWN: StreamKey = StreamKey(u64::MAX);
}

macro_rules! indexes {
    ($($id:ident),+) => {$(
        impl $id {
            /// As an index.
            #[allow(unreachable_pub)] // some of these types are public
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// From an index; the tables it counts never hold 2^32 entries.
            #[allow(clippy::cast_possible_truncation)]
            pub(crate) const fn at(index: usize) -> Self {
                $id(index as u32)
            }
        }
    )+};
}

indexes!(ExtentId, AliasId, PlanId, PieceId, FreeListId);

impl fmt::Display for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}
