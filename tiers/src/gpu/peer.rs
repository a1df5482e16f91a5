//! Access of other GPUs to the pool's memory, for the program's work and for the runtime's own.
//!
//! ```text
//! enable_peer   at the program's request   watched: every completion point waits for all of that GPU's work    access to all memory
//! watch         the program recorded a stream of that GPU       watched                                      no further access
//! lend_to       relays of copies    not watched: work is joined, or registered with the clock     access to open domains
//! peer blocks   their owners        not watched, as above                                        access to their domains
//! ```
//!
//! Invariants:
//! - A device that the program gave access is watched before it gets the access, and for ever after, so that every completion point
//! recorded meanwhile waits for its work too. Earlier completion points need not: the device could not access the memory freed in them, and
//! memory it has been given since belongs to later ones. The change is made under the clock's lock, so that no completion point is recorded
//! in between.
//! - Completion points do not wait for devices that the program did not name: the runtime registers its own work there with the clock
//! ([`glake_device::owned::CompletionEvents::outside`]).

use glake_device::owned::{DeviceSet, Mapping};
use glake_device::{Access, DeviceId, DriverError, Protection, Refusal, Verb};
use glake_stitch::DomainId;
use glake_units::Bytes;

use super::clock::CompletionClock;
use super::core::Core;
use super::growth::{Growing, Growth};
use super::reach::Reach;
use super::retry::retry;
use super::{PoolError, Result};

/// Operations on the access of other devices to a pool's memory.
#[derive(Debug)]
pub(super) struct PeerAccess<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) reach: &'a Reach,
}

