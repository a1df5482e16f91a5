//! The single process object of this library: its start, and its behaviour after fork and at exit.
//!
//! ```text
//! (nothing) ── first use, glake_start ──► serving ── exit ──► ending: frees are bookkeeping, allocations fail
//!     ▲              └ failed: says why,       └── fork ──► in the child: nothing is handed out
//!     └──────────────┘ tried again next time
//! ```
//!
//! Calls that release something succeed in the child and at the end of the process, and do nothing there except for frees: destructors call
//! them.
//!
//! A second copy of the library refuses to start. A copy loaded from another file would have its own pool and know none of the first one's
//! blocks. The copy that has started first wins.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use glake_abi::{ABI, GLAKE_UNAVAILABLE};
use glake_runtime::config::{Environment, Preset, Sources};
use glake_runtime::log;
use glake_runtime::process::Process;
use parking_lot::Mutex;

use crate::status::Failure;
use crate::{guard, region};

/// The started library. Never dropped: its destructor would call the driver, which may be gone by then.
static PROCESS: OnceLock<Library> = OnceLock::new();
static PHASE: AtomicU8 = AtomicU8::new(SERVING);
/// Current arguments of `glake_configure`. Locked while the process starts.
static CONFIGURED: Mutex<Option<Configured>> = Mutex::new(None);

const SERVING: u8 = 0;
const FORKED: u8 = 1;
const ENDING: u8 = 2;

struct Library {
    process: Process,
    name: CString,
}

/// Copy of the arguments of `glake_configure`.
#[derive(Clone, Default)]
struct Configured {
    preset: Option<Preset>,
    file: Option<PathBuf>,
    overrides: Option<String>,
    /// Working directory of the call, which relative paths begin at.
    directory: Option<PathBuf>,
}

impl Configured {
    fn sources(&self) -> Result<Sources, glake_runtime::config::ConfigError> {
        let (preset, file, directory) = (self.preset, self.file.clone(), self.directory.clone());
        let environment = Environment::of_process();
        let sources = Sources { preset, file, environment, flags: Vec::new(), directory };
        match &self.overrides {
            Some(overrides) => sources.with_overrides("configuration", overrides),
            None => Ok(sources),
        }
    }
}

/// Returns the process, for calls that may reach the driver; starts it on first use.
#[inline]
pub(crate) fn process() -> Result<&'static Process, Failure> {
    match (PHASE.load(Ordering::Acquire), PROCESS.get()) {
        (SERVING, Some(library)) => Ok(&library.process),
        (SERVING, None) => start(),
        (phase, _) => Err(over(phase)),
    }
}

/// Returns the process, for calls that only keep books; `None` if it has not started.
#[inline]
pub(crate) fn started_process() -> Result<Option<&'static Process>, Failure> {
    match PHASE.load(Ordering::Acquire) {
        FORKED => Err(over(FORKED)),
        _ => Ok(PROCESS.get().map(|library| &library.process)),
    }
}

/// Returns whether this is a child that was forked after the start.
#[inline]
pub(crate) fn is_forked() -> bool {
    PHASE.load(Ordering::Acquire) == FORKED
}

/// Returns whether the library no longer serves, in a forked child or at the end of the process.
pub(crate) fn is_over() -> bool {
    PHASE.load(Ordering::Acquire) != SERVING
}

