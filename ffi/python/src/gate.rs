//! Uses of regions at the gate. Nesting of uses is managed by `glake._gate`.

use std::ffi::{CString, c_char};

use pyo3::prelude::*;

use crate::error::{c_text, checked};
use crate::library::symbols;
use crate::statistics::written;

#[pyfunction]
pub(crate) fn use_begin(
    py: Python<'_>,
    tags: Vec<String>,
    when_closed: u32,
    timeout_ms: i64,
) -> PyResult<u64> {
    let tags = texts(tags)?;
    let mut entered = 0;
    checked(py, |symbols| {
        let tags = pointers(&tags);
        // SAFETY: the list and its texts live to the end of the call; it writes one number to a place that is ours.
        unsafe {
            (symbols.glake_use_begin)(tags.as_ptr(), tags.len(), when_closed, timeout_ms, &raw mut entered)
        }
    })?;
    Ok(entered)
}

#[pyfunction]
pub(crate) fn gate_wait(
    py: Python<'_>,
    tags: Vec<String>,
    when_closed: u32,
    timeout_ms: i64,
) -> PyResult<()> {
    let tags = texts(tags)?;
    checked(py, |symbols| {
        let tags = pointers(&tags);
        // SAFETY: the list and its texts live to the end of the call.
        unsafe { (symbols.glake_gate_wait)(tags.as_ptr(), tags.len(), when_closed, timeout_ms) }
    })
}

#[pyfunction]
pub(crate) fn use_end(py: Python<'_>, entered: u64) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_use_end)(entered) })
}

#[pyfunction]
pub(crate) fn use_join(py: Python<'_>, entered: u64) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_use_join)(entered) })
}

#[pyfunction]
pub(crate) fn use_leave(py: Python<'_>, entered: u64) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_use_leave)(entered) })
}

#[pyfunction]
pub(crate) fn safepoint_wanted() -> PyResult<bool> {
    // SAFETY: it takes nothing, and is one load.
    Ok(unsafe { (symbols()?.glake_safepoint_wanted)() })
}

#[pyfunction]
pub(crate) fn use_wanted(entered: u64) -> PyResult<bool> {
    // SAFETY: it takes a number, and waits for nothing.
    Ok(unsafe { (symbols()?.glake_use_wanted)(entered) })
}

#[pyfunction]
pub(crate) fn gate_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_gate_json)() })
}

/// Converts texts for C.
pub(crate) fn texts(texts: Vec<String>) -> PyResult<Vec<CString>> {
    texts.into_iter().map(c_text).collect()
}

/// Returns pointers to the texts; the result has a valid address even for an empty list.
pub(crate) fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    let mut pointers = Vec::with_capacity(texts.len().max(1));
    pointers.extend(texts.iter().map(|text| text.as_ptr()));
    pointers
}
