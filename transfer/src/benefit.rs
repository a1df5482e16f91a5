//! Prediction of which copies are worth a driver query for their memory kind.

/// Copies for which the engine can be faster than the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benefit {
    /// No benefit: the driver's copy is as fast for any kind of memory.
    Nothing,
    /// Copies from or to pageable host memory.
    Pageable,
    /// Possibly copies of any memory kind.
    Anything,
}