/// Runs an entry point that releases something or ends it. In a forked child and at the end of the process it succeeds without doing
/// anything: destructors call such entry points, and cannot fail.
pub(crate) fn give_up(body: impl FnOnce(&'static Process) -> Result<(), Failure>) -> i32 {
    give_up_if(true, body)
}

/// Runs an entry point that either releases or acquires, depending on its arguments (`gives_up`).
pub(crate) fn give_up_if(gives_up: bool, body: impl FnOnce(&'static Process) -> Result<(), Failure>) -> i32 {
    guard::answer(|| match process() {
        Ok(process) => body(process),
        Err(_) if gives_up && is_over() => Ok(()),
        Err(failure) => Err(failure),
    })
}

#[cold]
fn over(phase: u8) -> Failure {
    Failure::unavailable(match phase {
        FORKED => {
            "this process was forked from one that uses the GPU: its memory is the parent's; start workers with the spawn \
             or forkserver method instead"
        }
        _ => "the process is exiting: no memory is handed out and no copy is made any more",
    })
}

#[cold]
fn start() -> Result<&'static Process, Failure> {
    let configured = CONFIGURED.lock();
    if let Some(library) = PROCESS.get() {
        return Ok(&library.process);
    }
    watch_forks()?;
    refuse_second()?;
    let sources = configured.clone().unwrap_or_default().sources().map_err(Failure::unavailable)?;
    let config = sources.load().map_err(Failure::unavailable)?;
    log::start(&config.log.filter).map_err(Failure::unavailable)?;
    let process = Process::start(config)?;
    let name = CString::new(process.name()).unwrap_or_default();
    // Registered after the driver's own handlers, because handlers run in reverse order.
    // SAFETY: the handler is a function of this library, which is never unloaded, and lets nothing unwind.
    if unsafe { libc::atexit(at_exit) } != 0 {
        return Err(Failure::unavailable("the C library takes no more exit handlers"));
    }
    let process = &PROCESS.get_or_init(|| Library { process, name }).process;
    region::enter_early(process);
    Ok(process)
}

fn watch_forks() -> Result<(), Failure> {
    static WATCHED: OnceLock<c_int> = OnceLock::new();
    // SAFETY: the handler is a function of this library, which is never unloaded; it stores a number.
    match WATCHED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(in_child)) }) {
        0 => Ok(()),
        code => Err(Failure::unavailable(format_args!(
            "cannot register the fork handler: {}",
            std::io::Error::from_raw_os_error(*code)
        ))),
    }
}

/// Marks the child of a fork. A parent that was starting on another thread counts as started: its locks have no owner in the child.
extern "C" fn in_child() {
    if PROCESS.get().is_some() || CONFIGURED.is_locked() {
        PHASE.store(FORKED, Ordering::Release);
    }
    // The connection to the agent belongs to the parent.
    if let Some(socket) = PROCESS.get().and_then(|library| library.process.agent().socket()) {
        // SAFETY: it was the parent's agent thread's, which is not in this process: nobody else closes or uses it here.
        unsafe { libc::close(socket) };
    }
}

extern "C" fn at_exit() {
    if PHASE.compare_exchange(SERVING, ENDING, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return;
    }
    guard::logged(|| {
        if let Some(library) = PROCESS.get() {
            library.process.stop();
        }
        Ok(())
    });
}

/// Returns the version of this library.
#[unsafe(no_mangle)]
pub extern "C" fn glake_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Returns the number of this interface, which is raised when a structure or a signature changes.
#[unsafe(no_mangle)]
pub extern "C" fn glake_abi() -> u32 {
    ABI
}

/// Sets the configuration before the first use: a preset's name or null, the path of a TOML file or null (then the file that GLAKE_CONFIG
/// names), and TOML text that overrides the environment, or null. All of it is checked at once.
///
/// `GLAKE_INVALID`: already started, or an error in the configuration, with its line; nothing was changed.
///
/// # Safety
/// Each is null or a text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_configure(
    preset: *const c_char,
    file: *const c_char,
    overrides: *const c_char,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let (preset, file, overrides) = unsafe {
            (guard::text(preset, "preset")?, guard::text(file, "file")?, guard::text(overrides, "overrides")?)
        };
        if is_forked() {
            return Err(over(FORKED));
        }
        let configured = Configured {
            preset: preset.map(str::parse).transpose().map_err(Failure::invalid)?,
            file: file.map(PathBuf::from),
            overrides: overrides.map(str::to_owned),
            directory: std::env::current_dir().ok(),
        };
        configured.sources().and_then(|sources| sources.load()).map_err(Failure::invalid)?;
        let mut slot = CONFIGURED.lock();
        if PROCESS.get().is_some() {
            return Err(Failure::invalid("already started: configure before the first use of GPU memory"));
        }
        *slot = Some(configured);
        Ok(())
    })
}

