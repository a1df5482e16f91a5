//! `libgmlake.so` opened by a Rust program that calls it as a C program does, and the driver beside it to compare copies with.
//!
//! ```text
//! glake bench ─► Gmlake ─┬─ dlopen ─► libgmlake.so
//!                        └─ dlopen ─► libcuda.so.1 (copies and memory without the library)
//! ```
//!
//! Invariant: every function is safe. Addresses stay inside this module, and [`Gmlake::timed`] waits for all copies that it enqueues.

mod driver;
mod memory;

use std::ffi::{CStr, CString, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{CopyBlock, GLAKE_COPY_DIRECT, Segment, SegmentBlock, Unfit, Version};
pub use driver::CudaAllocator;
use driver::Libcuda;
pub use memory::{GpuMemory, HostMemory, Part};

/// Error of loading or calling a library.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The file cannot be loaded, or lacks a function.
    #[error("{}", reason(path, source))]
    Load {
        /// Path of the library.
        path: PathBuf,
        /// Error of the dynamic loader.
        #[source]
        source: libloading::Error,
    },
    /// The library and this program come from different releases.
    #[error("{} is of {found}, this program is of {}: take both from one release", path.display(), Version::OURS)]
    OtherVersion {
        /// Path of the library.
        path: PathBuf,
        /// Version of the library.
        found: Version,
    },
    /// Memory from the driver's allocators was requested on the simulated device.
    #[error(
        "foreign and mempool memory come from cuMemAlloc and cuMemAllocAsync, and there is no CUDA driver here: choose --device cuda, or other memory"
    )]
    NoDriver,
    /// A direct call of the driver failed.
    #[error("{call}: CUDA error {code}")]
    Driver {
        /// Name of the driver's function.
        call: &'static str,
        /// CUDA error code.
        code: u32,
    },
    /// The operating system has no memory left.
    #[error("no {size} bytes of host memory: {source}")]
    NoMemory {
        /// Requested size in bytes.
        size: usize,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// A function of the library failed.
    #[error("{text}")]
    Refused {
        /// Status code of the function.
        status: i32,
        /// Text of `glake_last_error`.
        text: String,
    },
}

type Result<T> = std::result::Result<T, ClientError>;

/// Returns the loader's message, which names the file; without one, the loader's call that failed.
fn reason(path: &Path, error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(words) => words.to_string(),
        None => format!("{}: {error}", path.display()),
    }
}

/// Stream that the library created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    device: i32,
    raw: usize,
}

/// Block that the library allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block(usize);

/// Function that performs copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyCall {
    /// `glake_copy_async`, once per pair.
    Async,
    /// `glake_copy_list`, once for all pairs.
    List,
    /// `glake_copy_to_all` from the first pair's source to all destinations.
    ToAll,
    /// `cuMemcpyAsync`, once per pair; without a driver, `glake_copy_async` with `GLAKE_COPY_DIRECT`.
    Native,
}

/// Copies to enqueue on a stream.
#[derive(Clone, Debug)]
pub struct Work<'m> {
    /// Stream of the copies.
    pub stream: Stream,
    /// Function that performs them.
    pub call: CopyCall,
    /// Destination and source of each copy.
    pub pairs: Vec<(Part<'m>, Part<'m>)>,
}

/// Duration of enqueued work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timed {
    /// Time until the last call returned.
    pub issued: Duration,
    /// Time until all streams completed.
    pub done: Duration,
}

