//! `libgmlake.so`, opened once and never closed: allocations outlive every reason to close it.

use std::ffi::{c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use pyo3::prelude::*;

use crate::error::Error;

/// The version of the C API that this module is written against.
const ABI: u32 = 1;

/// `glake_block`.
#[repr(C)]
pub(crate) struct Block {
    pub(crate) base: *mut c_void,
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) device: i32,
}

/// `glake_copy_block`.
#[repr(C)]
pub(crate) struct CopyBlock {
    pub(crate) to: *mut c_void,
    pub(crate) from: *const c_void,
    pub(crate) size: usize,
}

/// Called with an event as JSON before and after a shrink and a refill; anything but 0 stops it.
pub(crate) type Hook = unsafe extern "C" fn(*mut c_void, *const c_char) -> i32;

/// Called when a request could not be served: context, device, requested, total and free bytes.
pub(crate) type OutOfMemoryObserver = unsafe extern "C" fn(*mut c_void, i32, u64, u64, u64);

macro_rules! symbols {
    ($($name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        /// The functions of the C API that have a door here, under their own names.
        pub(crate) struct Symbols {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
        }

        impl Symbols {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the library's `glake_abi` is the one that these signatures were written for.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?;
                        *symbol
                    },)*
                })
            }
        }
    };
}

symbols! {
    gmlake_last_error() -> *const c_char;
    glake_last_status() -> i32;
    glake_version() -> *const c_char;
    glake_abi() -> u32;
    glake_configure(*const c_char, *const c_char, *const c_char) -> i32;
    glake_start() -> i32;
    glake_started() -> bool;
    glake_device_count(*mut i32) -> i32;
    glake_device_name() -> *const c_char;
    glake_alloc(i32, usize, *mut c_void, *mut *mut c_void) -> i32;
    glake_free(*mut c_void) -> i32;
    glake_find(*const c_void, *mut Block) -> i32;
    glake_record_stream(*mut c_void, *mut c_void) -> i32;
    glake_largest(i32, *mut u64) -> i32;
    glake_trim(i32, u64, *mut u64) -> i32;
    glake_set_fraction(i32, f64) -> i32;
    glake_fraction(i32, *mut f64) -> i32;
    glake_pool_create(i32, u64, u64) -> i32;
    glake_pool_release(i32, u64, u64) -> i32;
    glake_pool_use_count(i32, u64, u64, *mut i32) -> i32;
    glake_pool_trim(i32, u64, u64) -> i32;
    glake_reset_peaks(i32) -> i32;
    glake_reset_totals(i32) -> i32;
    glake_stats_json(i32) -> *mut c_char;
    glake_snapshot_json() -> *mut c_char;
    glake_string_free(*mut c_char);
    glake_record_history(bool, u64, bool) -> i32;
    glake_history_enabled() -> bool;
    glake_on_out_of_memory(Option<OutOfMemoryObserver>, *mut c_void) -> i32;
    glake_copy_async(*mut c_void, *const c_void, usize, *mut c_void, u32, *mut u64) -> i32;
    glake_copy_wait(u64) -> i32;
    glake_copy_done(u64, *mut bool) -> i32;
    glake_copy_drop(u64) -> i32;
    glake_device_of(*const c_void, *mut i32) -> i32;
    glake_copy_list(*const CopyBlock, usize, *mut c_void, u32, *mut u64) -> i32;
    glake_copy_to_all(*const *mut c_void, usize, *const c_void, usize, *mut c_void, u32, *mut u64) -> i32;
    glake_multi_path(i32) -> i32;
    glake_copy_stats_json() -> *mut c_char;
    glake_stream_synchronize(i32, *mut c_void) -> i32;
    glake_host_register(*mut c_void, usize) -> i32;
    glake_host_unregister(*mut c_void) -> i32;
    glake_region_define(*const c_char, u32, u32) -> i32;
    glake_region_enter(*const c_char) -> i32;
    glake_region_leave() -> i32;
    glake_region_seal(*const c_char, bool) -> i32;
    glake_region_unseal(*const c_char) -> i32;
    glake_region_prepare(*const c_char) -> i32;
    glake_region_pin(*const c_void, bool) -> i32;
    glake_region_wait(*const c_char, i32, *mut c_void) -> i32;
    glake_region_order(*const *const c_char, usize) -> i32;
    glake_region_of(*const c_void) -> *mut c_char;
    glake_regions_json() -> *mut c_char;
    glake_shrink(*const c_char) -> *mut c_char;
    glake_refill(*const c_char) -> *mut c_char;
    glake_left_json() -> *mut c_char;
    glake_gate_enter(*const *const c_char, usize, u32, i64, *mut u64) -> i32;
    glake_gate_wait(*const *const c_char, usize, u32, i64) -> i32;
    glake_gate_leave(u64) -> i32;
    glake_gate_json() -> *mut c_char;
    glake_hooks_set(Option<Hook>, Option<Hook>, *mut c_void, i64) -> i32;
    glake_enable_peer(i32, i32) -> i32;
    glake_share(*const c_void, *mut u8, usize, *mut usize, *mut u64) -> i32;
    glake_open_shared(*const u8, usize, i32, *mut *mut c_void) -> i32;
    glake_close_shared(*mut c_void) -> i32;
}

struct Open {
    path: PathBuf,
    symbols: Symbols,
}

static OPEN: OnceLock<Open> = OnceLock::new();

/// The functions of the open library.
pub(crate) fn symbols() -> PyResult<&'static Symbols> {
    match OPEN.get() {
        Some(open) => Ok(&open.symbols),
        None => Err(Error::new_err("libgmlake.so is not open yet: import glake, not glake._glake")),
    }
}

#[pyfunction]
pub(crate) fn open(path: PathBuf) -> PyResult<()> {
    // Two threads may both get here: dlopen gives them the same library, and one of the equal tables is kept.
    let open = match OPEN.get() {
        Some(open) => open,
        None => {
            let symbols = load(&path)?;
            OPEN.get_or_init(|| Open { path: path.clone(), symbols })
        }
    };
    if open.path == path {
        return Ok(());
    }
    Err(Error::new_err(format!(
        "asked to open {}, but this process has {} open already: one library holds its memory",
        path.display(),
        open.path.display(),
    )))
}

fn load(path: &Path) -> PyResult<Symbols> {
    let refuse = |why: String| Error::new_err(format!("cannot use {}: {why}", path.display()));
    // Global, so that the compiled backend finds the same functions.
    // SAFETY: libgmlake.so does nothing in its constructors.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| refuse(error.to_string()))?;
    // Blocks, observers and torch's own pointers into the library stay for the life of the process.
    let library: &Library = Box::leak(Box::new(library));
    let abi = {
        // SAFETY: the name has had this signature in every version; one without it is refused.
        let abi = unsafe { library.get::<unsafe extern "C" fn() -> u32>(b"glake_abi\0") }
            .map_err(|error| refuse(format!("it is not GLake's library ({error})")))?;
        // SAFETY: it takes nothing and answers a constant.
        unsafe { abi() }
    };
    if abi != ABI {
        return Err(refuse(format!(
            "its C API is version {abi}, this package needs {ABI}: install the library and the package of one release"
        )));
    }
    Symbols::find(library).map_err(|error| refuse(error.to_string()))
}

#[pyfunction]
pub(crate) fn path() -> Option<PathBuf> {
    OPEN.get().map(|open| open.path.clone())
}
