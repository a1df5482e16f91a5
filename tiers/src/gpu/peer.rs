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
//!   recorded meanwhile waits for its work too. Earlier completion points need not: the device could not access the memory freed in them, and
//!   memory it has been given since belongs to later ones. The change is made under the clock's lock, so that no completion point is recorded
//!   in between.
//! - Completion points do not wait for devices that the program did not name: the runtime registers its own work there with the clock
//!   ([`glake_device::owned::CompletionEvents::outside`]).
//!
//! `PeerBlocks`: memory for data evicted from other GPUs, their owners.
//!
//! Invariant: peer blocks lie in domains of their own, one for each owner, and no program uses them. Freed bytes are handed out again only
//! after all work enqueued before, on the pool's GPU and as registered with the clock.

use glake_device::owned::{DeviceSet, Mapping};
use glake_device::{Access, Address, DeviceId, DriverError, Protection, Refusal, Stream, Verb};
use glake_stitch::{DomainId, DomainOptions, StreamKey};
use glake_units::Bytes;

use super::blocks::{Block, Blocks};
use super::clock::CompletionClock;
use super::core::Core;
use super::domain::{Domains, FreeMemory};
use super::error::retry;
use super::growth::{Growth, GrowthGuard};
use super::reach::Reach;
use super::{PoolError, PoolStream, Result};

/// Operations on the access of other devices to a pool's memory.
#[derive(Debug)]
pub struct PeerAccess<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) reach: &'a Reach,
}

