//! Results of the C API: a status becomes an exception of `glake.errors` with the library's text, a C text becomes a Python one.

use std::ffi::{CStr, CString, c_char};

use pyo3::prelude::*;

use crate::library::{Functions, symbols};

pyo3::import_exception!(glake.errors, Error);
pyo3::import_exception!(glake.errors, InvalidError);
pyo3::import_exception!(glake.errors, OutOfMemoryError);
pyo3::import_exception!(glake.errors, UnsupportedError);

/// Makes one call without the GIL and raises the exception of its status.
pub(crate) fn checked(py: Python<'_>, call: impl FnOnce(&Functions) -> i32 + Send) -> PyResult<()> {
    let symbols = symbols()?;
    match py.detach(|| call(symbols)) {
        0 => {
            crate::lease::let_others_run_beside_an_agent(py, symbols);
            Ok(())
        }
        status => Err(raised(symbols, status)),
    }
}

/// Returns the exception of a status, with the text of this thread's last failed call. `glake.errors` has the table.
pub(crate) fn raised(symbols: &Functions, status: i32) -> PyErr {
    let text = last_error(symbols);
    Python::attach(|py| {
        let errors =
            py.import("glake.errors").and_then(|errors| errors.call_method1("of_status", (status, text)));
        errors.map_or_else(|error| error, PyErr::from_value)
    })
}

/// Returns the text of this thread's last failed call.
fn last_error(symbols: &Functions) -> String {
    // SAFETY: the answer is valid until this thread's next call that fails, and is copied at once.
    unsafe { text((symbols.gmlake_last_error)()) }.unwrap_or_else(|| "the library gave no reason".to_owned())
}

/// Copies a C text; `None` for null.
///
/// # Safety
/// `pointer` is null or points to a text that ends in a null byte.
pub(crate) unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise, and null is looked at first.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// Converts a text for C.
///
/// # Errors
/// The text contains a null byte.
pub(crate) fn c_text(text: String) -> PyResult<CString> {
    CString::new(text)
        .map_err(|error| InvalidError::new_err(format!("a text with a null byte in it: {error}")))
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
