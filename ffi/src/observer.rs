//! Observers: callbacks for failed requests and for mappings.

use std::ffi::c_void;
use std::sync::Arc;

use glake_abi::{MappingObserver, ShortageObserver};
use glake_runtime::process::{OnMapping, OnShortage, Shortage};

use crate::context::Context;
use crate::library;

/// Calls `observer`, on the requesting thread, before a request is refused for lack of memory; null ends that, also in a forked child and
/// at the end of the process. There is at most one observer.
///
/// # Safety
/// The observer may be called on any thread with this context for the life of the process, and calls no function of the library except
/// `glake_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_on_out_of_memory(observer: ShortageObserver, context: *mut c_void) -> i32 {
    library::give_up_if(observer.is_none(), |process| {
        let context = Context(context);
        let observer = observer.map(|observer| -> OnShortage {
            Arc::new(move |shortage: &Shortage| {
                let device = i32::try_from(shortage.device.0).unwrap_or(i32::MAX);
                let (wanted, total, free) =
                    (shortage.wanted.get(), shortage.total.get(), shortage.free.get());
                // SAFETY: the promise of who gave it.
                unsafe { observer(context.get(), device, wanted, total, free) };
            })
        });
        process.observers().on_shortage(observer);
        Ok(())
    })
}

/// Calls `observer`, on the thread at hand, for memory that was mapped or is about to be unmapped; null ends that. There is at most one
/// observer.
///
/// # Safety
/// As for `glake_on_out_of_memory`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_on_mapping(observer: MappingObserver, context: *mut c_void) -> i32 {
    library::give_up_if(observer.is_none(), |process| {
        let context = Context(context);
        let observer = observer.map(|observer| -> OnMapping {
            Arc::new(move |device, mapped, address, size| {
                let device = i32::try_from(device.0).unwrap_or(i32::MAX);
                // SAFETY: the promise of who gave it.
                unsafe { observer(context.get(), device, mapped, address.0, size.get()) };
            })
        });
        process.observers().on_mapping(observer);
        Ok(())
    })
}
