//! Lookup of `libgmlake.so`, opened once and never closed: allocations live as long as the process.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use glake_abi::{Unfit, Version};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use pyo3::prelude::*;

use crate::error::Error;

macro_rules! table {
    ($($name:ident($($argument:ty),*) $(-> $answer:ty)?;)*) => {
        glake_abi::table! {
            /// All functions of the library, not only those with a binding.
            #[allow(dead_code, reason = "the table checks that the library has every function, bound or not")]
            pub(crate) struct Functions { $($name),* }
        }
    };
}

glake_abi::functions!(table);

struct Open {
    path: PathBuf,
    symbols: Functions,
}

static OPEN: OnceLock<Open> = OnceLock::new();

/// Returns the functions of the open library.
pub(crate) fn symbols() -> PyResult<&'static Functions> {
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

fn load(path: &Path) -> PyResult<Functions> {
    let refuse = |why: String| Error::new_err(format!("cannot use {}: {why}", path.display()));
    // Global, so that the compiled backend finds the same functions.
    // SAFETY: libgmlake.so does nothing in its constructors.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| refuse(error.to_string()))?;
    // Blocks, observers and torch's own pointers into the library stay for the life of the process.
    let library: &Library = Box::leak(Box::new(library));
    // SAFETY: a name's address is looked up, and not followed.
    let find = |name: &CStr| unsafe { library.get(name.to_bytes_with_nul()) }.map(|found| *found);
    // SAFETY: all of them are that library's, which is never closed.
    unsafe { Functions::of(find) }.map_err(|unfit| {
        refuse(match unfit {
            Unfit::Missing(error) => format!("it is not GLake's library, or another release's ({error})"),
            Unfit::OtherVersion { found } => format!(
                "it is of {found}, this package is of {}: take both from one release, as one installed wheel has them",
                Version::OURS
            ),
        })
    })
}

#[pyfunction]
pub(crate) fn path() -> Option<PathBuf> {
    OPEN.get().map(|open| open.path.clone())
}
