//! What is offloaded of live blocks, and what that took.

use serde_json::Value;

use super::metrics;

metrics! {
    /// What is offloaded of live blocks, and what that took.
    #[derive(Copy, Default, Eq)]
    OffloadStats {
        /// What is offloaded and not released.
        entries: u64, Count, Stable;
        /// Its bytes in host memory.
        host_bytes: u64, Bytes, Stable;
        /// Pinned host memory that is kept for it, free or not.
        host_pinned_bytes: u64, Bytes, Stable;
        /// Copies to the host.
        copies_out: u64, Count, Stable;
        /// Their bytes.
        bytes_out: u64, Bytes, Stable;
        /// How long those ran that were timed and are over: while a copy waits for a program's work it does not run.
        busy_us_out: u64, Microseconds, Experimental;
        /// The bytes of those.
        timed_bytes_out: u64, Bytes, Experimental;
        /// Copies from the host.
        copies_in: u64, Count, Stable;
        /// Their bytes.
        bytes_in: u64, Bytes, Stable;
        /// How long those ran that were timed and are over.
        busy_us_in: u64, Microseconds, Experimental;
        /// The bytes of those.
        timed_bytes_in: u64, Bytes, Experimental;
        /// Times that there was no host memory, so that bytes stayed on their GPU.
        refused: u64, Count, Stable;
        /// Saves whose bytes were the same when their block was freed as when they were offloaded, of those that were checked.
        unchanged: u64, Count, Stable;
        /// Saves whose bytes were not, though nobody had said so: they were copied once more, and stay on their GPU from then on.
        changed: u64, Count, Stable;
        /// Saves that were to be checked and were not: they are checked another time.
        unchecked: u64, Count, Stable;
        /// Freed bytes of GPUs that copies still read: their stream's alone, behind a wait.
        held_bytes: u64, Bytes, Stable;
        /// Times that a stream took such bytes, and waits on its GPU for the copy.
        hold_waits: u64, Count, Stable;
    }
}

impl OffloadStats {
    /// One object.
    pub fn json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}
