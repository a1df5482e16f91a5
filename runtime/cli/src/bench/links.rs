//! Which links took part in copies.

/// How many links carried something in between; at least the target's own.
pub(super) fn changed(before: &[(String, u64)], after: &[(String, u64)]) -> u32 {
    let total = |of: &[(String, u64)], name: &str| -> u64 {
        of.iter().filter(|(other, _)| other == name).map(|(_, bytes)| bytes).sum()
    };
    let mut names: Vec<&str> = after.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let grown = names.into_iter().filter(|name| total(after, name) > total(before, name)).count();
    u32::try_from(grown.max(1)).unwrap_or(u32::MAX)
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
    }
}
