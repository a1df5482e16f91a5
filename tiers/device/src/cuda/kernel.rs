//! Modules and kernels.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use cudarc::driver::sys;

use super::Cuda;
use super::code::Code;
use super::stream::raw;
use crate::{DeviceId, Kernel, LaunchRequest, Module, ModuleSource, Result, Stream, Verb};

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
