//! Private pools as programs use them, by device and number, and checkpoints of their live blocks. The pools of one device are in
//! `private`.

use std::sync::Arc;

use glake_device::{Address, Stream};
use glake_tiers::{Checkpoint, Restored};
use glake_units::Bytes;

use super::device::{DeviceMemory, Started};
use super::device_registry::DeviceRegistry;
use super::observers::Action;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{Filter, PoolId, ProcessError, Result};

/// The private pools of a process.
#[derive(Debug)]
pub struct Pools {
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    /// Regions, told when a pool is released: its evicted memory no longer closes the gate.
    regions: Arc<RegionSet>,
}

impl Pools {
    pub(super) fn new(
        registry: &Arc<DeviceRegistry>,
        streams: &Arc<Streams>,
        regions: &Arc<RegionSet>,
    ) -> Pools {
        Pools { registry: registry.clone(), streams: streams.clone(), regions: regions.clone() }
    }

    /// Creates a private pool, or adds an owner to it.
    ///
    /// # Errors
    /// Errors of starting the device's pool.
    pub fn create(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.registry.started(self.registry.device(device)?)?;
        started.private.create(&started.pool, id);
        Ok(())
    }

    /// Routes allocations to a private pool, on streams that the filter accepts (`None`: all), with the newest route first. Adds an owner.
    /// Until it is known that no capture follows or that it is over, no completion point is recorded.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if allocations already go there, unless their capture is over.
    pub fn begin(&self, device: i64, id: PoolId, filter: Option<Filter>) -> Result<()> {
        let started = self.registry.started(self.registry.device(device)?)?;
        started.private.begin(&started.pool, id, filter)
    }

    /// Names the stream on which the capture of [`Pools::begin`] starts. An allocation of its thread elsewhere is then no sign that there
    /// is no capture.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if nothing was begun.
    pub fn expect_capture(&self, device: i64, id: PoolId, stream: Stream) -> Result<()> {
        let started = self.named(device, id)?;
        started.private.expect(&started.pool, id, stream)
    }

    /// Ends the route of [`Pools::begin`]; the pool stays.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if nothing was begun.
    pub fn end(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.named(device, id)?;
        started.private.end(&started.pool, id)
    }

    /// Removes an owner of a private pool. After the last one its memory is released as its blocks are freed.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the pool does not exist.
    pub fn release(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.named(device, id)?;
        let released = started.private.release(&started.pool, id);
        self.regions.given_up();
        released
    }

    /// Returns the number of owners of a private pool; 0 if it does not exist.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn owners(&self, device: i64, id: PoolId) -> Result<u32> {
        Ok(self.registry.device(device)?.started().map_or(0, |started| started.private.owners(id)))
    }

    /// Calls `visit` with the address and the size of every live block of a private pool.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the pool does not exist.
    pub fn blocks(&self, device: i64, id: PoolId, mut visit: impl FnMut(Address, Bytes)) -> Result<()> {
        let started = self.named(device, id)?;
        let domain = started.private.domain(&started.pool, id)?;
        started.pool.blocks_of(domain).into_iter().for_each(|block| visit(block.address, block.size));
        Ok(())
    }

    /// Waits for pending frees and releases the free memory of a private pool, except of a graph's pool that may be replayed. Returns the
    /// bytes.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the pool does not exist; the driver's error.
    pub fn trim(&self, device: i64, id: PoolId) -> Result<Bytes> {
        let started = self.named(device, id)?;
        let domain = started.private.domain(&started.pool, id)?;
        started.settle()?;
        let trimmed = started.pool.trim_domain(domain);
        self.regions.given_up();
        Ok(trimmed?)
    }

    /// Keeps all memory of the private pools with this number on their GPUs, on every device, memory that is made later and free memory
    /// too; otherwise reverts one earlier call. Calls are counted. The pools need not exist yet.
    ///
    /// # Errors
    /// [`ProcessError::Pool`] if part of a pool is evicted; [`ProcessError::Refused`] if it was not fixed.
    pub fn fix(&self, id: PoolId, fixed: bool) -> Result<()> {
        let unknown = || {
            ProcessError::invalid(format!("private pool {id} is not fixed: it was unfixed as often as fixed"))
        };
        let stays = self.registry.fixed_pools.fix(id, fixed).ok_or_else(unknown)?;
        let started = self.registry.devices.iter().filter_map(DeviceMemory::started);
        let set: Result<()> =
            { started }.try_for_each(|started| started.private.fix(&started.pool, id, stays));
        if set.is_err() && fixed {
            self.fix(id, false)?;
        }
        set
    }

    /// Records which blocks of a private pool are live.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the pool does not exist.
    pub fn checkpoint(&self, device: i64, id: PoolId) -> Result<PoolCheckpoint> {
        let started = self.named(device, id)?;
        let blocks = started.pool.checkpoint(started.private.domain(&started.pool, id)?)?;
        Ok(PoolCheckpoint { device, id, blocks })
    }

    /// Restores exactly the blocks of a checkpoint as live, at their addresses; see [`super::Process::restore`]. Refills evicted memory of
    /// the pool first.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the pool does not exist; errors of the refill; the pool's error, with the live blocks unchanged.
    pub(super) fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        let PoolCheckpoint { device, id, blocks } = checkpoint;
        let started = self.named(*device, *id)?;
        let domain = started.private.domain(&started.pool, *id)?;
        self.regions.touched_domain(started, domain)?;
        let restored = started.pool.restore(domain, blocks)?;
        let history = &self.registry.observers.history;
        if history.is_on() {
            let freed = restored.freed.iter().flat_map(|block| {
                [Action::FreeRequested, Action::FreeCompleted].map(|action| (action, block))
            });
            for (action, block) in freed.chain(restored.claimed.iter().map(|block| (Action::Alloc, block))) {
                let stream = self.streams.handle(block.stream).unwrap_or(Stream(0));
                let place = (block.address.0, block.size.get());
                history.note(action, started.pool.device(), place, stream, *id);
            }
        }
        Ok(restored)
    }

    /// Returns the device of a private pool.
    fn named(&self, device: i64, id: PoolId) -> Result<&Started> {
        let memory = self.registry.device(device)?;
        memory.started().ok_or_else(|| ProcessError::unknown_pool(memory.id(), id))
    }
}

