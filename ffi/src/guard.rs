//! Wrapper of every entry point: no panic escapes, and every failure keeps a text. With the context pointers of callbacks.

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use glake_abi::GLAKE_OK;

use crate::status::Failure;

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
///
/// # Safety
/// `to` is null or may be written.
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

/// Pointer that is passed to the program's callback on any thread, and never dereferenced here.
#[derive(Clone, Copy)]
pub(crate) struct Context(pub(crate) *mut c_void);

// SAFETY: who gives a function and its context promises that it may be called on any thread.
unsafe impl Send for Context {}
// SAFETY: as above, and on several at once.
unsafe impl Sync for Context {}

impl Context {
    /// Returns the pointer itself. A method, so that closures capture the whole value and not the bare pointer.
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}
