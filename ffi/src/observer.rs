//! What a program can be told, and what it can do with other devices and processes.

use std::ffi::c_void;
use std::sync::Arc;

use glake_runtime::process::{OnShortage, Shortage};

use crate::status::{Failure, GLAKE_UNSUPPORTED};
use crate::{guard, library};

/// Told of a request that is about to be refused: the device's memory, and what nobody holds of it.
pub type ShortageObserver =
    Option<unsafe extern "C" fn(context: *mut c_void, device: i32, requested: u64, total: u64, free: u64)>;
/// Told of memory that was mapped for blocks, or is about to be unmapped.
pub type MappingObserver =
    Option<unsafe extern "C" fn(context: *mut c_void, device: i32, mapped: bool, address: u64, size: u64)>;

/// A context that observers may be called with on any thread.
#[derive(Clone, Copy)]
struct Context(*mut c_void);

// SAFETY: who gives an observer promises that it may be called on any thread.
unsafe impl Send for Context {}
// SAFETY: as above, and on several at once.
unsafe impl Sync for Context {}

impl Context {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Calls `observer` on the thread at hand before a request is refused for want of memory; null ends that. There is one.
///
/// # Safety
/// It may be called on any thread with this context for as long as the process lives, and calls nothing of the library
/// but `glake_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_on_out_of_memory(observer: ShortageObserver, context: *mut c_void) -> i32 {
    guard::answer(|| {
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
        library::process()?.on_shortage(observer);
        Ok(())
    })
}

/// Calls `observer` on the thread at hand for memory that was mapped or is about to be unmapped; null ends that. There
/// is one.
///
/// # Safety
/// As `glake_on_out_of_memory`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_on_mapping(_observer: MappingObserver, _context: *mut c_void) -> i32 {
    guard::answer(|| Err(Failure::new(GLAKE_UNSUPPORTED, "mappings cannot be observed yet")))
}

/// Lets work of `device` touch pool memory of `peer`, what there is and what comes.
#[unsafe(no_mangle)]
pub extern "C" fn glake_enable_peer(device: i32, peer: i32) -> i32 {
    guard::answer(|| Ok(library::process()?.enable_peer(device.into(), peer.into())?))
}

/// Makes the block that an address lies in available to other processes: a handle of at most `capacity` bytes, its
/// length, and where the address lies in what the handle opens.
///
/// # Safety
/// `handle` may be written for `capacity` bytes, `length` and `offset` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_share(
    _pointer: *const c_void,
    _handle: *mut u8,
    _capacity: usize,
    _length: *mut usize,
    _offset: *mut u64,
) -> i32 {
    guard::answer(|| Err(Failure::new(GLAKE_UNSUPPORTED, "sharing with other processes is not there yet")))
}

/// Opens what another process shared, for work of a device.
///
/// # Safety
/// `handle` may be read for `length` bytes, `base` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_open_shared(
    _handle: *const u8,
    _length: usize,
    _device: i32,
    _base: *mut *mut c_void,
) -> i32 {
    guard::answer(|| Err(Failure::new(GLAKE_UNSUPPORTED, "sharing with other processes is not there yet")))
}

/// Closes what `glake_open_shared` opened, when it was closed as often as opened.
#[unsafe(no_mangle)]
pub extern "C" fn glake_close_shared(_base: *mut c_void) -> i32 {
    guard::answer(|| Err(Failure::new(GLAKE_UNSUPPORTED, "sharing with other processes is not there yet")))
}
