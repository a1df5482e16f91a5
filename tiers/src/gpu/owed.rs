//! The edges that streams were promised: each puts a stream behind what its new bytes were last used by.
//!
//! Invariant: the allocator counts an edge as made from the grant on. Until it is on the device (another thread is at it, or
//! it failed) every other grant to the stream makes one as well.

use std::sync::atomic::{AtomicUsize, Ordering};

use glake_stitch::{Grant, StreamKey};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// How many edges streams were promised that are not made. Changed under the allocator's lock when one is promised.
#[derive(Debug, Default)]
pub(super) struct OwedEdges {
    owed: Mutex<FxHashMap<StreamKey, usize>>,
    /// Over all streams; changed under the lock of `owed`.
    count: AtomicUsize,
}

impl OwedEdges {
    /// Notes the edge of a grant, or that it needs one since another is owed. To be called under the allocator's lock.
    #[inline]
    pub(super) fn owe(&self, mut grant: Grant, stream: StreamKey) -> Grant {
        if grant.edge || self.count.load(Ordering::Relaxed) > 0 {
            grant.edge = self.note(grant.edge, stream);
        }
        grant
    }

    /// Notes an edge that a grant needs by itself, or because another is owed to its stream; tells whether it does.
    #[cold]
    fn note(&self, needs: bool, stream: StreamKey) -> bool {
        let mut owed = self.owed.lock();
        let edge = needs || owed.contains_key(&stream);
        if edge {
            *owed.entry(stream).or_default() += 1;
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        edge
    }

    /// One edge of a stream is on the device.
    pub(super) fn made(&self, stream: StreamKey) {
        let mut owed = self.owed.lock();
        if let Some(left) = owed.get_mut(&stream) {
            *left -= 1;
            if *left == 0 {
                owed.remove(&stream);
            }
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_is_owed_an_edge_makes_one_for_every_grant() {
        let (owed, one, other) = (OwedEdges::default(), StreamKey(1), StreamKey(2));
        assert!(!owed.note(false, one));
        assert!(owed.note(true, one));
        assert!(owed.note(false, one) && !owed.note(false, other));
        owed.made(one);
        assert!(owed.note(false, one), "one of two is made");
        owed.made(one);
        owed.made(one);
        assert!(!owed.note(false, one));
        assert_eq!(owed.count.load(Ordering::Relaxed), 0);
        owed.made(other);
        assert_eq!(owed.count.load(Ordering::Relaxed), 0, "nothing was owed");
    }
}
