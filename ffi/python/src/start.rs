//! Configuration and start of the process's pools.

use std::ptr;

use pyo3::prelude::*;

use crate::error::{c_text, checked, text};
use crate::library::symbols;

#[pyfunction]
pub(crate) fn version() -> PyResult<String> {
    // SAFETY: a constant text.
    Ok(unsafe { text((symbols()?.glake_version)()) }.unwrap_or_default())
}

#[pyfunction]
pub(crate) fn abi() -> PyResult<u32> {
    // SAFETY: it takes nothing and answers a constant.
    Ok(unsafe { (symbols()?.glake_abi)() })
}

#[pyfunction]
#[pyo3(signature = (preset=None, file=None, overrides=None))]
pub(crate) fn configure(
    py: Python<'_>,
    preset: Option<String>,
    file: Option<String>,
    overrides: Option<String>,
) -> PyResult<()> {
    let [preset, file, overrides] = [preset, file, overrides].map(|text| text.map(c_text).transpose());
    let (preset, file, overrides) = (preset?, file?, overrides?);
    checked(py, |symbols| {
        let [preset, file, overrides] = [&preset, &file, &overrides]
            .map(|text| text.as_deref().map_or(ptr::null(), |text| text.as_ptr()));
        // SAFETY: each is null or a text that lives to the end of the call.
        unsafe { (symbols.glake_configure)(preset, file, overrides) }
    })
}

#[pyfunction]
pub(crate) fn start(py: Python<'_>) -> PyResult<()> {
    // SAFETY: it takes nothing.
    checked(py, |symbols| unsafe { (symbols.glake_start)() })
}

#[pyfunction]
pub(crate) fn started() -> PyResult<bool> {
    // SAFETY: it takes nothing and reads a flag.
    Ok(unsafe { (symbols()?.glake_started)() })
}

#[pyfunction]
pub(crate) fn device_count(py: Python<'_>) -> PyResult<i32> {
    let mut count = 0;
    // SAFETY: it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_device_count)(&raw mut count) })?;
    Ok(count)
}

#[pyfunction]
pub(crate) fn device_name() -> PyResult<Option<String>> {
    // SAFETY: null or a text that the library keeps.
    Ok(unsafe { text((symbols()?.glake_device_name)()) })
}
