//! Access to pool memory from other devices and other processes.

use std::ffi::c_void;

use glake_device::Address;

use crate::block::{address, pointer};
use crate::status::Failure;
use crate::{guard, library};

/// Gives work on `device` access to the pool memory of `peer`, present and future.
#[unsafe(no_mangle)]
pub extern "C" fn glake_enable_peer(device: i32, peer: i32) -> i32 {
    guard::answer(|| Ok(library::process()?.sharing().enable_peer(device.into(), peer.into())?))
}

/// Exports the block that contains an address to other processes of the same user, until it is freed: a handle of at most `capacity` bytes,
/// its length, and the offset of the address in the opened memory. An opener maps whole extents and can therefore see other data in them. A
/// handle takes some tens of bytes and a few more for each extent; if `capacity` is too small, `length` receives the required size.
///
/// # Safety
/// `handle` is null or may be written for `capacity` bytes; `length` and `offset` are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_share(
    pointer: *const c_void,
    handle: *mut u8,
    capacity: usize,
    length: *mut usize,
    offset: *mut u64,
) -> i32 {
    guard::answer(|| {
        let (bytes, at) = library::process()?.sharing().share(address(pointer))?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(length, "length", bytes.len())? };
        // SAFETY: as above.
        unsafe { guard::put(offset, "offset", at.get())? };
        if handle.is_null() || capacity < bytes.len() {
            let wanted = bytes.len();
            return Err(Failure::invalid(format_args!(
                "the handle needs {wanted} bytes: capacity is {capacity}"
            )));
        }
        // SAFETY: not null, long enough, and the caller's to be written; the bytes are ours.
        unsafe { handle.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    })
}

/// Opens memory shared by another process, for work on a device and on devices with access to its pool memory. Opening the same handle
/// again gives the same address. The exporting process must live and keep the block until this call returns.
///
/// # Safety
/// `handle` is null or may be read for `length` bytes; `base` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_open_shared(
    handle: *const u8,
    length: usize,
    device: i32,
    base: *mut *mut c_void,
) -> i32 {
    guard::answer(|| {
        if handle.is_null() || base.is_null() {
            let which = if handle.is_null() { "handle" } else { "base" };
            return Err(Failure::invalid(format_args!("{which} is null")));
        }
        // SAFETY: not null, and the caller's promise.
        let handle = unsafe { std::slice::from_raw_parts(handle, length) };
        let opened = library::process()?.sharing().open(handle, device.into())?;
        // SAFETY: not null, and the caller's promise.
        unsafe { base.write(pointer(opened)) };
        Ok(())
    })
}

/// Closes one use of memory opened by `glake_open_shared`. The last close unmaps it after all work enqueued before; the call waits for that
/// work, or defers the unmapping while a capture is open. Does nothing in a forked child and at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_close_shared(base: *mut c_void) -> i32 {
    library::give_up(|process| Ok(process.sharing().close(Address(base as u64))?))
}
