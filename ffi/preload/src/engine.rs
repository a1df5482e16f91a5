//! The engine of `libgmlake.so`: opened at the first large copy, then tried for every large copy.
//!
//! ```text
//! unknown ── first large copy ──► opening ─┬─► open: tried for each large copy, unless a hook is active
//!                                          └─► off: switched off, unavailable, a forked child
//! ```
//!
//! While one thread opens the library, others copy natively: no thread waits.

use std::cell::Cell;
use std::ffi::{OsString, c_int};
use std::fmt::Display;
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use glake_abi::{GLAKE_INVALID, GLAKE_UNAVAILABLE, GLAKE_UNSUPPORTED};

use crate::copy::Copy;
use crate::library::{Gmlake, Unusable};
use crate::real::Home;
use crate::{driver, runtime};

// Flags of `gmlake.h`.
pub(crate) const NORMAL: u32 = glake_abi::GLAKE_COPY_NORMAL;
pub(crate) const NOW: u32 = glake_abi::GLAKE_COPY_BLOCKING;
pub(crate) const PER_THREAD: u32 = glake_abi::GLAKE_COPY_PTDS;
pub(crate) const TO_GPU: u32 = glake_abi::GLAKE_COPY_TO_GPU;
pub(crate) const FROM_GPU: u32 = glake_abi::GLAKE_COPY_FROM_GPU;
// Results of `glake_copy_try`. Out of memory has the number of a copy that is not taken, and means the same here.
const TAKEN: i32 = 0;
const NOT_TAKEN: i32 = 1;
/// `CUDA_ERROR_UNKNOWN`, and the runtime's error of the same number.
const UNKNOWN: c_int = 999;

/// Version of the runtime from which `cudaSetDevice` makes a device's context current. Before it, some later call does, and the current
/// context does not tell the device of a copy.
const EAGER_CONTEXTS: c_int = 12_000;

/// Size below which copies are native; `usize::MAX`: all copies are.
static LEAST: AtomicUsize = AtomicUsize::new(1 << 20);
/// Set by the one thread that opens the library.
static OPENING: AtomicBool = AtomicBool::new(false);
/// The library once it is open. Set only by that thread, never waited for.
static LIBRARY: OnceLock<Gmlake> = OnceLock::new();

thread_local! {
    /// Whether this thread is in the engine, or in a real function that the engine was tried for.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Outcome of a try of the engine.
pub(crate) enum Answer {
    /// The engine made the copy.
    Taken,
    /// The engine did nothing: the real function must make the copy.
    Native,
    /// The copy failed, with an error number of the driver.
    Failed(c_int),
}

/// Returns the size of the smallest copy for which the engine is tried.
#[inline]
pub(crate) fn least() -> usize {
    LEAST.load(Ordering::Relaxed)
}

/// Returns whether this process is configured to copy over several paths, and no reason against it is known.
pub(crate) fn is_wanted() -> bool {
    least() != usize::MAX && matches!(switched_on(), Ok(true))
}

/// Calls a real function; copies that it makes bypass the engine.
pub(crate) fn unasked<T>(native: impl FnOnce() -> T) -> T {
    let before = INSIDE.replace(true);
    let answer = native();
    INSIDE.set(before);
    answer
}

/// Tries to hand a copy to the engine.
pub(crate) fn ask(home: Home, copy: &Copy) -> Answer {
    if INSIDE.get() {
        return Answer::Native;
    }
    unasked(|| {
        let Some(library) = LIBRARY.get().or_else(open) else { return Answer::Native };
        // Before its first call on a thread the runtime has created no context, or none that identifies the device.
        let early = home == Home::Runtime && runtime::version() < EAGER_CONTEXTS;
        if early || !driver::has_context() {
            return Answer::Native;
        }
        match library.copy(copy) {
            TAKEN => Answer::Taken,
            NOT_TAKEN | GLAKE_INVALID | GLAKE_UNSUPPORTED => Answer::Native,
            GLAKE_UNAVAILABLE => {
                // At the end of the process no error is reported.
                if !library.has_started() {
                    switch_off(&library.last_error());
                }
                Answer::Native
            }
            // The driver's own number, negated.
            error @ ..0 => Answer::Failed(error.saturating_neg()),
            _ => {
                tell_of_failure(copy.size, &library.last_error());
                Answer::Failed(UNKNOWN)
            }
        }
    })
}

#[cold]
fn open() -> Option<&'static Gmlake> {
    if OPENING.swap(true, Ordering::AcqRel) {
        return None;
    }
    match opened() {
        Ok(Some(library)) => {
            let _ = LIBRARY.set(library);
        }
        Ok(None) => LEAST.store(usize::MAX, Ordering::Relaxed),
        Err(why) => switch_off(&why),
    }
    LIBRARY.get()
}

fn opened() -> Result<Option<Gmlake>, Unusable> {
    if !switched_on()? {
        return Ok(None);
    }
    // SAFETY: the handler is a function of this library, which is never unloaded; it stores a number.
    match unsafe { libc::pthread_atfork(None, None, Some(in_child)) } {
        0 => Gmlake::open().map(Some),
        code => Err(Unusable::Forks { source: std::io::Error::from_raw_os_error(code) }),
    }
}

/// Switches a forked child to native copies: it must not use state of the parent.
unsafe extern "C" fn in_child() {
    LEAST.store(usize::MAX, Ordering::Relaxed);
}

fn switched_on() -> Result<bool, Unusable> {
    std::env::var_os("GLAKE_MULTI_PATH").map_or(Ok(false), switches_on)
}

/// Parses the value of the switch, by the rule of the library and the command.
fn switches_on(value: OsString) -> Result<bool, Unusable> {
    match value.to_str().map(str::trim) {
        Some("" | "0") => Ok(false),
        Some("1") => Ok(true),
        _ => Err(Unusable::Switch { value }),
    }
}

fn switch_off(why: &dyn Display) {
    LEAST.store(usize::MAX, Ordering::Relaxed);
    tell(format_args!("this program's copies take one path each: {why}"));
}

/// Reports the first failed copy on stderr: a program whose GPU is lost fails again and again.
fn tell_of_failure(size: usize, why: &dyn Display) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        tell(format_args!("a copy of {size} bytes failed: {why}"));
    }
}

fn tell(what: std::fmt::Arguments<'_>) {
    // A closed standard error is ignored.
    let _ = std::io::stderr().write_all(format!("glake: {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEANINGS: &[(&str, Option<bool>)] = &include!("../../../tests/tables/multi_path.rs");

    #[test]
    fn the_switch_means_what_it_means_to_the_library() {
        for (value, means) in MEANINGS {
            assert_eq!(switches_on((*value).into()).ok(), *means, "{value:?}");
        }
    }
}
