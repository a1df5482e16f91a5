//! Host memory that the engine has pinned for copies.

use glake_units::Bytes;

use crate::Engine;

impl Engine {
    /// Pinned host memory of its own: slots for pageable memory, and lists of blocks. Waits for nothing.
    pub fn pinned(&self) -> Bytes {
        self.pageable.pinned().saturating_add(self.kernels.now().pinned())
    }
}
