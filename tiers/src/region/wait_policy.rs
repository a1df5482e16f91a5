//! Whether it is worth waiting for memory, and going on: who stands above knows who is giving some back, and what was asked since.

use std::fmt;

use crate::PoolError;

/// Asked by a refill when there is no memory, after what is free elsewhere was given back.
pub trait WaitPolicy: fmt::Debug + Sync {
    /// Waits until there may be more memory than when it was last asked, and says whether there may: then the refill tries again.
    /// `refused` is what it met.
    /// The refill holds its region's turn meanwhile, and no lock of the pool.
    fn wait(&self, refused: &PoolError) -> bool;

    /// Whether the refill is still wanted: asked once it has its region's turn, and before each extent. One that is not ends well, with
    /// what it has brought.
    fn goes_on(&self) -> bool {
        true
    }
}

/// Waits for nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoWait;

impl WaitPolicy for NoWait {
    fn wait(&self, _: &PoolError) -> bool {
        false
    }
}
