//! Other GPUs whose work may touch the pool's memory: all of it, or what is lodged for one of them.
//!
//! Invariant: a device is watched before it is given access and for ever after, so every epoch that is recorded while a
//! peer may touch memory waits for the peer's work too. Epochs from before do not, and need not: what was freed in them
//! no peer could touch, and what it has been given since belongs to later ones. That is decided under the clock's lock,
//! so that no epoch is in between.

use glake_device::owned::DeviceSet;
use glake_device::{Access, DeviceId, DriverError, Protection};
use parking_lot::Mutex;

use super::execute::retry;
use super::{GpuPool, PoolError, Result};

/// Which devices' work may touch a pool's memory.
#[derive(Debug)]
pub(super) struct Reach {
    own: DeviceId,
    peers: Mutex<Peers>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peers {
    /// May touch what is mapped, and will be given what is mapped next.
    given: DeviceSet,
    /// Epochs wait for these.
    watched: DeviceSet,
}

impl Reach {
    pub(super) fn of(own: DeviceId) -> Self {
        Reach { own, peers: Mutex::default() }
    }

    /// Whose work an epoch has to cover.
    pub(super) fn watched(&self) -> DeviceSet {
        self.peers.lock().watched.union(DeviceSet::of(self.own))
    }

    /// What new mappings are given; with a guest, those of its lodgings.
    pub(super) fn access(&self, guest: Option<DeviceId>) -> Vec<Access> {
        let others = guest.map_or_else(|| self.given(), DeviceSet::of);
        [self.own].into_iter().chain(others.iter()).map(read_write).collect()
    }

    fn given(&self) -> DeviceSet {
        self.peers.lock().given
    }

    fn give(&self, peer: DeviceId) {
        let given = &mut self.peers.lock().given;
        *given = given.union(DeviceSet::of(peer));
    }

    /// Returns whether it was not watched before.
    fn watch(&self, peer: DeviceId) -> bool {
        let watched = &mut self.peers.lock().watched;
        let new = !watched.contains(peer);
        *watched = watched.union(DeviceSet::of(peer));
        new
    }

    fn unwatch(&self, peer: DeviceId) {
        let watched = &mut self.peers.lock().watched;
        *watched = watched.without(DeviceSet::of(peer));
    }
}

fn read_write(device: DeviceId) -> Access {
    Access { device, protection: Protection::ReadWrite }
}

impl GpuPool {
    /// Lets work of `peer` touch this pool's memory: what is mapped now, at all its addresses, and what will be. Plain
    /// memory of this device is opened to the peer as well. From then on memory is lent, unmapped and released only after
    /// the peer's work, too, is done, so the peer's context is made if there is none. Twice is no error, and a device need
    /// not be let to its own memory.
    ///
    /// # Errors
    /// [`PoolError::NoSuchDevice`], or what the driver answers, above all where the two devices cannot reach each other;
    /// the peer may touch nothing more than before, then.
    pub fn enable_peer(&self, peer: DeviceId) -> Result<()> {
        // Nothing is mapped or unmapped meanwhile.
        let _quiet = self.growth()?;
        if peer == self.device || self.reach.given().contains(peer) {
            return Ok(());
        }
        let new = self.watch(peer)?;
        self.open_to(peer, new).map_err(|error| self.failed(error))?;
        self.reach.give(peer);
        Ok(())
    }

    /// The devices, besides its own, whose work may touch the pool's memory.
    pub fn peers(&self) -> DeviceSet {
        self.reach.given()
    }

    /// Memory is lent, unmapped and released only after a guest's work, too, from now on; it is opened to nobody. To be called under
    /// the growth lock, like whatever stops watching.
    pub(super) fn admit(&self, guest: DeviceId) -> Result<()> {
        if guest == self.device || self.reach.watched().contains(guest) {
            return Ok(());
        }
        self.watch(guest).map(|_| ())
    }

