//! Read-only views of an allocator: each borrows the parts that it reads.

mod audit;
mod blocks;
mod extents;
mod largest;
mod report;

pub use audit::Broken;
pub use blocks::{Backing, Blocks, LiveBlock};
pub use extents::{ExtentView, ExtentViews, HomeRange};
pub use report::{BlockInfo, Report, Segment, SegmentKind};

pub(crate) use audit::Audit;
pub(crate) use largest::Largest;
