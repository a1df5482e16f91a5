//! Offloaded bytes of live blocks, each owned by a Python object.

use std::ffi::c_void;
use std::ptr;

use pyo3::prelude::*;

use crate::error::{OutOfMemoryError, UnsupportedError, checked};
use crate::library::symbols;
use crate::statistics::written;

pub(crate) fn pointer(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}

/// Offloaded bytes, released when the object is dropped.
#[pyclass(frozen, weakref)]
#[derive(Debug)]
pub(crate) struct Packed {
    id: u64,
    bytes: u64,
}

#[pymethods]
impl Packed {
    /// Number of offloaded bytes.
    #[getter]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn begin(&self, py: Python<'_>, stream: usize, address: usize) -> PyResult<()> {
        checked(py, |symbols| {
            // SAFETY: the library looks the address up; a stream is a name to it.
            unsafe { (symbols.glake_offload_reload)(self.id, pointer(address), pointer(stream)) }
        })
    }

    fn wait(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        // SAFETY: it takes a number; a stream is a name to the library.
        checked(py, |symbols| unsafe { (symbols.glake_offload_wait)(self.id, pointer(stream)) })
    }

    fn reload(&self, py: Python<'_>, stream: usize, address: usize) -> PyResult<()> {
        checked(py, |symbols| {
            // SAFETY: as of `begin`, and of `wait`.
            unsafe {
                match (symbols.glake_offload_reload)(self.id, pointer(address), pointer(stream)) {
                    0 => (symbols.glake_offload_wait)(self.id, pointer(stream)),
                    status => status,
                }
            }
        })
    }

    fn __repr__(&self) -> String {
        format!("<glake._glake.Packed {}: {} bytes>", self.id, self.bytes)
    }
}

impl Drop for Packed {
    /// Releases the bytes without waiting; does nothing in a forked child and at the end of the process.
    fn drop(&mut self) {
        if let Ok(symbols) = symbols() {
            // SAFETY: it takes a number. It is known, so that there is no failure to tell anybody of.
            unsafe { (symbols.glake_offload_release)(self.id) };
        }
    }
}

#[pyfunction]
pub(crate) fn offload_begin(
    py: Python<'_>,
    stream: usize,
    address: usize,
    bytes: u64,
) -> PyResult<Option<Packed>> {
    let mut id = 0;
    let begun = checked(py, |symbols| {
        // SAFETY: the library looks the address up; a stream is a name to it. It writes one number to a place that is ours.
        unsafe { (symbols.glake_offload_begin)(pointer(address), bytes, pointer(stream), &raw mut id) }
    });
    packed(py, begun, id, bytes)
}

/// Begins an offload like `offload_begin`, for a save of a site that is to be checked for changes.
pub(crate) fn begin_checked(
    py: Python<'_>,
    (stream, address, bytes): (usize, usize, u64),
    site: u64,
    save: u64,
) -> PyResult<Option<Packed>> {
    let mut id = 0;
    let begun = checked(py, |symbols| {
        let (pointer, stream) = (pointer(address), pointer(stream));
        // SAFETY: as of `offload_begin`.
        unsafe { (symbols.glake_offload_begin_checked)(pointer, bytes, stream, site, save, &raw mut id) }
    });
    packed(py, begun, id, bytes)
}

fn packed(py: Python<'_>, begun: PyResult<()>, id: u64, bytes: u64) -> PyResult<Option<Packed>> {
    match begun {
        Ok(()) => Ok(Some(Packed { id, bytes })),
        Err(error)
            if error.is_instance_of::<OutOfMemoryError>(py)
                || error.is_instance_of::<UnsupportedError>(py) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[pyfunction]
pub(crate) fn offload_prepare(py: Python<'_>, device: i32, bytes: u64) -> PyResult<()> {
    // SAFETY: it takes two numbers.
    checked(py, |symbols| unsafe { (symbols.glake_offload_prepare)(device, bytes) })
}

#[pyfunction]
pub(crate) fn offload_stats_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_offload_stats_json)() })
}

#[pyfunction]
pub(crate) fn is_private(py: Python<'_>, address: usize) -> PyResult<bool> {
    let mut is_private = false;
    // SAFETY: the library looks the address up; it writes one bool to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_is_private)(pointer(address), &raw mut is_private) })?;
    Ok(is_private)
}

#[pyfunction]
pub(crate) fn generation(py: Python<'_>, address: usize) -> PyResult<u64> {
    let mut generation = 0;
    // SAFETY: the library looks the address up; it writes one number to a place that is ours.
    checked(py, |symbols| unsafe { (symbols.glake_generation)(pointer(address), &raw mut generation) })?;
    Ok(generation)
}
