//! Room in a growing table, made before it is needed: by what may allocate, for what may not.

/// As many entries as a thread adds between two completion points, at most: 0.5 ms of hits.
const SPARE: usize = 8192;

/// Has a table reserve more, where it has little room left.
pub(crate) fn make(len: usize, capacity: usize, reserve: impl FnOnce(usize)) {
    if capacity - len < SPARE {
        reserve((len / 2).max(2 * SPARE));
    }
}
