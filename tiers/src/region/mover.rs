//! How bytes are moved: by whoever stands above, for this crate knows where they are and not which way they go.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use glake_device::owned::Span;
use glake_device::{DeviceId, Stream};

/// Why bytes were not moved, in the words of who moves them.
pub type MoveError = Box<dyn Error + Send + Sync>;

/// Moves bytes between spans.
pub trait Mover: fmt::Debug + Send + Sync {
    /// Enqueues copies between pairs of spans of one size, to and from, in no order among themselves. All work on them that came
    /// before is done.
    ///
    /// # Errors
    /// Where not all are enqueued. Those that are may run; the spans' memory is kept for them.
    fn enqueue(&self, copies: &[(Span, Span)]) -> Result<Box<dyn Moving>, MoveError>;

    /// The point behind all copies that it has enqueued by now.
    ///
    /// # Errors
    /// Where there is no telling.
    fn mark(&self) -> Result<Arc<dyn Mark>, MoveError>;
}

/// A point behind copies, on the GPU.
pub trait Mark: fmt::Debug + Send + Sync {
    /// Makes what is enqueued on a stream of `device` from now on wait for it.
    ///
    /// # Errors
    /// Where it cannot.
    fn follow(&self, device: DeviceId, stream: Stream) -> Result<(), MoveError>;
}

/// Copies that are under way.
pub trait Moving: fmt::Debug {
    /// Waits until all bytes are there. When it returns no span of these copies is held any more: what is held is not unmapped.
    ///
    /// # Errors
    /// Where some are not, and will not be.
    fn wait(self: Box<Self>) -> Result<(), MoveError>;
}
