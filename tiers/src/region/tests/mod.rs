//! Regions over the simulated device: real bytes at the same addresses, one good copy whatever fails, nothing left behind.

mod clean;
mod commit;
mod drain;
mod faults;
mod lease;
mod live;
mod over;
mod random;
mod released;
mod seal;
mod wait;
mod wait_policy;
mod withheld;

use std::time::Duration;

use glake_device::owned::{CompletionEvents, OwnedStream, Span};
use glake_device::{Address, DeviceId, Driver, DriverError, Faults, Recorder, Stream, Touch};
use glake_sim::{Census, Simulator};
use glake_stitch::StitchError;

use super::*;
use crate::fixture::{self, GPU, Native, PEER, pattern};
use crate::{HostError, Lease, PoolError, PoolOptions, Store, TransferContext};

const EXTENT: Bytes = Bytes::mib(2);
/// The most that a fixture's pool reserves.
const LIMIT: Bytes = Bytes::mib(48);

struct Fixture {
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    recorder: Arc<Recorder>,
    mover: Native,
    host: Arc<HostPool>,
    pool: Arc<GpuPool>,
    region: Region,
    here: PoolStream,
    /// Live blocks of the region and the seeds of their bytes.
    live: Vec<(Block, u8)>,
}

fn fixture_of(policy: Policy, host_copy: CopyPolicy, budget: Bytes) -> Fixture {
    fixture_under(None, policy, host_copy, budget)
}

fn fixture_under(lease: Option<Arc<Lease>>, policy: Policy, host_copy: CopyPolicy, budget: Bytes) -> Fixture {
    let (sim, faults) = fixture::machine();
    let recorder = Arc::new(Recorder::measured(faults.clone()).with_log());
    let driver: Arc<dyn Driver> = recorder.clone();
    let completion_events = CompletionEvents::new(driver.clone());
    let options = PoolOptions {
        settings: Some(fixture::settings(EXTENT, LIMIT)),
        completion_events: Some(completion_events.clone()),
        peers: vec![PEER],
        exportable: true,
        lease,
        ..PoolOptions::default()
    };
    let pool = Arc::new(GpuPool::new(driver.clone(), GPU, options).unwrap());
    let host = fixture::host(&completion_events, budget);
    let options = RegionOptions { policy, host_copy, extent: EXTENT, ..RegionOptions::of("weights") };
    let region = Region::new(&pool, options);
    let here = PoolStream::of(&*driver, GPU, Stream::LEGACY).unwrap();
    let mover = Native::new(&driver);
    Fixture { sim, faults, recorder, mover, host, pool, region, here, live: Vec::new() }
}

