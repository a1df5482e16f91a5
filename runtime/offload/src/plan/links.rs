//! What links between a GPU and the host give a pass.

use std::time::Duration;

use glake_units::Bandwidth;

use super::PlanError;

/// How fast bytes go out of a GPU and into it, over all paths that a pass may use.
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
    /// Out of the GPU, while nothing goes in.
    pub out: Bandwidth,
    /// Into the GPU, while nothing goes out.
    pub into: Bandwidth,
    /// Out of the GPU, while bytes go in.
    pub out_at_once: Bandwidth,
    /// Into the GPU, while bytes go out.
    pub into_at_once: Bandwidth,
    /// What a copy takes beside its bytes.
    pub copy: Duration,
}

impl Links {
    /// What a copy takes by itself, where nothing else was measured.
    pub const COPY: Duration = Duration::from_micros(10);

    /// Links whose ways do not slow each other down.
    pub const fn new(out: Bandwidth, into: Bandwidth) -> Self {
        Links { out, into, out_at_once: out, into_at_once: into, copy: Self::COPY }
    }

    /// The same, with these rates while both ways are in use.
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
