//! Leases: bounds, set by an agent, on the memory of each GPU that this process may hold.

use std::ffi::c_void;
use std::sync::Arc;

use glake_abi::{
    GLAKE_LEASE_GROW, GLAKE_LEASE_NONE, GLAKE_LEASE_RETURNED, GLAKE_LEASE_WAITING, GLAKE_LEASE_WANT,
    LeaseWatcher,
};
use glake_runtime::process::OnLease;
use glake_tiers::LeaseEvent;
use glake_units::Bytes;

use crate::context::Context;
use crate::status::Failure;
use crate::{guard, library};

/// Sets the lease of a device, a bound on the memory created for this process beside its limit; `GLAKE_LEASE_NONE`: no lease, as before the
/// first call. If more memory is held already, nothing is created until it fits again. Extent sizes and stitching are as without a lease.
///
/// An allocation above the lease is reported as `GLAKE_LEASE_GROW`, waits for a grant for up to `lease.grow_timeout_ms`, and then fails
/// with out of memory. A refill proceeds as grants arrive. A shrink lowers the lease by the bytes that it returns.
#[unsafe(no_mangle)]
pub extern "C" fn glake_lease_set(device: i32, bytes: u64) -> i32 {
    guard::answer(|| {
        let lease = (bytes != GLAKE_LEASE_NONE).then_some(Bytes::new(bytes));
        Ok(library::process()?.leases().set(device.into(), lease)?)
    })
}

/// Adds to a device's lease. 0 denies pending requests: threads that wait for a grant give up.
///
/// `GLAKE_INVALID`: the device has no lease.
#[unsafe(no_mangle)]
pub extern "C" fn glake_lease_grant(device: i32, bytes: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.leases().grant(device.into(), Bytes::new(bytes))?))
}

/// Lowers a device's lease by its unused part and by free memory, which is released for it: by at most `bytes`, without waiting. `given`,
/// if not null, receives the number of bytes.
///
/// # Safety
/// `given` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_lease_take(device: i32, bytes: u64, given: *mut u64) -> i32 {
    guard::answer(|| {
        let taken = library::process()?.leases().take(device.into(), Bytes::new(bytes))?;
        if !given.is_null() {
            // SAFETY: the caller's promise.
            unsafe { given.write(taken.get()) };
        }
        Ok(())
    })
}

/// Calls `watcher` for requests and returns of leases; null ends that, also in a forked child and at the end of the process. There is at
/// most one watcher; without one no call waits for grants. The watcher runs on the thread that caused the event, with no lock held except
/// those of regions being moved. It may call `glake_lease_set`, `_grant` and `_take`, and must neither move regions nor wait.
///
/// # Safety
/// The watcher may be called on any thread with this context for the life of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_lease_watch(watcher: LeaseWatcher, context: *mut c_void) -> i32 {
    library::give_up_if(watcher.is_none(), |process| {
        let context = Context(context);
        let watcher = watcher.map(|watcher| -> OnLease {
            Arc::new(move |event, device, bytes| {
                let device = i32::try_from(device.0).unwrap_or(i32::MAX);
                // SAFETY: the promise of who gave it.
                unsafe { watcher(context.get(), number_of(event), device, bytes.get()) };
            })
        });
        process.leases().watch(watcher);
        Ok::<(), Failure>(())
    })
}

fn number_of(event: LeaseEvent) -> i32 {
    match event {
        LeaseEvent::Want => GLAKE_LEASE_WANT,
        LeaseEvent::Grow => GLAKE_LEASE_GROW,
        LeaseEvent::Returned => GLAKE_LEASE_RETURNED,
        LeaseEvent::Waiting => GLAKE_LEASE_WAITING,
    }
}
