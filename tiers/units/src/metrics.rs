//! How a metric is described, wherever it is counted: every list of metrics is of these, and docs/METRICS.md is written
//! from them.

use std::fmt;

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Its name, within its group if it has one.
    pub name: &'static str,
    /// How its value behaves, or where it is kept.
    pub kind: Kind,
    /// What one of it is.
    pub unit: Unit,
    /// What tells its samples apart; none: it has one sample.
    pub labels: &'static [Label],
    /// Whether its name and meaning stay.
    pub stability: Stability,
    /// What it counts.
    pub help: &'static str,
}

/// How a metric's value behaves, or where it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A field of a structure, of this type.
    Field(&'static str),
    /// What is now.
    Gauge,
    /// What was since its process began: it only rises.
    Counter,
    /// How often a value was at most so large.
    Histogram,
}

/// What one of a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// One of what is counted.
    Count,
    /// A byte.
    Bytes,
    /// A second.
    Seconds,
    /// A microsecond.
    Microseconds,
    /// 10⁹ bytes a second.
    GigabytesPerSecond,
    /// A part of a whole, from 0 to 1.
    Ratio,
    /// True or false.
    Flag,
    /// A device's number.
    Device,
    /// A word.
    Word,
    /// An object, whose fields are metrics.
    Object,
    /// A list of such objects.
    List,
}

/// One thing that tells a metric's samples apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// What it is called.
    pub name: &'static str,
    /// What it may be; empty: any text.
    pub values: &'static [&'static str],
}

/// Whether a metric's name and meaning stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// They do, as long as the major version does.
    Stable,
    /// They may change with any version; the changelog says it.
    Experimental,
}

/// As the page of metrics has it.
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

/// The type of the field, or Prometheus' word.
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
