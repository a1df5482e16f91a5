//! Choice of the regions to evict and the bytes of each (pure).

use glake_tiers::{CopyPolicy, Policy};
use glake_units::Bytes;

/// Order of evictions when only a part is wanted: cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionCost {
    /// Bytes are discarded without a copy.
    Discarded,
    /// A host copy of the bytes may already exist.
    Copied,
    /// Bytes must be copied.
    Kept,
    /// Pool of a graph: all its bytes must be copied.
    Graph,
    /// Memory outside regions, which every use needs.
    Default,
}

impl EvictionCost {
    /// Returns the cost of a region that a program defined.
    pub(super) fn of(policy: Policy, host_copy: CopyPolicy, sealed: bool) -> EvictionCost {
        match policy {
            Policy::Discard => EvictionCost::Discarded,
            Policy::Sealed if sealed && host_copy == CopyPolicy::Retain => EvictionCost::Copied,
            Policy::Keep | Policy::Sealed => EvictionCost::Kept,
        }
    }
}

/// Returns the bytes to move of each candidate so that the sum reaches `wanted`, in the given order. Candidates without bytes are left out.
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
