//! Virtual memory: address reservations, physical memory and access rights.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;
use glake_meter::{Meter as _, Nvml};
use glake_units::Bytes;

use super::Cuda;
use crate::{
    Access, Address, DeviceId, DeviceInfo, ExtentProperties, Handle, MemoryInfo, Place, Protection, Result,
    Verb,
};

const FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

pub(super) fn info(cuda: &Cuda, device: crate::DeviceId) -> Result<MemoryInfo> {
    if !cuda.has_context(device, Verb::MemoryInfo)? {
        // The driver's own query needs a context, which would take half a GiB.
        let described = cuda.describe(device)?;
        if let Some(free) = free_by_nvml(&described) {
            return Ok(MemoryInfo { free, total: described.memory });
        }
    }
    let _guard = cuda.make_current(device, Verb::MemoryInfo)?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: out-parameters of this frame.
    unsafe { cuda.api.cuMemGetInfo_v2(&mut free, &mut total) }.of(Verb::MemoryInfo)?;
    Ok(MemoryInfo { free: Bytes::new(free as u64), total: Bytes::new(total as u64) })
}

/// Returns a device's free memory without needing a context; `None` where NVML cannot tell, as for a MIG instance.
fn free_by_nvml(device: &DeviceInfo) -> Option<Bytes> {
    let memory = Nvml::open()?.read(device.pci.as_deref()?).ok()?;
    let is_whole = memory.total.get().abs_diff(device.memory.get()) <= device.memory.get() / 16;
    is_whole.then(|| memory.free())
}

pub(super) fn granularity(cuda: &Cuda, properties: ExtentProperties) -> Result<Bytes> {
    let _relaxed = cuda.relax(Verb::Granularity)?;
    let mut granularity = 0;
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: parameters of this frame.
    unsafe { cuda.api.cuMemGetAllocationGranularity(&mut granularity, &described(properties), minimum) }
        .of(Verb::Granularity)?;
    Ok(Bytes::new(granularity as u64))
}

pub(super) fn reserve(cuda: &Cuda, size: Bytes) -> Result<Address> {
    let _relaxed = cuda.relax(Verb::Reserve)?;
    let mut start = 0;
    // SAFETY: an out-parameter of this frame.
    unsafe { cuda.api.cuMemAddressReserve(&mut start, length(size), 0, 0, 0) }.at(
        Verb::Reserve,
        Address(0),
        size,
    )?;
    Ok(Address(start))
}

/// # Safety
/// As [`crate::Driver::unreserve`].
pub(super) unsafe fn unreserve(cuda: &Cuda, start: Address, size: Bytes) -> Result<()> {
    let _relaxed = cuda.relax(Verb::Unreserve)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemAddressFree(start.0, length(size)) }.at(Verb::Unreserve, start, size)
}

pub(super) fn create(cuda: &Cuda, size: Bytes, properties: ExtentProperties) -> Result<Handle> {
    let _guard = match properties.place {
        Place::Gpu(device) => cuda.make_current(device, Verb::Create)?,
        Place::HostNuma(_) => cuda.relax(Verb::Create)?,
    };
    let mut handle = 0;
    // SAFETY: parameters of this frame.
    unsafe { cuda.api.cuMemCreate(&mut handle, length(size), &described(properties), 0) }.at(
        Verb::Create,
        Address(0),
        size,
    )?;
    let handle = Handle(handle);
    if let Place::Gpu(device) = properties.place {
        cuda.slot(device)?.alive.extents.more();
        cuda.extents.made(handle, device);
    }
    Ok(handle)
}

/// # Safety
/// As [`crate::Driver::release`].
pub(super) unsafe fn release(cuda: &Cuda, handle: Handle) -> Result<()> {
    let _relaxed = cuda.relax(Verb::Release)?;
    // Before the driver can reuse the number.
    let of = cuda.extents.gone(&handle);
    // SAFETY: the caller's promise.
    let released = unsafe { cuda.api.cuMemRelease(handle.0) }.of(Verb::Release);
    if let Some(device) = of {
        match &released {
            Ok(()) => cuda.slot(device)?.alive.extents.less(),
            Err(_) => cuda.extents.made(handle, device),
        }
    }
    released
}

