//! Wrapper of every entry point: no panic escapes, and every failure keeps a text.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::status::Failure;
use glake_abi::GLAKE_OK;

/// Runs the body of an entry point and returns its status; a failure's text is kept for the thread.
#[inline]
pub(crate) fn answer(body: impl FnOnce() -> Result<(), Failure>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => GLAKE_OK,
        Ok(Err(failure)) => failure.keep(),
        Err(panic) => Failure::panicked(&*panic).keep(),
    }
}

/// Runs an entry point that returns a value; returns `otherwise` if it fails.
pub(crate) fn value<T>(otherwise: T, body: impl FnOnce() -> Result<T, Failure>) -> T {
    let mut value = otherwise;
    answer(|| {
        value = body()?;
        Ok(())
    });
    value
}

/// Runs an entry point that cannot report to its caller: a failure is also logged.
pub(crate) fn logged(body: impl FnOnce() -> Result<(), Failure>) {
    answer(|| body().inspect_err(Failure::log));
}

/// Writes a value to a required out-parameter.
///
/// # Errors
/// `to` is null.
#[inline]
pub(crate) unsafe fn put<T>(to: *mut T, name: &str, value: T) -> Result<(), Failure> {
    if to.is_null() {
        return Err(Failure::invalid(format_args!("{name} is null: it must point to where the answer goes")));
    }
    // SAFETY: not null, so the caller may be written to.
    unsafe { to.write(value) };
    Ok(())
}

/// Reads a text of the caller; `None` for null.
///
/// # Safety
/// `text` is null, or ends with a zero and is not changed while the answer lives.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<Option<&'a str>, Failure> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    match text.to_str() {
        Ok(text) => Ok(Some(text)),
        Err(error) => Err(Failure::invalid(format_args!("{name} is no UTF-8: {error}"))),
    }
}
