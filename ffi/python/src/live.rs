//! Live ranges: the bytes of a block that an eviction has to keep.

use std::ffi::c_void;
use std::ptr;

use glake_abi::{ByteRange, LiveRangeAdd};
use pyo3::prelude::*;

use crate::error::checked;
use crate::hooks::Call;

#[pyfunction]
pub(crate) fn live_ranges(py: Python<'_>, address: usize, ranges: Option<Vec<(u64, u64)>>) -> PyResult<()> {
    let ranges: Option<Vec<ByteRange>> =
        ranges.map(|ranges| ranges.into_iter().map(|(start, end)| ByteRange { start, end }).collect());
    checked(py, |symbols| {
        let (first, count) =
            ranges.as_ref().map_or((ptr::null(), 0), |ranges| (ranges.as_ptr(), ranges.len()));
        // SAFETY: the list lives to the end of the call; an address is a name to the library.
        unsafe { (symbols.glake_live_ranges)(ptr::with_exposed_provenance(address), first, count) }
    })
}

#[pyfunction]
pub(crate) fn live_callback(py: Python<'_>, address: usize, callback: Py<PyAny>) -> PyResult<()> {
    Call::here();
    let context: *mut Py<PyAny> = Box::into_raw(Box::new(callback));
    let given = context.expose_provenance();
    // A failed call drops the function too.
    checked(py, |symbols| {
        let context = ptr::with_exposed_provenance_mut(given);
        // SAFETY: the context is what both functions take, until the second was called.
        unsafe {
            (symbols.glake_live_callback)(
                ptr::with_exposed_provenance(address),
                Some(answer),
                context,
                Some(dropped),
            )
        }
    })
}

/// Calls the program's function. An exception is reported as unraisable, and counts as no answer; the end of the interpreter too.
unsafe extern "C" fn answer(context: *mut c_void, add: LiveRangeAdd, into: *mut c_void) -> i32 {
    let (Some(add), Some(_call)) = (add, Call::begin()) else { return 1 };
    // SAFETY: the context is the function that `live_callback` gave, and was not dropped.
    let callback = unsafe { &*context.cast::<Py<PyAny>>() };
    let ranges = Python::try_attach(|py| {
        let ranges = callback.call0(py).and_then(|ranges| ranges.extract::<Vec<(u64, u64)>>(py));
        ranges.inspect_err(|error| error.clone_ref(py).write_unraisable(py, Some(callback.bind(py)))).ok()
    });
    let Some(Some(ranges)) = ranges else { return 1 };
    // SAFETY: the library gave both for this call.
    ranges.iter().for_each(|(start, end)| unsafe { add(into, *start, *end) });
    0
}

/// Drops the program's function; leaks it once the interpreter has ended.
unsafe extern "C" fn dropped(context: *mut c_void) {
    let context = context.cast::<Py<PyAny>>();
    // SAFETY: the context is what `live_callback` gave, and is given back once.
    let _ = Python::try_attach(|_| drop(unsafe { Box::from_raw(context) }));
}
