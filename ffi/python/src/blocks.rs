//! Allocation, free and lookup of blocks.

use std::ffi::c_void;
use std::ptr;

use pyo3::prelude::*;

use crate::error::{InvalidError, checked};
use glake_abi::Block;

/// A Python integer as the pointer that C wants; it is never followed here.
fn pointer(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}

#[pyfunction]
#[pyo3(signature = (device, size, stream=0))]
pub(crate) fn alloc(py: Python<'_>, device: i32, size: usize, stream: usize) -> PyResult<usize> {
    let mut address = 0;
    checked(py, |symbols| {
        let mut block = ptr::null_mut();
        // SAFETY: it writes one pointer to a place that is ours.
        let status = unsafe { (symbols.glake_alloc)(device, size, pointer(stream), &raw mut block) };
        address = block.expose_provenance();
        status
    })?;
    Ok(address)
}

#[pyfunction]
pub(crate) fn free(py: Python<'_>, address: usize) -> PyResult<()> {
    // SAFETY: the library looks the address up and refuses one where no block begins.
    checked(py, |symbols| unsafe { (symbols.glake_free)(pointer(address)) })
}

#[pyfunction]
pub(crate) fn find(py: Python<'_>, address: usize) -> PyResult<Option<(usize, u64, u64, i32)>> {
    let mut found = (0, 0, 0, 0);
    let outcome = checked(py, |symbols| {
        let mut block = Block { base: ptr::null_mut(), size: 0, requested: 0, device: 0 };
        // SAFETY: it writes one block to a place that is ours.
        let status = unsafe { (symbols.glake_find)(pointer(address), &raw mut block) };
        found = (block.base.expose_provenance(), block.size, block.requested, block.device);
        status
    });
    match outcome {
        Ok(()) => Ok(Some(found)),
        Err(error) if error.is_instance_of::<InvalidError>(py) => Ok(None),
        Err(error) => Err(error),
    }
}

#[pyfunction]
pub(crate) fn record_stream(py: Python<'_>, address: usize, stream: usize) -> PyResult<()> {
    // SAFETY: the library looks the address up; a stream is a name to it.
    checked(py, |symbols| unsafe { (symbols.glake_record_stream)(pointer(address), pointer(stream)) })
}

#[pyfunction]
pub(crate) fn largest(py: Python<'_>, device: i32) -> PyResult<u64> {
    let mut bytes = 0;
    // SAFETY: it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_largest)(device, &raw mut bytes) })?;
    Ok(bytes)
}

#[pyfunction]
#[pyo3(signature = (device=-1, keep=0))]
pub(crate) fn trim(py: Python<'_>, device: i32, keep: u64) -> PyResult<u64> {
    let mut released = 0;
    // SAFETY: it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_trim)(device, keep, &raw mut released) })?;
    Ok(released)
}

#[pyfunction]
pub(crate) fn set_fraction(py: Python<'_>, device: i32, fraction: f64) -> PyResult<()> {
    // SAFETY: it takes two numbers.
    checked(py, |symbols| unsafe { (symbols.glake_set_fraction)(device, fraction) })
}

#[pyfunction]
pub(crate) fn fraction(py: Python<'_>, device: i32) -> PyResult<f64> {
    let mut fraction = 0.0;
    // SAFETY: it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_fraction)(device, &raw mut fraction) })?;
    Ok(fraction)
}