/// Opens the devices now instead of at first use; a pool still starts when its device is first used. A failed start is retried by the next
/// call.
#[unsafe(no_mangle)]
pub extern "C" fn glake_start() -> i32 {
    guard::answer(|| process().map(|_| ()))
}

/// Returns whether the devices are open; false in a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn glake_started() -> bool {
    !is_forked() && PROCESS.get().is_some()
}

/// Returns the number of devices.
///
/// # Safety
/// `count` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_device_count(count: *mut i32) -> i32 {
    guard::answer(|| {
        let devices = i32::try_from(process()?.device_count()).unwrap_or(i32::MAX);
        // SAFETY: the caller's promise.
        unsafe { guard::put(count, "count", devices) }
    })
}

/// Returns the kind of the devices: "cuda", or "sim:" and the model; null before the start.
#[unsafe(no_mangle)]
pub extern "C" fn glake_device_name() -> *const c_char {
    PROCESS.get().map_or(std::ptr::null(), |library| library.name.as_ptr())
}

impl Failure {
    pub(crate) fn is_unavailable(&self) -> bool {
        self.status == GLAKE_UNAVAILABLE
    }
}

/// Symbol that every copy exports; it tells whether that copy has started.
const MARK: &CStr = c"glake_started";

/// Fails if another copy of the library has started.
///
/// # Errors
/// Another copy has started.
pub(crate) fn refuse_second() -> Result<(), Failure> {
    let ours = object_of(object_of as *const c_void);
    for path in loaded() {
        let Some((base, mark)) = mark_of(&path) else { continue };
        if ours.as_ref().is_some_and(|(our_base, _)| *our_base == base) {
            continue;
        }
        // SAFETY: the copy's `glake_started`, which takes nothing and lets nothing unwind.
        let started = unsafe { std::mem::transmute::<*const c_void, extern "C" fn() -> bool>(mark)() };
        if started {
            let this = ours.map(|(_, path)| path).unwrap_or_default();
            return Err(Failure::unavailable(format_args!(
                "two copies of GLake in one process: {} has started already, so {} does not; load one file everywhere \
                 (GLAKE_LIBRARY names it)",
                path.display(),
                this.display()
            )));
        }
    }
    Ok(())
}

/// Returns the files of all loaded objects.
fn loaded() -> Vec<PathBuf> {
    unsafe extern "C" fn note(info: *mut libc::dl_phdr_info, _: usize, files: *mut c_void) -> c_int {
        // SAFETY: the walk gives a valid entry, and `files` is the vector below, which nothing else uses meanwhile.
        let (info, files) = unsafe { (&*info, &mut *files.cast::<Vec<PathBuf>>()) };
        if !info.dlpi_name.is_null() {
            // SAFETY: the loader's names end with a zero.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) };
            if !name.is_empty() {
                files.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
            }
        }
        0
    }
    let mut files: Vec<PathBuf> = Vec::new();
    // SAFETY: `note` keeps to what the walk gives it, and pushing does not unwind (an allocation that fails aborts).
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut files).cast()) };
    files
}

/// Returns the mark that an object or one of its dependencies exports, and the base of the object that contains it.
fn mark_of(path: &Path) -> Option<(usize, *const c_void)> {
    let name = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: the object is loaded already, so that no code of it runs.
    let object = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if object.is_null() {
        return None;
    }
    // SAFETY: an open object and a name that ends with a zero.
    let mark = unsafe { libc::dlsym(object, MARK.as_ptr()) }.cast_const();
    // SAFETY: it was opened here.
    unsafe { libc::dlclose(object) };
    let (base, _) = object_of(mark)?;
    Some((base, mark))
}

/// Returns the load base and the file of the object that contains an address.
fn object_of(address: *const c_void) -> Option<(usize, PathBuf)> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: an out-parameter of this frame; any address may be asked for.
    if address.is_null() || unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's names end with a zero.
    let file = unsafe { CStr::from_ptr(info.dli_fname) };
    Some((info.dli_fbase as usize, PathBuf::from(OsStr::from_bytes(file.to_bytes()))))
}
