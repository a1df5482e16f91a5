//! Work on streams: copies, fills and kernel launches, one driver call each; modules of kernels.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys;
use glake_units::Bytes;

use super::api::Code;
use super::memory::length;
use super::stream::raw;
use super::{Cuda, stream};
use crate::{
    Address, CaptureState, CopyDevices, CopyRequest, DeviceId, DriverError, Kernel, LaunchRequest, Module,
    ModuleSource, Result, Stream, Verb,
};

/// # Safety
/// As [`crate::Driver::copy`].
pub(super) unsafe fn copy(cuda: &Cuda, device: DeviceId, request: CopyRequest, stream: Stream) -> Result<()> {
    let _guard = cuda.make_current_as_is(device, Verb::Copy)?;
    // SAFETY: the caller's promise.
    unsafe { copy_here(cuda, request, stream, Verb::Copy) }
}

/// Enqueues a copy in the calling thread's current context, as a program's own call would; without one, in the stream's context.
///
/// # Safety
/// As [`crate::Driver::copy_on`].
pub(super) unsafe fn copy_on(cuda: &Cuda, request: CopyRequest, stream: Stream) -> Result<()> {
    if cuda.current(Verb::Copy)?.is_null() {
        let device = stream::device(cuda, stream)?;
        // SAFETY: the caller's promise.
        return unsafe { copy(cuda, device, request, stream) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_here(cuda, request, stream, Verb::Copy) }
}

/// # Safety
/// As [`crate::Driver::copy_between`].
pub(super) unsafe fn copy_between(
    cuda: &Cuda,
    device: DeviceId,
    request: CopyRequest,
    owners: CopyDevices,
    stream: Stream,
) -> Result<()> {
    let verb = Verb::CopyBetween;
    let _guard = cuda.make_current_as_is(device, verb)?;
    let ((to, _to), (from, _from)) = (cuda.keep(owners.to, verb)?, cuda.keep(owners.from, verb)?);
    let CopyRequest { to: target, from: source, size } = request;
    // SAFETY: the caller's promise; both contexts are kept during the call.
    unsafe { cuda.api.cuMemcpyPeerAsync(target.0, to, source.0, from, length(size), raw(stream)) }
        .at(verb, target, size)
}

/// Enqueues several copies. Uses one driver call where allowed: CUDA 13 or later, not on the legacy stream and not during a capture.
///
/// # Safety
/// As [`crate::Driver::copy_batch`].
pub(super) unsafe fn copy_batch(
    cuda: &Cuda,
    device: DeviceId,
    requests: &[CopyRequest],
    stream: Stream,
) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::CopyBatch)?;
    let requests = || requests.iter().filter(|request| !request.size.is_zero());
    let count = requests().count();
    if count > 1
        && !stream::is_legacy(stream)
        && stream::capture_here(cuda, stream, Verb::CopyBatch)? == CaptureState::None
    {
        let mut to: Vec<u64> = requests().map(|request| request.to.0).collect();
        let mut from: Vec<u64> = requests().map(|request| request.from.0).collect();
        let mut sizes: Vec<usize> = requests().map(|request| length(request.size)).collect();
        let nowhere =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first = 0;
        // SAFETY: the caller's promise; all three lists have `count` entries, and one attribute applies
        // to all copies from the first on.
        let code = unsafe {
            cuda.api.cuMemcpyBatchAsync_v2(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                sizes.as_mut_ptr(),
                count,
                &mut attributes,
                &mut first,
                1,
                raw(stream),
            )
        };
        match code.of(Verb::CopyBatch) {
            Err(DriverError::Unsupported { .. }) => {}
            outcome => return outcome,
        }
    }
    for request in requests() {
        // SAFETY: the caller's promise.
        unsafe { copy_here(cuda, *request, stream, Verb::CopyBatch)? };
    }
    Ok(())
}

/// # Safety
/// As [`crate::Driver::fill`].
pub(super) unsafe fn fill(
    cuda: &Cuda,
    device: DeviceId,
    start: Address,
    size: Bytes,
    byte: u8,
    stream: Stream,
) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::Fill)?;
    if size.is_zero() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemsetD8Async(start.0, byte, length(size), raw(stream)) }.at(Verb::Fill, start, size)
}

