//! Pinned host memory, for programs without a CUDA runtime.

use std::ffi::c_void;

use glake_runtime::process::ProcessError;
use glake_units::Bytes;

use crate::block::address;
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
