//! Interface for moving bytes. This crate knows their locations; an implementation, such as the transfer engine, chooses the paths.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use glake_device::owned::Span;
use glake_device::{DeviceId, Stream};

/// Error of a mover, in its own words.
pub type MoveError = Box<dyn Error + Send + Sync>;

/// Mover of bytes between spans.
pub trait Mover: fmt::Debug + Send + Sync {
    /// Enqueues copies between pairs of spans of equal size, from source to destination, in no order among themselves. Earlier work on the
    /// spans has completed.
    ///
    /// # Errors
    /// Not all copies were enqueued. Those enqueued may run; they keep the memory of their spans.
    fn enqueue(&self, copies: &[(Span, Span)]) -> Result<Box<dyn Moving>, MoveError>;

    /// Returns a mark behind all copies enqueued so far.
    ///
    /// # Errors
    /// The mover cannot record a mark.
    fn mark(&self) -> Result<Arc<dyn Mark>, MoveError>;
}

/// Point behind copies on a GPU.
pub trait Mark: fmt::Debug + Send + Sync {
    /// Makes later work on a stream of `device` wait for the mark.
    ///
    /// # Errors
    /// The stream cannot be made to wait.
    fn follow(&self, device: DeviceId, stream: Stream) -> Result<(), MoveError>;
}

/// Copies in progress.
pub trait Moving: fmt::Debug {
    /// Waits until all bytes have arrived. Afterwards the copies hold no spans, which would prevent unmapping.
    ///
    /// # Errors
    /// Some copies failed.
    fn wait(self: Box<Self>) -> Result<(), MoveError>;
}
