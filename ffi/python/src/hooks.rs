//! Functions of the program that the library calls: hooks of shrinks and refills, live callbacks, and the observer of failed requests.
//!
//! A finalizing interpreter terminates every other thread that tries to attach to it, and a terminated thread with Rust frames aborts the
//! process. So the end of the interpreter waits for running hooks, and none begins after that ([`hooks_end`]).

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use glake_abi::LiveRangeAdd;
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

#[pyfunction]
pub(crate) fn on_out_of_memory(py: Python<'_>, observer: Option<Py<PyAny>>) -> PyResult<()> {
    let (call, context) = match observer {
        // Kept for the life of the process: another thread may be inside the observer while it is replaced.
        Some(observer) => {
            let context: *mut Py<PyAny> = Box::leak(Box::new(observer));
            (Some(observe as _), context.expose_provenance())
        }
        None => (None, 0),
    };
    checked(py, |symbols| {
        // SAFETY: the context is what `observe` takes, and is never freed.
        unsafe { (symbols.glake_on_out_of_memory)(call, ptr::with_exposed_provenance_mut(context)) }
    })
}

/// Calls the observer on the requesting thread. Its exceptions are reported as unraisable: the request raises its own error. Does nothing
/// while the interpreter ends.
unsafe extern "C" fn observe(context: *mut c_void, device: i32, requested: u64, total: u64, free: u64) {
    // SAFETY: the context is the observer that `on_out_of_memory` leaked.
    let observer = unsafe { &*context.cast::<Py<PyAny>>() };
    let _ = Python::try_attach(|py| {
        if let Err(error) = observer.call1(py, (device, requested, total, free)) {
            error.write_unraisable(py, Some(observer.bind(py)));
        }
    });
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
