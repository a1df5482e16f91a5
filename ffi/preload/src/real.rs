//! The real functions behind ours.
//!
//! A function is looked up at its first call: the one that the program would have been bound to (the next in load order), else in the
//! libraries by name, for programs that load them later (Python), else in any object that exports it (wheels rename their runtimes). The
//! object found is pinned, so that the address stays valid for the life of the process.

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::marker::PhantomData;
use std::mem::{forget, transmute_copy};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::os::unix::{Library, RTLD_LAZY};

/// Library of a function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// Runtime library of CUDA.
    Runtime,
    /// Driver library of CUDA.
    Driver,
}

impl Home {
    const fn names(self) -> &'static [&'static str] {
        match self {
            Home::Runtime => &["libcudart.so.13", "libcudart.so.12"],
            Home::Driver => &["libcuda.so.1"],
        }
    }
}

/// Error of a call whose real function was not found: `CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND`, and the runtime's error of the same
/// number.
pub(crate) const NOT_FOUND: c_int = 302;

/// A real function of type `F`, a function pointer.
pub(crate) struct Real<F> {
    home: Home,
    /// Name of the function, with a zero at the end.
    name: &'static str,
    found: AtomicPtr<c_void>,
    function: PhantomData<F>,
}

impl<F: Copy> Real<F> {
    /// Creates the entry of a function, not yet looked up.
    ///
    /// # Safety
    /// `name` ends with a zero, and `F` is the pointer type of its signature.
    pub(crate) const unsafe fn new(home: Home, name: &'static str) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        Real { home, name, found: AtomicPtr::new(null_mut()), function: PhantomData }
    }

    /// Returns the function; `None` while no loaded object has it.
    #[inline]
    pub(crate) fn get(&self) -> Option<F> {
        let mut address = self.found.load(Ordering::Acquire);
        if address.is_null() {
            address = find(self.home, self.name)?;
            self.found.store(address, Ordering::Release);
        }
        // SAFETY: the address of the function of this name, which has the signature of `F` as `new` was promised.
        Some(unsafe { transmute_copy::<*mut c_void, F>(&address) })
    }
}

/// Defines a real function by its name; its type is the signature in CUDA's header.
macro_rules! real {
    ($home:expr, $name:expr) => {
        // SAFETY: a zero is put behind the name, and the signature is compared with CUDA's header where it is written.
        unsafe { $crate::real::Real::new($home, concat!($name, "\0")) }
    };
}

pub(crate) use real;

#[cold]
fn find(home: Home, name: &str) -> Option<*mut c_void> {
    // SAFETY: the name ends with a zero, as `Real::new` was promised.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
    if !next.is_null() {
        return Some(next);
    }
    let named = home.names().iter().find_map(|library| exported(OsStr::new(library), name));
    named.or_else(|| {
        let ours = object_of(find as *const c_void).map(|(base, _)| base);
        let of_another = |address: &*mut c_void| object_of(*address).map(|(base, _)| base) != ours;
        loaded().iter().find_map(|path| exported(path.as_os_str(), name).filter(of_another))
    })
}

/// Returns a function of a loaded object or of one of its dependencies. The object stays loaded from then on.
fn exported(object: &OsStr, name: &str) -> Option<*mut c_void> {
    let flags = RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: the object is loaded already, so that no code of it runs.
    let library = unsafe { Library::open(Some(object), flags) }.ok()?;
    // SAFETY: an address is looked at only, never called as this type.
    let address = *unsafe { library.get::<*mut c_void>(name.as_bytes()) }.ok()?;
    if address.is_null() {
        return None;
    }
    // SAFETY: as above.
    forget(unsafe { Library::open(Some(object), flags | libc::RTLD_NODELETE) });
    Some(address)
}

/// Returns the files of all loaded objects except the program itself.
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

/// Returns the load base and the file of the object that contains an address.
pub(crate) fn object_of(address: *const c_void) -> Option<(usize, &'static Path)> {
    let mut info =
        libc::Dl_info { dli_fname: null(), dli_fbase: null_mut(), dli_sname: null(), dli_saddr: null_mut() };
    // SAFETY: an out-parameter of this frame; any address may be asked for.
    if unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's names end with a zero, and stay while the object is loaded: its callers ask for ours, which
    // stays, or look at the base only.
    let file = unsafe { CStr::from_ptr(info.dli_fname) };
    Some((info.dli_fbase as usize, Path::new(OsStr::from_bytes(file.to_bytes()))))
}