/// Copies on a private stream: the legacy stream would wait for every other stream and would break a capture.
pub(super) fn read_now(cuda: &Cuda, device: DeviceId, from: Address, into: &mut [u8]) -> Result<()> {
    let verb = Verb::ReadNow;
    let _guard = cuda.make_current(device, verb)?;
    if into.is_empty() {
        return Ok(());
    }
    let (own, _hold) = cuda.own_stream(device, verb)?;
    let stream = raw(own);
    let size = Bytes::new(into.len() as u64);
    // SAFETY: the slice is writable and outlives the wait below; the call takes no address of the host for one of
    // a device, so that memory which is not mapped is an error.
    unsafe { cuda.api.cuMemcpyDtoHAsync_v2(into.as_mut_ptr().cast(), from.0, into.len(), stream) }
        .at(verb, from, size)?;
    // SAFETY: a stream of ours.
    unsafe { cuda.api.cuStreamSynchronize(stream) }.at(verb, from, size)
}

/// # Safety
/// As [`crate::Driver::write_now`].
pub(super) unsafe fn write_now(cuda: &Cuda, device: DeviceId, to: Address, bytes: &[u8]) -> Result<()> {
    let verb = Verb::WriteNow;
    let _guard = cuda.make_current(device, verb)?;
    if bytes.is_empty() {
        return Ok(());
    }
    let (own, _hold) = cuda.own_stream(device, verb)?;
    let stream = raw(own);
    let size = Bytes::new(bytes.len() as u64);
    // SAFETY: the caller's promise; the slice outlives the wait below.
    unsafe { cuda.api.cuMemcpyHtoDAsync_v2(to.0, bytes.as_ptr().cast(), bytes.len(), stream) }
        .at(verb, to, size)?;
    // SAFETY: a stream of ours.
    unsafe { cuda.api.cuStreamSynchronize(stream) }.at(verb, to, size)
}

/// # Safety
/// As [`crate::Driver::copy`].
unsafe fn copy_here(cuda: &Cuda, request: CopyRequest, stream: Stream, verb: Verb) -> Result<()> {
    let CopyRequest { to, from, size } = request;
    if size.is_zero() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuMemcpyAsync(to.0, from.0, length(size), raw(stream)) }.at(verb, to, size)
}

fn raw_module(module: Module) -> sys::CUmodule {
    module.0 as usize as sys::CUmodule
}

pub(super) fn load(cuda: &Cuda, device: DeviceId, source: &ModuleSource) -> Result<Module> {
    let _guard = cuda.make_current(device, Verb::ModuleLoad)?;
    let ptx = terminated(source.ptx, Verb::ModuleLoad)?;
    let mut module = null_mut();
    // SAFETY: an out-parameter of this frame; PTX that ends with a zero.
    unsafe { cuda.api.cuModuleLoadData(&mut module, ptx.as_ptr().cast()) }.of(Verb::ModuleLoad)?;
    cuda.slot(device)?.alive.modules.more();
    Ok(Module(module as u64))
}

/// # Safety
/// As [`crate::Driver::module_unload`].
pub(super) unsafe fn unload(cuda: &Cuda, device: DeviceId, module: Module) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::ModuleUnload)?;
    // SAFETY: the caller's promise.
    unsafe { cuda.api.cuModuleUnload(raw_module(module)) }.of(Verb::ModuleUnload)?;
    cuda.slot(device)?.alive.modules.less();
    Ok(())
}

pub(super) fn find(cuda: &Cuda, device: DeviceId, module: Module, name: &str) -> Result<Kernel> {
    let _guard = cuda.make_current(device, Verb::KernelFind)?;
    let name = terminated(name, Verb::KernelFind)?;
    let mut kernel = null_mut();
    // SAFETY: an out-parameter of this frame; the module is the caller's to name.
    unsafe { cuda.api.cuModuleGetFunction(&mut kernel, raw_module(module), name.as_ptr()) }
        .of(Verb::KernelFind)?;
    Ok(Kernel(kernel as u64))
}

/// # Safety
/// As [`crate::Driver::launch`].
pub(super) unsafe fn launch(
    cuda: &Cuda,
    device: DeviceId,
    request: &LaunchRequest<'_>,
    stream: Stream,
) -> Result<()> {
    let _guard = cuda.make_current(device, Verb::Launch)?;
    let kernel = request.kernel.0 as usize as sys::CUfunction;
    let ([grid_x, grid_y, grid_z], [x, y, z]) = (request.grid, request.block);
    let mut arguments: Vec<*mut c_void> =
        request.arguments.iter().map(|argument| std::ptr::from_ref(argument).cast_mut().cast()).collect();
    let (list, extra) = (arguments.as_mut_ptr(), null_mut());
    // SAFETY: the caller's promise; CUDA reads the arguments during the call.
    unsafe { cuda.api.cuLaunchKernel(kernel, grid_x, grid_y, grid_z, x, y, z, 0, raw(stream), list, extra) }
        .of(Verb::Launch)
}

fn terminated(text: &str, verb: Verb) -> Result<CString> {
    CString::new(text).or_else(|_| Code::INVALID_VALUE.of(verb).map(|()| CString::default()))
}
