//! Description of metrics. Every list of metrics consists of these, and docs/METRICS.md is generated from them.

use std::fmt;

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
