//! Ordering edges that grants require: each makes a stream wait for the last use of its new bytes.
//!
//! Invariant: the allocator counts an edge as recorded from the grant on. Until it is on the device (another thread is recording it, or
//! recording failed), every other grant to the stream records one as well.

use std::sync::atomic::{AtomicUsize, Ordering};

use glake_stitch::{Grant, StreamKey};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Number of required edges not recorded yet, by stream. Increased under the allocator's lock.
#[derive(Debug, Default)]
pub(super) struct OwedEdges {
    owed: Mutex<FxHashMap<StreamKey, usize>>,
    /// Total over all streams; changes under the lock of `owed`.
    count: AtomicUsize,
}

impl OwedEdges {
    /// Notes that a grant needs an edge, by itself or because its stream has an unrecorded one. Must be called under the allocator's lock.
    #[inline]
    pub(super) fn owe(&self, mut grant: Grant, stream: StreamKey) -> Grant {
        if grant.edge || self.count.load(Ordering::Relaxed) > 0 {
            grant.edge = self.note(grant.edge, stream);
        }
        grant
    }

    /// Notes an edge if the grant needs one or the stream has an unrecorded one. Returns whether it does.
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

    /// Notes that one edge of a stream has been recorded on the device.
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