    /// Returns whether the device was not watched before.
    fn watch(&self, peer: DeviceId) -> Result<bool> {
        let devices = self.driver.devices().map_err(|error| self.failed(error))?;
        if !devices.iter().any(|info| info.id == peer) || DeviceSet::of(peer).is_empty() {
            return Err(PoolError::NoSuchDevice { device: peer, count: devices.len() });
        }
        // Says whether the devices reach each other at all: with nothing mapped yet, nothing else would.
        let reached = retry(|| self.driver.enable_peer_access(peer, self.device));
        reached.map_err(|error| self.failed(error))?;
        let _between_epochs = self.clock.lock();
        Ok(self.reach.watch(peer))
    }

    /// Gives access to all that is mapped, or to nothing.
    fn open_to(&self, peer: DeviceId, new: bool) -> std::result::Result<(), DriverError> {
        let runs = self.reservation.mapped();
        for (done, &(offset, size)) in runs.iter().enumerate() {
            let given = retry(|| self.reservation.set_access(offset, size, &[read_write(peer)]));
            let Err(error) = given else { continue };
            if done == 0 && new {
                self.reach.unwatch(peer);
            }
            let none = [Access { device: peer, protection: Protection::None }];
            for &(offset, size) in &runs[..done] {
                // Nobody was told of the access, and the peer stays watched: one that is left is harmless.
                if let Err(error) = retry(|| self.reservation.protect(offset, size, &none)) {
                    tracing::warn!(target: "glake::peers", %peer, %error, "access could not be taken back");
                }
            }
            return Err(error);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use glake_device::owned::OwnedStream;
    use glake_device::sim::{Census, SimOptions, SimTopology, Simulator};
    use glake_device::{Address, Driver, Fault, Faults, Injected, Refusal, Stream, Touch, Verb, When};
    use glake_stitch::Settings;
    use glake_units::Bytes;

    use super::*;
    use crate::{Block, PoolOptions, PoolStream};

    const OWN: DeviceId = DeviceId(0);
    const PEER: DeviceId = DeviceId(1);
    const FOUR: Bytes = Bytes::mib(4);

    struct Bed {
        sim: Arc<Simulator>,
        faults: Arc<Faults>,
        pool: GpuPool,
        /// A stream of the peer.
        stream: OwnedStream,
        here: PoolStream,
    }

    fn bed(peers: &[DeviceId]) -> Bed {
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
        Bed { stream: OwnedStream::new(&driver, PEER).unwrap(), sim, faults, pool, here }
    }

    impl Bed {
        fn malloc(&self, size: Bytes) -> Block {
            self.pool.malloc(size, self.here).unwrap()
        }

        /// Blocks that fill the pool, of which every other one is free.
        fn fragments(&self) -> Vec<Block> {
            let blocks: Vec<Block> = (0..8).map(|_| self.malloc(FOUR)).collect();
            for block in blocks.iter().step_by(2) {
                self.pool.free(block.address).unwrap();
            }
            blocks.into_iter().skip(1).step_by(2).collect()
        }

        /// The peer writes one byte all over a block, in a kernel that takes a millisecond.
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
        let bed = bed(&[]);
        let kept = bed.fragments();
        let stitched = bed.malloc(Bytes::mib(10));
        assert_eq!(bed.pool.counters().stitches, 1);
        for block in [kept[0], stitched] {
            assert_eq!(refusal(bed.write(block, 1)), Refusal::NoPeerAccess);
        }
        bed.pool.enable_peer(PEER).unwrap();
        assert_eq!(bed.pool.peers(), DeviceSet::of(PEER));
        let later = bed.malloc(Bytes::mib(3));
        let blocks = [kept[0], kept[3], stitched, later];
        for (block, byte) in blocks.into_iter().zip(1..) {
            bed.write(block, byte).unwrap();
        }
        bed.stream.synchronize().unwrap();
        for (block, byte) in blocks.into_iter().zip(1..) {
            bed.assert_all(block, byte);
        }
        for block in kept.into_iter().chain([stitched, later]) {
            bed.pool.free(block.address).unwrap();
        }
        bed.end();
    }

    #[test]
    fn what_a_peer_uses_goes_only_after_it() {
        for peers in [&[][..], &[PEER]] {
            let bed = bed(peers);
            let block = bed.malloc(Bytes::mib(8));
            bed.pool.enable_peer(PEER).unwrap();
            bed.write(block, 7).unwrap();
            bed.pool.free(block.address).unwrap();
            let start = bed.sim.now();
            assert_eq!(bed.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "the peer still writes");
            assert_eq!(bed.sim.now(), start);
            bed.pool.settle().unwrap();
            assert!(bed.sim.now() >= start + Duration::from_millis(1));
            assert_eq!(bed.pool.trim(Bytes::ZERO).unwrap(), Bytes::mib(8));
            bed.end();
        }
    }

    #[test]
    fn epochs_from_before_hold_for_what_no_peer_could_touch() {
        let bed = bed(&[]);
        // Free neighbours would become one piece, of the latest epoch.
        let [early, one, pending, another, late] = [(); 5].map(|()| bed.malloc(FOUR));
        bed.pool.free(early.address).unwrap();
        bed.pool.settle().unwrap();
        bed.pool.free(pending.address).unwrap();
        bed.pool.tick().unwrap();
        bed.pool.enable_peer(PEER).unwrap();
        bed.write(late, 9).unwrap();
        bed.pool.free(late.address).unwrap();
        assert_eq!(bed.pool.trim(Bytes::ZERO).unwrap(), Bytes::mib(8), "no work of the peer is waited for");
        assert_eq!(bed.sim.now(), Duration::ZERO);
        for block in [one, another] {
            bed.pool.free(block.address).unwrap();
        }
        bed.end();
    }

    #[test]
    fn a_failure_gives_no_access() {
        for nth in 1..=3 {
            let bed = bed(&[]);
            let (first, hole, second) = (bed.malloc(FOUR), bed.malloc(FOUR), bed.malloc(FOUR));
            let last = bed.malloc(Bytes::kib(3));
            bed.pool.free(hole.address).unwrap();
            bed.pool.settle().unwrap();
            bed.pool.trim(Bytes::ZERO).unwrap();
            let fail = |verb| Fault { verb: Some(verb), when: When::Nth(nth), error: Injected::Failed(1) };
            bed.faults.set(&[fail(Verb::SetAccess)]);
            bed.pool.enable_peer(PEER).unwrap_err();
            assert_eq!(bed.pool.peers(), DeviceSet::EMPTY);
            for block in [first, second, last] {
                assert_eq!(refusal(bed.write(block, 1)), Refusal::NoPeerAccess, "{nth}");
            }
            bed.faults.set(&[]);
            bed.pool.enable_peer(PEER).unwrap();
            for block in [first, second, last] {
                bed.write(block, 1).unwrap();
                bed.pool.free(block.address).unwrap();
            }
            bed.end();
        }
    }

    #[test]
    fn who_is_no_peer() {
        let bed = bed(&[PEER, PEER, OWN]);
        bed.pool.enable_peer(OWN).unwrap();
        bed.pool.enable_peer(PEER).unwrap();
        let unknown = bed.pool.enable_peer(DeviceId(2)).unwrap_err();
        assert!(matches!(unknown, PoolError::NoSuchDevice { device: DeviceId(2), count: 2 }), "{unknown}");
        let block = bed.malloc(FOUR);
        bed.write(block, 3).unwrap();
        bed.stream.synchronize().unwrap();
        let copied = bed.sim.plain_alloc(PEER, FOUR).unwrap();
        let copy = Touch { address: copied, size: FOUR };
        let from: Address = block.address;
        let reads = [Touch { address: from, size: FOUR }];
        let time = Duration::from_micros(1);
        let copying = bed.sim.enqueue_kernel(PEER, bed.stream.id(), &reads, &[copy], time, move |memory| {
            let mut bytes = vec![0; 4 << 20];
            memory.read(from, &mut bytes).unwrap();
            memory.write(copied, &bytes).unwrap();
        });
        copying.unwrap();
        bed.stream.synchronize().unwrap();
        let mut bytes = vec![0; 4 << 20];
        bed.sim.read_now(PEER, copied, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 3));
        bed.sim.plain_free(copied).unwrap();
        bed.pool.free(block.address).unwrap();
        bed.end();
    }
}
