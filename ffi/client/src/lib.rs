//! `libgmlake.so` opened by a Rust program, which measures it as C programs use it: each call goes through the C interface.
//!
//! ```text
//! glake bench ─► glake-client ─ ─ dlopen ─ ─► libgmlake.so (glake-ffi, which is built on glake-runtime)
//! ```
//!
//! It stands apart because it must be unsafe and the command must not.

mod copies;
mod memory;
mod native;

use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use glake_abi::{Segment, SegmentBlock, Unfit, Version};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

pub use copies::{Enqueued, On, Timed};
pub use glake_abi::{GLAKE_COPY_BACKGROUND, GLAKE_COPY_CRITICAL, GLAKE_OUT_OF_MEMORY};
pub use memory::{GpuMemory, HostMemory, Part};
pub use native::{CudaAllocator, Libcuda};

/// Why the library does not do what it is asked.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be loaded, or lacks a name.
    #[error("{}", reason(path, source))]
    Load {
        /// Which.
        path: PathBuf,
        /// The loader's answer.
        #[source]
        source: libloading::Error,
    },
    /// Another version.
    #[error("{} is of {found}, this program is of {}: take both from one release", path.display(), Version::OURS)]
    OtherVersion {
        /// Which.
        path: PathBuf,
        /// Of which it is.
        found: Version,
    },
    /// The driver refused a call that was made beside the library.
    #[error("{call}: CUDA error {code}")]
    Driver {
        /// Which call.
        call: &'static str,
        /// The driver's number.
        code: u32,
    },
    /// The system has no memory left.
    #[error("no {size} bytes of host memory: {source}")]
    NoMemory {
        /// How much was asked for.
        size: usize,
        /// Its answer.
        #[source]
        source: std::io::Error,
    },
    /// The library refused.
    #[error("{text}")]
    Refused {
        /// Its number for that.
        status: i32,
        /// Its words.
        text: String,
    },
}

type Result<T> = std::result::Result<T, LoadError>;

/// The loader's own words, which name the file; where it has none, which of its calls failed.
fn reason(path: &Path, error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(words) => words.to_string(),
        None => format!("{}: {error}", path.display()),
    }
}

/// A stream that the library made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(usize);

/// A block that the library handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block(usize);

/// Free ranges, as they are counted.
#[derive(Default)]
struct Ranges {
    /// Whether the segment at hand is a second view of memory that others count.
    stitched: bool,
    free: u32,
}

glake_abi::table! {
    struct Functions {
        glake_last_error,
        glake_configure,
        glake_start,
        glake_alloc,
        glake_free,
        glake_trim,
        glake_stream_create,
        glake_segments,
        glake_stream_synchronize,
        glake_device_count,
        glake_host_register,
        glake_host_unregister,
        glake_copy_async,
        glake_copy_list,
        glake_copy_to_all,
        glake_multi_path,
        glake_copy_stats_json,
        glake_string_free,
        glake_driver_calls,
        glake_heap_allocations,
    }
}

/// The library, which is never unloaded.
#[derive(Debug)]
pub struct Gmlake {
    functions: Functions,
    _library: std::mem::ManuallyDrop<Library>,
}

impl Gmlake {
    /// Loads a file that is `libgmlake.so`.
    ///
    /// # Errors
    /// [`LoadError::Load`], [`LoadError::OtherVersion`].
    pub fn open(path: &Path) -> Result<Gmlake> {
        let failed = |source| LoadError::Load { path: path.to_owned(), source };
        // SAFETY: the library runs nothing when it is loaded.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        // SAFETY: a name's address is looked up, and not followed.
        let find = |name: &CStr| unsafe { library.get(name.to_bytes_with_nul()) }.map(|found| *found);
        // SAFETY: all of them are that library's, which is kept below and closed by nobody.
        match unsafe { Functions::of(find) } {
            Ok(functions) => Ok(Gmlake { functions, _library: std::mem::ManuallyDrop::new(library) }),
            Err(Unfit::Missing(source)) => Err(failed(source)),
            Err(Unfit::OtherVersion { found }) => {
                Err(LoadError::OtherVersion { path: path.to_owned(), found })
            }
        }
    }

