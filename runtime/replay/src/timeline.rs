//! Live and reserved memory over time, for plots. Points are merged as the timeline grows; every peak is kept.

use glake_units::Bytes;

use crate::trace::{Event, Trace};

/// Interval of a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// End of the interval, in microseconds.
    pub at_us: u64,
    /// Peak of live memory in the interval, each block rounded up to 512 bytes.
    pub active: Bytes,
    /// Peak of reserved memory in the interval.
    pub reserved: Bytes,
}

/// Live and reserved memory over a replay, in at most [`Timeline::POINTS`] points.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    points: Vec<Point>,
    /// Events per point; doubles whenever points are merged.
    stride: u32,
    /// Events in the last point so far.
    filled: u32,
    active: Bytes,
}

impl Timeline {
    /// Maximum number of points.
    pub const POINTS: usize = 2000;

    /// Creates an empty timeline.
    pub fn new() -> Self {
        Timeline { stride: 1, ..Timeline::default() }
    }

    /// Returns the points in order of time.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Records the state after an event.
    pub(super) fn note(&mut self, trace: &Trace, event: Event, reserved: Bytes) {
        let rounded = |bytes: Bytes| bytes.align_up(Bytes::new(512)).unwrap_or(Bytes::MAX);
        match event {
            Event::Allocate { bytes, .. } => self.active = self.active.saturating_add(rounded(bytes)),
            Event::FreeCompleted { block, .. } => {
                self.active = self.active.saturating_sub(rounded(trace.size_of(block)));
            }
            Event::FreeRequested { .. } | Event::RecordStream { .. } => {}
        }
        let now = Point { at_us: event.at_us(), active: self.active, reserved };
        match self.points.last_mut() {
            Some(last) if self.filled < self.stride => {
                *last = joined(*last, now);
                self.filled += 1;
            }
            _ => {
                if self.points.len() == Self::POINTS {
                    self.thin_out();
                }
                self.points.push(now);
                self.filled = 1;
            }
        }
    }

    fn thin_out(&mut self) {
        let halved = self.points.chunks(2).filter_map(|pair| pair.iter().copied().reduce(joined));
        self.points = halved.collect();
        self.stride = self.stride.saturating_mul(2);
    }
}

fn joined(a: Point, b: Point) -> Point {
    Point { at_us: b.at_us, active: a.active.max(b.active), reserved: a.reserved.max(b.reserved) }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::path::Path;

    use super::*;

    #[test]
    fn stays_small_and_keeps_peaks() {
        let mut text = String::new();
        for block in 0..10_000_u32 {
            let bytes = if block == 7777 { 1 << 20 } else { 512 };
            writeln!(text, "a {block} {bytes} 0 {block}\nf {block} {block}").unwrap();
        }
        let trace = Trace::from_bytes(Path::new("t"), text.as_bytes(), None).unwrap();
        let mut timeline = Timeline::new();
        for (place, &event) in trace.events().iter().enumerate() {
            timeline.note(&trace, event, Bytes::new(place as u64));
        }
        let points = timeline.points();
        assert!(points.len() <= Timeline::POINTS && points.len() >= Timeline::POINTS / 2, "{}", points.len());
        assert_eq!(points.iter().map(|point| point.active).max(), Some(Bytes::mib(1)));
        assert_eq!(points.last().unwrap().at_us, 9999);
        assert_eq!(points.last().unwrap().reserved, Bytes::new(29_999));
        assert!(points.windows(2).all(|pair| pair[0].at_us <= pair[1].at_us));
    }
}
