//! Spare capacity of growing tables, made ahead by calls that may allocate for calls that may not.

/// Maximum number of entries that a thread adds to a device's tables between two completion points: 0.5 ms of hits.
pub(crate) const OF_DEVICE: usize = 8192;
/// Maximum number of entries that a thread adds to one free list between two completion points; there may be thousands of lists.
pub(crate) const OF_LIST: usize = 256;

/// Reserves capacity in a table if fewer than `spare` entries fit.
pub(crate) fn make(len: usize, capacity: usize, spare: usize, reserve: impl FnOnce(usize)) {
    if capacity - len < spare {
        reserve((len / 2).max(2 * spare));
    }
}
