//! Detection of a second copy of this library. A copy loaded from another file would have its own pool and know none of the first one's
//! blocks. The copy that has started wins; any other refuses to start.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::status::Failure;

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
