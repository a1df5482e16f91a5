//! Hooks: functions of the program that the library calls on threads of its own.
//!
//! While an interpreter ends it ends every other thread that comes back to it, and one with frames of Rust takes the process with
//! it. So the interpreter's end waits for the hooks that run, and none begins after that ([`hooks_end`]).

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::{checked, text};

/// Hooks that run.
static CALLS: AtomicUsize = AtomicUsize::new(0);
/// Whether the interpreter ends.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Where they run: the threads of a parent are not in its child.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// How long the interpreter's end waits before it looks again.
const PAUSE: Duration = Duration::from_millis(2);

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

/// Calls a hook. What it raises is reported, and stops what it was called before. Says nothing once the interpreter ends.
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

/// The interpreter ends: from now on no hook begins, and those that run are waited for. In a forked child none runs.
#[pyfunction]
pub(crate) fn hooks_end(py: Python<'_>) -> PyResult<()> {
    ENDED.store(true, Ordering::SeqCst);
    while CALLS.load(Ordering::SeqCst) > 0 && PROCESS.load(Ordering::SeqCst) == std::process::id() {
        py.detach(|| std::thread::sleep(PAUSE));
        py.check_signals()?;
    }
    Ok(())
}

/// A hook that runs.
pub(crate) struct Call;

impl Call {
    /// From now on hooks run in this process.
    pub(crate) fn here() {
        PROCESS.store(std::process::id(), Ordering::SeqCst);
    }

    /// None once the interpreter ends: who waits for calls has said so before it counts them, and a call counts itself before it
    /// looks.
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
