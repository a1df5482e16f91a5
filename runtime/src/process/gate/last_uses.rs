//! Number of the last use of each tag.

use std::collections::BTreeMap;

use super::tags::Tags;

/// Number of the last use of each tag, whether it has ended or not.
#[derive(Clone, Debug, Default)]
pub(super) struct LastUses {
    of_all: u64,
    /// Last use of each tag that a use named.
    of_tag: BTreeMap<String, u64>,
    /// Last use of any tag: every use may touch memory outside regions.
    of_any: u64,
}

impl LastUses {
    /// Records that a use of `tags` begins or resumes under `number`.
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

    /// Returns the number of the last use of a tag; 0 if there was none.
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
