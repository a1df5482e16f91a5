//! Statistics and snapshots as JSON written by the library, so that their keys have one source.

use std::ffi::c_char;

use pyo3::prelude::*;

use crate::error::{checked, raised, text};
use crate::library::{Functions, symbols};

#[pyfunction]
pub(crate) fn stats_json(py: Python<'_>, device: i32) -> PyResult<String> {
    // SAFETY: it takes a number; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_stats_json)(device) })
}

#[pyfunction]
pub(crate) fn snapshot_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_snapshot_json)() })
}

#[pyfunction]
pub(crate) fn reset_peaks(py: Python<'_>, device: i32) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_reset_peaks)(device) })
}

#[pyfunction]
pub(crate) fn reset_totals(py: Python<'_>, device: i32) -> PyResult<()> {
    // SAFETY: it takes a number.
    checked(py, |symbols| unsafe { (symbols.glake_reset_totals)(device) })
}

/// Returns a text that the library writes, and frees the original; raises if the library returns null.
pub(crate) fn written(
    py: Python<'_>,
    write: impl FnOnce(&Functions) -> *mut c_char + Send,
) -> PyResult<String> {
    let symbols = symbols()?;
    py.detach(|| {
        let given = taken(symbols, write(symbols));
        // SAFETY: it takes nothing and answers of this thread's last call that failed.
        given.ok_or_else(|| raised(symbols, unsafe { (symbols.glake_last_status)() }))
    })
}

/// Copies a text that the library wrote, and frees the original; `None` for null.
pub(crate) fn taken(symbols: &Functions, given: *mut c_char) -> Option<String> {
    // SAFETY: null or a text that the library wrote and gave to us.
    let copy = unsafe { text(given) }?;
    // SAFETY: ours, copied, and not used again.
    unsafe { (symbols.glake_string_free)(given) };
    Some(copy)
}
