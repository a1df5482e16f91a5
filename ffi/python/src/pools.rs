//! Private pools by torch's id, a pair of integers. Routing of allocations to them needs C++ and has no binding here.

use pyo3::prelude::*;

use crate::error::checked;

#[pyfunction]
pub(crate) fn pool_create(py: Python<'_>, device: i32, id: (u64, u64)) -> PyResult<()> {
    // SAFETY: it takes three numbers.
    checked(py, |symbols| unsafe { (symbols.glake_pool_create)(device, id.0, id.1) })
}

#[pyfunction]
pub(crate) fn pool_release(py: Python<'_>, device: i32, id: (u64, u64)) -> PyResult<()> {
    // SAFETY: it takes three numbers.
    checked(py, |symbols| unsafe { (symbols.glake_pool_release)(device, id.0, id.1) })
}

#[pyfunction]
pub(crate) fn pool_use_count(py: Python<'_>, device: i32, id: (u64, u64)) -> PyResult<i32> {
    let mut count = 0;
    // SAFETY: it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_pool_use_count)(device, id.0, id.1, &raw mut count) })?;
    Ok(count)
}

#[pyfunction]
pub(crate) fn pool_trim(py: Python<'_>, device: i32, id: (u64, u64)) -> PyResult<()> {
    // SAFETY: it takes three numbers.
    checked(py, |symbols| unsafe { (symbols.glake_pool_trim)(device, id.0, id.1) })
}
