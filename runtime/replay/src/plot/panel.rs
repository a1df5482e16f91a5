//! Data of a picture.

use glake_units::Bytes;

use crate::Point;

/// Data of one trace: live memory, and the memory that each policy reserved.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Name of the trace.
    pub title: String,
    /// Time of the trace's first event, in the trace's microseconds: zero of the time axis.
    pub begin_us: u64,
    /// Curves in the order of the legend, one per replay.
    pub curves: Vec<Curve>,
}

/// Curve of one replay.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Name of the policy, which selects the colour.
    pub policy: String,
    /// Distinction from other curves of the same policy, such as `100 ms behind`. May be empty.
    pub variant: String,
    /// Peak of the reserved memory.
    pub peak: Bytes,
    /// Live and reserved memory over time.
    pub points: Vec<Point>,
}

impl Panel {
    /// Returns the end of the last point, in microseconds of the trace.
    pub(super) fn end_us(&self) -> u64 {
        self.curves.iter().flat_map(|curve| &curve.points).map(|point| point.at_us).max().unwrap_or(0)
    }

    /// Returns the peak and points of live memory, from the curve that reached the highest peak: a replay that ran out of memory lacks the
    /// blocks that failed.
    pub(super) fn live(&self) -> (Bytes, &[Point]) {
        let peak = |curve: &Curve| curve.points.iter().map(|point| point.active).max().unwrap_or(Bytes::ZERO);
        self.curves
            .iter()
            .map(|curve| (peak(curve), curve.points.as_slice()))
            .max_by_key(|(peak, _)| *peak)
            .unwrap_or((Bytes::ZERO, &[]))
    }

    /// Returns the top of the memory axis.
    pub(super) fn peak(&self) -> Bytes {
        self.curves.iter().map(|curve| curve.peak).fold(self.live().0, Bytes::max)
    }
}
