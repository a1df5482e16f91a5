//! Budget of memory mappings for the simulators of this process.
//!
//! The kernel allows a process `vm.max_map_count` mappings; at the limit the next `malloc` fails and aborts the process. So all simulators
//! together stay below three quarters of it. The count is a static, because the limit is per process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Kernel default, used if the limit cannot be read.
const USUAL_LIMIT: u64 = 65_530;

/// Returns the number of mappings that all simulators of this process may have: three quarters of `vm.max_map_count`.
pub fn mapping_budget() -> u64 {
    limit()
}

fn limit() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(USUAL_LIMIT) / 4 * 3
    })
}

/// Reserves `count` mappings; returns false if the budget is exhausted.
pub(super) fn take(count: u64) -> bool {
    let left = |taken: u64| taken.checked_add(count).filter(|sum| *sum <= limit());
    TAKEN.fetch_update(Relaxed, Relaxed, left).is_ok()
}

/// Returns mappings to the budget.
pub(super) fn give(count: u64) {
    TAKEN.fetch_sub(count, Relaxed);
}
