//! What is drawn.

use glake_units::Bytes;

use crate::Point;

/// One trace: what was live, and what each policy reserved for it.
#[derive(Clone, Debug)]
pub struct Panel {
    /// The trace's name.
    pub title: String,
    /// When the trace begins, in its own microseconds: zero of the time axis.
    pub begin_us: u64,
    /// A curve a replay, in the order of the legend.
    pub curves: Vec<Curve>,
}

/// One replay.
#[derive(Clone, Debug)]
pub struct Curve {
    /// What was replayed on: it decides the colour.
    pub policy: String,
    /// What tells it from another curve of the same policy: `100 ms behind`. May be empty.
    pub variant: String,
    /// The most that was reserved.
    pub peak: Bytes,
    /// Live and reserved memory over time.
    pub points: Vec<Point>,
}

impl Panel {
    /// When the last point ends, in microseconds of the trace.
    pub(super) fn end_us(&self) -> u64 {
        self.curves.iter().flat_map(|curve| &curve.points).map(|point| point.at_us).max().unwrap_or(0)
    }

    /// The most that was live: that of the curve that got furthest, since a replay that ran out of memory lacks
    /// what it could not have.
    pub(super) fn live(&self) -> (Bytes, &[Point]) {
        let peak = |curve: &Curve| curve.points.iter().map(|point| point.active).max().unwrap_or(Bytes::ZERO);
        self.curves
            .iter()
            .map(|curve| (peak(curve), curve.points.as_slice()))
            .max_by_key(|(peak, _)| *peak)
            .unwrap_or((Bytes::ZERO, &[]))
    }

    /// The top of the memory axis.
    pub(super) fn peak(&self) -> Bytes {
        self.curves.iter().map(|curve| curve.peak).fold(self.live().0, Bytes::max)
    }
}
