//! The knobs of leases: how much memory of a GPU an agent lets this process hold.

use glake_units::Bytes;

use super::knob::{SIZE, knobs};

const MILLISECONDS: &str = "a whole number of milliseconds";

knobs! {
    /// What is asked of whoever gives leases, and how long that is waited for.
    Lease as lease {
        [lease]
        /// How much more than what comes back is asked for when memory comes back.
        ///
        /// Under an agent it comes from free memory alone: nothing of others is evicted for it. Growth up to what was granted waits for
        /// nobody. 0: every new extent above what came back is asked for by itself. Larger, where a worker's requests make much new
        /// memory; it is kept from others as long as this worker is awake.
        growth: Bytes = Bytes::gib(1), SIZE;
        /// How long an allocation above the lease waits for a grant.
        ///
        /// 0: it is out of memory at once, but for what is granted within the call. Larger, where others take longer to give memory back;
        /// whoever waits holds what it has.
        grow_timeout_ms: u64 = 2_000, MILLISECONDS;
        /// How long a refill waits for the next grant before it gives back what it brought, and fails.
        ///
        /// 0: it takes what is granted already. Larger, where others are not given up for longer than that.
        refill_timeout_ms: u64 = 30_000, MILLISECONDS;
    }
}
