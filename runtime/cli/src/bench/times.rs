//! Medians, percentiles and rates of measured times, and the links that carried bytes of copies.

use std::collections::BTreeSet;
use std::time::Duration;

/// Converts a duration to microseconds.
pub(crate) fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Returns the median; for an even number of values, the mean of the two middle ones; 0 without values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len() % 2) {
        (None, _) => 0.0,
        (Some(value), 1) => *value,
        (Some(value), _) => (value + values[middle - 1]) / 2.0,
    }
}

/// Returns the smallest value that the given fraction of all values does not exceed; 0 without values.
pub(super) fn percentile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    // a place in a list
    let place = (values.len() as f64 * part).ceil() as usize;
    values.get(place.max(1) - 1).copied().unwrap_or(0.0)
}

/// Returns a rate in GB/s (10^9 bytes per second).
#[allow(clippy::cast_precision_loss)] // a rate for people
pub(crate) fn gbps(bytes: u64, us: f64) -> f64 {
    bytes as f64 / us / 1e3
}

/// Returns the bytes that each link carried between two readings, without idle links. Entries of one name are added up.
pub(crate) fn grown<N: Clone + Ord>(before: &[(N, u64)], after: &[(N, u64)]) -> Vec<(N, u64)> {
    let total = |of: &[(N, u64)], name: &N| {
        of.iter().filter(|(other, _)| other == name).map(|(_, bytes)| bytes).sum::<u64>()
    };
    let names: BTreeSet<&N> = after.iter().map(|(name, _)| name).collect();
    let each =
        names.into_iter().map(|name| (name.clone(), total(after, name).saturating_sub(total(before, name))));
    each.filter(|(_, bytes)| *bytes > 0).collect()
}

/// Returns the number of links that carried bytes between two readings; at least 1, the target's own.
pub(super) fn changed<N: Clone + Ord>(before: &[(N, u64)], after: &[(N, u64)]) -> u32 {
    u32::try_from(grown(before, after).len().max(1)).unwrap_or(u32::MAX)
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

#[cfg(test)]
mod links_tests {
    use super::*;

    #[test]
    fn links_that_carried_something() {
        let named = |list: &[(&str, u64)]| -> Vec<(String, u64)> {
            list.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect()
        };
        let before = named(&[("0 to_gpu", 5), ("1 to_gpu", 5)]);
        assert_eq!(changed(&before, &before), 1);
        // Two ways of one relay are one link.
        let after = named(&[("0 to_gpu", 9), ("1 to_gpu", 5), ("2 to_gpu", 1), ("2 to_gpu", 1)]);
        assert_eq!(changed(&before, &after), 2);
        assert_eq!(grown(&before, &after), named(&[("0 to_gpu", 4), ("2 to_gpu", 2)]));
    }
}
