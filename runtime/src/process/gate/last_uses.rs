//! Which use touched a tag last.

use std::collections::BTreeMap;

use super::tags::Tags;

/// The last use of each tag, whether it has ended or not.
#[derive(Clone, Debug, Default)]
pub(super) struct LastUses {
    of_all: u64,
    /// Of those only that a use named.
    of_tag: BTreeMap<String, u64>,
    /// Every use touches what lies in no region.
    of_any: u64,
}

impl LastUses {
    /// A use begins, or goes on, as that number.
    pub(super) fn note(&mut self, tags: &Tags, number: u64) {
        self.of_any = number;
        match tags {
            Tags::All => self.of_all = number,
            Tags::These(tags) => {
                for tag in tags {
                    match self.of_tag.get_mut(tag) {
                        Some(last) => *last = number,
                        None => _ = self.of_tag.insert(tag.clone(), number),
                    }
                }
            }
        }
    }

    /// The number of the last use of a tag; 0: there was none.
    pub(super) fn of(&self, tag: &str) -> u64 {
        match tag {
            super::DEFAULT => self.of_any,
            tag => self.of_all.max(self.of_tag.get(tag).copied().unwrap_or(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_of_everything_is_one_of_each_tag() {
        let mut last = LastUses::default();
        assert_eq!(last.of("a"), 0);
        last.note(&Tags::of(&["a"]), 3);
        assert_eq!((last.of("a"), last.of("b"), last.of(super::super::DEFAULT)), (3, 0, 3));
        last.note(&Tags::All, 5);
        last.note(&Tags::of(&["b"]), 8);
        assert_eq!((last.of("a"), last.of("b"), last.of("c")), (5, 8, 5));
    }
}
