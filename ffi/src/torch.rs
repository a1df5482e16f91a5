//! The functions that torch's pluggable allocator needs, with torch's signatures.
//!
//! Functions that throw, or take C++ objects by value, are in the shim; a jump leads there, so that its exceptions pass no Rust frame and
//! its symbols need no export.

use std::arch::naked_asm;
use std::ffi::c_void;

use glake_runtime::process::{PoolId, ProcessError};

use crate::block::{address, pointer, stream};
use crate::status::Failure;
use crate::{guard, library};

/// `std::pair<unsigned long long, unsigned long long>` in its calling convention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PairId {
    /// First number, set if a capture created the pool.
    pub first: u64,
    /// Second number, set if the program created the pool.
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

/// Returns whether torch is loaded into this process.
pub(crate) fn is_loaded() -> bool {
    gmlake_shim_is_torch_loaded()
}

/// Jumps to a function of the shim with all arguments as the caller passed them.
macro_rules! jump {
    ($to:ident) => {
        #[cfg(target_arch = "x86_64")]
        naked_asm!("jmp {}", sym $to);
        #[cfg(target_arch = "aarch64")]
        naked_asm!("b {}", sym $to);
    };
}

/// Allocates a block for work on a stream of the device; null for size 0. On failure it throws std::runtime_error if torch is loaded, else
/// returns null; gmlake_last_error says why.
///
/// # Safety
/// The conditions of `glake_alloc` hold.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_malloc(size: usize, device: i32, stream: *mut c_void) -> *mut c_void {
    jump!(gmlake_shim_malloc);
}

/// Frees a block, identified by the pointer alone. A pointer that is no block is logged, and nothing is changed.
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

/// Opens the devices; throws as gmlake_malloc does. Calling it is optional.
///
/// # Safety
/// None needed; it is unsafe because it is a jump.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_init(device_count: i32) {
    jump!(gmlake_shim_init);
}

/// Releases all cached memory: waits for pending frees and releases free memory on all devices. Blocks stay. Throws as gmlake_malloc does.
/// Does nothing in a forked child and at the end of the process.
///
/// # Safety
/// The conditions of `gmlake_init` hold.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_reset() {
    jump!(gmlake_shim_reset);
}

/// Sets the fraction of a device's memory that may be reserved. Throws as gmlake_malloc does.
///
/// # Safety
/// The conditions of `gmlake_init` hold.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_memory_fraction(fraction: f64, device: i32) {
    jump!(gmlake_shim_memory_fraction);
}

/// Returns the start of the block that contains an address; null if there is none. `size`, if not null, receives the requested size.
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

/// Records a use of a block by a stream, as `glake_record_stream`; does nothing if no block of this library begins at the pointer.
///
/// # Safety
/// The conditions of `glake_record_stream` hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gmlake_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    if ptr.is_null() || !library::glake_started() {
        return;
    }
    guard::logged(|| {
        let process = match library::process() {
            Ok(process) => process,
            // In a forked child, or at the end of the process: no memory is handed out again.
            Err(failure) if failure.is_unavailable() => return Ok(()),
            Err(failure) => return Err(failure),
        };
        match process.record_stream(address(ptr), self::stream(stream)) {
            Ok(()) | Err(ProcessError::UnknownAddress { .. }) => Ok(()),
            Err(error) => Err(Failure::from(error)),
        }
    });
}

/// Routes allocations on streams that the filter accepts to a private pool. C++: `(int device, std::pair<unsigned long long, unsigned long
/// long> id, std::function<bool(CUstream_st *)> filter)`. Throws as gmlake_malloc does.
///
/// # Safety
/// The caller is C++ and passes these by value.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gmlake_begin_allocate_to_pool(device: i32, id: PairId, filter: *mut c_void) {
    jump!(gmlake_shim_begin_allocate_to_pool);
}

/// Ends the routing of gmlake_begin_allocate_to_pool; a failure is logged.
#[unsafe(no_mangle)]
pub extern "C" fn gmlake_end_allocate_to_pool(device: i32, id: PairId) {
    pooled(|process| process.pools().end(device.into(), id.into()));
}

/// Removes an owner of a private pool; a failure is logged.
#[unsafe(no_mangle)]
pub extern "C" fn gmlake_release_pool(device: i32, id: PairId) {
    pooled(|process| process.pools().release(device.into(), id.into()));
}

/// Runs a call that destructors make: does nothing in a forked child and at the end of the process.
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
