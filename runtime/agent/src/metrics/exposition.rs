//! Prometheus' text format, version 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats).

use std::fmt::{Display, Write as _};

use glake_units::metrics::Metric;

/// Builder of the text.
#[derive(Debug, Default)]
pub(crate) struct Exposition(String);

impl Exposition {
    /// Adds a metric with its samples. Each sample has values for the metric's labels, in their order.
    pub(crate) fn metric<'a, const LABELS: usize, V: Display>(
        &mut self,
        metric: &Metric,
        samples: impl IntoIterator<Item = ([&'a str; LABELS], V)>,
    ) {
        self.begin(metric);
        let names = || metric.labels.iter().map(|label| label.name);
        for (values, value) in samples {
            self.sample(metric.name, names().zip(values), value);
        }
    }

    /// Adds a histogram: cumulative counts in ascending order, the total count and the sum.
    pub(crate) fn histogram(
        &mut self,
        metric: &Metric,
        within: impl IntoIterator<Item = (f64, u64)>,
        count: u64,
        sum: f64,
    ) {
        self.begin(metric);
        let bucket = format!("{}_bucket", metric.name);
        for (most, count) in within {
            self.sample(&bucket, [("le", most.to_string().as_str())], count);
        }
        self.sample(&bucket, [("le", "+Inf")], count);
        self.sample(&format!("{}_sum", metric.name), [], sum);
        self.sample(&format!("{}_count", metric.name), [], count);
    }

    pub(crate) fn text(self) -> String {
        self.0
    }

    fn begin(&mut self, Metric { name, kind, help, .. }: &Metric) {
        // In a help a quotation mark is itself.
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample<'a>(
        &mut self,
        name: &str,
        labels: impl IntoIterator<Item = (&'a str, &'a str)>,
        value: impl Display,
    ) {
        let label = |(name, value)| format!("{name}=\"{}\"", escaped(value));
        let labels: Vec<String> = labels.into_iter().map(label).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }
}

/// Escapes a label's value for its quotation marks.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use glake_units::metrics::{Kind, Label, Stability, Unit};

    use super::*;

    const OF: Metric = Metric {
        name: "of",
        kind: Kind::Gauge,
        unit: Unit::Count,
        labels: &[Label { name: "a", values: &[] }, Label { name: "b", values: &[] }],
        stability: Stability::Stable,
        help: "\"C:\\\"\nand more.",
    };
    const TOOK: Metric = Metric { name: "took", kind: Kind::Histogram, labels: &[], help: "It.", ..OF };

    #[test]
    fn what_ends_a_value_or_a_line_is_escaped() {
        let mut text = Exposition::default();
        text.metric(&OF, [(["\\n", "\"\n}"], 7)]);
        assert_eq!(
            text.text(),
            "# HELP of \"C:\\\\\"\\nand more.\n# TYPE of gauge\nof{a=\"\\\\n\",b=\"\\\"\\n}\"} 7\n"
        );
    }

    #[test]
    fn a_histogram_ends_with_all() {
        let mut text = Exposition::default();
        text.histogram(&TOOK, [(0.5, 1), (1.0, 1)], 2, 4.5);
        let lines = [
            "# HELP took It.",
            "# TYPE took histogram",
            "took_bucket{le=\"0.5\"} 1",
            "took_bucket{le=\"1\"} 1",
            "took_bucket{le=\"+Inf\"} 2",
            "took_sum 4.5",
            "took_count 2",
        ];
        assert_eq!(text.text().lines().collect::<Vec<_>>(), lines);
    }
}
