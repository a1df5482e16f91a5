//! Sets of regions, given by their tags.

use std::collections::BTreeSet;
use std::fmt;

/// Tag of memory outside regions.
pub(in super::super) const DEFAULT: &str = "default";
/// Prefix of the tags of graph pools.
pub(in super::super) const GRAPH: &str = "graph ";

/// A set of regions, given by tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tags {
    /// Every region, memory outside regions and the pools of graphs.
    All,
    /// Exactly the listed tags.
    These(BTreeSet<String>),
}

/// Returns whether a tag is reserved for memory outside regions, so that a program cannot define it.
pub(in super::super) fn is_reserved(tag: &str) -> bool {
    tag == DEFAULT || tag.starts_with(GRAPH)
}

impl Tags {
    /// Returns the set of these tags; an empty list means all.
    pub fn of<S: AsRef<str>>(tags: &[S]) -> Tags {
        match tags {
            [] => Tags::All,
            tags => Tags::These(tags.iter().map(|tag| tag.as_ref().to_owned()).collect()),
        }
    }

    /// Returns whether work under these tags may touch the memory of `tag`. Memory outside regions may always be touched.
    pub(in super::super) fn use_of(&self, tag: &str) -> bool {
        match self {
            Tags::All => true,
            Tags::These(tags) => is_reserved(tag) || tags.contains(tag),
        }
    }

    /// Returns whether `tag` is in the set.
    pub(super) fn contains(&self, tag: &str) -> bool {
        match self {
            Tags::All => true,
            Tags::These(tags) => tags.contains(tag),
        }
    }

    /// Returns whether work under these tags touches any memory of `others`.
    pub(super) fn uses_any_of(&self, others: &Tags) -> bool {
        match others {
            Tags::All => true,
            Tags::These(tags) => tags.iter().any(|tag| self.use_of(tag)),
        }
    }
}

impl fmt::Display for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tags::All => f.write_str("everything"),
            Tags::These(tags) => {
                let quoted: Vec<String> = tags.iter().map(|tag| format!("'{tag}'")).collect();
                f.write_str(&quoted.join(", "))
            }
        }
    }
}
