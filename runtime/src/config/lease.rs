//! Configuration keys of leases, which limit the GPU memory that an agent lets this process hold.

use glake_units::Bytes;

use super::knob::{SIZE, knobs};

const MILLISECONDS: &str = "a whole number of milliseconds";

knobs! {
    /// Timeouts of lease requests.
    Lease as lease {
        [lease]
        /// Memory for growth that a refill requests in addition to what comes back.
        ///
        /// An agent grants it only from free memory and evicts nothing for it. Growth up to the grant needs no further request. 0: every
        /// new extent is requested by itself. Raise it if a worker's requests create much new memory; other workers cannot use the
        /// granted memory while this worker is awake.
        growth: Bytes = Bytes::gib(1), SIZE;
        /// Timeout for an allocation that exceeds the lease.
        ///
        /// 0: the allocation fails at once unless the request is granted within the call. Raise it if other workers take longer to release
        /// memory. A waiting process keeps the memory it holds.
        grow_timeout_ms: u64 = 2_000, MILLISECONDS;
        /// Timeout of a refill for its next grant. After it the refill is rolled back and fails.
        ///
        /// 0: the refill uses only memory that is already granted. Raise it if other workers keep their memory for longer.
        refill_timeout_ms: u64 = 30_000, MILLISECONDS;
    }
}
