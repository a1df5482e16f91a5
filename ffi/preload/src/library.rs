//! Lookup of `libgmlake.so` and of its functions for copies.

use std::error::Error as _;
use std::ffi::{CStr, OsString, c_void};
use std::path::PathBuf;

use glake_abi::{Unfit, Version};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::copy::Copy;
use crate::real::object_of;

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
