//! Private pools, as programs ask for them: by device and number.

use glake_device::{Address, Stream};
use glake_units::Bytes;

use super::device::Started;
use super::{Filter, PoolId, Process, ProcessError, Result};

impl Process {
    /// Makes a private pool, or adds an owner to it.
    ///
    /// # Errors
    /// What starting the device's pool meets.
    pub fn create_pool(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.started(self.device(device)?)?;
        started.private.create(&started.pool, id);
        Ok(())
    }

    /// Sends allocations on streams that the filter takes (`None`: on all) to a private pool from now on, the newest such
    /// pool first. It adds an owner. Until it is known that no capture follows, or that it is over, no epoch is recorded.
    ///
    /// # Errors
    /// [`ProcessError::PoolOpen`] where they go there already, but for a capture that is over.
    pub fn begin_pool(&self, device: i64, id: PoolId, filter: Option<Filter>) -> Result<()> {
        let started = self.started(self.device(device)?)?;
        started.private.begin(&started.pool, id, filter)
    }

    /// Says on which stream the capture begins that [`Process::begin_pool`] was called for. An allocation of its thread elsewhere is
    /// then no sign that there is none.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`] where nothing was begun.
    pub fn expect_capture(&self, device: i64, id: PoolId, stream: Stream) -> Result<()> {
        let started = self.named(device, id)?;
        started.private.expect(&started.pool, id, stream)
    }

    /// Ends what [`Process::begin_pool`] began; the pool stays.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`] where nothing was begun.
    pub fn end_pool(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.named(device, id)?;
        started.private.end(&started.pool, id)
    }

    /// One owner of a private pool less. The last one gives it up: its memory goes back once its blocks are freed.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`].
    pub fn release_pool(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.named(device, id)?;
        let released = started.private.release(&started.pool, id);
        self.regions.given_up();
        released
    }

    /// How many owners a private pool has; 0 where there is none.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn pool_owners(&self, device: i64, id: PoolId) -> Result<u32> {
        Ok(self.device(device)?.started().map_or(0, |started| started.private.owners(id)))
    }

    /// Calls `visit` with the address and the size of every live block of a private pool.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`].
    pub fn pool_blocks(&self, device: i64, id: PoolId, mut visit: impl FnMut(Address, Bytes)) -> Result<()> {
        let started = self.named(device, id)?;
        let domain = started.private.domain(&started.pool, id)?;
        started.pool.blocks_of(domain).into_iter().for_each(|block| visit(block.address, block.size));
        Ok(())
    }

    /// Releases what is free in a private pool, after pending frees were waited for: not for the pool of a graph that may
    /// be replayed. Returns how much went.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`]; what the driver answers.
    pub fn trim_pool(&self, device: i64, id: PoolId) -> Result<Bytes> {
        let started = self.named(device, id)?;
        let domain = started.private.domain(&started.pool, id)?;
        started.settle()?;
        let trimmed = started.pool.trim_domain(domain);
        self.regions.given_up();
        Ok(trimmed?)
    }

    /// A device that has private pools.
    pub(super) fn named(&self, device: i64, id: PoolId) -> Result<&Started> {
        let memory = self.device(device)?;
        memory.started().ok_or(ProcessError::UnknownPool { device: memory.id(), id })
    }
}
