//! Streams, for programs without a CUDA runtime: on the simulated device there is no other way to create them.

use std::ffi::c_void;

use crate::block::stream;
use crate::status::Failure;
use crate::{guard, library};

/// Creates a stream of a device that does not synchronise with the legacy default stream.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_stream_create(device: i32, out: *mut *mut c_void) -> i32 {
    guard::answer(|| {
        if out.is_null() {
            return Err(Failure::invalid("out is null: it must point to where the answer goes"));
        }
        let made = library::process()?.streams().create(device.into())?;
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(made.0 as *mut c_void) };
        Ok(())
    })
}

/// Waits on the host until the work of a stream is complete. The device may be -1: that of the stream, or the calling thread's current
/// device for a default stream.
///
/// # Safety
/// `stream` is null or a stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_stream_synchronize(device: i32, stream: *mut c_void) -> i32 {
    guard::answer(|| {
        let device = (device != -1).then_some(i64::from(device));
        Ok(library::process()?.streams().synchronize(device, self::stream(stream))?)
    })
}

/// Destroys a stream of `glake_stream_create`; its work still completes. Does nothing in a forked child and at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_stream_destroy(device: i32, stream: *mut c_void) -> i32 {
    library::give_up(|process| Ok(process.streams().destroy(device.into(), self::stream(stream))?))
}