    /// Starts it with a configuration: TOML text, over file and environment.
    ///
    /// # Errors
    /// [`LoadError::Refused`]: started already, no driver, or what is wrong in the text.
    pub fn start(&self, configuration: &str) -> Result<()> {
        let text = CString::new(configuration.replace('\0', " ")).unwrap_or_default();
        // SAFETY: a text that lives until the call returns.
        self.done(unsafe {
            (self.functions.glake_configure)(std::ptr::null(), std::ptr::null(), text.as_ptr())
        })?;
        // SAFETY: it takes nothing.
        self.done(unsafe { (self.functions.glake_start)() })
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: an out-parameter of this frame.
        self.done(unsafe { (self.functions.glake_device_count)(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// A stream of a device.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn stream(&self, device: i32) -> Result<Stream> {
        let mut stream = null_mut();
        // SAFETY: an out-parameter of this frame.
        self.done(unsafe { (self.functions.glake_stream_create)(device, &mut stream) })?;
        Ok(Stream(stream as usize))
    }

    /// A block for work on a stream.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    #[inline]
    pub fn alloc(&self, device: i32, size: usize, stream: Stream) -> Result<Block> {
        let mut block = null_mut();
        // SAFETY: a stream that the library made and never destroys, and an out-parameter of this frame.
        let status =
            unsafe { (self.functions.glake_alloc)(device, size, stream.0 as *mut c_void, &mut block) };
        self.done(status).map(|()| Block(block as usize))
    }

    /// Gives a block back.
    ///
    /// # Errors
    /// [`LoadError::Refused`]: it was given back before.
    #[inline]
    pub fn free(&self, block: Block) -> Result<()> {
        // SAFETY: the library looks addresses up and follows none.
        self.done(unsafe { (self.functions.glake_free)(block.0 as *mut c_void) })
    }

    /// Waits for pending frees, and releases free memory until at most `keep` bytes are reserved.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn trim(&self, device: i32, keep: u64) -> Result<()> {
        // SAFETY: null asks for no answer.
        self.done(unsafe { (self.functions.glake_trim)(device, keep, null_mut()) })
    }

    /// How many ranges of a device's mapped memory are free.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn free_ranges(&self, device: i32) -> Result<u32> {
        unsafe extern "C" fn enter(ranges: *mut c_void, segment: *const Segment) {
            // SAFETY: the library calls it with the context below, and with a segment of its own.
            unsafe { (*ranges.cast::<Ranges>()).stitched = (*segment).stitched };
        }
        unsafe extern "C" fn count(ranges: *mut c_void, block: *const SegmentBlock) {
            // SAFETY: as above.
            let (ranges, block) = unsafe { (&mut *ranges.cast::<Ranges>(), &*block) };
            ranges.free += u32::from(!block.live && !ranges.stitched);
        }
        let mut ranges = Ranges::default();
        let context = (&raw mut ranges).cast::<c_void>();
        // SAFETY: the context lives until the call returns, and nothing else uses it.
        let status = unsafe { (self.functions.glake_segments)(device, Some(enter), Some(count), context) };
        self.done(status).map(|()| ranges.free)
    }

    /// Calls of the driver so far.
    ///
    /// # Errors
    /// [`LoadError::Refused`].
    pub fn driver_calls(&self) -> Result<u64> {
        let mut calls = 0;
        // SAFETY: an out-parameter of this frame; null asks for no answer.
        self.done(unsafe { (self.functions.glake_driver_calls)(&mut calls, null_mut()) }).map(|()| calls)
    }

    /// Allocations on the heap so far.
    pub fn heap_allocations(&self) -> u64 {
        // SAFETY: it takes nothing.
        unsafe { (self.functions.glake_heap_allocations)() }
    }

    #[inline]
    fn done(&self, status: i32) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(self.refusal(status)) }
    }

    #[cold]
    fn refusal(&self, status: i32) -> LoadError {
        // SAFETY: a text of this thread that ends with a zero and stays until its next failure.
        let text = unsafe { CStr::from_ptr((self.functions.glake_last_error)()) };
        LoadError::Refused { status, text: text.to_string_lossy().into_owned() }
    }
}
