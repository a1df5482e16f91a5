//! Peer blocks: memory for data evicted from other GPUs, their owners.
//!
//! Invariant: peer blocks lie in domains of their own, one for each owner, and no program uses them. Freed bytes are handed out again only
//! after all work enqueued before, on the pool's GPU and as registered with the clock ([`super::peer`]).

use glake_device::{Address, DeviceId, Stream};
use glake_stitch::{DomainId, DomainOptions, StreamKey};
use glake_units::Bytes;

use super::blocks::{Block, Blocks};
use super::core::Core;
use super::domain::Domains;
use super::free_memory::FreeMemory;
use super::growth::{Growing, Growth};
use super::peer::PeerAccess;
use super::{PoolStream, Result};

/// Extent size of peer blocks. Copies overlap with opening the next extent; larger extents open in less time but hide less of it.
const EXTENT: Bytes = Bytes::mib(256);
/// Divisor: peer extents are at most this part of the device's memory.
const PART: u64 = 4;

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
        let units = memory.get() / PART / unit.get().max(1);
        EXTENT.min(Bytes::new(units.saturating_mul(unit.get()))).max(unit)
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

    fn domain_of(&self, growing: &mut Growing<'_>, owner: DeviceId) -> Result<DomainId> {
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
        assert_eq!(fixture.pool.peers(), DeviceSet::EMPTY);
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
        fixture.pool.enable_peer(PEERS[0]).unwrap_err();
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
