//! Regions whose copies go to the host, to another GPU and to files: real bytes, real files, nothing left behind.

#[cfg(target_arch = "x86_64")]
mod broken;
mod damage;
mod faults;
mod kill;
mod peer;

use std::path::Path;

use glake_device::owned::{Epochs, Span};
use glake_device::{DeviceId, Driver, Faults, Stream};
use glake_sim::{Census, Simulator};
use glake_units::Bytes;
use tempfile::TempDir;

use super::*;
use crate::bed::{self, GPU, Native, PEER, pattern};
use crate::{
    Block, CopyPolicy, FileStatistics, HostStatistics, MappingObserver, MoveError, NoWait, Policy,
    PoolOptions, PoolStream, Refilled, Region, RegionError, RegionOptions, Residency, Shrunk,
};

const EXTENT: Bytes = Bytes::mib(4);

/// Which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Host,
    Peer,
    File,
}

const ALL: [To; 3] = [To::Host, To::Peer, To::File];

struct Bed {
    root: TempDir,
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    epochs: Arc<Epochs>,
    mover: Native,
    host: Arc<HostPool>,
    files: Arc<FileTier>,
    digests: Digests,
    pool: Arc<GpuPool>,
    peer: Arc<GpuPool>,
    region: Region,
    here: PoolStream,
    live: Vec<(Block, u8)>,
}

#[derive(Clone)]
struct Ground<'a> {
    policy: Policy,
    host_copy: CopyPolicy,
    /// Of the region.
    extent: Bytes,
    budget: Bytes,
    /// `None`: a directory of its own.
    directory: Option<&'a Path>,
    observer: Option<Arc<dyn MappingObserver>>,
}

impl Default for Ground<'_> {
    fn default() -> Self {
        let (policy, host_copy) = (Policy::Keep, CopyPolicy::Drop);
        Ground { policy, host_copy, extent: EXTENT, budget: Bytes::MAX, directory: None, observer: None }
    }
}

fn pool(
    driver: &Arc<dyn Driver>,
    epochs: &Arc<Epochs>,
    device: DeviceId,
    observer: Option<Arc<dyn MappingObserver>>,
) -> Arc<GpuPool> {
    let (settings, epochs) = (Some(bed::settings(EXTENT, Bytes::mib(64))), Some(epochs.clone()));
    let options = PoolOptions { settings, epochs, observer, ..PoolOptions::default() };
    Arc::new(GpuPool::new(driver.clone(), device, options).unwrap())
}

fn bed() -> Bed {
    bed_of(Ground::default())
}

fn bed_of(ground: Ground<'_>) -> Bed {
    let Ground { policy, host_copy, extent, budget, directory, observer } = ground;
    let (sim, faults) = bed::machine();
    let driver: Arc<dyn Driver> = faults.clone();
    let epochs = Epochs::new(driver.clone());
    let host = bed::host(&epochs, budget);
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("extents");
    let files = Arc::new(FileTier::open(directory.unwrap_or(&own)).unwrap());
    let digests = Digests::new(&epochs, GPU).unwrap();
    let (peer, pool) = (pool(&driver, &epochs, PEER, None), pool(&driver, &epochs, GPU, observer));
    let options = RegionOptions { policy, host_copy, extent, ..RegionOptions::of("weights") };
    let region = Region::new(&pool, options);
    let here = PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap();
    let mover = Native::new(&driver);
    let live = Vec::new();
    Bed { root, sim, faults, epochs, mover, host, files, digests, pool, peer, region, here, live }
}

impl Bed {
    fn add(&mut self, size: Bytes) -> Block {
        let block = self.region.malloc(size, self.here).unwrap();
        let seed = u8::try_from(self.live.len() * 7 % 251).unwrap();
        self.pool.write(block.address, &pattern(seed, block.size)).unwrap();
        self.live.push((block, seed));
        block
    }

    fn free(&mut self, index: usize) {
        let (block, _) = self.live.remove(index);
        self.pool.free(block.address).unwrap();
    }

    /// Five extents: whole ones, one with holes, one of small blocks.
    fn furnish(&mut self) {
        for kib in [4096, 4096, 1536, 1000, 1024, 3, 700, 3000] {
            self.add(Bytes::kib(kib));
        }
        self.free(3);
        self.pool.settle().unwrap();
    }

