//! Regions, shrink and refill. Asks and reports are the library's JSON: their fields have one source.

use std::ffi::{c_char, c_void};
use std::ptr;

use pyo3::prelude::*;

use crate::error::{c_text, checked, text};
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
pub(crate) fn region_enter(py: Python<'_>, tag: String) -> PyResult<()> {
    let tag = c_text(tag)?;
    // SAFETY: the text lives to the end of the call.
    checked(py, |symbols| unsafe { (symbols.glake_region_enter)(tag.as_ptr()) })
}

#[pyfunction]
pub(crate) fn region_leave(py: Python<'_>) -> PyResult<()> {
    // SAFETY: it takes nothing.
    checked(py, |symbols| unsafe { (symbols.glake_region_leave)() })
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
pub(crate) fn region_pin(py: Python<'_>, address: usize, pinned: bool) -> PyResult<()> {
    // SAFETY: an address is a name to the library.
    checked(py, |symbols| unsafe {
        (symbols.glake_region_pin)(ptr::with_exposed_provenance(address), pinned)
    })
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
pub(crate) fn left_json(py: Python<'_>) -> PyResult<String> {
    // SAFETY: it takes nothing; its answer is a text of ours to free, or null.
    written(py, |symbols| unsafe { (symbols.glake_left_json)() })
}

/// What is called before and after.
struct Hooks {
    before: Option<Py<PyAny>>,
    after: Option<Py<PyAny>>,
}

#[pyfunction]
pub(crate) fn hooks_set(
    py: Python<'_>,
    before: Option<Py<PyAny>>,
    after: Option<Py<PyAny>>,
    timeout_ms: i64,
) -> PyResult<()> {
    let first = before.is_some().then_some(call_before as _);
    let second = after.is_some().then_some(call_after as _);
    // Kept for the life of the process: another thread may be inside a hook while it is replaced.
    let context: *mut Hooks = Box::leak(Box::new(Hooks { before, after }));
    let context = context.expose_provenance();
    checked(py, |symbols| {
        let context = ptr::with_exposed_provenance_mut(context);
        // SAFETY: the context is what both calls take, and is never freed.
        unsafe { (symbols.glake_hooks_set)(first, second, context, timeout_ms) }
    })
}

unsafe extern "C" fn call_before(context: *mut c_void, event: *const c_char) -> i32 {
    // SAFETY: the context is what `hooks_set` leaked, the event a text that lives to the end of the call.
    unsafe { told(&*context.cast::<Hooks>(), event, |hooks| hooks.before.as_ref()) }
}

unsafe extern "C" fn call_after(context: *mut c_void, event: *const c_char) -> i32 {
    // SAFETY: as of `call_before`.
    unsafe { told(&*context.cast::<Hooks>(), event, |hooks| hooks.after.as_ref()) }
}

/// Calls a hook. What it raises is reported, and stops what it was called before. Says nothing while the interpreter ends.
///
/// # Safety
/// `event` is null or a text.
unsafe fn told(hooks: &Hooks, event: *const c_char, which: impl Fn(&Hooks) -> Option<&Py<PyAny>>) -> i32 {
    let Some(hook) = which(hooks) else { return 0 };
    // SAFETY: the caller's promise.
    let event = unsafe { text(event) }.unwrap_or_default();
    let raised = Python::try_attach(|py| match hook.call1(py, (event,)) {
        Ok(_) => false,
        Err(error) => {
            error.write_unraisable(py, Some(hook.bind(py)));
            true
        }
    });
    raised.unwrap_or(false).into()
}
