//! Regions, shrink and refill. Requests and reports are the library's JSON, so that their fields have one source.

use std::ptr;

use pyo3::prelude::*;

use crate::error::{c_text, checked};
use crate::gate::{pointers, texts};
use crate::library::symbols;
use crate::statistics::{taken, written};

#[pyfunction]
pub(crate) fn region_define(py: Python<'_>, tag: String, policy: u32, host_copy: u32) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call.
    checked(py, |symbols| unsafe { (symbols.glake_region_define)(tag.as_ptr(), policy, host_copy) })
}

#[pyfunction]
pub(crate) fn region_push(py: Python<'_>, tag: String) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call.
    checked(py, |symbols| unsafe { (symbols.glake_region_push)(tag.as_ptr()) })
}

#[pyfunction]
pub(crate) fn region_pop(py: Python<'_>) -> PyResult<()> {
    // SAFETY: it takes nothing.
    checked(py, |symbols| unsafe { (symbols.glake_region_pop)() })
}

#[pyfunction]
#[pyo3(signature = (tag, strict=false))]
pub(crate) fn region_seal(py: Python<'_>, tag: String, strict: bool) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call.
    checked(py, |symbols| unsafe { (symbols.glake_region_seal)(tag.as_ptr(), strict) })
}

#[pyfunction]
pub(crate) fn region_unseal(py: Python<'_>, tag: String) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call.
    checked(py, |symbols| unsafe { (symbols.glake_region_unseal)(tag.as_ptr()) })
}

#[pyfunction]
pub(crate) fn region_prepare(py: Python<'_>, tag: String) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call.
    checked(py, |symbols| unsafe { (symbols.glake_region_prepare)(tag.as_ptr()) })
}

#[pyfunction]
pub(crate) fn region_fix(py: Python<'_>, address: usize, fixed: bool) -> PyResult<()> {
    // SAFETY: an address is a name to the library.
    checked(py, |symbols| unsafe { (symbols.glake_region_fix)(ptr::with_exposed_provenance(address), fixed) })
}

#[pyfunction]
pub(crate) fn region_wait(py: Python<'_>, tag: String, device: i32, stream: usize) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call; a stream is a name to the library.
    checked(py, |symbols| unsafe {
        (symbols.glake_region_wait)(tag.as_ptr(), device, ptr::with_exposed_provenance_mut(stream))
    })
}

#[pyfunction]
pub(crate) fn region_order(py: Python<'_>, tags: Vec<String>) -> PyResult<()> {
    let tags = texts(tags)?;
    checked(py, |symbols| {
        let tags = pointers(&tags);
        // SAFETY: the list and its texts live to the end of the call.
        unsafe { (symbols.glake_region_order)(tags.as_ptr(), tags.len()) }
    })
}

#[pyfunction]
pub(crate) fn region_of(py: Python<'_>, address: usize) -> PyResult<Option<String>> {
    let symbols = symbols()?;
    Ok(py.detach(|| {
        // SAFETY: an address is a name to the library; its answer is a text of ours to free, or null.
        let given = unsafe { (symbols.glake_region_of)(ptr::with_exposed_provenance(address)) };
        taken(symbols, given)
    }))
}

#[pyfunction]
pub(crate) fn regions_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_regions_json)() })
}

#[pyfunction]
pub(crate) fn shrink(py: Python<'_>, request: String) -> PyResult<String> {
    let request = c_text(request)?;
    // SAFETY: the text lives to the end of the call; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_shrink)(request.as_ptr()) })
}

#[pyfunction]
pub(crate) fn refill(py: Python<'_>, request: String) -> PyResult<String> {
    let request = c_text(request)?;
    // SAFETY: as of `shrink`.
    written(py, |symbols| unsafe { (symbols.glake_refill)(request.as_ptr()) })
}

#[pyfunction]
pub(crate) fn memory_usage_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_memory_usage_json)() })
}
