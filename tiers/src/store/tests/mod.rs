//! Regions whose copies go to the host, to another GPU and to files: real bytes, real files, nothing left behind.

#[cfg(target_arch = "x86_64")]
mod broken;
mod damage;
mod demote;
mod faults;
mod kill;
mod peer;

use std::path::Path;

use glake_device::owned::{CompletionEvents, Span};
use glake_device::{DeviceId, Driver, Faults, Stream};
use glake_sim::{Census, Simulator};
use glake_units::Bytes;
use tempfile::TempDir;

use super::*;
use crate::fixture::{self, GPU, Native, PEER, pattern};
use crate::{
    Block, ByteRange, CopyPolicy, FileStatistics, HostStatistics, MappingObserver, MoveError, NoWait, Policy,
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

struct Fixture {
    root: TempDir,
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    completion_events: Arc<CompletionEvents>,
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
struct Harness<'a> {
    policy: Policy,
    host_copy: CopyPolicy,
    /// Of the region.
    extent: Bytes,
    budget: Bytes,
    /// `None`: a directory of its own.
    directory: Option<&'a Path>,
    observer: Option<Arc<dyn MappingObserver>>,
}

impl Default for Harness<'_> {
    fn default() -> Self {
        let (policy, host_copy) = (Policy::Keep, CopyPolicy::Drop);
        Harness { policy, host_copy, extent: EXTENT, budget: Bytes::MAX, directory: None, observer: None }
    }
}

fn pool(
    driver: &Arc<dyn Driver>,
    completion_events: &Arc<CompletionEvents>,
    device: DeviceId,
    observer: Option<Arc<dyn MappingObserver>>,
) -> Arc<GpuPool> {
    let (settings, completion_events) =
        (Some(fixture::settings(EXTENT, Bytes::mib(64))), Some(completion_events.clone()));
    let options = PoolOptions { settings, completion_events, observer, ..PoolOptions::default() };
    Arc::new(GpuPool::new(driver.clone(), device, options).unwrap())
}

fn fixture() -> Fixture {
    fixture_of(Harness::default())
}

fn fixture_of(harness: Harness<'_>) -> Fixture {
    let Harness { policy, host_copy, extent, budget, directory, observer } = harness;
    let (sim, faults) = fixture::machine();
    let driver: Arc<dyn Driver> = faults.clone();
    let completion_events = CompletionEvents::new(driver.clone());
    let host = fixture::host(&completion_events, budget);
    let root = tempfile::tempdir().unwrap();
    let own = root.path().join("extents");
    let files = Arc::new(FileTier::open(directory.unwrap_or(&own)).unwrap());
    let digests = Digests::new(&completion_events, GPU).unwrap();
    let (peer, pool) =
        (pool(&driver, &completion_events, PEER, None), pool(&driver, &completion_events, GPU, observer));
    let options = RegionOptions { policy, host_copy, extent, ..RegionOptions::of("weights") };
    let region = Region::new(&pool, options);
    let here = PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap();
    let mover = Native::new(&driver);
    let live = Vec::new();
    Fixture {
        root,
        sim,
        faults,
        completion_events,
        mover,
        host,
        files,
        digests,
        pool,
        peer,
        region,
        here,
        live,
    }
}

impl Fixture {
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
        TransferContext { mover: &self.mover, checks: checked.then_some(&self.digests), fill: checked }
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
        let standing = self.pool.records().standing(self.region.domain());
        standing.into_iter().map(|(_, residency)| residency).collect()
    }

    fn live_bytes(&self) -> Bytes {
        self.live.iter().map(|(block, _)| block.size).sum()
    }

    /// How many live bytes are not what they were.
    fn wrong_bytes(&self) -> usize {
        fixture::wrong_bytes(&self.pool, &self.live)
    }

    fn used(&self, device: DeviceId) -> Bytes {
        fixture::used(&self.sim, device)
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
        // What is interrupted with nothing live in it comes back empty.
        self.refill(false).unwrap();
        self.assert_no_copies();
        let Fixture { root, sim, completion_events, mover, host, files, digests, pool, peer, region, .. } =
            self;
        drop(region);
        pool.settle().unwrap();
        pool.trim(Bytes::ZERO).unwrap();
        pool.check().unwrap();
        assert_eq!(pool.reserved(), Bytes::ZERO);
        drop((mover, host, files, digests, pool, peer, completion_events));
        assert_eq!(sim.census(), Census::default());
        drop(root);
    }
}

#[test]
fn bytes_come_back_from_every_store() {
    for (to, checked) in ALL.into_iter().flat_map(|to| [(to, false), (to, true)]) {
        let mut fixture = fixture();
        fixture.furnish();
        let before = fixture.pool.reserved();
        for _ in 0..2 {
            let report = fixture.shrink(to, checked).unwrap();
            let expected = (before, fixture.live_bytes(), Bytes::ZERO);
            assert_eq!((report.freed, report.copied, report.resident), expected, "{to:?}");
            assert_eq!(fixture.used(GPU), Bytes::ZERO);
            let at = fixture.store(to).place();
            assert!(fixture.residencies().iter().all(|found| *found == Residency::Evicted { at }));
            let on_peer = fixture.used(PEER);
            assert_eq!(on_peer >= fixture.live_bytes(), to == To::Peer, "{to:?}: {on_peer}");
            let extents = fixture.residencies().len() as u64;
            let files = if to == To::File { extents } else { 0 };
            assert_eq!(fixture.files.statistics().files, files);
            let pinned = fixture.host.statistics().in_use;
            assert_eq!(pinned >= fixture.live_bytes(), to == To::Host, "{to:?}: {pinned}");
            let report = fixture.refill(checked).unwrap();
            assert_eq!((report.copied, report.evicted), (fixture.live_bytes(), Bytes::ZERO));
            assert_eq!(fixture.wrong_bytes(), 0, "{to:?}");
            fixture.assert_no_copies();
        }
        fixture.end();
    }
}