impl PeerAccess<'_> {
    /// Gives the program's work on `peer` access to this pool's memory: all current mappings at all their addresses, and later ones. Also
    /// enables the driver's peer access to plain memory of this device, which the program can observe. From then on memory is lent,
    /// unmapped and released only after the peer's work, too, has completed; therefore the peer's context is created if there is none.
    /// Repeated calls and the pool's own device are no errors.
    ///
    /// # Errors
    /// [`PoolError::NoSuchDevice`], or the driver's error, above all if the two devices cannot reach each other; the peer's access to the
    /// pool is unchanged, its access to plain memory may be enabled.
    pub fn enable(&self, peer: DeviceId) -> Result<()> {
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

    /// Covers the program's work on `peer`, which uses this pool's memory: from now on memory is lent, unmapped and released only after
    /// that device's work, too, has completed. Gives the device no further access.
    ///
    /// # Errors
    /// [`PoolError::Poisoned`].
    pub fn watch(&self, peer: DeviceId) -> Result<()> {
        if peer != self.core.device() && !self.reach.watched().contains(peer) {
            self.watch_under(&self.growth.lock()?, peer);
        }
        Ok(())
    }

    fn watch_under(&self, _growing: &GrowthGuard<'_>, peer: DeviceId) {
        self.clock.between_points(|| {
            self.core.reservation().watch(peer);
            self.reach.watch(peer);
        });
    }

    /// Gives the runtime's own work on another device access to this pool's memory: all current mappings at all their addresses, and later
    /// ones. Such work must be joined into this device's context or registered with the clock
    /// ([`glake_device::owned::CompletionEvents::outside`]): completion points wait for no other work there, and the program observes no
    /// change. Repeated calls are no error.
    ///
    /// # Errors
    /// The same as [`PeerAccess::enable`].
    pub fn lend_to(&self, relay: DeviceId) -> Result<()> {
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

    /// Closes a domain without memory to the devices that the pool is lent to: relays copy its data through their own memory. Frequently
    /// mapped memory is opened and unmapped faster the fewer GPUs have access. Devices added by [`PeerAccess::enable`] keep access.
    pub fn close_domain(&self, domain: DomainId) {
        self.reach.close(domain);
    }

    /// Opens a closed domain again, its current and its later mappings. Does nothing if the domain is not closed.
    ///
    /// # Errors
    /// The driver's error: the domain stays closed.
    pub fn open_domain(&self, domain: DomainId) -> Result<()> {
        let growing = self.growth.lock()?;
        let others = self.reach.given().without(self.reach.of_domain(domain));
        let opened = self.open_closed(others, growing.mappings_in(domain));
        opened.map_err(|error| self.core.failed(error))?;
        self.reach.open(domain);
        Ok(())
    }

    /// Returns the domain of the block at an address if the domain is closed to devices that the pool is lent to.
    pub fn closed_at(&self, address: Address) -> Option<DomainId> {
        let offset = self.reach.is_any_closed().then(|| self.core.offset(address).ok()).flatten()?;
        let domain = self.core.lock().blocks().find(offset)?.domain;
        (self.reach.of_domain(domain) != self.reach.given()).then_some(domain)
    }

    /// Returns the other devices whose work may access the pool's open memory.
    pub fn devices(&self) -> DeviceSet {
        self.reach.given()
    }

    /// Returns the other devices whose work may access the memory of a domain.
    pub fn devices_of(&self, domain: DomainId) -> DeviceSet {
        self.reach.of_domain(domain)
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
    fn closed(&self, growing: &GrowthGuard<'_>) -> Vec<Mapping> {
        self.reach.closed().into_iter().flat_map(|domain| growing.mappings_in(domain)).collect()
    }

    /// Returns all other mappings, in runs.
    fn open(&self, growing: &GrowthGuard<'_>) -> Vec<Mapping> {
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

/// Maximum extent size of peer blocks. Copies overlap with opening the next extent; larger extents open in less time but hide less of it.
const MAX_EXTENT_BYTES: Bytes = Bytes::mib(256);
/// Number of peer extents that fit into the device's memory, at least.
const MIN_EXTENTS_PER_DEVICE: u64 = 4;

/// Operations on the peer blocks of one pool.
#[derive(Debug)]
pub(crate) struct PeerBlocks<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) blocks: &'a Blocks,
    pub(super) domains: Domains<'a>,
    pub(super) access: PeerAccess<'a>,
    pub(super) free_memory: FreeMemory<'a>,
}

impl PeerBlocks<'_> {
    /// Allocates a block that the owner's work may access, and later the devices that get access to all of the pool.
    pub(crate) fn alloc(&self, owner: DeviceId, size: Bytes) -> Result<Block> {
        let domain = self.domain_of(&mut self.growth.lock()?, owner)?;
        let stream = PoolStream::of(&**self.core.driver(), self.core.device(), Stream::LEGACY)?;
        self.blocks.malloc(domain, size, stream)
    }

    /// Returns the extent size that small allocations share.
    pub(crate) fn shared(&self) -> Bytes {
        let core = self.core.lock();
        let (unit, memory) = (core.settings().granularity, core.settings().memory);
        let units = memory.get() / MIN_EXTENTS_PER_DEVICE / unit.get().max(1);
        MAX_EXTENT_BYTES.min(Bytes::new(units.saturating_mul(unit.get()))).max(unit)
    }

    /// Frees a peer block and returns its size.
    pub(crate) fn free(&self, address: Address) -> Result<Bytes> {
        self.core.lock().record_stream(self.core.offset(address)?, StreamKey::UNKNOWN);
        self.blocks.free(address)
    }

    /// Releases free, unused memory of peer blocks to the driver. Never waits.
    pub(crate) fn sweep(&self) -> Result<Bytes> {
        let domains: Vec<DomainId> = self.growth.lock()?.owners().values().copied().collect();
        domains.into_iter().map(|domain| self.free_memory.trim_domain(domain)).sum()
    }

    fn domain_of(&self, growing: &mut GrowthGuard<'_>, owner: DeviceId) -> Result<DomainId> {
        self.access.admit(owner)?;
        if let Some(domain) = growing.owners().get(&owner) {
            return Ok(*domain);
        }
        let options = DomainOptions::region(self.shared());
        let domain = self.domains.add_under(growing, options, self.growth.properties());
        growing.owners().insert(owner, domain);
        Ok(domain)
    }
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
        fixture.pool.peer_access().enable(PEER).unwrap();
        assert_eq!(fixture.pool.peer_access().devices(), DeviceSet::of(PEER));
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
            fixture.pool.peer_access().enable(PEER).unwrap();
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
        fixture.pool.peer_access().lend_to(PEER).unwrap();
        assert_eq!(fixture.pool.peer_access().devices(), DeviceSet::of(PEER));
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
            fixture.pool.peer_access().lend_to(PEER).unwrap();
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
        fixture.pool.peer_access().lend_to(PEER).unwrap();
        let block = fixture.malloc(Bytes::mib(8));
        fixture.pool.peer_access().enable(PEER).unwrap();
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
        fixture.pool.peer_access().enable(PEER).unwrap();
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
        fixture.pool.peer_access().close_domain(domain);
        let closed = || fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
        let (early, other) = (closed(), fixture.malloc(FOUR));
        fixture.pool.peer_access().lend_to(PEER).unwrap();
        let late = closed();
        let (own, both) = (DeviceSet::of(OWN), DeviceSet::of(OWN).union(DeviceSet::of(PEER)));
        let reach = |block: Block| fixture.pool.reach_of(block.address, block.size);
        for block in [early, late] {
            assert_eq!(refusal(fixture.write(block, 1)), Refusal::NoPeerAccess);
            assert_eq!(reach(block), (own, (block.address, block.size)));
            assert_eq!(fixture.pool.peer_access().closed_at(block.address), Some(domain));
        }
        fixture.write(other, 1).unwrap();
        assert_eq!(reach(other).0, both);
        assert_eq!(fixture.pool.peer_access().closed_at(other.address), None);
        assert_eq!(
            fixture.pool.reach_of(other.address, Bytes::gib(1)).0,
            own,
            "what lies behind is another's"
        );
        // A domain counts as open only if all its mappings could be opened.
        let fail = Fault { verb: Some(Verb::SetAccess), when: When::Nth(2), error: Injected::Failed(1) };
        fixture.faults.set(&[fail]);
        fixture.pool.peer_access().open_domain(domain).unwrap_err();
        fixture.faults.set(&[]);
        assert_eq!(refusal(fixture.write(early, 2)), Refusal::NoPeerAccess);
        assert_eq!(reach(early).0, own);
        fixture.pool.peer_access().open_domain(domain).unwrap();
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
            fixture.pool.peer_access().close_domain(domain);
            let early = fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
            if lent_before {
                fixture.pool.peer_access().lend_to(PEER).unwrap();
            }
            fixture.pool.peer_access().enable(PEER).unwrap();
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
            fixture.pool.peer_access().close_domain(domain);
            let block = fixture.pool.malloc_in(domain, FOUR, fixture.here).unwrap();
            fixture.pool.peer_access().lend_to(PEER).unwrap();
            fixture.pool.protection().protect(domain).unwrap();
            match lets_in {
                true => fixture.pool.peer_access().enable(PEER).unwrap(),
                false => fixture.pool.peer_access().open_domain(domain).unwrap(),
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
            fixture.pool.peer_access().enable(PEER).unwrap_err();
            assert_eq!(fixture.pool.peer_access().devices(), DeviceSet::EMPTY);
            for block in [first, second, last] {
                assert_eq!(refusal(fixture.write(block, 1)), Refusal::NoPeerAccess, "{nth}");
            }
            fixture.faults.set(&[]);
            fixture.pool.peer_access().enable(PEER).unwrap();
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
        fixture.pool.peer_access().enable(OWN).unwrap();
        fixture.pool.peer_access().enable(PEER).unwrap();
        let unknown = fixture.pool.peer_access().enable(DeviceId(2)).unwrap_err();
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

#[cfg(test)]
mod peer_blocks_tests {
    use std::sync::Arc;
    use std::time::Duration;

    use glake_device::owned::{DeviceSet, OwnedEvent, OwnedStream};
    use glake_device::{Driver, DriverError, EventKind, Fault, Faults, Injected, Refusal, Touch, Verb, When};
    use glake_sim::{Census, SimOptions, SimTopology, Simulator};

    use super::*;
    use crate::{GpuPool, PoolError, PoolOptions};

    const OWN: DeviceId = DeviceId(0);
    const PEERS: [DeviceId; 3] = [DeviceId(1), DeviceId(2), DeviceId(3)];
    const SIZE: Bytes = Bytes::mib(2);

    struct Fixture {
        sim: Arc<Simulator>,
        faults: Arc<Faults>,
        pool: GpuPool,
        streams: Vec<OwnedStream>,
    }

    fn fixture(peers: &[DeviceId]) -> Fixture {
        let topology = SimTopology::uniform(4, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let options = PoolOptions { peers: peers.to_vec(), ..PoolOptions::default() };
        let pool = GpuPool::new(driver.clone(), OWN, options).unwrap();
        let streams = PEERS.map(|peer| OwnedStream::new(&driver, peer).unwrap()).into();
        Fixture { sim, faults, pool, streams }
    }

    impl Fixture {
        /// Enqueues a kernel on a peer that writes all of a block and takes a millisecond.
        fn write(&self, peer: usize, block: Block) -> std::result::Result<(), DriverError> {
            let writes = [Touch { address: block.address, size: block.size }];
            let time = Duration::from_millis(1);
            self.sim.enqueue_kernel(PEERS[peer], self.streams[peer].id(), &[], &writes, time, |_| {})?;
            // Registers the work, as copies for an owner do.
            let driver = self.pool.completion_events().driver();
            let done = OwnedEvent::new(driver, PEERS[peer], EventKind::Plain)?;
            done.record(self.streams[peer].id())?;
            self.pool.completion_events().outside(OWN, done);
            Ok(())
        }

        fn assert_refused(&self, peer: usize, block: Block) {
            match self.write(peer, block) {
                Err(DriverError::Refused { reason: Refusal::NoPeerAccess, .. }) => {}
                other => panic!("GPU {}: {other:?}", PEERS[peer]),
            }
        }

        fn end(self) {
            self.pool.settle().unwrap();
            self.pool.peer_blocks().sweep().unwrap();
            self.pool.trim(Bytes::ZERO).unwrap();
            assert_eq!(self.pool.reserved(), Bytes::ZERO);
            let sim = self.sim.clone();
            drop(self);
            assert_eq!(sim.census(), Census::default());
        }
    }

    #[test]
    fn a_peer_block_is_open_to_its_owner_alone() {
        for peers in [&[][..], &PEERS] {
            let fixture = fixture(peers);
            let one = fixture.pool.peer_blocks().alloc(PEERS[0], SIZE).unwrap();
            let other = fixture.pool.peer_blocks().alloc(PEERS[1], SIZE).unwrap();
            fixture.write(0, one).unwrap();
            fixture.write(1, other).unwrap();
            for (peer, block) in [(1, one), (2, one), (0, other), (2, other)] {
                fixture.assert_refused(peer, block);
            }
            // Memory of one owner is not given to another.
            fixture.pool.peer_blocks().free(one.address).unwrap();
            fixture.pool.settle().unwrap();
            let again = fixture.pool.peer_blocks().alloc(PEERS[1], SIZE).unwrap();
            assert_ne!(again.address, one.address);
            fixture.assert_refused(0, again);
            fixture.write(1, again).unwrap();
            let here =
                PoolStream::of(&**fixture.pool.completion_events().driver(), OWN, Stream::LEGACY).unwrap();
            let own = fixture.pool.malloc(SIZE, here).unwrap();
            match peers {
                [] => fixture.assert_refused(0, own),
                _ => fixture.write(0, own).unwrap(),
            }
            for block in [other, again, own] {
                fixture.pool.free(block.address).unwrap();
            }
            fixture.end();
        }
    }

    #[test]
    fn a_peer_block_goes_after_its_owners_work() {
        let fixture = fixture(&[]);
        let block = fixture.pool.peer_blocks().alloc(PEERS[0], SIZE).unwrap();
        assert_eq!(fixture.pool.peer_access().devices(), DeviceSet::EMPTY);
        fixture.write(0, block).unwrap();
        fixture.pool.peer_blocks().free(block.address).unwrap();
        assert_eq!(fixture.pool.peer_blocks().sweep().unwrap(), Bytes::ZERO, "the owner still writes");
        fixture.pool.settle().unwrap();
        assert!(fixture.pool.peer_blocks().sweep().unwrap() >= SIZE);
        fixture.end();
    }

    #[test]
    fn a_device_that_is_let_to_all_is_watched_though_that_fails() {
        let fixture = fixture(&[]);
        let block = fixture.pool.peer_blocks().alloc(PEERS[0], SIZE).unwrap();
        fixture.faults.set(&[Fault {
            verb: Some(Verb::SetAccess),
            when: When::Nth(1),
            error: Injected::Failed(1),
        }]);
        fixture.pool.peer_access().enable(PEERS[0]).unwrap_err();
        fixture.faults.set(&[]);
        fixture.write(0, block).unwrap();
        fixture.pool.peer_blocks().free(block.address).unwrap();
        assert_eq!(fixture.pool.peer_blocks().sweep().unwrap(), Bytes::ZERO, "the owner still writes");
        fixture.end();
    }

    #[test]
    fn who_owns_no_peer_block() {
        let fixture = fixture(&[]);
        let unknown = fixture.pool.peer_blocks().alloc(DeviceId(4), SIZE).unwrap_err();
        assert!(matches!(unknown, PoolError::NoSuchDevice { device: DeviceId(4), count: 4 }), "{unknown}");
        fixture.end();
    }
}
