//! The region of one measurement: its blocks, what they hold, and where it goes.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use glake_device::{Address, Stream};
use glake_tiers::{
    Block, CopyPolicy, FileTier, GpuPool, Impatient, Policy, PoolStream, Refilled, Region, RegionOptions,
    Shrunk, Store, Transit,
};
use glake_units::Bytes;

use super::ground::Ground;
use super::{BenchError, ShrinkOptions, ShrinkTier};
use crate::config::Config;
use crate::pattern::{CHUNK, fill, matching};

/// Threads that write and compare bytes at most: more of them wait for the same link.
const THREADS: usize = 8;
/// Extents of a simulated GPU's region, which is small.
const SMALL: Bytes = Bytes::mib(8);
/// What bytes pass through on their way to files.
const STAGED: Bytes = Bytes::mib(96);

/// A region, and its store.
pub(super) struct Field<'a> {
    ground: &'a Ground,
    region: Region,
    pool: Arc<GpuPool>,
    blocks: Vec<Block>,
    store: Store,
    /// After all that has files in it.
    _folder: Option<OwnFolder>,
}

/// A folder that is removed at the end.
struct OwnFolder(PathBuf);

/// A part of a block: where it is, where it lies in its block, which block, how long.
type Part = (Address, u64, u64, usize);

impl<'a> Field<'a> {
    /// A region full of bytes that tell their places.
    pub(super) fn new(
        ground: &'a Ground,
        config: &Config,
        options: &ShrinkOptions,
        tier: ShrinkTier,
    ) -> Result<Self, BenchError> {
        let server = ground.server();
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
        let blocks = sizes(ground.bytes(), options.tensors).map(|size| region.malloc(size, stream));
        let blocks = blocks.collect::<Result<_, _>>()?;
        let (store, folder) = store(ground, config, options, tier)?;
        let field = Field { ground, store, _folder: folder, region, pool, blocks };
        field.write()?;
        if options.sealed {
            field.region.seal(false)?;
        }
        Ok(field)
    }

    /// All of it leaves.
    pub(super) fn shrink(&self) -> Result<Shrunk, BenchError> {
        Ok(self.region.shrink(Bytes::MAX, &self.store, self.transit())?)
    }

    /// All of it comes back.
    pub(super) fn refill(&self) -> Result<Refilled, BenchError> {
        Ok(self.region.refill(Bytes::MAX, self.transit(), &Impatient)?)
    }

    fn transit(&self) -> Transit<'_> {
        Transit { mover: self.ground.mover(), checks: self.ground.digests() }
    }

    fn write(&self) -> Result<(), BenchError> {
        self.each_part(|bytes, (address, at, seed, length)| {
            fill(&mut bytes[..length], at, seed);
            Ok(self.pool.write(address, &bytes[..length])?)
        })
    }

    /// Compares every byte.
    ///
    /// # Errors
    /// [`BenchError::Differs`].
    pub(super) fn compare(&self, when: &str) -> Result<(), BenchError> {
        self.each_part(|bytes, (address, at, seed, length)| {
            bytes[..length].fill(0);
            self.pool.read(address, &mut bytes[..length])?;
            match matching(&bytes[..length], at, seed) {
                all if all == length as u64 => Ok(()),
                some => {
                    let case = format!("{when}: tensor {seed}, byte {}", at + some);
                    Err(BenchError::Differs { case })
                }
            }
        })
    }

    /// Visits every part once, by several threads, each with memory of its own.
    fn each_part(
        &self,
        visit: impl Fn(&mut [u8], Part) -> Result<(), BenchError> + Sync,
    ) -> Result<(), BenchError> {
        let parts: Vec<Part> =
            (0..).zip(&self.blocks).flat_map(|(seed, block)| parts(seed, *block)).collect();
        let (next, cores) = (AtomicU64::new(0), thread::available_parallelism().map_or(1, usize::from));
        let work = || {
            let mut bytes = vec![0; CHUNK];
            loop {
                let mine = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap_or(usize::MAX);
                let Some(part) = parts.get(mine) else { return Ok(()) };
                visit(&mut bytes, *part)?;
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..cores.min(THREADS)).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Frees everything; what is pinned for it goes with it.
    pub(super) fn end(self) -> Result<(), BenchError> {
        for block in &self.blocks {
            self.pool.free(block.address)?;
        }
        Ok(())
    }
}

/// So many bytes in so many sizes, which differ by 512 at most but for the last.
fn sizes(bytes: Bytes, tensors: u32) -> impl Iterator<Item = Bytes> {
    let (bytes, count) = (bytes.get(), u64::from(tensors.max(1)));
    // Blocks are multiples of 512 bytes: of equal ones nothing is rounded.
    let each = (bytes / count) & !511;
    let each = if each == 0 { bytes / count } else { each };
    (0..count).map(move |number| Bytes::new(if number + 1 == count { bytes - each * number } else { each }))
}

fn parts(seed: u64, block: Block) -> impl Iterator<Item = Part> {
    (0..block.size.get()).step_by(CHUNK).map(move |at| {
        let length = usize::try_from(block.size.get() - at).unwrap_or(CHUNK).min(CHUNK);
        (Address(block.address.0 + at), at, seed, length)
    })
}

/// Where the region goes; nothing of it is made ahead but what is asked for.
fn store(
    ground: &Ground,
    config: &Config,
    options: &ShrinkOptions,
    tier: ShrinkTier,
) -> Result<(Store, Option<OwnFolder>), BenchError> {
    let server = ground.server();
    let pinned = |size: Bytes| {
        let host = server.host()?;
        if options.prepare {
            host.prepare(size)?;
        }
        Ok::<_, BenchError>(host)
    };
    match tier {
        ShrinkTier::Host => Ok((Store::Host(pinned(ground.bytes())?), None)),
        ShrinkTier::Peer => Ok((Store::Peer(server.pool(ground.peer()?, &config.pool)?), None)),
        ShrinkTier::File => {
            let own = std::env::temp_dir().join(format!("glake-bench-{}", std::process::id()));
            let folder = options.folder.as_deref().unwrap_or(&own);
            let files = Arc::new(FileTier::open(folder)?);
            let host = pinned(STAGED.min(ground.bytes()))?;
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
