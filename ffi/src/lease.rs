//! Leases: how much memory of each GPU an agent lets this process hold.

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

/// Sets how much memory of a device may be made for this process, beside its limit; `GLAKE_LEASE_NONE`: nothing but that bounds it, as
/// before the first call. Where more is made already nothing new is until it fits again. The sizes of extents, and what is stitched, are
/// as without one.
///
/// An allocation above it is told as `GLAKE_LEASE_GROW`, waits for a grant as long as `lease.grow_timeout_ms` says, and is out of memory
/// then. A refill comes back as grants come. A shrink lowers the lease by what it gives back.
#[unsafe(no_mangle)]
pub extern "C" fn glake_lease_set(device: i32, bytes: u64) -> i32 {
    guard::answer(|| {
        let lease = (bytes != GLAKE_LEASE_NONE).then_some(Bytes::new(bytes));
        Ok(library::process()?.leases().set(device.into(), lease)?)
    })
}

/// Adds to a device's lease. 0 says that there is none: whoever waits for a grant gives up.
///
/// `GLAKE_INVALID`: the device has no lease.
#[unsafe(no_mangle)]
pub extern "C" fn glake_lease_grant(device: i32, bytes: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.leases().grant(device.into(), Bytes::new(bytes))?))
}

/// Lowers a device's lease by what is not made of it, and by free memory, which goes back to the driver for it: by `bytes` at most, and
/// nothing is waited for. `given`, which may be null, is by how much.
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

/// Calls `watcher` for what is wanted of leases and given back; null ends that, also in a forked child and at the end of the process.
/// There is one; while there is none nothing is waited for. It is called on the thread at hand, with no lock held but those of regions
/// that move. It may call `glake_lease_set`, `_grant` and `_take`, and must neither move regions nor wait.
///
/// # Safety
/// It may be called on any thread with this context for as long as the process lives.
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
