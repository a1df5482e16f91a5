//! Which regions' memory goes, and how much of each: pure.

use glake_tiers::{CopyPolicy, Policy};
use glake_units::Bytes;

/// In which order memory is given up where only some of it is wanted: what costs least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionCost {
    /// Its bytes are given up.
    Discarded,
    /// A copy of its bytes may be there.
    Copied,
    /// Its bytes are copied.
    Kept,
    /// A graph's pool: all its bytes are copied.
    Graph,
    /// What lies in no region: everything that the program does needs it.
    Default,
}

impl EvictionCost {
    /// Of a region that a program made.
    pub(super) fn of(policy: Policy, host_copy: CopyPolicy, sealed: bool) -> EvictionCost {
        match policy {
            Policy::Discard => EvictionCost::Discarded,
            Policy::Sealed if sealed && host_copy == CopyPolicy::Retain => EvictionCost::Copied,
            Policy::Keep | Policy::Sealed => EvictionCost::Kept,
        }
    }
}

/// How much of each goes, or comes back, to make `wanted` together; what has nothing to give is left out. In the order given.
pub(super) fn in_order<T: Copy>(sizes: &[(T, Bytes)], wanted: Bytes) -> Vec<(T, Bytes)> {
    let mut left = wanted;
    let mut chosen = Vec::new();
    for &(which, size) in sizes {
        let amount = size.min(left);
        if amount.is_zero() {
            continue;
        }
        left = left.saturating_sub(amount);
        chosen.push((which, amount));
    }
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_costs_least_goes_first() {
        let costs = [
            EvictionCost::of(Policy::Discard, CopyPolicy::Drop, false),
            EvictionCost::of(Policy::Sealed, CopyPolicy::Retain, true),
            EvictionCost::of(Policy::Sealed, CopyPolicy::Retain, false),
            EvictionCost::Graph,
            EvictionCost::Default,
        ];
        assert!(costs.is_sorted());
        assert_eq!(costs[2], EvictionCost::of(Policy::Keep, CopyPolicy::Retain, true));
        assert_eq!(costs[2], EvictionCost::of(Policy::Sealed, CopyPolicy::Drop, true));
    }

    proptest! {
        #[test]
        fn as_much_as_is_wanted_or_there(sizes in prop::collection::vec(0..1000_u64, 0..12), wanted in 0..6000_u64) {
            let sizes: Vec<(usize, Bytes)> = sizes.into_iter().map(Bytes::new).enumerate().collect();
            let chosen = in_order(&sizes, Bytes::new(wanted));
            let total: u64 = chosen.iter().map(|(_, amount)| amount.get()).sum();
            let there: u64 = sizes.iter().map(|(_, size)| size.get()).sum();
            prop_assert_eq!(total, wanted.min(there));
            prop_assert!(chosen.is_sorted_by(|a, b| a.0 < b.0));
            prop_assert!(chosen.iter().all(|(which, amount)| !amount.is_zero() && *amount <= sizes[*which].1));
            // All but the last are taken whole.
            prop_assert!(chosen.iter().rev().skip(1).all(|(which, amount)| *amount == sizes[*which].1));
        }
    }
}