#[test]
fn only_live_ranges_go_to_any_store() {
    for (to, checked) in ALL.into_iter().flat_map(|to| [(to, false), (to, true)]) {
        let mut fixture = fixture();
        fixture.furnish();
        let (block, seed) = fixture.live[0];
        let ranges = [(5_usize, 700_usize), (1024, 2048), (4000, 4096)];
        let live = ranges
            .map(|(start, end)| ByteRange { start: Bytes::kib(start as u64), end: Bytes::kib(end as u64) });
        fixture.pool.live_bytes().set(block.address, &live).unwrap();
        let report = fixture.shrink(to, checked).unwrap();
        let undefined = block.size.saturating_sub(Bytes::kib(695 + 1024 + 96));
        assert_eq!(report.undefined, undefined, "{to:?}");
        assert_eq!(report.copied, fixture.live_bytes().saturating_sub(undefined), "{to:?}");
        fixture.refill(checked).unwrap();
        assert_eq!(fixture::wrong_bytes(&fixture.pool, &fixture.live[1..]), 0, "{to:?}");
        let mut found = vec![0; usize::try_from(block.size.get()).unwrap()];
        fixture.pool.read(block.address, &mut found).unwrap();
        for (start, end) in ranges {
            assert!(
                found[start << 10..end << 10] == pattern(seed, block.size)[start << 10..end << 10],
                "{to:?}"
            );
        }
        fixture.end();
    }
}

#[test]
fn each_extent_comes_back_from_where_it_is() {
    let mut fixture = fixture();
    fixture.furnish();
    let by = |to, amount| fixture.region.shrink(amount, &fixture.store(to), fixture.context(true)).unwrap();
    by(To::Peer, EXTENT);
    by(To::File, EXTENT);
    by(To::Host, Bytes::MAX);
    // What is out stays where it is.
    assert_eq!(fixture.shrink(To::File, true).unwrap(), Shrunk::default());
    let places: Vec<Place> = fixture.residencies().into_iter().map(Residency::authority).collect();
    assert!([Place::Peer(PEER), Place::File, Place::Host].iter().all(|place| places.contains(place)));
    let held = fixture.region.holding();
    let at = |place| fixture.region.places().into_iter().find(|of| of.0 == place).map(|of| of.1).unwrap();
    assert_eq!((held.in_peers, held.in_files), (at(Place::Peer(PEER)), at(Place::File)));
    assert!(at(Place::Host) < held.evicted);
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}

#[test]
fn a_retained_copy_serves_wherever_it_is() {
    for to in ALL {
        let (policy, host_copy) = (Policy::Sealed, CopyPolicy::Retain);
        let mut fixture = fixture_of(Harness { policy, host_copy, ..Harness::default() });
        fixture.furnish();
        fixture.region.seal(false).unwrap();
        assert_eq!(fixture.shrink(to, true).unwrap().copied, fixture.live_bytes());
        fixture.refill(true).unwrap();
        let at = fixture.store(to).place();
        assert!(fixture.residencies().iter().all(|found| *found == Residency::Resident { copy: Some(at) }));
        // Another store is asked for, and nothing is copied to it.
        for other in ALL {
            let again = fixture.shrink(other, true).unwrap();
            assert_eq!((again.copied, again.resident), (Bytes::ZERO, Bytes::ZERO), "{to:?}, {other:?}");
            assert!(fixture.residencies().iter().all(|found| *found == Residency::Evicted { at }));
            fixture.refill(true).unwrap();
            assert_eq!(fixture.wrong_bytes(), 0);
        }
        fixture.region.unseal().unwrap();
        fixture.assert_no_copies();
        fixture.end();
    }
}

#[test]
fn copies_go_with_the_last_block_of_their_extent() {
    for to in ALL {
        let mut fixture = fixture();
        fixture.furnish();
        fixture.shrink(to, true).unwrap();
        while fixture.live.len() > 1 {
            fixture.free(0);
        }
        let kept = fixture.residencies().iter().filter(|found| found.copy().is_some()).count();
        assert!(kept >= 1, "{to:?}");
        fixture.free(0);
        fixture.assert_no_copies();
        fixture.end();
    }
}

#[test]
fn its_own_gpu_is_no_store() {
    let mut fixture = fixture();
    fixture.furnish();
    let own = Store::Peer(fixture.pool.clone());
    let refused = fixture.region.shrink(Bytes::MAX, &own, fixture.context(false)).unwrap_err();
    drop(own);
    let RegionError::Stopped { source, .. } = refused else { panic!("{refused}") };
    assert!(matches!(*source, RegionError::OwnMemory { .. }), "{source}");
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}

#[test]
fn host_memory_is_pinned_while_copies_are_made() {
    let mut fixture = fixture();
    fixture.furnish();
    let host = fixture.host.clone();
    // No copy ends before all is pinned.
    fixture.meddle(move |_| {
        let begun = std::time::Instant::now();
        while host.statistics().pinned < Bytes::mib(16) {
            assert!(begun.elapsed().as_secs() < 60, "nobody pins meanwhile");
            std::thread::yield_now();
        }
        Ok(())
    });
    fixture.shrink(To::Host, false).unwrap();
    assert_eq!(fixture.host.statistics().pins, 4);
    fixture.refill(false).unwrap();
    // It is there for the next time.
    fixture.shrink(To::Host, false).unwrap();
    assert_eq!(fixture.host.statistics().pins, 4);
    fixture.refill(false).unwrap();
    fixture.end();
}
