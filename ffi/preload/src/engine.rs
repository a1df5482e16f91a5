//! The engine of `libgmlake.so`, looked up and opened at the first large copy, then tried for every large copy.
//!
//! ```text
//! unknown ── first large copy ──► opening ─┬─► open: tried for each large copy, unless a hook is active
//!                                          └─► off: switched off, unavailable, a forked child
//! ```
//!
//! While one thread opens the library, others copy natively: no thread waits.

use std::cell::Cell;
use std::error::Error as _;
use std::ffi::{CStr, OsString, c_int, c_void};
use std::fmt::Display;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use glake_abi::{GLAKE_INVALID, GLAKE_UNAVAILABLE, GLAKE_UNSUPPORTED, Unfit, Version};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::last_error;
use crate::real::{self, Home, object_of};

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
        let early = home == Home::Runtime && real::runtime_version() < EAGER_CONTEXTS;
        if early || !real::has_context() {
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
    if std::env::var_os("GLAKE_DISABLE").is_some_and(disables) {
        return Ok(false);
    }
    std::env::var_os("GLAKE_MULTI_PATH").map_or(Ok(false), switches_on)
}

/// Returns whether a value of `GLAKE_DISABLE` switches everything off: any but 0 and an empty one.
fn disables(value: OsString) -> bool {
    !matches!(value.to_string_lossy().trim(), "" | "0")
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

/// File name of the library, which is also its soname.
const FILE: &str = "libgmlake.so";

/// Reason why the library cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// The switch has an invalid value.
    #[error("GLAKE_MULTI_PATH = {value:?}: allowed is 0 or 1")]
    Switch {
        /// Value of the switch.
        value: OsString,
    },
    /// The file is missing, or lacks a function.
    #[error(
        "{}; put {FILE} of the same build beside libglake_preload.so, or name it in GLAKE_LIBRARY",
        reason(source)
    )]
    Load {
        /// Error of the loader.
        source: libloading::Error,
    },
    /// The library has another version.
    #[error(
        "{} is of {found}, libglake_preload.so is of {}: take both from one release, as one installed wheel has them",
        path.display(),
        Version::OURS
    )]
    OtherVersion {
        /// File of the library.
        path: PathBuf,
        /// Version of the library.
        found: Version,
    },
    /// The C library refused to register the fork handler.
    #[error("cannot register the fork handler: {source}")]
    Forks {
        /// Error of the C library.
        source: std::io::Error,
    },
}

/// Returns the loader's own message, which names the file; if it has none, the failed call.
fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

glake_abi::table! {
    struct Functions { glake_copy_try, glake_started, glake_last_error }
}

/// Functions of the library, which is never closed.
pub(crate) struct Gmlake(Functions);

impl Gmlake {
    /// Opens the library: the one already loaded by the process, else the file named by `GLAKE_LIBRARY`, else the one beside this library,
    /// else the one found by the loader.
    pub(crate) fn open() -> Result<Gmlake, Unusable> {
        let flags = RTLD_NOW | RTLD_LOCAL;
        // SAFETY: it is loaded already, so that no code of it runs.
        let loaded = unsafe { Library::open(Some(FILE), flags | libc::RTLD_NOLOAD) };
        let library = loaded.or_else(|_| {
            // SAFETY: the library runs nothing when it is loaded.
            unsafe { Library::open(Some(path()), flags) }
        });
        let library = library.map_err(|source| Unusable::Load { source })?;
        Gmlake::of(&*Box::leak(Box::new(library)))
    }