pub(super) fn alloc_plain(cuda: &Cuda, device: DeviceId, size: Bytes) -> Result<Address> {
    let _guard = cuda.make_current(device, Verb::AllocPlain)?;
    let mut start = 0;
    // SAFETY: an out-parameter of this frame.
    unsafe { cuda.api.cuMemAlloc_v2(&mut start, length(size)) }.at(Verb::AllocPlain, Address(0), size)?;
    // The memory would go with the context.
    cuda.slot(device)?.alive.extents.more();
    Ok(Address(start))
}

/// # Safety
/// As [`crate::Driver::free_plain`].
pub(super) unsafe fn free_plain(cuda: &Cuda, device: DeviceId, start: Address) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::FreePlain)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemFree_v2(start.0) }.at(Verb::FreePlain, start, Bytes::ZERO)?;
    cuda.slot(device)?.alive.extents.less();
    Ok(())
}

/// # Safety
/// As [`crate::Driver::map`].
pub(super) unsafe fn map(cuda: &Cuda, start: Address, size: Bytes, handle: Handle) -> Result<()> {
    let _relaxed = cuda.relax(Verb::Map)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemMap(start.0, length(size), 0, handle.0, 0) }.at(Verb::Map, start, size)
}

/// # Safety
/// As [`crate::Driver::unmap`].
pub(super) unsafe fn unmap(cuda: &Cuda, start: Address, size: Bytes) -> Result<()> {
    let _relaxed = cuda.relax(Verb::Unmap)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemUnmap(start.0, length(size)) }.at(Verb::Unmap, start, size)
}

/// # Safety
/// As [`crate::Driver::set_access`].
pub(super) unsafe fn set_access(cuda: &Cuda, start: Address, size: Bytes, access: &[Access]) -> Result<()> {
    if access.is_empty() {
        return Ok(());
    }
    let made = access.iter().find_map(|of| cuda.make_current_if_made(of.device, Verb::SetAccess).transpose());
    let _guard = match made {
        Some(made) => made?,
        // A device can be given access without having a context.
        None => cuda.make_any_current(Verb::SetAccess)?,
    };
    let described: Vec<sys::CUmemAccessDesc> = access
        .iter()
        .map(|access| {
            Ok(sys::CUmemAccessDesc {
                location: sys::CUmemLocation {
                    type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                    id: cuda.device(access.device, Verb::SetAccess)?,
                },
                flags: match access.protection {
                    Protection::None => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
                    Protection::Read => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
                    Protection::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                },
            })
        })
        .collect::<Result<_>>()?;
    // SAFETY: the caller's promise; the descriptions live until the call is over.
    unsafe { cuda.api.cuMemSetAccess(start.0, length(size), described.as_ptr(), described.len()) }.at(
        Verb::SetAccess,
        start,
        size,
    )
}

pub(super) fn export(cuda: &Cuda, handle: Handle) -> Result<OwnedFd> {
    let _relaxed = cuda.relax(Verb::Export)?;
    let mut fd: c_int = -1;
    // SAFETY: for this kind of handle, CUDA writes an int.
    unsafe { cuda.api.cuMemExportToShareableHandle((&raw mut fd).cast(), handle.0, FD, 0) }
        .of(Verb::Export)?;
    // SAFETY: a descriptor that has just been made for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn import(cuda: &Cuda, shared: BorrowedFd<'_>) -> Result<Handle> {
    let _relaxed = cuda.relax(Verb::Import)?;
    let mut handle = 0;
    // For this kind of handle, the pointer is the descriptor itself.
    let fd = shared.as_raw_fd() as usize as *mut c_void;
    // SAFETY: an out-parameter of this frame; the descriptor is open, and not taken.
    unsafe { cuda.api.cuMemImportFromShareableHandle(&mut handle, fd, FD) }.of(Verb::Import)?;
    Ok(Handle(handle))
}

/// Converts a size; it always fits, because every target with a CUDA driver is 64-bit.
pub(super) fn length(size: Bytes) -> usize {
    usize::try_from(size.get()).unwrap_or(usize::MAX)
}

fn described(properties: ExtentProperties) -> sys::CUmemAllocationProp {
    let (type_, id) = match properties.place {
        Place::Gpu(device) => (sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, device.0),
        Place::HostNuma(node) => (sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, node),
    };
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if properties.exportable {
            FD
        } else {
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
        location: sys::CUmemLocation { type_, id: c_int::try_from(id).unwrap_or(c_int::MAX) },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(properties.gpu_direct),
            usage: 0,
            reserved: [0; 4],
        },
    }
}