#[cfg(test)]
#[cfg(not(schedules))]
mod tests {
    use super::super::fixture::Parts;
    use super::*;

    const ID: PoolId = PoolId(4, 0);

    #[test]
    fn a_pool_lives_as_long_as_its_owners() {
        let Parts { pools, .. } = Parts::new();
        assert!(
            matches!(pools.end(0, ID), Err(ref error) if error.says("has no private pool")),
            "its device has not started"
        );
        assert_eq!(pools.owners(0, ID).unwrap(), 0);
        pools.create(0, ID).unwrap();
        pools.begin(0, ID, None).unwrap();
        pools.end(0, ID).unwrap();
        assert_eq!((pools.owners(0, ID).unwrap(), pools.owners(1, ID).unwrap()), (2, 0));
        pools.release(0, ID).unwrap();
        pools.release(0, ID).unwrap();
        assert!(matches!(pools.trim(0, ID), Err(ref error) if error.says("has no private pool")));
        assert!(matches!(pools.create(5, ID), Err(ProcessError::NoSuchDevice { device: 5, .. })));
    }

    #[test]
    fn a_restore_makes_the_blocks_of_its_checkpoint_live_again() {
        let Parts { pools, registry, streams, sim, .. } = Parts::new();
        pools.create(0, ID).unwrap();
        let started = pools.named(0, ID).unwrap();
        let domain = started.private.domain(&started.pool, ID).unwrap();
        let stream = streams.of(&*sim, glake_device::DeviceId(0), Stream(0)).unwrap();
        let block = started.pool.malloc_in(domain, Bytes::mib(20), stream).unwrap().address;
        let live = || {
            let mut live = Vec::new();
            pools.blocks(0, ID, |address, _| live.push(address)).unwrap();
            live
        };
        let checkpoint = pools.checkpoint(0, ID).unwrap();
        registry.observers.keep_history(true, 10, false);
        started.pool.free(block).unwrap();
        assert_eq!(live(), []);
        pools.restore(&checkpoint).unwrap();
        assert_eq!(live(), [block]);
        let kept = registry.observers.history.of(started.pool.device());
        assert_eq!(kept.last().map(|event| (event.action, event.pool)), Some((Action::Alloc, ID)));
    }
}

/// Live blocks of a private pool at some time.
#[derive(Clone, Debug)]
pub struct PoolCheckpoint {
    pub(super) device: i64,
    pub(super) id: PoolId,
    pub(super) blocks: Checkpoint,
}