fn fixture() -> Fixture {
    fixture_of(Policy::Keep, CopyPolicy::Drop, Bytes::MAX)
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

    /// Large, small and stitched blocks, and every extent with something live.
    fn furnish(&mut self) {
        for _ in 0..8 {
            self.add(EXTENT);
        }
        for index in 0..4 {
            self.free(index);
        }
        let pool = self.pool.clone();
        pool.settle().unwrap();
        pool.set_memory_fraction(0.25);
        self.add(Bytes::mib(7));
        pool.set_memory_fraction(0.75);
        assert_eq!(pool.counters().stitches, 1);
        self.add(Bytes::kib(3));
        self.add(Bytes::kib(700));
        self.add(Bytes::mib(2));
    }

    fn assert_bytes(&self) {
        assert_eq!(fixture::wrong_bytes(&self.pool, &self.live), 0);
    }

    fn shrink(&self) -> Result<Shrunk> {
        self.shrink_by(Bytes::MAX)
    }

    fn refill(&self) -> Result<Refilled> {
        self.refill_by(Bytes::MAX)
    }

    fn shrink_by(&self, amount: Bytes) -> Result<Shrunk> {
        self.region.shrink(
            amount,
            &Store::Host(self.host.clone()),
            TransferContext { mover: &self.mover, checks: None, fill: false },
        )
    }

    fn refill_by(&self, amount: Bytes) -> Result<Refilled> {
        self.region.refill(amount, TransferContext { mover: &self.mover, checks: None, fill: false }, &NoWait)
    }

    fn used(&self) -> Bytes {
        fixture::used(&self.sim, GPU)
    }

    /// Whether what these domains hold, here and evicted, can all be here at once beside a block more: what was evicted may be more than
    /// the GPU has, and then not all comes back.
    fn has_room(&self, domains: &[DomainId], block: Bytes) -> bool {
        let held = |domain: &DomainId| {
            let standing = self.pool.records().standing(*domain);
            standing.iter().map(|(view, _)| view.size).sum()
        };
        let block = block.saturating_add(EXTENT).saturating_add(EXTENT);
        domains.iter().map(held).sum::<Bytes>().saturating_add(block) <= LIMIT
    }

    fn live_bytes(&self) -> Bytes {
        self.live.iter().map(|(block, _)| block.size).sum()
    }

    /// One good copy of every extent, and books that agree.
    fn assert_sound(&self) {
        self.pool.check().unwrap();
        for (view, residency) in self.pool.records().standing(self.region.domain) {
            assert!(!residency.is_moving(), "{residency}");
            let here = residency.authority() == crate::Place::Gpu;
            assert_eq!(here, view.state == glake_stitch::ExtentState::Resident, "{residency}");
            assert!(residency.holds_gpu() || view.state == glake_stitch::ExtentState::Evicted, "{residency}");
        }
    }

    fn end(mut self) {
        self.faults.set(&[]);
        while !self.live.is_empty() {
            self.free(0);
        }
        let Fixture { sim, mover, host, pool, region, .. } = self;
        drop(region);
        pool.settle().unwrap();
        pool.trim(Bytes::ZERO).unwrap();
        pool.check().unwrap();
        assert_eq!((pool.reserved(), pool.report().segments().len()), (Bytes::ZERO, 0));
        let statistics = host.statistics();
        assert_eq!((statistics.in_use, statistics.retained), (Bytes::ZERO, Bytes::ZERO));
        drop((mover, pool, host));
        assert_eq!(sim.census(), Census::default());
    }
}

