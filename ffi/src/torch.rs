//! The names that torch's pluggable allocator asks for, with torch's signatures.
//!
//! What throws, or takes C++ by value, is in the shim; a jump leads there, so that its exceptions pass no frame of ours
//! and its symbols need no export.

use std::arch::naked_asm;
use std::ffi::c_void;

use glake_runtime::process::{PoolId, ProcessError};

use crate::block::{address, pointer, stream};
use crate::status::Failure;
use crate::{guard, library};

/// `std::pair<unsigned long long, unsigned long long>`, which is passed as this is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PairId {
    /// Set where a capture made the pool.
    pub first: u64,
    /// Set where the program did.
    pub second: u64,
}

unsafe extern "C-unwind" {
    safe fn gmlake_shim_is_torch_loaded() -> bool;
    fn gmlake_shim_malloc();
    fn gmlake_shim_init();
    fn gmlake_shim_reset();
    fn gmlake_shim_memory_fraction();
    fn gmlake_shim_begin_allocate_to_pool();
}

/// Whether torch is loaded into this process.
pub(crate) fn is_loaded() -> bool {
    gmlake_shim_is_torch_loaded()
}

/// Jumps to a function of the shim with everything as the caller passed it.
macro_rules! jump {
    ($to:ident) => {
        #[cfg(target_arch = "x86_64")]
        naked_asm!("jmp {}", sym $to);
        #[cfg(target_arch = "aarch64")]
        naked_asm!("b {}", sym $to);
    };
}

/// Hands out a block for work on a stream of the device; null for size 0. On failure it throws std::runtime_error where
/// torch is loaded, else returns null; gmlake_last_error says why.
///
/// # Safety
/// As `glake_alloc`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_malloc(size: usize, device: i32, stream: *mut c_void) -> *mut c_void {
    jump!(gmlake_shim_malloc);
}

/// Takes a block back. Only the pointer is looked at. A pointer that is no block's is logged, and nothing is changed.
#[unsafe(no_mangle)]
pub extern "C" fn gmlake_free(pointer: *mut c_void, _size: usize, _device: i32, _stream: *mut c_void) {
    if pointer.is_null() || library::is_forked() {
        return;
    }
    guard::logged(|| {
        let address = address(pointer);
        match library::started_process()? {
            Some(process) => Ok(process.free(address)?),
            None => Err(ProcessError::UnknownAddress { address }.into()),
        }
    });
}

/// Opens the devices; throws as gmlake_malloc does. It need not be called.
///
/// # Safety
/// None needed; it is unsafe because it is a jump.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_init(device_count: i32) {
    jump!(gmlake_shim_init);
}

/// Empties the cache: waits for pending frees and releases what is free, on all devices. Blocks stay. Throws as
/// gmlake_malloc does; in a forked child and at the end of the process nothing is done.
///
/// # Safety
/// As `gmlake_init`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_reset() {
    jump!(gmlake_shim_reset);
}

/// Changes the part of a device's memory that may be reserved. Throws as gmlake_malloc does.
///
/// # Safety
/// As `gmlake_init`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_memory_fraction(fraction: f64, device: i32) {
    jump!(gmlake_shim_memory_fraction);
}

/// Where the block that an address lies in begins; null where there is none. `size`, where not null, gets what was asked
/// for.
///
/// # Safety
/// `size` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmlake_base_alloc(ptr: *mut c_void, size: *mut usize) -> *mut c_void {
    guard::value(std::ptr::null_mut(), || {
        let Some(found) = library::started_process()?.and_then(|process| process.find(address(ptr))) else {
            return Ok(std::ptr::null_mut());
        };
        if !size.is_null() {
            // SAFETY: not null, and the caller's promise.
            unsafe { size.write(usize::try_from(found.requested.get()).unwrap_or(usize::MAX)) };
        }
        Ok(pointer(found.address))
    })
}

/// As `glake_record_stream`; nothing is done where no block of ours begins at the pointer.
///
/// # Safety
/// As `glake_record_stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmlake_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    if ptr.is_null() || !library::glake_started() {
        return;
    }
    guard::logged(|| {
        let process = match library::process() {
            Ok(process) => process,
            // A child, or the end: nothing is handed out again.
            Err(failure) if failure.is_unavailable() => return Ok(()),
            Err(failure) => return Err(failure),
        };
        match process.record_stream(address(ptr), self::stream(stream)) {
            Ok(()) | Err(ProcessError::UnknownAddress { .. }) => Ok(()),
            Err(error) => Err(Failure::from(error)),
        }
    });
}

/// Sends allocations on streams that the filter takes to a private pool. C++: `(int device, std::pair<unsigned long long,
/// unsigned long long> id, std::function<bool(CUstream_st *)> filter)`. Throws as gmlake_malloc does.
///
/// # Safety
/// The caller is C++ and passes these by value.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_begin_allocate_to_pool(device: i32, id: PairId, filter: *mut c_void) {
    jump!(gmlake_shim_begin_allocate_to_pool);
}

/// Ends that; a failure is logged.
#[unsafe(no_mangle)]
pub extern "C" fn gmlake_end_allocate_to_pool(device: i32, id: PairId) {
    pooled(|process| process.pools().end(device.into(), id.into()));
}

/// One owner of a private pool less; a failure is logged.
#[unsafe(no_mangle)]
pub extern "C" fn gmlake_release_pool(device: i32, id: PairId) {
    pooled(|process| process.pools().release(device.into(), id.into()));
}

/// For destructors: in a forked child and at the end of the process nothing is done.
fn pooled(body: impl FnOnce(&glake_runtime::process::Process) -> Result<(), ProcessError>) {
    if library::is_over() {
        return;
    }
    guard::logged(|| match library::started_process()? {
        Some(process) => Ok(body(process)?),
        None => Err(Failure::invalid("nothing has started: no private pool was ever begun")),
    });
}

impl From<PairId> for PoolId {
    fn from(id: PairId) -> PoolId {
        PoolId(id.first, id.second)
    }
}
