//! Identifiers of the core: small integers, each with its own type.

use std::fmt;

/// A stream, identified by the caller; unique for the life of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(pub u64);

/// Id of a domain, the extents of one owner (the default domain, a region, a graph's private pool), never shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(
    /// Number in the upper half, table index in the lower: one word, because every hit compares it.
    u64,
);

/// A piece of physical memory: the unit of mapping, lending and release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtentId(pub(crate) u32);

/// A stitched address range: extents with free memory, mapped side by side a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AliasId(pub(crate) u32);

/// Id of a plan, driver work that the core waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanId(pub(crate) u32);

/// A completion point in the order of frees: passed once all work enqueued on the device before it has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PointNumber(pub u64);

/// Id of a hold, an event after which other work no longer uses a block. Each id is used once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(pub u64);

/// Number of an address change of bytes; 0: never. The count saturates: see [`Move::is_after`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Move(pub(crate) u32);

/// A run of bytes at home: free, live, or the edge of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PieceId(pub(crate) u32);

/// Id of a free list, the free pieces of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FreeListId(pub(crate) u32);

impl DomainId {
    /// The default domain, which always exists.
    pub(crate) const DEFAULT: DomainId = DomainId(0);

    /// Packs a number and a table index; the table never holds 2^32 entries.
    pub(crate) const fn new(number: u32, place: usize) -> DomainId {
        DomainId((number as u64) << u32::BITS | place as u64)
    }

    /// Returns the unique number of the domain: the count of domains created before it.
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

    /// Returns whether this move came after `edge`; always true once the count is exhausted.
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
    /// Key for unknown work, which has completed once a completion point has passed.
    pub const UNKNOWN: StreamKey = StreamKey(u64::MAX);
}

macro_rules! indexes {
    ($($id:ident),+) => {$(
        impl $id {
            /// Returns the id as an index.
            #[allow(unreachable_pub)] // some of these types are public
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// Creates the id of an index; the tables never hold 2^32 entries.
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