#[test]
fn bytes_come_back_to_their_addresses() {
    let mut fixture = fixture();
    fixture.furnish();
    let before = (fixture.pool.reserved(), fixture.pool.stats());
    assert!(fixture.used() >= before.0);
    let report = fixture.shrink().unwrap();
    assert_eq!((report.freed, report.resident, report.skipped.len()), (before.0, Bytes::ZERO, 0));
    assert_eq!(report.copied, fixture.live_bytes(), "live bytes and no others");
    assert_eq!((fixture.used(), fixture.pool.reserved()), (Bytes::ZERO, Bytes::ZERO));
    assert_eq!(fixture.sim.census().mappings, 0, "unmapped at all addresses");
    let stats = fixture.pool.stats();
    assert_eq!(stats.all.allocated_bytes.current, before.1.all.allocated_bytes.current, "blocks stay live");
    assert!(fixture.pool.read(fixture.live[0].0.address, &mut [0]).is_err());
    fixture.assert_sound();
    assert_eq!(fixture.shrink().unwrap(), Shrunk::default(), "nothing is left to do");

    let report = fixture.refill().unwrap();
    assert_eq!(report, Refilled { mapped: before.0, copied: fixture.live_bytes(), evicted: Bytes::ZERO });
    assert_eq!(fixture.pool.reserved(), before.0);
    fixture.assert_bytes();
    fixture.assert_sound();
    let stats = fixture.pool.stats();
    assert_eq!((stats.mappings, stats.alias_bytes), (before.1.mappings, before.1.alias_bytes));
    assert_eq!(fixture.host.statistics().in_use, Bytes::ZERO, "copies are dropped");

    // The stitched block is one memory at two addresses again, and the peer has its access.
    let (block, _) = fixture.live[4];
    let stream = OwnedStream::new(&fixture.mover.driver, PEER).unwrap();
    let (address, size) = (block.address, block.size);
    let bytes = pattern(99, size);
    let work = move |memory: &mut dyn glake_device::KernelMemory| memory.write(address, &bytes).unwrap();
    let writes = [Touch { address, size }];
    fixture.sim.enqueue_kernel(PEER, stream.id(), &[], &writes, Duration::from_micros(1), work).unwrap();
    stream.synchronize().unwrap();
    drop(stream);
    fixture.live[4].1 = 99;
    fixture.shrink().unwrap();
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn a_shrink_waits_for_work_of_every_device() {
    let mut fixture = fixture();
    let block = fixture.add(EXTENT);
    let stream = OwnedStream::new(&fixture.mover.driver, PEER).unwrap();
    let bytes = pattern(77, block.size);
    let writes = [Touch { address: block.address, size: block.size }];
    let to = block.address;
    let work = move |memory: &mut dyn glake_device::KernelMemory| memory.write(to, &bytes).unwrap();
    fixture.sim.enqueue_kernel(PEER, stream.id(), &[], &writes, Duration::from_millis(5), work).unwrap();
    fixture.live[0].1 = 77;
    fixture.shrink().unwrap();
    assert!(fixture.sim.now() >= Duration::from_millis(5));
    fixture.refill().unwrap();
    fixture.assert_bytes();
    drop(stream);
    fixture.end();
}

#[test]
fn a_capture_refuses_a_shrink_and_changes_nothing() {
    let mut fixture = fixture();
    fixture.furnish();
    let hold = fixture.pool.clock().hold();
    let refused = fixture.shrink().unwrap_err();
    assert!(
        matches!(refused, RegionError::Pool(PoolError::Driver(DriverError::Capturing { .. }))),
        "{refused}"
    );
    fixture.assert_bytes();
    drop(hold);
    fixture.end();
}

#[test]
fn what_is_sealed_is_copied_once() {
    let mut fixture = fixture_of(Policy::Sealed, CopyPolicy::Retain, Bytes::MAX);
    fixture.furnish();
    fixture.region.seal(false).unwrap();
    let refused = fixture.region.malloc(EXTENT, fixture.here).unwrap_err();
    let sealed =
        matches!(refused, RegionError::Pool(PoolError::Refused { source: StitchError::Sealed { .. }, .. }));
    assert!(sealed, "{refused}");
    assert_eq!(fixture.shrink().unwrap().copied, fixture.live_bytes());
    let copies = fixture.host.statistics().in_use;
    assert!(copies >= fixture.live_bytes());
    fixture.refill().unwrap();
    assert_eq!(fixture.host.statistics().retained, copies);
    fixture.assert_bytes();
    for _ in 0..2 {
        let again = fixture.shrink().unwrap();
        assert_eq!((again.copied, again.resident), (Bytes::ZERO, Bytes::ZERO));
        assert_eq!(fixture.host.statistics().retained, Bytes::ZERO, "it is needed now");
        fixture.refill().unwrap();
        fixture.assert_bytes();
    }
    fixture.region.unseal().unwrap();
    assert_eq!(fixture.host.statistics().retained, Bytes::ZERO);
    let (block, _) = fixture.live[0];
    fixture.pool.write(block.address, &pattern(200, block.size)).unwrap();
    fixture.live[0].1 = 200;
    assert_eq!(fixture.shrink().unwrap().copied, fixture.live_bytes());
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn what_is_discarded_is_not_copied() {
    let mut fixture = fixture_of(Policy::Discard, CopyPolicy::Drop, Bytes::ZERO);
    fixture.furnish();
    let reserved = fixture.pool.reserved();
    let report = fixture.shrink().unwrap();
    assert_eq!((report.freed, report.copied), (reserved, Bytes::ZERO));
    assert_eq!(fixture.refill().unwrap().copied, Bytes::ZERO);
    assert_eq!(fixture.pool.reserved(), reserved);
    for (block, _) in &fixture.live {
        fixture.pool.write(block.address, &[1; 512]).unwrap();
    }
    assert!(fixture.region.seal(false).is_err());
    fixture.end();
}

#[test]
fn freed_while_away() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.shrink().unwrap();
    let pinned = fixture.host.statistics().in_use;
    assert!(!pinned.is_zero());
    // While nothing of it is resident, what is free in it is not handed out: new memory is.
    let (home, _) = fixture.live[0];
    let fresh = fixture.add(EXTENT);
    assert_eq!(fixture.pool.reserved(), EXTENT);
    fixture.free(0);
    let after = fixture.host.statistics().in_use;
    assert!(after < pinned, "the copy of an extent with nothing live goes: {after} of {pinned}");
    let again = fixture.add(EXTENT);
    assert!(again.address != home.address && fresh.address != home.address);
    // The stitched block goes too: the next refill has less to bring back.
    fixture.free(3);
    let report = fixture.refill().unwrap();
    assert_eq!(report.evicted, Bytes::ZERO);
    fixture.assert_bytes();
    fixture.assert_sound();
    fixture.shrink().unwrap();
    while !fixture.live.is_empty() {
        fixture.free(0);
    }
    assert_eq!(fixture.host.statistics().in_use, Bytes::ZERO);
    fixture.pool.check().unwrap();
    fixture.end();
}

#[test]
fn what_others_have_stays() {
    let mut fixture = fixture();
    let (kept, goes) = (fixture.add(EXTENT), fixture.add(EXTENT));
    let shared = fixture.pool.export(kept.address, 0..usize::MAX).unwrap();
    let report = fixture.shrink().unwrap();
    let skipped = Skipped { address: kept.address, size: EXTENT, reason: SkipReason::Exported };
    assert_eq!((report.freed, report.resident, report.skipped), (EXTENT, EXTENT, vec![skipped]));
    assert!(matches!(fixture.pool.export(goes.address, 0..usize::MAX), Err(PoolError::Evicted { .. })));
    fixture.refill().unwrap();
    fixture.assert_bytes();
    drop(shared);
    fixture.end();
}

#[test]
fn all_of_a_graphs_pool_is_copied() {
    let mut fixture = fixture();
    let block = fixture.add(Bytes::kib(1536));
    fixture.pool.keep_addresses(fixture.region.domain);
    let behind = Address(block.address.0 + (3 << 19));
    fixture.pool.write(behind, &[42; 4096]).unwrap();
    let report = fixture.shrink().unwrap();
    assert_eq!((report.freed, report.copied), (EXTENT, EXTENT));
    fixture.refill().unwrap();
    let mut found = [0; 4096];
    fixture.pool.read(behind, &mut found).unwrap();
    assert_eq!(found, [42; 4096]);
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn without_host_memory_or_room_it_stops_and_goes_on() {
    let mut fixture = fixture_of(Policy::Keep, CopyPolicy::Drop, Bytes::mib(4));
    for _ in 0..6 {
        fixture.add(EXTENT);
    }
    let stopped = fixture.shrink().unwrap_err();
    let RegionError::Stopped { moved, copied, resident: left, source, .. } = stopped else {
        panic!("{stopped}")
    };
    assert!(matches!(*source, RegionError::Host(HostError::OverBudget { .. })), "{source}");
    assert_eq!((moved, copied, left), (Bytes::mib(4), Bytes::mib(4), Bytes::mib(8)));
    fixture.assert_sound();
    // Somebody takes the space meanwhile.
    fixture.pool.set_memory_fraction(10.0 / 64.0);
    let stopped = fixture.refill().unwrap_err();
    let RegionError::Stopped { moved, source, .. } = stopped else { panic!("{stopped}") };
    assert!(matches!(*source, RegionError::Pool(ref error) if error.is_out_of_memory()), "{source}");
    assert_eq!(moved, EXTENT);
    fixture.assert_sound();
    fixture.pool.set_memory_fraction(1.0);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}
