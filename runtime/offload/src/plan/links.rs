//! Rates of the links between a GPU and the host.

use std::time::Duration;

use glake_units::Bandwidth;

use super::PlanError;

/// Rates of copies out of a GPU and into it, over all paths that a pass may use.
///
/// ```
/// use glake_offload::Links;
/// use glake_units::Bandwidth;
///
/// let one = Links::new(Bandwidth(55.0), Bandwidth(55.0)).at_once(Bandwidth(51.0), Bandwidth(51.0));
/// assert_eq!(one.out_at_once, Bandwidth(51.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Rate out of the GPU while the other direction is idle.
    pub out: Bandwidth,
    /// Rate into the GPU while the other direction is idle.
    pub into: Bandwidth,
    /// Rate out of the GPU while both directions are busy.
    pub out_at_once: Bandwidth,
    /// Rate into the GPU while both directions are busy.
    pub into_at_once: Bandwidth,
    /// Fixed cost of a copy.
    pub copy: Duration,
}

impl Links {
    /// Default fixed cost of a copy.
    pub const COPY: Duration = Duration::from_micros(10);

    /// Creates links whose directions do not slow each other down.
    pub const fn new(out: Bandwidth, into: Bandwidth) -> Self {
        Links { out, into, out_at_once: out, into_at_once: into, copy: Self::COPY }
    }

    /// Sets the rates while both directions are busy.
    #[must_use]
    pub const fn at_once(mut self, out: Bandwidth, into: Bandwidth) -> Self {
        (self.out_at_once, self.into_at_once) = (out, into);
        self
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        let rates = [
            ("out of", self.out),
            ("out of", self.out_at_once),
            ("into", self.into),
            ("into", self.into_at_once),
        ];
        let bad = rates.into_iter().find(|(_, rate)| !(rate.0 > 0.0 && rate.0.is_finite()));
        bad.map_or(Ok(()), |(direction, rate)| Err(PlanError::Rate { direction, rate }))
    }
}
