//! What `cudaGetLastError` owes a thread whose copy was taken and failed: the runtime was not called, so it knows nothing.
//!
//! A later failure of the runtime's own takes the place of the one that is kept, as natively.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::real::{Home, NOT_FOUND, Real, real};

type Ask = unsafe extern "C" fn() -> c_int;

static TAKE: Real<Ask> = real!(Home::Runtime, "cudaGetLastError");
static LOOK: Real<Ask> = real!(Home::Runtime, "cudaPeekAtLastError");

/// Whether there ever was one: programs ask after every launch.
static EVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    static KEPT: Cell<c_int> = const { Cell::new(0) };
}

/// Keeps a failure for the calling thread, in the place of what was there.
pub(crate) fn keep(error: c_int) {
    asked(&TAKE);
    KEPT.set(error);
    EVER.store(true, Ordering::Relaxed);
}

#[inline]
fn asked(real: &Real<Ask>) -> c_int {
    // SAFETY: it takes nothing.
    real.get().map_or(NOT_FOUND, |real| unsafe { real() })
}

/// The runtime's answer; where it knows of no failure, `kept`.
fn later_or(real: &Real<Ask>, kept: c_int) -> c_int {
    match asked(real) {
        0 => kept,
        later => {
            KEPT.set(0);
            later
        }
    }
}

/// In front of the real `cudaGetLastError`.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    if EVER.load(Ordering::Relaxed) { later_or(&TAKE, KEPT.take()) } else { asked(&TAKE) }
}

/// In front of the real `cudaPeekAtLastError`.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> c_int {
    if EVER.load(Ordering::Relaxed) { later_or(&LOOK, KEPT.get()) } else { asked(&LOOK) }
}