crate::table! {
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

/// Open library. It is never unloaded.
#[derive(Debug)]
pub struct Gmlake {
    functions: Functions,
    driver: Option<Libcuda>,
    _library: ManuallyDrop<Library>,
}

/// # Errors
/// All functions: [`ClientError::Refused`] if the library refuses.
impl Gmlake {
    /// Loads a `libgmlake.so` and starts it with a configuration: TOML text that overrides file and environment.
    ///
    /// # Errors
    /// [`ClientError::Load`], [`ClientError::OtherVersion`]; [`ClientError::Refused`] if the process started the library before, or the
    /// text is invalid.
    pub fn start(path: &Path, configuration: &str) -> Result<Gmlake> {
        let failed = |source| ClientError::Load { path: path.to_owned(), source };
        // SAFETY: the library runs no code of its own when it is loaded.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        // SAFETY: the lookup does not dereference the address.
        let find = |name: &CStr| unsafe { library.get(name.to_bytes_with_nul()) }.map(|found| *found);
        // SAFETY: all addresses belong to this library, which is never closed.
        let functions = unsafe { Functions::of(find) }.map_err(|error| match error {
            Unfit::Missing(source) => failed(source),
            Unfit::OtherVersion { found } => ClientError::OtherVersion { path: path.to_owned(), found },
        })?;
        let library = Gmlake { functions, driver: None, _library: ManuallyDrop::new(library) };
        let text = CString::new(configuration.replace('\0', " ")).unwrap_or_default();
        // SAFETY: the text lives until the call returns.
        library.done(unsafe { (library.functions.glake_configure)(null(), null(), text.as_ptr()) })?;
        // SAFETY: the function takes no arguments.
        library.done(unsafe { (library.functions.glake_start)() })?;
        Ok(library)
    }

    /// Loads the driver for [`CopyCall::Native`] and [`GpuMemory::of_driver`].
    ///
    /// # Errors
    /// [`ClientError::Load`], [`ClientError::Driver`].
    pub fn load_driver(&mut self) -> Result<()> {
        self.driver = Some(Libcuda::open(self.device_count()?)?);
        Ok(())
    }

    /// Returns whether the driver is loaded.
    pub fn has_driver(&self) -> bool {
        self.driver.is_some()
    }

    /// Returns the number of devices.
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: an out-parameter on this stack frame.
        self.done(unsafe { (self.functions.glake_device_count)(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Creates a stream of a device.
    pub fn stream(&self, device: u32) -> Result<Stream> {
        let (device, mut stream) = (i32::try_from(device).unwrap_or(i32::MAX), null_mut());
        // SAFETY: an out-parameter on this stack frame.
        self.done(unsafe { (self.functions.glake_stream_create)(device, &mut stream) })?;
        Ok(Stream { device, raw: stream as usize })
    }

    /// Allocates a block for work on a stream, on the stream's device.
    #[inline]
    pub fn alloc(&self, size: usize, stream: Stream) -> Result<Block> {
        let mut block = null_mut();
        let raw = stream.raw as *mut c_void;
        // SAFETY: a stream of the library, which is never destroyed, and an out-parameter on this stack frame.
        let status = unsafe { (self.functions.glake_alloc)(stream.device, size, raw, &mut block) };
        self.done(status).map(|()| Block(block as usize))
    }

    /// Frees a block.
    #[inline]
    pub fn free(&self, block: Block) -> Result<()> {
        // SAFETY: the library looks the address up and does not dereference it.
        self.done(unsafe { (self.functions.glake_free)(block.0 as *mut c_void) })
    }

    /// Waits for pending frees, and releases free memory until at most `keep` bytes are reserved.
    pub fn trim(&self, device: i32, keep: u64) -> Result<()> {
        // SAFETY: null requests no result.
        self.done(unsafe { (self.functions.glake_trim)(device, keep, null_mut()) })
    }

    /// Returns the number of free ranges in a device's mapped memory.
    pub fn free_ranges(&self, device: i32) -> Result<u32> {
        /// Number of free ranges, and whether the current segment is a second mapping of other segments' memory.
        #[derive(Default)]
        struct Ranges {
            free: u32,
            stitched: bool,
        }
        unsafe extern "C" fn enter(ranges: *mut c_void, segment: *const Segment) {
            // SAFETY: the library passes the context below and a segment of its own.
            unsafe { (*ranges.cast::<Ranges>()).stitched = (*segment).stitched };
        }
        unsafe extern "C" fn count(ranges: *mut c_void, block: *const SegmentBlock) {
            // SAFETY: as above.
            let (ranges, block) = unsafe { (&mut *ranges.cast::<Ranges>(), &*block) };
            ranges.free += u32::from(!block.live && !ranges.stitched);
        }
        let mut ranges = Ranges::default();
        let context = (&raw mut ranges).cast::<c_void>();
        // SAFETY: the context lives until the call returns, and only the callbacks use it.
        let status = unsafe { (self.functions.glake_segments)(device, Some(enter), Some(count), context) };
        self.done(status).map(|()| ranges.free)
    }

    /// Returns the number of driver calls so far.
    pub fn driver_calls(&self) -> Result<u64> {
        let mut calls = 0;
        // SAFETY: an out-parameter on this stack frame; null requests no result.
        self.done(unsafe { (self.functions.glake_driver_calls)(&mut calls, null_mut()) }).map(|()| calls)
    }

    /// Returns the number of heap allocations so far.
    pub fn heap_allocations(&self) -> u64 {
        // SAFETY: the function takes no arguments.
        unsafe { (self.functions.glake_heap_allocations)() }
    }

    /// Lets copies use the links of other GPUs.
    pub fn enable_multi_path(&self) -> Result<()> {
        // SAFETY: the function takes a number.
        self.done(unsafe { (self.functions.glake_multi_path)(1) })
    }

    /// Returns the statistics of copies as a JSON object.
    pub fn copy_stats(&self) -> Result<String> {
        // SAFETY: the function takes no arguments.
        let text = unsafe { (self.functions.glake_copy_stats_json)() };
        if text.is_null() {
            return Err(self.refusal(0));
        }
        // SAFETY: a zero-terminated text of the library, freed once, after it was copied.
        unsafe {
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            (self.functions.glake_string_free)(text);
            Ok(copy)
        }
    }

    /// Enqueues work in order, sleeps until `nap` has passed since the first call, and waits for all streams. `flags` apply to copies
    /// through the library.
    ///
    /// # Errors
    /// The first error of a call. All streams are waited for in any case.
    pub fn timed(&self, work: &[Work<'_>], flags: u32, nap: Duration) -> Result<Timed> {
        let block = |(to, from): &(Part<'_>, Part<'_>)| CopyBlock {
            to: to.address as *mut c_void,
            from: from.address as *const c_void,
            size: to.size.min(from.size),
        };
        let blocks = |work: &Work<'_>| -> (Vec<CopyBlock>, Vec<*mut c_void>) {
            work.pairs.iter().map(block).map(|block| (block, block.to)).unzip()
        };
        let blocks: Vec<_> = work.iter().map(blocks).collect();
        let begin = Instant::now();
        let enqueued = work.iter().zip(&blocks).try_for_each(|(work, (blocks, to))| {
            if let Some(driver) = &self.driver {
                driver.enter(work.stream.device)?;
            }
            // SAFETY: the parts live until this function returns, and all streams are waited for below.
            unsafe { self.enqueue(work.stream, work.call, blocks, to, flags) }
        });
        let issued = begin.elapsed();
        if enqueued.is_ok() {
            std::thread::sleep(nap.saturating_sub(issued));
        }
        let waited: Vec<Result<()>> = work.iter().map(|work| self.wait(work.stream)).collect();
        let done = begin.elapsed();
        enqueued?;
        waited.into_iter().collect::<Result<()>>()?;
        Ok(Timed { issued, done })
    }

    /// # Safety
    /// The memory of the blocks lives until the stream was waited for. `to` are the destinations of `blocks`.
    unsafe fn enqueue(
        &self,
        stream: Stream,
        call: CopyCall,
        blocks: &[CopyBlock],
        to: &[*mut c_void],
        flags: u32,
    ) -> Result<()> {
        let (functions, raw, no_handle) = (&self.functions, stream.raw as *mut c_void, null_mut());
        let each = |flags| {
            blocks.iter().try_for_each(|block| {
                // SAFETY: the caller's promise; null requests no handle.
                self.done(unsafe {
                    (functions.glake_copy_async)(block.to, block.from, block.size, raw, flags, no_handle)
                })
            })
        };
        match (call, &self.driver) {
            (CopyCall::Async, _) => each(flags),
            (CopyCall::List, _) => {
                // SAFETY: as above.
                self.done(unsafe {
                    (functions.glake_copy_list)(blocks.as_ptr(), blocks.len(), raw, flags, no_handle)
                })
            }
            (CopyCall::ToAll, _) => {
                let size = blocks.iter().map(|block| block.size).min().unwrap_or(0);
                let from = blocks.first().map_or(null(), |block| block.from);
                // SAFETY: as above.
                self.done(unsafe {
                    (functions.glake_copy_to_all)(to.as_ptr(), to.len(), from, size, raw, flags, no_handle)
                })
            }
            (CopyCall::Native, Some(driver)) => blocks.iter().try_for_each(|block| {
                // SAFETY: as above.
                unsafe { driver.copy(block, stream) }
            }),
            (CopyCall::Native, None) => each(GLAKE_COPY_DIRECT),
        }
    }

    fn wait(&self, stream: Stream) -> Result<()> {
        match &self.driver {
            Some(driver) => driver.synchronize(stream.raw),
            None => {
                let raw = stream.raw as *mut c_void;
                // SAFETY: a stream of the library.
                self.done(unsafe { (self.functions.glake_stream_synchronize)(stream.device, raw) })
            }
        }
    }

    #[inline]
    fn done(&self, status: i32) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(self.refusal(status)) }
    }

    #[cold]
    fn refusal(&self, status: i32) -> ClientError {
        // SAFETY: a zero-terminated text of this thread, valid until the thread's next failure.
        let text = unsafe { CStr::from_ptr((self.functions.glake_last_error)()) };
        ClientError::Refused { status, text: text.to_string_lossy().into_owned() }
    }
}
