//! Pinned host memory, peer access and pointer attributes.

use std::ffi::c_void;

use cudarc::driver::sys;
use glake_units::Bytes;

use super::Cuda;
use super::api::Code;
use super::memory::length;
use crate::{Address, DeviceId, PointerAttributes, PointerKind, Result, Verb};

/// Flag `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
const PORTABLE: u32 = 1;

/// # Safety
/// As [`crate::Driver::host_register`].
pub(super) unsafe fn register(cuda: &Cuda, start: Address, size: Bytes) -> Result<()> {
    let (_guard, device) = cuda.make_some_current(Verb::HostRegister)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemHostRegister_v2(pointer(start), length(size), PORTABLE) }.at(
        Verb::HostRegister,
        start,
        size,
    )?;
    // Pinned for every context, but releasing this context would unpin it.
    if let Some(device) = device {
        cuda.slot(device)?.alive.registrations.more();
        cuda.registrations.made(start, device);
    }
    Ok(())
}

/// # Safety
/// As [`crate::Driver::host_unregister`].
pub(super) unsafe fn unregister(cuda: &Cuda, start: Address) -> Result<()> {
    let _guard = cuda.make_any_current(Verb::HostUnregister)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemHostUnregister(pointer(start)) }.at(Verb::HostUnregister, start, Bytes::ZERO)?;
    if let Some(device) = cuda.registrations.gone(&start) {
        cuda.slot(device)?.alive.registrations.less();
    }
    Ok(())
}

pub(super) fn can_access_peer(cuda: &Cuda, device: DeviceId, peer: DeviceId) -> Result<bool> {
    let verb = Verb::CanAccessPeer;
    let (from, to) = (cuda.device(device, verb)?, cuda.device(peer, verb)?);
    let mut can = 0;
    // SAFETY: an out-parameter of this frame and devices that exist.
    unsafe { cuda.api.cuDeviceCanAccessPeer(&mut can, from, to) }.of(verb)?;
    Ok(can != 0)
}

pub(super) fn enable_peer_access(cuda: &Cuda, device: DeviceId, peer: DeviceId) -> Result<()> {
    let verb = Verb::EnablePeerAccess;
    let _guard = cuda.make_current(device, verb)?;
    let (context, _hold) = cuda.keep(peer, verb)?;
    // SAFETY: a retained context, which is kept.
    match unsafe { cuda.api.cuCtxEnablePeerAccess(context, 0) } {
        Code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        code => code.of(verb),
    }
}

/// Queries all attributes in one call. For an unknown address the driver returns zeroes and no error.
pub(super) fn pointer_attributes(cuda: &Cuda, address: Address) -> Result<PointerAttributes> {
    let verb = Verb::PointerAttributes;
    let _guard = cuda.make_any_current(verb)?;
    let (mut memory, mut ordinal, mut managed) = (0_u32, -1_i32, 0_u32);
    let (mut start, mut size, mut number) = (0_u64, 0_usize, 0_u64);
    let mut names = [
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
        sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    ];
    let mut values: [*mut c_void; 6] = [
        (&raw mut memory).cast(),
        (&raw mut ordinal).cast(),
        (&raw mut start).cast(),
        (&raw mut size).cast(),
        (&raw mut number).cast(),
        (&raw mut managed).cast(),
    ];
    // SAFETY: six names and six places of this frame for their values: an unsigned, an int, an address, a size, a number of 64
    // bits and a boolean, for which CUDA writes an unsigned.
    unsafe { cuda.api.cuPointerGetAttributes(6, names.as_mut_ptr(), values.as_mut_ptr(), address.0) }.at(
        verb,
        address,
        Bytes::ZERO,
    )?;
    const HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
    const DEVICE: u32 = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
    let kind = match (memory, u32::try_from(ordinal)) {
        _ if managed != 0 => PointerKind::Managed,
        (DEVICE, Ok(device)) => {
            let mapped = cuda.mapped.known(number).map_or_else(|| is_mapped(cuda, address), Ok)?;
            cuda.mapped.remember(number, mapped);
            PointerKind::Device { device: DeviceId(device), mapped }
        }
        (HOST, _) => PointerKind::Pinned,
        _ => PointerKind::Pageable,
    };
    Ok(PointerAttributes { kind, range: (size > 0).then_some((Address(start), Bytes::new(size as u64))) })
}

/// Returns whether the memory has a handle; only memory mapped by `cuMemMap` does.
fn is_mapped(cuda: &Cuda, address: Address) -> Result<bool> {
    let verb = Verb::PointerAttributes;
    let mut handle = 0;
    // SAFETY: an out-parameter of this frame.
    match unsafe { cuda.api.cuMemRetainAllocationHandle(&mut handle, pointer(address)) } {
        Code(0) => {
            // SAFETY: the reference that has just been taken.
            unsafe { cuda.api.cuMemRelease(handle) }.of(verb)?;
            Ok(true)
        }
        // A lost context is an error; every other error means no.
        code => match code.of(verb) {
            Err(error) if error.is_sticky() => Err(error),
            _ => Ok(false),
        },
    }
}

fn pointer(address: Address) -> *mut c_void {
    std::ptr::without_provenance_mut(usize::try_from(address.0).unwrap_or(0))
}
