//! Room in a growing table, made before it is needed: by what may allocate, for what may not.

/// As many entries as a thread adds to a device's tables between two completion points, at most: 0.5 ms of hits.
pub(crate) const OF_DEVICE: usize = 8192;
/// The same for what each free list has of its own, of which there may be thousands.
pub(crate) const OF_LIST: usize = 256;

/// Has a table reserve more, where it has room for fewer than `spare` entries.
pub(crate) fn make(len: usize, capacity: usize, spare: usize, reserve: impl FnOnce(usize)) {
    if capacity - len < spare {
        reserve((len / 2).max(2 * spare));
    }
}
