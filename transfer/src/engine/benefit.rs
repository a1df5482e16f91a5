//! Which copies are worth asking the driver what their memory is.

/// What a copy has to be for the engine to gain by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benefit {
    /// Whatever the memory is, the driver's copy is as good.
    Nothing,
    /// It gains if the host's memory is pageable.
    Pageable,
    /// It may gain whatever the memory is.
    Anything,
}
