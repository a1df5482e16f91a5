//! Access to memory from other GPUs and other processes.

use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::checked;

/// Size of the buffer for a handle, more than any handle takes.
const CAPACITY: usize = 4096;

#[pyfunction]
pub(crate) fn enable_peer(py: Python<'_>, device: i32, peer: i32) -> PyResult<()> {
    // SAFETY: it takes two numbers.
    checked(py, |symbols| unsafe { (symbols.glake_enable_peer)(device, peer) })
}

#[pyfunction]
pub(crate) fn share(py: Python<'_>, address: usize) -> PyResult<(Bound<'_, PyBytes>, u64)> {
    let mut handle = [0; CAPACITY];
    let (mut length, mut offset) = (0, 0);
    checked(py, |symbols| {
        let block = ptr::with_exposed_provenance(address);
        // SAFETY: it writes at most `CAPACITY` bytes and two numbers, to places that are ours.
        unsafe {
            (symbols.glake_share)(block, handle.as_mut_ptr(), CAPACITY, &raw mut length, &raw mut offset)
        }
    })?;
    Ok((PyBytes::new(py, handle.get(..length).unwrap_or(&handle)), offset))
}

#[pyfunction]
pub(crate) fn open_shared(py: Python<'_>, handle: &[u8], device: i32) -> PyResult<usize> {
    let mut address = 0;
    checked(py, |symbols| {
        let mut base = ptr::null_mut();
        // SAFETY: it reads the handle, whose length goes with it, and writes one pointer to a place that is ours.
        let status =
            unsafe { (symbols.glake_open_shared)(handle.as_ptr(), handle.len(), device, &raw mut base) };
        address = base.expose_provenance();
        status
    })?;
    Ok(address)
}

#[pyfunction]
pub(crate) fn close_shared(py: Python<'_>, address: usize) -> PyResult<()> {
    // SAFETY: the library looks the address up and refuses one that it did not open.
    checked(py, |symbols| unsafe { (symbols.glake_close_shared)(ptr::with_exposed_provenance_mut(address)) })
}
