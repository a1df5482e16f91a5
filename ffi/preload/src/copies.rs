//! The copy functions of CUDA's runtime and driver, for programs that link them or look up their functions. A program with a static runtime
//! does not call the runtime's symbols.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::engine::{FROM_GPU, NORMAL, NOW, PER_THREAD, TO_GPU, copy_functions};
use crate::real::Home;

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

copy_functions! {
    Home::Runtime;
    cudaMemcpy(kind: c_int): stream null_mut(), flags NOW | way(kind), asked crosses(kind);
    cudaMemcpy_ptds(kind: c_int): stream null_mut(), flags NOW | PER_THREAD | way(kind), asked crosses(kind);
    cudaMemcpyAsync(kind: c_int, stream: *mut c_void): stream stream, flags NORMAL | way(kind), asked crosses(kind);
    cudaMemcpyAsync_ptsz(kind: c_int, stream: *mut c_void): stream stream, flags PER_THREAD | way(kind), asked crosses(kind);
}

copy_functions! {
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
