//! Checkpoint of the live blocks of a private pool.

use glake_tiers::Checkpoint;

use super::PoolId;

/// Live blocks of a private pool at some time.
#[derive(Clone, Debug)]
pub struct PoolCheckpoint {
    pub(super) device: i64,
    pub(super) id: PoolId,
    pub(super) blocks: Checkpoint,
}