    fn of(library: &'static Library) -> Result<Gmlake, Unusable> {
        // SAFETY: a name's address is looked up, and not followed.
        let find = |name: &CStr| unsafe { library.get(name.to_bytes_with_nul()) }.map(|found| *found);
        // SAFETY: all of them are that library's, which is never closed.
        match unsafe { Functions::of(find) } {
            Ok(functions) => Ok(Gmlake(functions)),
            Err(Unfit::Missing(source)) => Err(Unusable::Load { source }),
            Err(Unfit::OtherVersion { found }) => {
                let path = find(c"glake_abi").ok().and_then(object_of).map(|(_, path)| path.to_owned());
                Err(Unusable::OtherVersion { path: path.unwrap_or_default(), found })
            }
        }
    }

    /// Calls the library's `glake_copy_try`.
    pub(crate) fn copy(&self, copy: &Copy) -> i32 {
        // SAFETY: what the program promised of a copy of these, it promised for the real function.
        unsafe { (self.0.glake_copy_try)(copy.to, copy.from, copy.size, copy.stream, copy.flags) }
    }

    /// Returns whether the library serves, or served until the process began to end.
    pub(crate) fn has_started(&self) -> bool {
        // SAFETY: it takes nothing.
        unsafe { (self.0.glake_started)() }
    }

    /// Returns the error text of its last failed call on this thread.
    pub(crate) fn last_error(&self) -> String {
        // SAFETY: a text of this thread that ends with a zero and stays until its next failure.
        unsafe { CStr::from_ptr((self.0.glake_last_error)()) }.to_string_lossy().into_owned()
    }
}

/// Returns a path, or a name for the loader to find.
fn path() -> PathBuf {
    if let Some(named) = std::env::var_os("GLAKE_LIBRARY").filter(|named| !named.is_empty()) {
        return PathBuf::from(named);
    }
    let ours = object_of(path as *const c_void).map(|(_, ours)| ours.with_file_name(FILE));
    ours.filter(|beside| beside.is_file()).unwrap_or_else(|| PathBuf::from(FILE))
}

/// A copy as passed to the engine.
pub(crate) struct Copy {
    pub(crate) to: *mut c_void,
    pub(crate) from: *const c_void,
    pub(crate) size: usize,
    pub(crate) stream: *mut c_void,
    pub(crate) flags: u32,
}

/// Tries the engine, and makes the copy natively if it does not take it.
#[cold]
pub(crate) fn try_engine(home: Home, copy: &Copy, native: impl FnOnce() -> c_int) -> c_int {
    match ask(home, copy) {
        Answer::Taken => 0,
        // Copies made by the real function bypass the engine: it was tried for the outer one.
        Answer::Native => unasked(native),
        Answer::Failed(error) => {
            if home == Home::Runtime {
                last_error::keep(error);
            }
            error
        }
    }
}

/// Defines copy functions of a library, each under the real one's name. `stream`, `flags` and `asked` may use the parameters of the
/// function.
macro_rules! copy_functions {
    ($home:expr; $($name:ident($($more:ident: $type:ty),*): stream $stream:expr, flags $flags:expr, asked $asked:expr;)*) => {$(
        #[doc = concat!("Interposes the real `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// The contract of the real function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            to: *mut ::std::ffi::c_void,
            from: *const ::std::ffi::c_void,
            size: usize,
            $($more: $type,)*
        ) -> ::std::ffi::c_int {
            type Function = unsafe extern "C" fn(
                *mut ::std::ffi::c_void, *const ::std::ffi::c_void, usize $(, $type)*
            ) -> ::std::ffi::c_int;
            static REAL: $crate::real::Real<Function> = $crate::real::real!($home, stringify!($name));
            let native = move || match REAL.get() {
                // SAFETY: the caller's arguments, as they are.
                Some(real) => unsafe { real(to, from, size $(, $more)*) },
                None => $crate::real::NOT_FOUND,
            };
            if size < $crate::engine::least() {
                return native();
            }
            if !$asked {
                return $crate::engine::unasked(native);
            }
            let copy = $crate::engine::Copy { to, from, size, stream: $stream, flags: $flags };
            $crate::engine::try_engine($home, &copy, native)
        }
    )*};
}

pub(crate) use copy_functions;

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
