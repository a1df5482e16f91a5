//! Memory tiers: GPU memory as pools over the driver, pinned host memory, and files.
//!
//! ```text
//! ffi ─► runtime ─► transfer ─► glake-tiers ─► glake-device     executes a plan's steps
//!                                    └──────► glake-stitch      plans
//! ```
//!
//! | tier | | hands out |
//! |---|---|---|
//! | [`GpuPool`] | executes the plans of the pure core: reserve, execute, commit or abort | blocks at addresses |
//! | [`HostPool`] | memory pinned once and reused, under a budget | [`HostBlock`]; a [`Ring`] if there is too little |
//! | [`FileTier`] | complete files only, every page checked | [`SealedFile`] |
//!
//! The tier that holds an extent's bytes, and the copy that is valid, are plain data: [`Place`], [`Residency`]. A [`Region`] is a domain of
//! a pool whose extents move to a [`Store`] and return to their addresses.
//!
//! ```
//! use std::sync::Arc;
//! use glake_sim::{SimOptions, Simulator};
//! use glake_device::{DeviceId, Driver, Stream};
//! use glake_tiers::{GpuPool, PoolOptions, PoolStream};
//! use glake_units::Bytes;
//!
//! let driver: Arc<dyn Driver> = Arc::new(Simulator::new(SimOptions::default())?);
//! let pool = GpuPool::new(driver.clone(), DeviceId(0), PoolOptions::default())?;
//! let stream = PoolStream::of(&*driver, DeviceId(0), Stream::LEGACY)?;
//! let block = pool.malloc(Bytes::mib(20), stream)?;
//! pool.write(block.address, b"real bytes")?;
//! let mut back = [0; 10];
//! pool.read(block.address, &mut back)?;
//! assert_eq!(&back, b"real bytes");
//! pool.free(block.address)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod file;
#[cfg(test)]
mod fixture;
mod gpu;
mod host;
mod import;
mod place;
mod region;
mod store;
mod ticker;
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod traced;

pub use file::{Collected, Draft, FileError, FileStatistics, FileStep, FileTier, Flaw, PAGE, SealedFile};
pub use gpu::{
    Block, BlockId, BlockLife, ByteRange, Checkpoint, CompletionClock, CompletionLag, Credits, EvictedBytes,
    Exported, GpuPool, GpuWaits, Lease, LeaseEvent, LeaseObserver, LeaseOptions, LeaseShort, LeaseView,
    LiveAnswer, LiveBlock, LiveBytes, MappingObserver, PeerAccess, PendingWork, PoolError, PoolOptions,
    PoolStream, ReadHolds, Report, Restored,
};
pub use host::{
    AvailableMemory, Budget, HostBlock, HostError, HostOptions, HostPool, HostStatistics, Pinning,
    PinningUnderWay, Reclaim, Ring, RingSlot, Staging, nodes_of,
};
pub use import::Import;
pub use place::{NotNow, Place, Residency, Step};
pub use region::{
    Clean, CleanCounts, Cleaned, CopyPolicy, Demotion, Mark, MoveError, Mover, Moving, NoWait, Policy,
    Refilled, Region, RegionError, RegionHolding, RegionOptions, Shrunk, SkipReason, Skipped, WaitPolicy,
};
pub use store::{Store, TransferContext};
pub use ticker::Ticker;
