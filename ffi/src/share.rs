//! Other devices, and other processes.

use std::ffi::c_void;

use glake_device::Address;

use crate::block::{address, pointer};
use crate::status::Failure;
use crate::{guard, library};

/// Lets work of `device` touch pool memory of `peer`, what there is and what comes.
#[unsafe(no_mangle)]
pub extern "C" fn glake_enable_peer(device: i32, peer: i32) -> i32 {
    guard::answer(|| Ok(library::process()?.sharing().enable_peer(device.into(), peer.into())?))
}

/// Makes the block that an address lies in available to other processes of the same user, until it is freed: a handle of
/// at most `capacity` bytes, its length, and where the address lies in what the handle opens. An opener maps whole extents
/// and so can see what else lies in them. A handle is some tens of bytes and a few more for each extent; where `capacity`
/// is too small, `length` says what is needed.
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

/// Opens what another process shared, for work of a device and of those that may touch its pool memory. The same handle
/// opened again gives the same address. The process that shared it must live and keep the block until this returns.
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

/// Ends one use of what `glake_open_shared` opened. With the last it is unmapped, after all work that was enqueued before;
/// that is waited for, or put off while a capture is open. In a forked child and at the end of the process nothing is done.
#[unsafe(no_mangle)]
pub extern "C" fn glake_close_shared(base: *mut c_void) -> i32 {
    library::give_up(|process| Ok(process.sharing().close(Address(base as u64))?))
}
