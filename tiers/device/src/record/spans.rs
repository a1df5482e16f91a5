//! Mapped ranges and their number of GPUs: calls name ranges, prices go by extent.

use std::collections::BTreeMap;

use crate::Verb;
use crate::decorate::Call;

/// Contents of a call's range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    /// Number of mapped extents.
    pub(super) extents: u64,
    /// Sum over the extents of the GPUs that may access each, counting at least one.
    pub(super) gpus: u64,
}

/// Mappings by start address.
#[derive(Debug, Default)]
pub(super) struct Spans {
    mapped: BTreeMap<u64, u64>,
}

impl Spans {
    /// Applies one call and returns the contents of its range.
    pub(super) fn follow(&mut self, call: &Call, done: bool) -> Span {
        let start = call.start.0;
        let range = start..start.saturating_add(call.size.get());
        match call.verb {
            Verb::Map if done => {
                self.mapped.insert(start, 0);
                Span { extents: 1, gpus: 1 }
            }
            Verb::SetAccess => {
                let mut span = Span::default();
                for (_, gpus) in self.mapped.range_mut(range) {
                    // Calls that name fewer GPUs remove no access, so the number never falls.
                    if done {
                        *gpus = (*gpus).max(u64::from(call.gpus));
                    }
                    span.extents += 1;
                    span.gpus += u64::from(call.gpus.max(1));
                }
                span
            }
            Verb::Unmap => {
                let starts: Vec<(u64, u64)> = self.mapped.range(range).map(|(s, g)| (*s, *g)).collect();
                let mut span = Span::default();
                for (start, gpus) in starts {
                    span.extents += 1;
                    span.gpus += gpus.max(1);
                    if done {
                        self.mapped.remove(&start);
                    }
                }
                span
            }
            _ => Span::default(),
        }
    }
}
