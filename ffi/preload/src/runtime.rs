//! The copy functions of CUDA's runtime, if it is a shared library: programs with a static runtime do not call these symbols.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::copy::copies;
use crate::engine::{FROM_GPU, NORMAL, NOW, PER_THREAD, TO_GPU};
use crate::real::{Home, Real, real};

/// Returns whether a `cudaMemcpyKind` may cross a link: host to device, device to host, and the default kind.
#[inline]
fn crosses(kind: c_int) -> bool {
    matches!(kind, 1 | 2 | 4)
}

/// Returns the flag for the direction of a kind: the real function refuses the opposite direction, or uses the actual one.
#[inline]
fn way(kind: c_int) -> u32 {
    match kind {
        1 => TO_GPU,
        2 => FROM_GPU,
        _ => NORMAL,
    }
}

copies! {
    Home::Runtime;
    cudaMemcpy(kind: c_int): stream null_mut(), flags NOW | way(kind), asked crosses(kind);
    cudaMemcpy_ptds(kind: c_int): stream null_mut(), flags NOW | PER_THREAD | way(kind), asked crosses(kind);
    cudaMemcpyAsync(kind: c_int, stream: *mut c_void): stream stream, flags NORMAL | way(kind), asked crosses(kind);
    cudaMemcpyAsync_ptsz(kind: c_int, stream: *mut c_void): stream stream, flags PER_THREAD | way(kind), asked crosses(kind);
}

/// Returns the version of the loaded runtime; 0 if unknown.
pub(crate) fn version() -> c_int {
    type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
    static REAL: Real<Version> = real!(Home::Runtime, "cudaRuntimeGetVersion");
    static KNOWN: AtomicI32 = AtomicI32::new(0);
    let mut version = KNOWN.load(Ordering::Relaxed);
    if let (0, Some(real)) = (version, REAL.get()) {
        // SAFETY: an out-parameter of this frame.
        unsafe { real(&mut version) };
        KNOWN.store(version, Ordering::Relaxed);
    }
    version
}