    fn store(&self, to: To) -> Store {
        match to {
            To::Host => Store::Host(self.host.clone()),
            To::Peer => Store::Peer(self.peer.clone()),
            To::File => Store::File { files: self.files.clone(), host: self.host.clone() },
        }
    }

    fn context(&self, checked: bool) -> TransferContext<'_> {
        TransferContext { mover: &self.mover, checks: checked.then_some(&self.digests) }
    }

    fn shrink(&self, to: To, checked: bool) -> Result<Shrunk, RegionError> {
        self.region.shrink(Bytes::MAX, &self.store(to), self.context(checked))
    }

    fn refill(&self, checked: bool) -> Result<Refilled, RegionError> {
        self.region.refill(Bytes::MAX, self.context(checked), &NoWait)
    }

    fn meddle(&self, meddle: impl FnMut(&[(Span, Span)]) -> Result<(), MoveError> + Send + 'static) {
        *self.mover.meddle.lock() = Some(Box::new(meddle));
    }

    fn residencies(&self) -> Vec<Residency> {
        let standing = self.pool.standing(self.region.domain()).unwrap();
        standing.into_iter().map(|(_, residency)| residency).collect()
    }

    fn live_bytes(&self) -> Bytes {
        self.live.iter().map(|(block, _)| block.size).sum()
    }

    /// How many live bytes are not what they were.
    fn wrong_bytes(&self) -> usize {
        bed::wrong_bytes(&self.pool, &self.live)
    }

    fn used(&self, device: DeviceId) -> Bytes {
        bed::used(&self.sim, device)
    }

    /// No copy is anywhere; what a copy's memory waits for is done.
    fn assert_no_copies(&self) {
        let HostStatistics { in_use, retained, .. } = self.host.statistics();
        assert_eq!((in_use, retained), (Bytes::ZERO, Bytes::ZERO));
        assert_eq!(self.files.statistics(), FileStatistics::default());
        assert_eq!(std::fs::read_dir(self.files.path()).unwrap().count(), 1, "the lock");
        self.peer.settle().unwrap();
        self.peer.trim(Bytes::ZERO).unwrap();
        assert_eq!((self.peer.reserved(), self.used(PEER)), (Bytes::ZERO, Bytes::ZERO));
        self.peer.check().unwrap();
    }

    fn end(mut self) {
        self.faults.set(&[]);
        *self.mover.meddle.lock() = None;
        while !self.live.is_empty() {
            self.free(0);
        }
        // What is halfway with nothing live in it comes back empty.
        self.refill(false).unwrap();
        self.assert_no_copies();
        let Bed { root, sim, epochs, mover, host, files, digests, pool, peer, region, .. } = self;
        drop(region);
        pool.settle().unwrap();
        pool.trim(Bytes::ZERO).unwrap();
        pool.check().unwrap();
        assert_eq!(pool.reserved(), Bytes::ZERO);
        drop((mover, host, files, digests, pool, peer, epochs));
        assert_eq!(sim.census(), Census::default());
        drop(root);
    }
}

#[test]
fn bytes_come_back_from_every_store() {
    for (to, checked) in ALL.into_iter().flat_map(|to| [(to, false), (to, true)]) {
        let mut bed = bed();
        bed.furnish();
        let before = bed.pool.reserved();
        for _ in 0..2 {
            let report = bed.shrink(to, checked).unwrap();
            let expected = (before, bed.live_bytes(), Bytes::ZERO);
            assert_eq!((report.freed, report.copied, report.left), expected, "{to:?}");
            assert_eq!(bed.used(GPU), Bytes::ZERO);
            let at = bed.store(to).place();
            assert!(bed.residencies().iter().all(|found| *found == Residency::Evicted { at }));
            let on_peer = bed.used(PEER);
            assert_eq!(on_peer >= bed.live_bytes(), to == To::Peer, "{to:?}: {on_peer}");
            let extents = bed.residencies().len() as u64;
            let files = if to == To::File { extents } else { 0 };
            assert_eq!(bed.files.statistics().files, files);
            let pinned = bed.host.statistics().in_use;
            assert_eq!(pinned >= bed.live_bytes(), to == To::Host, "{to:?}: {pinned}");
            let report = bed.refill(checked).unwrap();
            assert_eq!((report.copied, report.away), (bed.live_bytes(), Bytes::ZERO));
            assert_eq!(bed.wrong_bytes(), 0, "{to:?}");
            bed.assert_no_copies();
        }
        bed.end();
    }
}

