//! Parts of live blocks without memory.

use std::ptr;

use pyo3::prelude::*;

use crate::error::checked;

#[pyfunction]
pub(crate) fn decommit(py: Python<'_>, address: usize, bytes: u64) -> PyResult<u64> {
    let mut freed = 0;
    checked(py, |symbols| {
        // SAFETY: it writes one number to a place that is ours; an address is a name to the library.
        unsafe { (symbols.glake_decommit)(ptr::with_exposed_provenance(address), bytes, &raw mut freed) }
    })?;
    Ok(freed)
}

#[pyfunction]
pub(crate) fn commit(py: Python<'_>, address: usize, bytes: u64) -> PyResult<u64> {
    let mut made = 0;
    checked(py, |symbols| {
        // SAFETY: as above.
        unsafe { (symbols.glake_commit)(ptr::with_exposed_provenance(address), bytes, &raw mut made) }
    })?;
    Ok(made)
}
