//! Errors of copies that the engine took, for `cudaGetLastError`: the runtime was not called and does not know them.
//!
//! A later failure of the runtime itself replaces the stored one, as in a native program.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::real::{Home, NOT_FOUND, Real, real};

type Ask = unsafe extern "C" fn() -> c_int;

static TAKE: Real<Ask> = real!(Home::Runtime, "cudaGetLastError");
static LOOK: Real<Ask> = real!(Home::Runtime, "cudaPeekAtLastError");

/// Whether any error was ever stored: programs ask after every launch.
static EVER: AtomicBool = AtomicBool::new(false);

thread_local! {
    static KEPT: Cell<c_int> = const { Cell::new(0) };
}

/// Stores a failure for the calling thread, replacing an earlier one.
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

/// Returns the runtime's error; if it has none, `kept`.
fn later_or(real: &Real<Ask>, kept: c_int) -> c_int {
    match asked(real) {
        0 => kept,
        later => {
            KEPT.set(0);
            later
        }
    }
}

/// Interposes the runtime's `cudaGetLastError`.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> c_int {
    if EVER.load(Ordering::Relaxed) { later_or(&TAKE, KEPT.take()) } else { asked(&TAKE) }
}

/// Interposes the runtime's `cudaPeekAtLastError`.
#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> c_int {
    if EVER.load(Ordering::Relaxed) { later_or(&LOOK, KEPT.get()) } else { asked(&LOOK) }
}