impl PeerAccess<'_> {
    /// Gives the program's work on `peer` access to the pool's memory.
    pub(super) fn enable(&self, peer: DeviceId) -> Result<()> {
        // Prevents mapping and unmapping meanwhile.
        let growing = self.growth.lock()?;
        let own = self.core.device();
        if peer == own || self.reach.watched().contains(peer) && self.reach.let_in().contains(peer) {
            return Ok(());
        }
        self.check_reach(peer)?;
        let enabled = retry(|| self.core.driver().enable_peer_access(peer, own));
        enabled.map_err(|error| self.core.failed(error))?;
        self.watch_under(&growing, peer);
        let devices = DeviceSet::of(peer);
        if !self.reach.given().contains(peer) {
            let opened = self.open_to(devices, Protection::ReadWrite, &self.open(&growing));
            opened.map_err(|error| self.core.failed(error))?;
        }
        let opened = self.open_closed(devices, self.closed(&growing));
        opened.map_err(|error| self.core.failed(error))?;
        self.reach.let_in_all(peer);
        Ok(())
    }

    /// Covers the program's work on `peer`, which already accesses the pool's memory.
    pub(super) fn watch(&self, peer: DeviceId) -> Result<()> {
        if peer != self.core.device() && !self.reach.watched().contains(peer) {
            self.watch_under(&self.growth.lock()?, peer);
        }
        Ok(())
    }

    fn watch_under(&self, _growing: &Growing<'_>, peer: DeviceId) {
        self.clock.between_points(|| {
            self.core.reservation().watch(peer);
            self.reach.watch(peer);
        });
    }

    /// Gives the runtime's work on another device access to the pool's memory, except closed domains.
    pub(super) fn lend_to(&self, relay: DeviceId) -> Result<()> {
        // Prevents mapping and unmapping meanwhile.
        let growing = self.growth.lock()?;
        if relay == self.core.device() {
            return Ok(());
        }
        self.check_reach(relay)?;
        self.core.reservation().lend(relay);
        if !self.reach.given().contains(relay) {
            let opened = self.open_to(DeviceSet::of(relay), Protection::ReadWrite, &self.open(&growing));
            opened.map_err(|error| self.core.failed(error))?;
            self.reach.give(relay);
        }
        Ok(())
    }

    /// Closes a domain without memory: only its own device and those that the program named get access.
    pub(super) fn close_domain(&self, domain: DomainId) {
        self.reach.close(domain);
    }

    /// Opens a closed domain to all devices that the pool is lent to, for current and later mappings.
    pub(super) fn open_domain(&self, domain: DomainId) -> Result<()> {
        let growing = self.growth.lock()?;
        let others = self.reach.given().without(self.reach.of_domain(domain));
        let opened = self.open_closed(others, growing.mappings_in(domain));
        opened.map_err(|error| self.core.failed(error))?;
        self.reach.open(domain);
        Ok(())
    }

    /// Prepares for the runtime's work on an owner's GPU, which will access peer blocks; gives it no further access. Must be called under
    /// the growth lock.
    pub(super) fn admit(&self, owner: DeviceId) -> Result<()> {
        if owner != self.core.device() {
            self.check_reach(owner)?;
            self.core.reservation().lend(owner);
        }
        Ok(())
    }

    /// Checks whether a device can access this one, which no other call would tell while nothing is mapped. Changes nothing.
    fn check_reach(&self, peer: DeviceId) -> Result<()> {
        let driver = self.core.driver();
        let devices = driver.devices().map_err(|error| self.core.failed(error))?;
        if !devices.iter().any(|info| info.id == peer) || DeviceSet::of(peer).is_empty() {
            return Err(PoolError::NoSuchDevice { device: peer, count: devices.len() });
        }
        match retry(|| driver.can_access_peer(peer, self.core.device())) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let (verb, address) = (Verb::CanAccessPeer, self.core.reservation().start());
                Err(self.core.failed(DriverError::Refused { verb, address, reason: Refusal::NoPeerAccess }))
            }
            Err(error) => Err(self.core.failed(error)),
        }
    }

    /// Returns the mappings of closed domains.
    fn closed(&self, growing: &Growing<'_>) -> Vec<Mapping> {
        self.reach.closed().into_iter().flat_map(|domain| growing.mappings_in(domain)).collect()
    }

    /// Returns all other mappings, in runs.
    fn open(&self, growing: &Growing<'_>) -> Vec<Mapping> {
        without(self.core.reservation().mapped(), self.closed(growing))
    }

    /// Gives devices access to mappings of closed domains: read access if they are sealed against writes, full access on unsealing.
    fn open_closed(&self, peers: DeviceSet, mappings: Vec<Mapping>) -> std::result::Result<(), DriverError> {
        let (own, reservation) = (self.core.device(), self.core.reservation());
        let is_written = |mapping: &Mapping| reservation.writers(*mapping).contains(own);
        let (open, sealed): (Vec<_>, Vec<_>) = mappings.into_iter().partition(is_written);
        self.open_to(peers, Protection::ReadWrite, &open)?;
        self.open_to(peers, Protection::Read, &sealed)
    }

    /// Gives devices access to all of the mappings, or to none on failure.
    fn open_to(
        &self,
        peers: DeviceSet,
        protection: Protection,
        runs: &[Mapping],
    ) -> std::result::Result<(), DriverError> {
        let reservation = self.core.reservation();
        let access: Vec<Access> = peers.iter().map(|device| Access { device, protection }).collect();
        if access.is_empty() {
            return Ok(());
        }
        for (done, run) in runs.iter().enumerate() {
            let given = retry(|| reservation.set_access(run.offset, run.size, &access));
            let Err(error) = given else { continue };
            let none: Vec<Access> =
                peers.iter().map(|device| Access { device, protection: Protection::None }).collect();
            for run in &runs[..done] {
                // The program was not told of the access, so that a remaining one is harmless.
                if let Err(error) = retry(|| reservation.protect(run.offset, run.size, &none)) {
                    tracing::warn!(target: "glake::peers", ?peers, %error, "access could not be taken back");
                }
            }
            return Err(error);
        }
        Ok(())
    }
}