#[test]
fn each_extent_comes_back_from_where_it_is() {
    let mut bed = bed();
    bed.furnish();
    let by = |to, amount| bed.region.shrink(amount, &bed.store(to), bed.context(true)).unwrap();
    by(To::Peer, EXTENT);
    by(To::File, EXTENT);
    by(To::Host, Bytes::MAX);
    // What is out stays where it is.
    assert_eq!(bed.shrink(To::File, true).unwrap(), Shrunk::default());
    let places: Vec<Place> = bed.residencies().into_iter().map(Residency::authority).collect();
    assert!([Place::Peer(PEER), Place::File, Place::Host].iter().all(|place| places.contains(place)));
    bed.refill(true).unwrap();
    assert_eq!(bed.wrong_bytes(), 0);
    bed.end();
}

#[test]
fn a_retained_copy_serves_wherever_it_is() {
    for to in ALL {
        let (policy, host_copy) = (Policy::Sealed, CopyPolicy::Retain);
        let mut bed = bed_of(Ground { policy, host_copy, ..Ground::default() });
        bed.furnish();
        bed.region.seal(false).unwrap();
        assert_eq!(bed.shrink(to, true).unwrap().copied, bed.live_bytes());
        bed.refill(true).unwrap();
        let at = bed.store(to).place();
        assert!(bed.residencies().iter().all(|found| *found == Residency::Resident { copy: Some(at) }));
        // Another store is asked for, and nothing is copied to it.
        for other in ALL {
            let again = bed.shrink(other, true).unwrap();
            assert_eq!((again.copied, again.left), (Bytes::ZERO, Bytes::ZERO), "{to:?}, {other:?}");
            assert!(bed.residencies().iter().all(|found| *found == Residency::Evicted { at }));
            bed.refill(true).unwrap();
            assert_eq!(bed.wrong_bytes(), 0);
        }
        bed.region.unseal().unwrap();
        bed.assert_no_copies();
        bed.end();
    }
}

#[test]
fn copies_go_with_the_last_block_of_their_extent() {
    for to in ALL {
        let mut bed = bed();
        bed.furnish();
        bed.shrink(to, true).unwrap();
        while bed.live.len() > 1 {
            bed.free(0);
        }
        let kept = bed.residencies().iter().filter(|found| found.copy().is_some()).count();
        assert!(kept >= 1, "{to:?}");
        bed.free(0);
        bed.assert_no_copies();
        bed.end();
    }
}

#[test]
fn its_own_gpu_is_no_store() {
    let mut bed = bed();
    bed.furnish();
    let own = Store::Peer(bed.pool.clone());
    let refused = bed.region.shrink(Bytes::MAX, &own, bed.context(false)).unwrap_err();
    drop(own);
    let RegionError::Stopped { source, .. } = refused else { panic!("{refused}") };
    assert!(matches!(*source, RegionError::OwnMemory { .. }), "{source}");
    assert_eq!(bed.wrong_bytes(), 0);
    bed.end();
}

#[test]
fn host_memory_is_pinned_while_copies_are_made() {
    let mut bed = bed();
    bed.furnish();
    let host = bed.host.clone();
    // No copy ends before all is pinned.
    bed.meddle(move |_| {
        let begun = std::time::Instant::now();
        while host.statistics().pinned < Bytes::mib(16) {
            assert!(begun.elapsed().as_secs() < 60, "nobody pins meanwhile");
            std::thread::yield_now();
        }
        Ok(())
    });
    bed.shrink(To::Host, false).unwrap();
    assert_eq!(bed.host.statistics().pins, 4);
    bed.refill(false).unwrap();
    // It is there for the next time.
    bed.shrink(To::Host, false).unwrap();
    assert_eq!(bed.host.statistics().pins, 4);
    bed.refill(false).unwrap();
    bed.end();
}
