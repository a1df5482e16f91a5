//! Membership of the node agent.

use std::ffi::c_char;
use std::ptr;

use pyo3::prelude::*;

use crate::error::{c_text, checked};
use crate::lease::let_others_run;

#[pyfunction]
pub(crate) fn join(py: Python<'_>, name: Option<String>, agent: Option<String>) -> PyResult<()> {
    let (name, agent) = (name.map(c_text).transpose()?, agent.map(c_text).transpose()?);
    let pointer = |text: &Option<std::ffi::CString>| text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
    let (first, second) = (pointer(&name).expose_provenance(), pointer(&agent).expose_provenance());
    checked(py, |symbols| {
        let text = ptr::with_exposed_provenance::<c_char>;
        // SAFETY: each is null or a text that lives until the call returns.
        unsafe { (symbols.glake_join)(text(first), text(second)) }
    })?;
    let_others_run(py)
}

#[pyfunction]
pub(crate) fn leave(py: Python<'_>) -> PyResult<()> {
    // SAFETY: it takes nothing.
    checked(py, |symbols| unsafe { (symbols.glake_leave)() })
}
