//! Pinned host memory for programs that have no CUDA runtime.

use std::ffi::c_void;

use glake_runtime::process::ProcessError;
use glake_units::Bytes;

use crate::block::address;
use crate::{guard, library};

/// Pins host memory, so that every GPU copies from and to it at full speed, for programs without a CUDA runtime. The range
/// begins and ends between pages.
///
/// # Safety
/// The range is the caller's, and stays mapped until it is unpinned.
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

/// Unpins what `glake_host_register` pinned. In a forked child and at the end of the process nothing is done.
///
/// # Safety
/// No copy from or to it is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_host_unregister(start: *mut c_void) -> i32 {
    library::give_up(|process| {
        // SAFETY: the caller's promise.
        unsafe { process.driver().host_unregister(address(start)) }.map_err(ProcessError::from)?;
        Ok(())
    })
}
