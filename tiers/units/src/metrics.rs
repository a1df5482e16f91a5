//! Description of metrics. Every list of metrics consists of these, and docs/METRICS.md is generated from them.

use std::fmt;
use std::time::Duration;

/// Description of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name, within its group if it has one.
    pub name: &'static str,
    /// Kind of its value, or its place.
    pub kind: Kind,
    /// Unit of the value.
    pub unit: Unit,
    /// Labels that distinguish its samples; empty: a single sample.
    pub labels: &'static [Label],
    /// Stability of its name and meaning.
    pub stability: Stability,
    /// Help text for users.
    pub help: &'static str,
}

/// Kind of a metric's value, or its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Field of a structure, with its type.
    Field(&'static str),
    /// Current value, rising or falling.
    Gauge,
    /// Total since the process began; never decreases.
    Counter,
    /// Distribution with cumulative buckets.
    Histogram,
}

/// Unit of a metric's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Number of events or objects.
    Count,
    /// Amount of memory in bytes.
    Bytes,
    /// Duration in seconds.
    Seconds,
    /// Duration in microseconds.
    Microseconds,
    /// 10⁹ bytes a second.
    GigabytesPerSecond,
    /// Ratio from 0 to 1.
    Ratio,
    /// Boolean value, 0 or 1.
    Flag,
    /// Number of a device.
    Device,
    /// Word of an enumeration.
    Word,
    /// Object whose fields are metrics.
    Object,
    /// List of such objects.
    List,
}

/// Label that distinguishes samples of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// Name of the label.
    pub name: &'static str,
    /// Possible label values; empty: any text.
    pub values: &'static [&'static str],
}

/// Stability of a metric's name and meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Unchanged within a major version.
    Stable,
    /// May change with any version; announced in the changelog.
    Experimental,
}

/// Distribution of durations over cumulative buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// Upper end of each bucket in seconds, ascending.
    ends: &'static [f64],
    /// Number of durations up to each end.
    within: Vec<u64>,
    count: u64,
    sum: Duration,
}

impl Histogram {
    /// Creates an empty histogram. `ends`: upper end of each bucket in seconds, ascending.
    pub fn new(ends: &'static [f64]) -> Self {
        Histogram { ends, within: vec![0; ends.len()], count: 0, sum: Duration::ZERO }
    }

    /// Counts a duration.
    pub fn add(&mut self, took: Duration) {
        self.count += 1;
        self.sum = self.sum.saturating_add(took);
        let seconds = took.as_secs_f64();
        let within = self.ends.iter().zip(&mut self.within);
        within.filter(|(end, _)| seconds <= **end).for_each(|(_, count)| *count += 1);
    }

    /// Returns the upper end of each bucket in seconds, and the number of durations up to it.
    pub fn within(&self) -> impl Iterator<Item = (f64, u64)> {
        self.ends.iter().copied().zip(self.within.iter().copied())
    }

    /// Returns the number of durations.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of the durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }
}

/// Formats the unit for the page of metrics.
impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unit::Count => "count",
            Unit::Bytes => "bytes",
            Unit::Seconds => "seconds",
            Unit::Microseconds => "microseconds",
            Unit::GigabytesPerSecond => "GB/s",
            Unit::Ratio => "ratio",
            Unit::Flag => "flag",
            Unit::Device => "device",
            Unit::Word => "word",
            Unit::Object => "object",
            Unit::List => "list",
        })
    }
}

/// Formats the type of the field, or Prometheus' word.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Field(of) => of,
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        })
    }
}
