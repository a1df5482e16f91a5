//! Which blocks of a private pool were live, and the way back to that.

use glake_tiers::{Checkpoint, Restored};

use super::history::Action;
use super::{PoolId, Process, Result};

/// The live blocks of a private pool at some time.
#[derive(Clone, Debug)]
pub struct PoolCheckpoint {
    device: i64,
    id: PoolId,
    blocks: Checkpoint,
}

impl Process {
    /// Remembers which blocks of a private pool are live.
    ///
    /// # Errors
    /// [`super::ProcessError::UnknownPool`].
    pub fn checkpoint(&self, device: i64, id: PoolId) -> Result<PoolCheckpoint> {
        let started = self.named(device, id)?;
        let blocks = started.pool.checkpoint(started.private.domain(&started.pool, id)?)?;
        Ok(PoolCheckpoint { device, id, blocks })
    }

    /// Makes exactly the blocks of a checkpoint live again, at their addresses ([`glake_tiers::GpuPool::restore`]).
    ///
    /// # Errors
    /// [`super::ProcessError::UnknownPool`]; what the pool refuses: the same blocks as before are live then.
    pub fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        let PoolCheckpoint { device, id, blocks } = checkpoint;
        let started = self.named(*device, *id)?;
        let restored = started.pool.restore(started.private.domain(&started.pool, *id)?, blocks)?;
        // The pool has ended them before their bytes could be others'; what they were opened by is closed.
        self.exporter.forget_ended();
        let history = &self.observers.history;
        if history.is_on() {
            let freed = restored.freed.iter().flat_map(|block| {
                [Action::FreeRequested, Action::FreeCompleted].map(|action| (action, block))
            });
            for (action, block) in freed.chain(restored.claimed.iter().map(|block| (Action::Alloc, block))) {
                let stream = self.streams.handle(block.stream).unwrap_or(glake_device::Stream(0));
                let place = (block.address.0, block.size.get());
                history.note(action, started.pool.device(), place, stream, *id);
            }
        }
        Ok(restored)
    }
}
