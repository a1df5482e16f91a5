//! Membership of the node agent, and the watcher of leases.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_abi::{GLAKE_LEASE_GROW, GLAKE_LEASE_RETURNED, GLAKE_LEASE_WAITING, GLAKE_LEASE_WANT};
use pyo3::prelude::*;

use crate::bindings::{Pass, Prepare};
use crate::error::checked;
use crate::hooks::Call;
use crate::library::Functions;

/// Time for which a thread that waits for a grant with the GIL releases it: the granting thread may need it.
const PAUSE: Duration = Duration::from_millis(2);

/// Whether the program has set a watcher.
static WATCHED: AtomicBool = AtomicBool::new(false);
/// Whether the module's own watcher is set if the program has none.
static LETS_OTHERS_RUN: AtomicBool = AtomicBool::new(false);
/// Whether this process has decided about the module's own watcher.
static IS_SEEN_TO: AtomicBool = AtomicBool::new(false);

#[pyfunction]
pub(crate) fn join(py: Python<'_>, name: Option<String>, agent: Option<String>) -> PyResult<()> {
    let (name, agent) = (name.prepare()?, agent.prepare()?);
    // SAFETY: each is null or a text that lives until the call returns.
    checked(py, |symbols| unsafe { (symbols.glake_join)(name.pass(), agent.pass()) })?;
    let_others_run(py)
}

#[pyfunction]
pub(crate) fn lease_watch(py: Python<'_>, watcher: Option<Py<PyAny>>) -> PyResult<()> {
    WATCHED.store(watcher.is_some(), Ordering::Relaxed);
    let (call, context) = match watcher {
        // Kept for the life of the process: another thread may be inside it while it is replaced.
        Some(watcher) => {
            Call::here();
            let context: *mut Py<PyAny> = Box::leak(Box::new(watcher));
            (Some(told as _), context.expose_provenance())
        }
        // Threads that wait for an agent's grant still release the GIL.
        None if LETS_OTHERS_RUN.load(Ordering::Relaxed) => (Some(told as _), 0),
        None => (None, 0),
    };
    checked(py, |symbols| {
        // SAFETY: the context is what `told` takes, and is never freed.
        unsafe { (symbols.glake_lease_watch)(call, ptr::with_exposed_provenance_mut(context)) }
    })
}

/// Makes threads that wait for a grant release the GIL, whether or not the program watches leases.
pub(crate) fn let_others_run(py: Python<'_>) -> PyResult<()> {
    if LETS_OTHERS_RUN.swap(true, Ordering::Relaxed) || WATCHED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Call::here();
    // SAFETY: without a context `told` calls nothing of Python's.
    checked(py, |symbols| unsafe { (symbols.glake_lease_watch)(Some(told), ptr::null_mut()) })
}

/// Calls [`let_others_run`] once if the process joins an agent by itself: any later call may wait for a grant.
#[inline]
pub(crate) fn let_others_run_beside_an_agent(py: Python<'_>, symbols: &Functions) {
    if !IS_SEEN_TO.load(Ordering::Relaxed) {
        see_to_it(py, symbols);
    }
}

#[cold]
fn see_to_it(py: Python<'_>, symbols: &Functions) {
    // SAFETY: it takes nothing.
    if !unsafe { (symbols.glake_started)() } {
        return;
    }
    IS_SEEN_TO.store(true, Ordering::Relaxed);
    // SAFETY: as above.
    let joins = unsafe { (symbols.glake_joins_agent)() };
    if joins && let Err(error) = let_others_run(py) {
        error.write_unraisable(py, None);
    }
}

/// Calls the watcher. An exception is reported as unraisable. Does nothing once the interpreter ends.
unsafe extern "C" fn told(context: *mut c_void, event: i32, device: i32, bytes: u64) {
    let Some(_call) = Call::begin() else { return };
    let name = match event {
        GLAKE_LEASE_WANT => "want",
        GLAKE_LEASE_GROW => "grow",
        GLAKE_LEASE_RETURNED => "returned",
        GLAKE_LEASE_WAITING => {
            let _ = Python::try_attach(|py| py.detach(|| std::thread::sleep(PAUSE)));
            return;
        }
        _ => return,
    };
    if context.is_null() {
        return;
    }
    // SAFETY: the context is the watcher that `lease_watch` leaked.
    let watcher = unsafe { &*context.cast::<Py<PyAny>>() };
    let _ = Python::try_attach(|py| {
        if let Err(error) = watcher.call1(py, (name, device, bytes)) {
            error.write_unraisable(py, Some(watcher.bind(py)));
        }
    });
}
