//! How many mappings the simulators of this process may still make.
//!
//! The kernel allows a process `vm.max_map_count` mappings, and at the limit the next `malloc` fails and aborts the
//! process. So all simulators together keep to three quarters of it, and the count is a static: the limit is the
//! process's too.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

static TAKEN: AtomicU64 = AtomicU64::new(0);

/// Used where the limit cannot be read; the kernel's default.
const USUAL_LIMIT: u64 = 65_530;

/// How many mappings all simulators of this process can make together: three quarters of `vm.max_map_count`.
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

/// Takes `count` mappings; false where there are no more.
pub(super) fn take(count: u64) -> bool {
    let left = |taken: u64| taken.checked_add(count).filter(|sum| *sum <= limit());
    TAKEN.fetch_update(Relaxed, Relaxed, left).is_ok()
}

/// Gives mappings back.
pub(super) fn give(count: u64) {
    TAKEN.fetch_sub(count, Relaxed);
}
