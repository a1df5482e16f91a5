//! Which regions somebody speaks of.

use std::collections::BTreeSet;
use std::fmt;

/// The tag of what lies in no region.
pub(in super::super) const DEFAULT: &str = "default";
/// How the tags of graphs' pools begin.
pub(in super::super) const GRAPH: &str = "graph ";

/// Regions by their tags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tags {
    /// Every region, what lies in none, and the pools of graphs.
    All,
    /// These.
    These(BTreeSet<String>),
}

/// Whether a tag is one of those that a program cannot define: its memory is in no region.
pub(in super::super) fn is_reserved(tag: &str) -> bool {
    tag == DEFAULT || tag.starts_with(GRAPH)
}

impl Tags {
    /// These; none: all.
    pub fn of<S: AsRef<str>>(tags: &[S]) -> Tags {
        match tags {
            [] => Tags::All,
            tags => Tags::These(tags.iter().map(|tag| tag.as_ref().to_owned()).collect()),
        }
    }

    /// Whether work under these touches the memory of a tag: that of no region it may always touch.
    pub(in super::super) fn use_of(&self, tag: &str) -> bool {
        match self {
            Tags::All => true,
            Tags::These(tags) => is_reserved(tag) || tags.contains(tag),
        }
    }

    /// Whether a tag is one of these.
    pub(super) fn contains(&self, tag: &str) -> bool {
        match self {
            Tags::All => true,
            Tags::These(tags) => tags.contains(tag),
        }
    }

    /// Whether work under these touches any memory of others.
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
