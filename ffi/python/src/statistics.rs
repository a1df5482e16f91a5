//! Statistics and snapshots, as the JSON that the library writes: its keys have one source.

use std::ffi::c_char;

use pyo3::prelude::*;

use crate::blocks::fraction;
use crate::error::{Error, checked, last_error, text};
use crate::library::{Symbols, symbols};
use crate::start::device_count;

#[pyfunction]
pub(crate) fn stats_json(py: Python<'_>, device: i32) -> PyResult<String> {
    // SAFETY: it takes a number; its answer is a text of ours to free, or null.
    let written = written(py, |symbols| unsafe { (symbols.glake_stats_json)(device) })?;
    written.or_else(|why| {
        // A null has no status: another question about the device does.
        fraction(py, device)?;
        Err(Error::new_err(why))
    })
}

#[pyfunction]
pub(crate) fn snapshot_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    let written = written(py, |symbols| unsafe { (symbols.glake_snapshot_json)() })?;
    written.or_else(|why| {
        device_count(py)?;
        Err(Error::new_err(why))
    })
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

/// Takes a text that the library wrote for us, and gives it back to it. The library's reason where it wrote none.
pub(crate) fn written(
    py: Python<'_>,
    write: impl FnOnce(&Symbols) -> *mut c_char + Send,
) -> PyResult<Result<String, String>> {
    let symbols = symbols()?;
    Ok(py.detach(|| {
        let pointer = write(symbols);
        // SAFETY: null or a text that the library wrote and gave to us.
        let copy = unsafe { text(pointer) }.ok_or_else(|| last_error(symbols));
        if !pointer.is_null() {
            // SAFETY: ours, copied, and not used again.
            unsafe { (symbols.glake_string_free)(pointer) };
        }
        copy
    }))
}
