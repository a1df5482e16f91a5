//! The region of one measurement, and where it goes.

use std::path::PathBuf;
use std::sync::Arc;

use glake_device::Stream;
use glake_tiers::{
    CopyPolicy, FileTier, Policy, PoolStream, Refilled, Region, RegionOptions, Shrunk, Store, TransferContext,
};
use glake_units::Bytes;

use super::harness::Harness;
use super::{BenchError, ShrinkOptions, ShrinkTier};
use crate::filled::{Difference, Filled};
use glake_runtime::config::Config;

/// Extents of a simulated GPU's region, which is small.
const SMALL: Bytes = Bytes::mib(8);
/// Size of the staging buffer for files.
const STAGED: Bytes = Bytes::mib(96);

/// A region, and its store.
pub(super) struct Field<'a> {
    harness: &'a Harness,
    region: Filled,
    store: Store,
    /// After all that has files in it.
    _folder: Option<OwnFolder>,
}

/// A folder that is removed at the end.
struct OwnFolder(PathBuf);

impl<'a> Field<'a> {
    /// A region full of bytes that tell their places.
    pub(super) fn new(
        harness: &'a Harness,
        config: &Config,
        options: &ShrinkOptions,
        tier: ShrinkTier,
    ) -> Result<Self, BenchError> {
        let server = harness.server();
        let pool = server.pool(server.target().id, &config.pool)?;
        let mut wanted = RegionOptions::of("bench");
        if options.sealed {
            (wanted.policy, wanted.host_copy) = (Policy::Sealed, CopyPolicy::Retain);
        }
        if server.is_simulated() {
            wanted.extent = SMALL;
        }
        let region = Region::new(&pool, wanted);
        let stream = PoolStream::of(&**server.driver(), server.target().id, Stream::LEGACY)?;
        let blocks = sizes(harness.bytes(), options.tensors).map(|size| region.malloc(size, stream));
        let blocks = blocks.collect::<Result<_, _>>()?;
        let (store, folder) = store(harness, config, options, tier)?;
        let region = Filled::new(region, blocks)?;
        if options.sealed {
            region.region().seal(false)?;
        }
        Ok(Field { harness, store, _folder: folder, region })
    }

    /// Evicts the whole region.
    pub(super) fn shrink(&self) -> Result<Shrunk, BenchError> {
        Ok(self.region.shrink(&self.store, self.transfer_context())?)
    }

    /// Refills the whole region.
    pub(super) fn refill(&self) -> Result<Refilled, BenchError> {
        Ok(self.region.refill(self.transfer_context())?)
    }

    fn transfer_context(&self) -> TransferContext<'_> {
        TransferContext { mover: self.harness.mover(), checks: self.harness.digests() }
    }

    /// Compares every byte with the expected pattern.
    ///
    /// # Errors
    /// [`BenchError::Differs`].
    pub(super) fn compare(&self, when: &str) -> Result<(), BenchError> {
        match self.region.compare()? {
            None => Ok(()),
            Some(Difference { block, at, .. }) => {
                Err(BenchError::Differs { case: format!("{when}: tensor {block}, byte {at}") })
            }
        }
    }

    /// Frees everything; what is pinned for it goes with it.
    pub(super) fn end(self) -> Result<(), BenchError> {
        Ok(self.region.end()?)
    }
}

/// Divides `bytes` into block sizes that differ by at most 512, except for the last one.
fn sizes(bytes: Bytes, tensors: u32) -> impl Iterator<Item = Bytes> {
    let (bytes, count) = (bytes.get(), u64::from(tensors.max(1)));
    // Blocks are multiples of 512 bytes: of equal ones nothing is rounded.
    let each = (bytes / count) & !511;
    let each = if each == 0 { bytes / count } else { each };
    (0..count).map(move |number| Bytes::new(if number + 1 == count { bytes - each * number } else { each }))
}

/// Creates the store for the region's copies; allocates nothing in advance unless requested.
fn store(
    harness: &Harness,
    config: &Config,
    options: &ShrinkOptions,
    tier: ShrinkTier,
) -> Result<(Store, Option<OwnFolder>), BenchError> {
    let server = harness.server();
    let pinned = |size: Bytes| {
        let host = server.host()?;
        if options.prepare {
            host.prepare(size)?;
        }
        Ok::<_, BenchError>(host)
    };
    match tier {
        ShrinkTier::Host => Ok((Store::Host(pinned(harness.bytes())?), None)),
        ShrinkTier::Peer => Ok((Store::Peer(server.pool(harness.peer()?, &config.pool)?), None)),
        ShrinkTier::File => {
            let own = std::env::temp_dir().join(format!("glake-bench-{}", std::process::id()));
            let folder = options.folder.as_deref().unwrap_or(&own);
            let files = Arc::new(FileTier::open(folder)?);
            let host = pinned(STAGED.min(harness.bytes()))?;
            Ok((Store::File { files, host }, options.folder.is_none().then_some(OwnFolder(own))))
        }
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // What is not empty is not all ours.
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_about_equal_and_all_there() {
        for (bytes, tensors) in [(16 << 30, 64), (1000, 3), (5000, 3), (7, 7), (1 << 20, 1)] {
            let sizes: Vec<u64> = sizes(Bytes::new(bytes), tensors).map(Bytes::get).collect();
            assert_eq!((sizes.len(), sizes.iter().sum()), (tensors as usize, bytes));
            assert!(sizes.iter().all(|size| *size > 0), "{sizes:?}");
        }
    }
}
