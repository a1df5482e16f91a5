//! Links that carried bytes of copies.

use std::collections::BTreeSet;

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