/// Subtracts mappings from runs.
fn without(runs: Vec<(Bytes, Bytes)>, mut mappings: Vec<Mapping>) -> Vec<Mapping> {
    mappings.sort_unstable_by_key(|mapping| mapping.offset);
    let mut left = Vec::with_capacity(runs.len());
    for (offset, size) in runs {
        let (mut at, end) = (offset, offset.saturating_add(size));
        let first = mappings.partition_point(|mapping| mapping.offset < offset);
        for mapping in mappings[first..].iter().take_while(|mapping| mapping.offset < end) {
            left.push(Mapping { offset: at, size: mapping.offset.saturating_sub(at) });
            at = mapping.offset.saturating_add(mapping.size);
        }
        left.push(Mapping { offset: at, size: end.saturating_sub(at) });
    }
    left.retain(|run| !run.size.is_zero());
    left
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use glake_device::owned::OwnedStream;
    use glake_device::{Address, Driver, Fault, Faults, Injected, Refusal, Stream, Touch, Verb, When};
    use glake_sim::{Census, SimOptions, SimTopology, Simulator};
    use glake_stitch::{DomainOptions, Settings};
    use glake_units::Bytes;

    use super::*;
    use crate::{Block, GpuPool, PoolOptions, PoolStream};

    const OWN: DeviceId = DeviceId(0);
    const PEER: DeviceId = DeviceId(1);
    const FOUR: Bytes = Bytes::mib(4);

    struct Fixture {
        sim: Arc<Simulator>,
        faults: Arc<Faults>,
        pool: GpuPool,
        /// Stream on the peer device.
        stream: OwnedStream,
        here: PoolStream,
    }

    fn fixture(peers: &[DeviceId]) -> Fixture {
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let limit = Bytes::mib(32);
        let settings = Settings { extent: FOUR, limit, ..Settings::for_memory(Bytes::mib(64)) };
        let options =
            PoolOptions { settings: Some(settings), peers: peers.to_vec(), ..PoolOptions::default() };
        let pool = GpuPool::new(driver.clone(), OWN, options).unwrap();
        let here = PoolStream::of(&*driver, OWN, Stream::LEGACY).unwrap();
        Fixture { stream: OwnedStream::new(&driver, PEER).unwrap(), sim, faults, pool, here }
    }

    impl Fixture {
        fn malloc(&self, size: Bytes) -> Block {
            self.pool.malloc(size, self.here).unwrap()
        }

        /// Fills the pool with blocks and frees every other one.
        fn fragments(&self) -> Vec<Block> {
            let blocks: Vec<Block> = (0..8).map(|_| self.malloc(FOUR)).collect();
            for block in blocks.iter().step_by(2) {
                self.pool.free(block.address).unwrap();
            }
            blocks.into_iter().skip(1).step_by(2).collect()
        }

        /// Enqueues a kernel on the peer that fills a block with one byte and takes a millisecond.
        fn write(&self, block: Block, byte: u8) -> std::result::Result<(), DriverError> {
            let Block { address, size } = block;
            let bytes = vec![byte; usize::try_from(size.get()).unwrap()];
            let writes = [Touch { address, size }];
            let time = Duration::from_millis(1);
            self.sim.enqueue_kernel(PEER, self.stream.id(), &[], &writes, time, move |memory| {
                memory.write(address, &bytes).unwrap();
            })
        }

        fn assert_all(&self, block: Block, byte: u8) {
            let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
            self.pool.read(block.address, &mut bytes).unwrap();
            assert!(bytes.iter().all(|found| *found == byte), "{block:?} is not all {byte}");
        }

        fn end(self) {
            self.pool.settle().unwrap();
            self.pool.trim(Bytes::ZERO).unwrap();
            assert_eq!(self.pool.reserved(), Bytes::ZERO);
            let sim = self.sim.clone();
            drop(self);
            assert_eq!(sim.census(), Census::default());
        }
    }

    fn refusal(outcome: std::result::Result<(), DriverError>) -> Refusal {
        match outcome {
            Err(DriverError::Refused { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_peer_touches_what_is_there_and_what_comes() {
        let fixture = fixture(&[]);
        let kept = fixture.fragments();
        let stitched = fixture.malloc(Bytes::mib(10));
        assert_eq!(fixture.pool.counters().stitches, 1);
        for block in [kept[0], stitched] {
            assert_eq!(refusal(fixture.write(block, 1)), Refusal::NoPeerAccess);
        }
        fixture.pool.enable_peer(PEER).unwrap();
        assert_eq!(fixture.pool.peers(), DeviceSet::of(PEER));
        let later = fixture.malloc(Bytes::mib(3));
        let blocks = [kept[0], kept[3], stitched, later];
        for (block, byte) in blocks.into_iter().zip(1..) {
            fixture.write(block, byte).unwrap();
        }
        fixture.stream.synchronize().unwrap();
        for (block, byte) in blocks.into_iter().zip(1..) {
            fixture.assert_all(block, byte);
        }
        for block in kept.into_iter().chain([stitched, later]) {
            fixture.pool.free(block.address).unwrap();
        }
        fixture.end();
    }

    #[test]
    fn what_a_peer_uses_goes_only_after_it() {
        for peers in [&[][..], &[PEER]] {
            let fixture = fixture(peers);
            let block = fixture.malloc(Bytes::mib(8));
            fixture.pool.enable_peer(PEER).unwrap();
            fixture.write(block, 7).unwrap();
            fixture.pool.free(block.address).unwrap();
            let start = fixture.sim.now();
            assert_eq!(fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "the peer still writes");
            assert_eq!(fixture.sim.now(), start);
            fixture.pool.settle().unwrap();
            assert!(fixture.sim.now() >= start + Duration::from_millis(1));
            assert_eq!(fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::mib(8));
            fixture.end();
        }
    }

    #[test]
    fn no_point_waits_for_a_gpu_that_memory_is_only_lent_to() {
        let fixture = fixture(&[]);
        let kept = fixture.fragments();
        fixture.pool.lend_to(PEER).unwrap();
        assert_eq!(fixture.pool.peers(), DeviceSet::of(PEER));
        // Nothing that the program can see has changed.
        assert_eq!(fixture.sim.program_enable_peer(PEER, OWN), 0);
        // Work of the program there, which never ends as far as this GPU knows.
        let word = Arc::new(glake_device::owned::Flag::several(fixture.pool.completion_events(), 1).unwrap());
        word[0].await_on(fixture.stream.of(), 1, glake_device::Compare::AtLeast).unwrap();
        for block in kept {
            fixture.pool.free(block.address).unwrap();
        }
        // The simulator would say that nothing can complete these.
        fixture.pool.settle().unwrap();
        fixture.pool.trim(Bytes::ZERO).unwrap();
        assert_eq!(fixture.pool.reserved(), Bytes::ZERO);
        word[0].set(1);
        fixture.stream.synchronize().unwrap();
        drop(word);
        fixture.end();
    }

    #[test]
    fn work_of_ours_elsewhere_is_waited_for_once_it_is_told_of() {
        for stitched in [false, true] {
            let fixture = fixture(&[]);
            fixture.pool.lend_to(PEER).unwrap();
            let kept = if stitched { fixture.fragments() } else { Vec::new() };
            let block = fixture.malloc(Bytes::mib(8));
            // Other free memory is taken first.
            fixture.pool.settle().unwrap();
            fixture.pool.trim(Bytes::ZERO).unwrap();
            fixture.write(block, 7).unwrap();
            let driver = fixture.pool.completion_events().driver();
            let done =
                glake_device::owned::OwnedEvent::new(driver, PEER, glake_device::EventKind::Plain).unwrap();
            done.record(fixture.stream.id()).unwrap();
            fixture.pool.completion_events().outside(OWN, done);
            fixture.pool.free(block.address).unwrap();
            let start = fixture.sim.now();
            fixture.pool.tick().unwrap();
            assert_eq!(fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "the peer still writes");
            assert_eq!(fixture.sim.now(), start);
            fixture.pool.settle().unwrap();
            assert!(fixture.sim.now() >= start + Duration::from_millis(1));
            for block in kept {
                fixture.pool.free(block.address).unwrap();
            }
            fixture.end();
        }
    }

    #[test]
    fn what_was_lent_is_watched_once_the_program_asks() {
        let fixture = fixture(&[]);
        fixture.pool.lend_to(PEER).unwrap();
        let block = fixture.malloc(Bytes::mib(8));
        fixture.pool.enable_peer(PEER).unwrap();
        assert_eq!(fixture.sim.program_enable_peer(PEER, OWN), 704, "the program asked for it");
        fixture.write(block, 7).unwrap();
        fixture.pool.free(block.address).unwrap();
        let start = fixture.sim.now();
        assert_eq!(fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "the peer still writes");
        fixture.pool.settle().unwrap();
        assert!(fixture.sim.now() >= start + Duration::from_millis(1));
        fixture.end();
    }

    #[test]
    fn points_from_before_hold_for_what_no_peer_could_touch() {
        let fixture = fixture(&[]);
        // Free neighbours would become one piece, of the latest completion point.
        let [early, one, pending, another, late] = [(); 5].map(|()| fixture.malloc(FOUR));
        fixture.pool.free(early.address).unwrap();
        fixture.pool.settle().unwrap();
        fixture.pool.free(pending.address).unwrap();
        fixture.pool.tick().unwrap();
        fixture.pool.enable_peer(PEER).unwrap();
        fixture.write(late, 9).unwrap();
        fixture.pool.free(late.address).unwrap();
        assert_eq!(
            fixture.pool.trim(Bytes::ZERO).unwrap(),
            Bytes::mib(8),
            "no work of the peer is waited for"
        );
        assert_eq!(fixture.sim.now(), Duration::ZERO);
        for block in [one, another] {
            fixture.pool.free(block.address).unwrap();
        }
        fixture.end();
    }

    #[test]
    fn a_closed_domain_is_lent_to_nobody_until_it_is_opened() {
        let fixture = fixture(&[]);
        let domain = fixture.pool.add_domain(DomainOptions::region(FOUR), None);
        fixture.pool.close_domain(domain);
        let closed = || fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
        let (early, other) = (closed(), fixture.malloc(FOUR));
        fixture.pool.lend_to(PEER).unwrap();
        let late = closed();
        let (own, both) = (DeviceSet::of(OWN), DeviceSet::of(OWN).union(DeviceSet::of(PEER)));
        let reach = |block: Block| fixture.pool.reach_of(block.address, block.size);
        for block in [early, late] {
            assert_eq!(refusal(fixture.write(block, 1)), Refusal::NoPeerAccess);
            assert_eq!(reach(block), (own, (block.address, block.size)));
            assert_eq!(fixture.pool.closed_at(block.address), Some(domain));
        }
        fixture.write(other, 1).unwrap();
        assert_eq!(reach(other).0, both);
        assert_eq!(fixture.pool.closed_at(other.address), None);
        assert_eq!(
            fixture.pool.reach_of(other.address, Bytes::gib(1)).0,
            own,
            "what lies behind is another's"
        );
        // A domain counts as open only if all its mappings could be opened.
        let fail = Fault { verb: Some(Verb::SetAccess), when: When::Nth(2), error: Injected::Failed(1) };
        fixture.faults.set(&[fail]);
        fixture.pool.open_domain(domain).unwrap_err();
        fixture.faults.set(&[]);
        assert_eq!(refusal(fixture.write(early, 2)), Refusal::NoPeerAccess);
        assert_eq!(reach(early).0, own);
        fixture.pool.open_domain(domain).unwrap();
        let last = closed();
        for block in [early, late, last] {
            fixture.write(block, 3).unwrap();
            assert_eq!(reach(block).0, both);
        }
        fixture.stream.synchronize().unwrap();
        for block in [early, late, last, other] {
            fixture.pool.free(block.address).unwrap();
        }
        fixture.end();
    }

    #[test]
    fn who_the_program_lets_in_may_touch_closed_memory() {
        for lent_before in [false, true] {
            let fixture = fixture(&[]);
            let domain = fixture.pool.add_domain(DomainOptions::region(FOUR), None);
            fixture.pool.close_domain(domain);
            let early = fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
            if lent_before {
                fixture.pool.lend_to(PEER).unwrap();
            }
            fixture.pool.enable_peer(PEER).unwrap();
            let late = fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
            for block in [early, late] {
                fixture.write(block, 5).unwrap();
                assert!(fixture.pool.reach_of(block.address, block.size).0.contains(PEER));
                fixture.pool.free(block.address).unwrap();
            }
            assert_eq!(fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "the peer still writes");
            fixture.end();
        }
    }

    #[test]
    fn what_is_sealed_against_writes_is_opened_to_readers_alone() {
        for lets_in in [false, true] {
            let fixture = fixture(&[]);
            let domain = fixture.pool.add_domain(DomainOptions::region(FOUR), None);
            fixture.pool.close_domain(domain);
            let block = fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
            fixture.pool.lend_to(PEER).unwrap();
            fixture.pool.protection().protect(domain).unwrap();
            match lets_in {
                true => fixture.pool.enable_peer(PEER).unwrap(),
                false => fixture.pool.open_domain(domain).unwrap(),
            }
            fixture.write(block, 1).unwrap_err();
            fixture.pool.protection().open(domain).unwrap();
            fixture.write(block, 2).unwrap();
            fixture.stream.synchronize().unwrap();
            fixture.assert_all(block, 2);
            fixture.pool.free(block.address).unwrap();
            fixture.end();
        }
    }

    #[test]
    fn runs_without_mappings_are_what_is_between_them() {
        let mib = |offset, size| (Bytes::mib(offset), Bytes::mib(size));
        let at = |(offset, size)| Mapping { offset, size };
        let runs = vec![mib(0, 10), mib(20, 4)];
        assert_eq!(without(runs.clone(), Vec::new()), [mib(0, 10), mib(20, 4)].map(at));
        let holes = [mib(20, 4), mib(2, 2), mib(4, 2)].map(at).to_vec();
        assert_eq!(without(runs, holes), [mib(0, 2), mib(6, 4)].map(at));
    }

    #[test]
    fn a_failure_gives_no_access() {
        for nth in 1..=3 {
            let fixture = fixture(&[]);
            let (first, hole, second) = (fixture.malloc(FOUR), fixture.malloc(FOUR), fixture.malloc(FOUR));
            let last = fixture.malloc(Bytes::kib(3));
            fixture.pool.free(hole.address).unwrap();
            fixture.pool.settle().unwrap();
            fixture.pool.trim(Bytes::ZERO).unwrap();
            let fail = |verb| Fault { verb: Some(verb), when: When::Nth(nth), error: Injected::Failed(1) };
            fixture.faults.set(&[fail(Verb::SetAccess)]);
            fixture.pool.enable_peer(PEER).unwrap_err();
            assert_eq!(fixture.pool.peers(), DeviceSet::EMPTY);
            for block in [first, second, last] {
                assert_eq!(refusal(fixture.write(block, 1)), Refusal::NoPeerAccess, "{nth}");
            }
            fixture.faults.set(&[]);
            fixture.pool.enable_peer(PEER).unwrap();
            for block in [first, second, last] {
                fixture.write(block, 1).unwrap();
                fixture.pool.free(block.address).unwrap();
            }
            fixture.end();
        }
    }

    #[test]
    fn who_is_no_peer() {
        let fixture = fixture(&[PEER, PEER, OWN]);
        fixture.pool.enable_peer(OWN).unwrap();
        fixture.pool.enable_peer(PEER).unwrap();
        let unknown = fixture.pool.enable_peer(DeviceId(2)).unwrap_err();
        assert!(matches!(unknown, PoolError::NoSuchDevice { device: DeviceId(2), count: 2 }), "{unknown}");
        let block = fixture.malloc(FOUR);
        fixture.write(block, 3).unwrap();
        fixture.stream.synchronize().unwrap();
        let copied = fixture.sim.plain_alloc(PEER, FOUR).unwrap();
        let copy = Touch { address: copied, size: FOUR };
        let from: Address = block.address;
        let reads = [Touch { address: from, size: FOUR }];
        let time = Duration::from_micros(1);
        let copying =
            fixture.sim.enqueue_kernel(PEER, fixture.stream.id(), &reads, &[copy], time, move |memory| {
                let mut bytes = vec![0; 4 << 20];
                memory.read(from, &mut bytes).unwrap();
                memory.write(copied, &bytes).unwrap();
            });
        copying.unwrap();
        fixture.stream.synchronize().unwrap();
        let mut bytes = vec![0; 4 << 20];
        fixture.sim.read_now(PEER, copied, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 3));
        fixture.sim.plain_free(copied).unwrap();
        fixture.pool.free(block.address).unwrap();
        fixture.end();
    }
}
