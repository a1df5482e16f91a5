//! Copies between the host and GPUs. Ownership and lifetime of the memory are managed by `glake._copies`.

use std::ffi::c_void;
use std::ptr;

use pyo3::prelude::*;

use crate::error::checked;
use crate::statistics::written;
use glake_abi::CopyBlock;

fn pointer(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}

#[pyfunction]
#[pyo3(signature = (to, from_, size, stream=0, flags=0))]
pub(crate) fn copy_async(
    py: Python<'_>,
    to: usize,
    from_: usize,
    size: usize,
    stream: usize,
    flags: u32,
) -> PyResult<u64> {
    let mut handle = 0;
    checked(py, |symbols| {
        let (to, from) = (pointer(to), pointer(from_).cast_const());
        // SAFETY: the caller keeps both ranges until the copy is done; it writes one number to a place that is ours.
        unsafe { (symbols.glake_copy_async)(to, from, size, pointer(stream), flags, &raw mut handle) }
    })?;
    Ok(handle)
}

#[pyfunction]
#[pyo3(signature = (blocks, stream=0, flags=0))]
pub(crate) fn copy_list(
    py: Python<'_>,
    blocks: Vec<(usize, usize, usize)>,
    stream: usize,
    flags: u32,
) -> PyResult<u64> {
    let mut handle = 0;
    checked(py, |symbols| {
        let block = |&(to, from, size): &(usize, usize, usize)| CopyBlock {
            to: pointer(to),
            from: pointer(from).cast_const(),
            size,
        };
        let blocks: Vec<CopyBlock> = blocks.iter().map(block).collect();
        let (list, count) = (blocks.as_ptr(), blocks.len());
        // SAFETY: the list lives to the end of the call, for which it is read; the rest is as of `copy_async`.
        unsafe { (symbols.glake_copy_list)(list, count, pointer(stream), flags, &raw mut handle) }
    })?;
    Ok(handle)
}

#[pyfunction]
#[pyo3(signature = (to, from_, size, stream=0, flags=0))]
pub(crate) fn copy_to_all(
    py: Python<'_>,
    to: Vec<usize>,
    from_: usize,
    size: usize,
    stream: usize,
    flags: u32,
) -> PyResult<u64> {
    let mut handle = 0;
    checked(py, |symbols| {
        let to: Vec<*mut c_void> = to.iter().copied().map(pointer).collect();
        let (list, count, from) = (to.as_ptr(), to.len(), pointer(from_).cast_const());
        // SAFETY: as of `copy_list`.
        unsafe {
            (symbols.glake_copy_to_all)(list, count, from, size, pointer(stream), flags, &raw mut handle)
        }
    })?;
    Ok(handle)
}

#[pyfunction]
pub(crate) fn copy_wait(py: Python<'_>, handle: u64) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_copy_wait)(handle) })
}

#[pyfunction]
pub(crate) fn copy_done(py: Python<'_>, handle: u64) -> PyResult<bool> {
    let mut done = false;
    // SAFETY: it writes one flag to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_copy_done)(handle, &raw mut done) })?;
    Ok(done)
}

#[pyfunction]
pub(crate) fn copy_drop(py: Python<'_>, handle: u64) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_copy_drop)(handle) })
}

#[pyfunction]
pub(crate) fn device_of(py: Python<'_>, address: usize) -> PyResult<Option<i32>> {
    let mut device = -1;
    // SAFETY: the address is a name to the library; it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_device_of)(pointer(address), &raw mut device) })?;
    Ok((device >= 0).then_some(device))
}

#[pyfunction]
#[pyo3(signature = (on=true))]
pub(crate) fn multi_path(py: Python<'_>, on: bool) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_multi_path)(on.into()) })
}

#[pyfunction]
pub(crate) fn copy_stats_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_copy_stats_json)() })
}

#[pyfunction]
pub(crate) fn stream_synchronize(py: Python<'_>, device: i32, stream: usize) -> PyResult<()> {
    // SAFETY: a stream is a name to the library.
    checked(py, |symbols| unsafe { (symbols.glake_stream_synchronize)(device, pointer(stream)) })
}

#[pyfunction]
pub(crate) fn host_register(py: Python<'_>, address: usize, size: usize) -> PyResult<()> {
    // SAFETY: the caller keeps the range mapped until it is unpinned.
    checked(py, |symbols| unsafe { (symbols.glake_host_register)(pointer(address), size) })
}

#[pyfunction]
pub(crate) fn host_unregister(py: Python<'_>, address: usize) -> PyResult<()> {
    // SAFETY: the library refuses what is not pinned; the caller's copies of it are done.
    checked(py, |symbols| unsafe { (symbols.glake_host_unregister)(pointer(address)) })
}
