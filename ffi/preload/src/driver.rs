//! The copy functions of CUDA's driver, for programs that link it or look up its functions.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::copy::copies;
use crate::engine::{FROM_GPU, NORMAL, NOW, PER_THREAD, TO_GPU};
use crate::real::{Home, Real, real};

copies! {
    Home::Driver;
    cuMemcpy(): stream null_mut(), flags NOW, asked true;
    cuMemcpy_ptds(): stream null_mut(), flags NOW | PER_THREAD, asked true;
    cuMemcpyAsync(stream: *mut c_void): stream stream, flags NORMAL, asked true;
    cuMemcpyAsync_ptsz(stream: *mut c_void): stream stream, flags PER_THREAD, asked true;
    cuMemcpyHtoD_v2(): stream null_mut(), flags NOW | TO_GPU, asked true;
    cuMemcpyHtoD_v2_ptds(): stream null_mut(), flags NOW | PER_THREAD | TO_GPU, asked true;
    cuMemcpyHtoDAsync_v2(stream: *mut c_void): stream stream, flags NORMAL | TO_GPU, asked true;
    cuMemcpyHtoDAsync_v2_ptsz(stream: *mut c_void): stream stream, flags PER_THREAD | TO_GPU, asked true;
    cuMemcpyDtoH_v2(): stream null_mut(), flags NOW | FROM_GPU, asked true;
    cuMemcpyDtoH_v2_ptds(): stream null_mut(), flags NOW | PER_THREAD | FROM_GPU, asked true;
    cuMemcpyDtoHAsync_v2(stream: *mut c_void): stream stream, flags NORMAL | FROM_GPU, asked true;
    cuMemcpyDtoHAsync_v2_ptsz(stream: *mut c_void): stream stream, flags PER_THREAD | FROM_GPU, asked true;
}

/// Returns whether the calling thread has a context; false without a driver.
pub(crate) fn has_context() -> bool {
    type Current = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
    static REAL: Real<Current> = real!(Home::Driver, "cuCtxGetCurrent");
    let Some(real) = REAL.get() else { return true };
    let mut context = null_mut();
    // SAFETY: an out-parameter of this frame.
    let status = unsafe { real(&mut context) };
    status == 0 && !context.is_null()
}
