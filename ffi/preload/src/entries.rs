//! The functions by which a program looks up driver functions: the result is replaced if this library has that function.
//!
//! The real function answers first. Its answer stands if it found nothing, if it is not one of ours, or if the engine is not wanted.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::real::{Home, NOT_FOUND, Real, real};
use crate::{driver, engine, runtime};

/// Flag `CU_GET_PROC_ADDRESS_LEGACY_STREAM`, and `cudaEnableLegacyStream`.
const LEGACY: u64 = 1;
/// Flag `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`, and `cudaEnablePerThreadDefaultStream`.
const PER_THREAD: u64 = 2;

/// Version that introduced functions with a per-thread default stream.
const PER_THREAD_SINCE: c_int = 7000;

type FirstLookup = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
type Lookup = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
type Entry = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_ulonglong, *mut c_int) -> c_int;
type VersionedEntry =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_uint, c_ulonglong, *mut c_int) -> c_int;

/// Returns our function with this name and signature version.
fn ours(name: &CStr, version: c_int, per_thread: bool) -> Option<*mut c_void> {
    type Now = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int;
    type Later = unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void) -> c_int;
    let either = |since, legacy, own| match per_thread {
        true if version >= PER_THREAD_SINCE => Some(own),
        false if version >= since => Some(legacy),
        _ => None,
    };
    let now = |since, legacy: Now, own: Now| either(since, legacy as *mut c_void, own as *mut c_void);
    let later = |since, legacy: Later, own: Later| either(since, legacy as *mut c_void, own as *mut c_void);
    match name.to_bytes() {
        b"cuMemcpy" => now(4000, driver::cuMemcpy, driver::cuMemcpy_ptds),
        b"cuMemcpyHtoD" => now(3020, driver::cuMemcpyHtoD_v2, driver::cuMemcpyHtoD_v2_ptds),
        b"cuMemcpyDtoH" => now(3020, driver::cuMemcpyDtoH_v2, driver::cuMemcpyDtoH_v2_ptds),
        b"cuMemcpyAsync" => later(4000, driver::cuMemcpyAsync, driver::cuMemcpyAsync_ptsz),
        b"cuMemcpyHtoDAsync" => later(3020, driver::cuMemcpyHtoDAsync_v2, driver::cuMemcpyHtoDAsync_v2_ptsz),
        b"cuMemcpyDtoHAsync" => later(3020, driver::cuMemcpyDtoHAsync_v2, driver::cuMemcpyDtoHAsync_v2_ptsz),
        b"cuGetProcAddress" if version >= 12_000 => Some(cuGetProcAddress_v2 as Lookup as *mut c_void),
        b"cuGetProcAddress" if version >= 11_030 => Some(cuGetProcAddress as FirstLookup as *mut c_void),
        _ => None,
    }
}

/// Replaces the real function that was found by ours.
///
/// # Safety
/// `name` is null or ends with a zero; `found` is null or may be read and written.
unsafe fn replace(name: *const c_char, found: *mut *mut c_void, version: c_int, per_thread: bool) {
    // SAFETY: the caller's promise.
    if name.is_null() || found.is_null() || unsafe { *found }.is_null() {
        return;
    }
    // SAFETY: not null, and the caller's promise.
    let name = unsafe { CStr::from_ptr(name) };
    if let Some(ours) = ours(name, version, per_thread).filter(|_| engine::is_wanted()) {
        // SAFETY: the caller's promise.
        unsafe { *found = ours };
    }
}

/// Interposes `cuGetProcAddress`, the form before CUDA 12.
///
/// # Safety
/// The contract of the real function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    static REAL: Real<FirstLookup> = real!(Home::Driver, "cuGetProcAddress");
    let Some(real) = REAL.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, as they are.
    let status = unsafe { real(name, found, version, flags) };
    if status == 0 {
        // SAFETY: the real one has read the name and written what it found.
        unsafe { replace(name, found, version, flags & PER_THREAD != 0) };
    }
    status
}

/// Interposes `cuGetProcAddress_v2`, the form since CUDA 12.
///
/// # Safety
/// The contract of the real function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    flags: u64,
    outcome: *mut c_int,
) -> c_int {
    static REAL: Real<Lookup> = real!(Home::Driver, "cuGetProcAddress_v2");
    let Some(real) = REAL.get() else { return NOT_FOUND };
    // SAFETY: the caller's arguments, as they are.
    let status = unsafe { real(name, found, version, flags, outcome) };
    if status == 0 {
        // SAFETY: the real one has read the name and written what it found.
        unsafe { replace(name, found, version, flags & PER_THREAD != 0) };
    }
    status
}

/// Defines the runtime's lookup functions; `default` is the stream kind if the flags name none.
macro_rules! entries {
    ($($name:ident, $versioned:ident: default $default:expr;)*) => {$(
        #[doc = concat!("Interposes the real `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// The contract of the real function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            name: *const c_char,
            found: *mut *mut c_void,
            flags: c_ulonglong,
            outcome: *mut c_int,
        ) -> c_int {
            static REAL: Real<Entry> = real!(Home::Runtime, stringify!($name));
            let Some(real) = REAL.get() else { return NOT_FOUND };
            // SAFETY: the caller's arguments, as they are.
            let status = unsafe { real(name, found, flags, outcome) };
            if status == 0 {
                let per_thread = (flags | $default) & (LEGACY | PER_THREAD) == PER_THREAD;
                // SAFETY: the real one has read the name and written what it found.
                unsafe { replace(name, found, runtime::version(), per_thread) };
            }
            status
        }

        #[doc = concat!("Interposes the real `", stringify!($versioned), "`.")]
        ///
        /// # Safety
        /// The contract of the real function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $versioned(
            name: *const c_char,
            found: *mut *mut c_void,
            version: c_uint,
            flags: c_ulonglong,
            outcome: *mut c_int,
        ) -> c_int {
            static REAL: Real<VersionedEntry> = real!(Home::Runtime, stringify!($versioned));
            let Some(real) = REAL.get() else { return NOT_FOUND };
            // SAFETY: the caller's arguments, as they are.
            let status = unsafe { real(name, found, version, flags, outcome) };
            if status == 0 {
                let version = c_int::try_from(version).unwrap_or(c_int::MAX);
                let per_thread = (flags | $default) & (LEGACY | PER_THREAD) == PER_THREAD;
                // SAFETY: the real one has read the name and written what it found.
                unsafe { replace(name, found, version, per_thread) };
            }
            status
        }
    )*};
}

entries! {
    cudaGetDriverEntryPoint, cudaGetDriverEntryPointByVersion: default 0;
    cudaGetDriverEntryPoint_ptsz, cudaGetDriverEntryPointByVersion_ptsz: default PER_THREAD;
}
