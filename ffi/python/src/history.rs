//! Event history of snapshots, and the observer of failed requests.

use std::ffi::c_void;
use std::ptr;

use pyo3::prelude::*;

use crate::error::checked;
use crate::library::symbols;

#[pyfunction]
#[pyo3(signature = (enabled, max_entries=u64::MAX, clear=false))]
pub(crate) fn record_history(py: Python<'_>, enabled: bool, max_entries: u64, clear: bool) -> PyResult<()> {
    // SAFETY: it takes two flags and a number.
    checked(py, |symbols| unsafe { (symbols.glake_record_history)(enabled, max_entries, clear) })
}

#[pyfunction]
pub(crate) fn history_enabled() -> PyResult<bool> {
    // SAFETY: it takes nothing and reads a flag.
    Ok(unsafe { (symbols()?.glake_history_enabled)() })
}

#[pyfunction]
pub(crate) fn on_out_of_memory(py: Python<'_>, observer: Option<Py<PyAny>>) -> PyResult<()> {
    let (call, context) = match observer {
        // Kept for the life of the process: another thread may be inside the observer while it is replaced.
        Some(observer) => {
            let context: *mut Py<PyAny> = Box::leak(Box::new(observer));
            (Some(observe as _), context.expose_provenance())
        }
        None => (None, 0),
    };
    checked(py, |symbols| {
        // SAFETY: the context is what `observe` takes, and is never freed.
        unsafe { (symbols.glake_on_out_of_memory)(call, ptr::with_exposed_provenance_mut(context)) }
    })
}

/// Calls the observer on the requesting thread. Its exceptions are reported as unraisable: the request raises its own error. Does nothing
/// while the interpreter ends.
unsafe extern "C" fn observe(context: *mut c_void, device: i32, requested: u64, total: u64, free: u64) {
    // SAFETY: the context is the observer that `on_out_of_memory` leaked.
    let observer = unsafe { &*context.cast::<Py<PyAny>>() };
    let _ = Python::try_attach(|py| {
        if let Err(error) = observer.call1(py, (device, requested, total, free)) {
            error.write_unraisable(py, Some(observer.bind(py)));
        }
    });
}
