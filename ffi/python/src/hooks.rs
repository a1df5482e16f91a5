//! Hooks: functions of the program that the library calls on threads of its own.
//!
//! A finalizing interpreter terminates every other thread that tries to attach to it, and a terminated thread with Rust frames aborts the
//! process. So the end of the interpreter waits for running hooks, and none begins after that ([`hooks_end`]).

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::{checked, text};

/// Number of running hooks.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Whether the interpreter is ending.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Process in which hooks run: a child has no threads of its parent.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Interval at which the end of the interpreter checks for running hooks.
const PAUSE: Duration = Duration::from_millis(2);

/// Functions to call before and after a move of memory.
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
    Call::here();
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

/// Calls a hook. An exception is reported as unraisable, and stops the move that the hook precedes. Does nothing once the interpreter ends.
///
/// # Safety
/// `event` is null or a text.
unsafe fn told(hooks: &Hooks, event: *const c_char, which: impl Fn(&Hooks) -> Option<&Py<PyAny>>) -> i32 {
    let Some(hook) = which(hooks) else { return 0 };
    let Some(_call) = Call::begin() else { return 0 };
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

/// Ends hooks because the interpreter ends: none begins from now on, and the call waits for running ones. In a forked child none runs.
#[pyfunction]
pub(crate) fn hooks_end(py: Python<'_>) -> PyResult<()> {
    ENDED.store(true, Ordering::SeqCst);
    while CALLS.load(Ordering::SeqCst) > 0 && PROCESS.load(Ordering::SeqCst) == std::process::id() {
        py.detach(|| std::thread::sleep(PAUSE));
        py.check_signals()?;
    }
    Ok(())
}

/// Guard of a running hook.
pub(crate) struct Call;

impl Call {
    /// Records that hooks run in this process.
    pub(crate) fn here() {
        PROCESS.store(std::process::id(), Ordering::SeqCst);
    }

    /// Begins a hook; `None` once the interpreter ends. The call is counted before the check, and [`hooks_end`] sets its flag before it
    /// counts, so that one of the two always sees the other.
    pub(crate) fn begin() -> Option<Call> {
        CALLS.fetch_add(1, Ordering::SeqCst);
        let call = Call;
        (!ENDED.load(Ordering::SeqCst)).then_some(call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, Ordering::SeqCst);
    }
}
