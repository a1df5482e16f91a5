//! Pinned host memory and streams, for programs without a CUDA runtime: on the simulated device there is no other way to create a stream.

use std::ffi::c_void;

use glake_runtime::process::ProcessError;
use glake_units::Bytes;

use crate::block::{address, stream};
use crate::status::Failure;
use crate::{guard, library};

/// Pins host memory, so that every GPU copies from and to it at full speed, for programs without a CUDA runtime. The range begins and ends
/// on page boundaries.
///
/// # Safety
/// The range belongs to the caller, and stays mapped until it is unpinned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_host_register(start: *mut c_void, size: usize) -> i32 {
    guard::answer(|| {
        let driver = library::process()?.driver();
        // SAFETY: the caller's promise.
        unsafe { driver.host_register(address(start), Bytes::new(size as u64)) }
            .map_err(ProcessError::from)?;
        Ok(())
    })
}

/// Unpins memory pinned by `glake_host_register`. Does nothing in a forked child and at the end of the process.
///
/// # Safety
/// No copy from or to it is in progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_host_unregister(start: *mut c_void) -> i32 {
    library::give_up(|process| {
        // SAFETY: the caller's promise.
        unsafe { process.driver().host_unregister(address(start)) }.map_err(ProcessError::from)?;
        Ok(())
    })
}

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
