//! `libcuda.so.1`, called without the library in between.

use std::ffi::{c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::null_mut;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::{ClientError, Result, Stream};
use crate::CopyBlock;

const FILE: &str = "libcuda.so.1";

macro_rules! calls {
    ($($name:ident = $symbol:literal($($argument:ty),*);)*) => {
        #[derive(Debug)]
        struct Calls {
            $($name: unsafe extern "C" fn($($argument),*) -> c_uint,)*
        }

        impl Calls {
            fn find(library: &Library) -> std::result::Result<Self, libloading::Error> {
                Ok(Calls {
                    // SAFETY: the driver's documented signatures, unchanged since CUDA 4, or 11.2 for allocate_async.
                    $($name: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }?,)*
                })
            }
        }
    };
}

calls! {
    initialise = "cuInit"(c_uint);
    device = "cuDeviceGet"(*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut *mut c_void, c_int);
    set_current = "cuCtxSetCurrent"(*mut c_void);
    allocate = "cuMemAlloc_v2"(*mut u64, usize);
    allocate_async = "cuMemAllocAsync"(*mut u64, usize, *mut c_void);
    free = "cuMemFree_v2"(u64);
    copy = "cuMemcpyAsync"(u64, u64, usize, *mut c_void);
    synchronize = "cuStreamSynchronize"(*mut c_void);
}

/// Allocator of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaAllocator {
    /// `cuMemAlloc`.
    Plain,
    /// `cuMemAllocAsync`, from the device's default pool.
    Mempool,
}

/// Driver with the primary contexts of all devices.
#[derive(Debug)]
pub(super) struct Libcuda {
    calls: Calls,
    contexts: Vec<usize>,
    _library: Library,
}

impl Libcuda {
    /// Loads the driver for the first `devices` devices.
    pub(super) fn open(devices: u32) -> Result<Libcuda> {
        let failed = |source| ClientError::Load { path: Path::new(FILE).to_owned(), source };
        // SAFETY: the library that libgmlake.so has loaded already.
        let library = unsafe { Library::open(Some(FILE), RTLD_NOW | RTLD_LOCAL) }.map_err(failed)?;
        let calls = Calls::find(&library).map_err(failed)?;
        // SAFETY: the flags must be zero, and are.
        done("cuInit", unsafe { (calls.initialise)(0) })?;
        let mut contexts = Vec::new();
        for ordinal in 0..devices {
            let (mut device, mut context) = (0, null_mut());
            let ordinal = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
            // SAFETY: an out-parameter on this stack frame.
            done("cuDeviceGet", unsafe { (calls.device)(&mut device, ordinal) })?;
            // SAFETY: as above, and a device that exists.
            done("cuDevicePrimaryCtxRetain", unsafe { (calls.retain)(&mut context, device) })?;
            contexts.push(context.expose_provenance());
        }
        Ok(Libcuda { calls, contexts, _library: library })
    }

    /// Makes a device's context current for the calling thread.
    pub(super) fn enter(&self, device: i32) -> Result<()> {
        let place = usize::try_from(device).unwrap_or(usize::MAX);
        let context = std::ptr::with_exposed_provenance_mut(self.contexts.get(place).copied().unwrap_or(0));
        // SAFETY: a retained context, or null.
        done("cuCtxSetCurrent", unsafe { (self.calls.set_current)(context) })
    }

    pub(super) fn allocate(&self, device: i32, size: usize, by: CudaAllocator) -> Result<usize> {
        self.enter(device)?;
        let mut address = 0;
        match by {
            // SAFETY: an out-parameter on this stack frame.
            CudaAllocator::Plain => done("cuMemAlloc", unsafe { (self.calls.allocate)(&mut address, size) })?,
            CudaAllocator::Mempool => {
                // SAFETY: as above.
                done("cuMemAllocAsync", unsafe {
                    (self.calls.allocate_async)(&mut address, size, null_mut())
                })?;
                // Every stream may use the memory once the default stream completed.
                self.synchronize(0)?;
            }
        }
        Ok(usize::try_from(address).unwrap_or(0))
    }

    /// Frees memory of `allocate`, which waits for all work. Memory that cannot be freed stays until the end of the process.
    pub(super) fn release(&self, device: i32, address: usize) {
        if self.enter(device).is_ok() {
            // SAFETY: allocated here, and freed once.
            unsafe { (self.calls.free)(address as u64) };
        }
    }

    /// Enqueues a copy on a stream of the current device.
    ///
    /// # Safety
    /// The memory on both sides lives until the copy completed.
    pub(super) unsafe fn copy(&self, block: &CopyBlock, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise; the library never destroys its streams.
        done("cuMemcpyAsync", unsafe {
            (self.calls.copy)(block.to as u64, block.from as u64, block.size, stream.raw as *mut c_void)
        })
    }

    pub(super) fn synchronize(&self, stream: usize) -> Result<()> {
        // SAFETY: a stream of the library, or the default stream.
        done("cuStreamSynchronize", unsafe { (self.calls.synchronize)(stream as *mut c_void) })
    }
}

fn done(call: &'static str, code: c_uint) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(ClientError::Driver { call, code }) }
}
