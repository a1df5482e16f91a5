//! Whether it is worth waiting for memory: who stands above knows who is giving some back.

use std::fmt;

use crate::PoolError;

/// Asked by a refill when there is no memory, after what is free elsewhere was given back.
pub trait WaitPolicy: fmt::Debug + Sync {
    /// Waits until there may be more memory than when it was last asked, and says whether there may: then the refill tries again.
    /// `refused` is what it met.
    /// The refill holds its region's turn meanwhile, and no lock of the pool.
    fn wait(&self, refused: &PoolError) -> bool;
}

/// Waits for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoWait;

impl WaitPolicy for NoWait {
    fn wait(&self, _: &PoolError) -> bool {
        false
    }
}
