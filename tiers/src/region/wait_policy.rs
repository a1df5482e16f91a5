//! Policy of a refill for waiting and for stopping early. The caller knows which processes are releasing memory, and whether the refill is
//! still wanted.

use std::fmt;

use crate::PoolError;

/// Policy that a refill asks when there is no memory, after free memory elsewhere has been released.
pub trait WaitPolicy: fmt::Debug + Sync {
    /// Waits until more memory may be available than at the last call. Returns whether to try again. `refused` is the error of the last
    /// attempt. The refill holds its region's turn during the call, and no lock of the pool.
    fn wait(&self, refused: &PoolError) -> bool;

    /// Returns whether the refill is still wanted. Asked once the refill has its region's turn, and before each extent; if false, the
    /// refill ends without an error.
    fn goes_on(&self) -> bool {
        true
    }
}

/// Policy that never waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoWait;

impl WaitPolicy for NoWait {
    fn wait(&self, _: &PoolError) -> bool {
        false
    }
}
