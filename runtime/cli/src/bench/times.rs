//! Times of runs, and what is told of them.

use std::time::Duration;

/// Converts a duration to microseconds.
pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The middle one, or between the two middle ones.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len() % 2) {
        (None, _) => 0.0,
        (Some(value), 1) => *value,
        (Some(value), _) => (value + values[middle - 1]) / 2.0,
    }
}

/// The one that this part of all values does not exceed.
pub(super) fn percentile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    // a place in a list
    let place = (values.len() as f64 * part).ceil() as usize;
    values.get(place.max(1) - 1).copied().unwrap_or(0.0)
}

/// 10^9 bytes a second.
#[allow(clippy::cast_precision_loss)] // a rate for people
pub(crate) fn gbps(bytes: u64, us: f64) -> f64 {
    bytes as f64 / us / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles() {
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let of = |part| percentile(&hundred, part);
        assert_eq!([of(0.0), of(0.5), of(0.99), of(1.0)], [1.0, 50.0, 99.0, 100.0]);
        assert_eq!([percentile(&[7.0], 0.99), percentile(&[], 0.99)], [7.0, 0.0]);
    }

    #[test]
    fn medians() {
        assert_eq!(median(Vec::new()).to_bits(), 0.0_f64.to_bits());
        assert_eq!(median(vec![3.0, 1.0, 2.0]).to_bits(), 2.0_f64.to_bits());
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]).to_bits(), 2.5_f64.to_bits());
    }
}
